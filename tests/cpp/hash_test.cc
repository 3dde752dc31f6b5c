// Frozen values of hash.h: they decide owners, initial values and hashed ids of checkpoints, so a change of any is a change of
// format.
#include "tf_ops/core/hash.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace hvd_ctr {
namespace {

constexpr int64_t kMaxId = std::numeric_limits<int64_t>::max();
constexpr int64_t kMinId = std::numeric_limits<int64_t>::min();

TEST(HashTest, Mix64IsSplitMix64) {
  // The first two outputs of the published generator with seed 0.
  EXPECT_EQ(Mix64(0), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(Mix64(0x9e3779b97f4a7c15ULL), 0x6e789e6aa1b965f4ULL);
}

// The values below come from an independent implementation with unbounded integers.
TEST(HashTest, FrozenValues) {
  EXPECT_EQ(HashKey(0, 0, kOwnerSalt), 0x40f0f63f8fd4b163ULL);
  EXPECT_EQ(HashKey(3, 7, kOwnerSalt), 0xb3f765f2857ec111ULL);
  EXPECT_EQ(HashKey(1, kMaxId, kOwnerSalt), 0xd30d54b3bbb444c7ULL);

  const std::vector<int64_t> ids = {0, 1, 2, 3, int64_t{1} << 53, (int64_t{1} << 53) + 1, int64_t{1} << 31, kMaxId};
  const std::vector<int32_t> owners = {1, 0, 1, 1, 2, 1, 2, 2};
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(OwnerOf(0, ids[i], 4), owners[i]) << ids[i];
  EXPECT_EQ(OwnerOf(1, 2, 4), 3);
  EXPECT_EQ(OwnerOf(1, 3, 4), 2);

  EXPECT_EQ(HashToRange(0, 1000), 264);
  EXPECT_EQ(HashToRange(0x7fffffff, 1000), 60);
  EXPECT_EQ(HashToRange(0x80000000, 1000), 661);
  EXPECT_EQ(HashToRange(0xffffffff, 1000), 554);
  EXPECT_EQ(HashToRange(-1, 1000), 586);
  EXPECT_EQ(HashToRange(kMinId, 1000), 60);
  EXPECT_EQ(HashToRange(kMaxId, 1000), 392);

  EXPECT_EQ(HashBytes("", 0), 0x5b21f68ffa77f14cULL);
  EXPECT_EQ(HashBytes("item", 4), 0x2c6912e1aa715d57ULL);
  EXPECT_EQ(HashBytes("item", 4, 1), 0xd35170c246ce49d4ULL);
  EXPECT_EQ(HashBytes("\xff\x00", 2), 0x9774ff4297e14b27ULL);
}

TEST(HashTest, RangesHold) {
  for (const uint64_t n : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0}}) {
    EXPECT_EQ(ReduceRange(0, n), 0u);
    EXPECT_EQ(ReduceRange(~uint64_t{0}, n), n - 1);
  }
  for (int64_t id = -1000; id < 1000; ++id) {
    for (const int64_t rows : {int64_t{1}, int64_t{7}, kMaxId}) {
      EXPECT_GE(HashToRange(id * 0x123456789ab, rows), 0);
      EXPECT_LT(HashToRange(id * 0x123456789ab, rows), rows);
    }
    EXPECT_EQ(OwnerOf(0, id, 1), 0);
  }
}

// Owners' shares of n keys within five standard deviations of even.
void ExpectEven(const std::vector<int64_t>& shares, const std::string& what) {
  double n = 0;
  for (const int64_t share : shares) n += static_cast<double>(share);
  const double parts = static_cast<double>(shares.size());
  const double deviation = std::sqrt(n / parts * (1 - 1 / parts));
  for (size_t w = 0; w < shares.size(); ++w) {
    EXPECT_NEAR(static_cast<double>(shares[w]), n / parts, 5 * deviation) << what << ", part " << w;
  }
}

TEST(HashTest, OwnersAreEvenForSequencesStridesAndHighBits) {
  for (const int32_t world_size : {2, 3, 4, 8, 13}) {
    for (const int64_t step : {int64_t{1}, int64_t{8}, int64_t{1} << 20, int64_t{1} << 45}) {
      std::vector<int64_t> shares(world_size);
      for (int64_t i = 0; i < 100000; ++i) ++shares[OwnerOf(2, i * step, world_size)];
      ExpectEven(shares, "W = " + std::to_string(world_size) + ", step " + std::to_string(step));
    }
  }
}

TEST(HashTest, KeysOfOneOwnerSpreadUnderTheOtherSalts) {
  for (const uint64_t salt : {kDirectorySalt, kHostStoreSalt, kInitialValueSalt}) {
    std::vector<int64_t> shares(16);
    for (int64_t id = 0; id < 200000; ++id) {
      if (OwnerOf(0, id, 16) == 5) ++shares[ReduceRange(HashKey(0, id, salt), 16)];
    }
    ExpectEven(shares, "salt " + std::to_string(salt));
  }
}

TEST(HashTest, TablesAndSaltsGiveDifferentHashes) {
  std::set<uint64_t> seen;
  for (const uint64_t salt : {kOwnerSalt, kDirectorySalt, kHostStoreSalt, kInitialValueSalt, kHashIdsSalt}) {
    for (int32_t table = 0; table < 20; ++table) {
      for (int64_t id = 0; id < 100; ++id) seen.insert(HashKey(table, id, salt));
    }
  }
  EXPECT_EQ(seen.size(), 5u * 20u * 100u);
}

TEST(HashTest, BytesDependOnEveryByteLengthAndSeed) {
  std::set<uint64_t> seen;
  const std::vector<std::string> texts = {"",     "a",   "b", "aa", "ab", "ba", std::string(1, '\0'), std::string(2, '\0'),
                                          "\xff", "\x7f"};
  for (const std::string& text : texts) {
    for (uint64_t seed = 0; seed < 4; ++seed) seen.insert(HashBytes(text.data(), static_cast<int64_t>(text.size()), seed));
  }
  EXPECT_EQ(seen.size(), texts.size() * 4);
}

}  // namespace
}  // namespace hvd_ctr
