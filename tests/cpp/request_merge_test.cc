#include "tf_ops/core/request_merge.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/slot_directory.h"

namespace hvd_ctr {

class RequestMergeTestPeer {
 public:
  static void SetBase(RequestMerge* merge, uint32_t base) { merge->base_ = base; }
  static uint32_t base(const RequestMerge& merge) { return merge.base_; }
};

namespace {

Status MergeInto(RequestMerge* merge, const std::vector<int64_t>& ids, const std::vector<int32_t>& tables, MergedKeys* merged) {
  return merge->Run(ids, tables, merged);
}

std::vector<int64_t> Ids(const MergedKeys& merged) {
  std::vector<int64_t> ids;
  for (const Key& key : merged.keys) ids.push_back(key.id);
  return ids;
}

TEST(RequestMergeTest, SameRowOfTwoRanksIsOneWorkingKey) {
  RequestMerge merge(1, 0, 1);
  MergedKeys merged;
  const std::vector<int64_t> ids = {4, 7, 9, 4};
  const std::vector<int32_t> tables(4, 0);
  ASSERT_TRUE(MergeInto(&merge, ids, tables, &merged).ok());
  EXPECT_EQ(Ids(merged), (std::vector<int64_t>{4, 7, 9}));
  EXPECT_EQ(merged.inverse, (std::vector<int32_t>{0, 1, 2, 0}));
  EXPECT_EQ(merged.requested, std::vector<int64_t>{4});
  EXPECT_EQ(merged.unique, std::vector<int64_t>{3});
}

TEST(RequestMergeTest, NoKeys) {
  RequestMerge merge(2, 0, 1);
  MergedKeys merged;
  ASSERT_TRUE(MergeInto(&merge, {}, {}, &merged).ok());
  EXPECT_TRUE(merged.keys.empty());
  EXPECT_TRUE(merged.inverse.empty());
  EXPECT_EQ(merged.unique, (std::vector<int64_t>{0, 0}));
}

TEST(RequestMergeTest, RefusesNegativeIdsUnknownTablesAndUnequalLengths) {
  RequestMerge merge(2, 0, 1);
  MergedKeys merged;
  const std::vector<int64_t> negative = {3, -5};
  const std::vector<int64_t> fine = {3, 5};
  Status status = MergeInto(&merge, negative, {0, 1}, &merged);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("-5"), std::string::npos) << status.message();
  status = MergeInto(&merge, fine, {0, 2}, &merged);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("table 2"), std::string::npos) << status.message();
  EXPECT_EQ(MergeInto(&merge, fine, {0}, &merged).code(), StatusCode::kInvalidArgument);
}

// Invariant 6: foreign keys are dropped; W ranks together keep every key exactly once.
TEST(RequestMergeTest, EveryKeyBelongsToExactlyOneRankAndHashesAreTheDirectorys) {
  std::mt19937_64 random(3);
  std::vector<int64_t> ids;
  std::vector<int32_t> tables;
  for (int i = 0; i < 3000; ++i) {
    ids.push_back(i % 3 == 0 ? static_cast<int64_t>(random() % 50) : static_cast<int64_t>(random() >> 1));
    tables.push_back(static_cast<int32_t>(random() % 4));
  }
  for (const int32_t world_size : {1, 2, 3, 5}) {
    std::vector<int> owners(ids.size(), 0);
    for (int32_t rank = 0; rank < world_size; ++rank) {
      RequestMerge merge(4, rank, world_size);
      MergedKeys merged;
      for (int repeat = 0; repeat < 2; ++repeat) ASSERT_TRUE(MergeInto(&merge, ids, tables, &merged).ok());
      std::map<std::pair<int32_t, int64_t>, int32_t> model;
      int64_t foreign = 0;
      for (size_t i = 0; i < ids.size(); ++i) {
        if (OwnerOf(tables[i], ids[i], world_size) != rank) {
          ASSERT_EQ(merged.inverse[i], -1);
          ++foreign;
          continue;
        }
        ++owners[i];
        const auto next = static_cast<int32_t>(model.size());
        ASSERT_EQ(merged.inverse[i], model.emplace(std::make_pair(tables[i], ids[i]), next).first->second);
        ASSERT_EQ(merged.keys[static_cast<size_t>(merged.inverse[i])], (Key{ids[i], tables[i]}));
      }
      EXPECT_EQ(merged.foreign, foreign);
      ASSERT_EQ(merged.keys.size(), model.size());
      ASSERT_EQ(merged.hashes.size(), model.size());
      for (size_t k = 0; k < merged.keys.size(); ++k) ASSERT_EQ(merged.hashes[k], SlotDirectory::Hash(merged.keys[k]));
    }
    EXPECT_EQ(owners, std::vector<int>(ids.size(), 1));
  }
}

// The inverse of Mix64: makes an id for any hash.
uint64_t UnMix64(uint64_t x) {
  x ^= (x >> 31) ^ (x >> 62);
  x *= 0x319642b2d24d8ec3ULL;
  x ^= (x >> 27) ^ (x >> 54);
  x *= 0x96de1b173f119089ULL;
  x ^= (x >> 30) ^ (x >> 60);
  return x - 0x9e3779b97f4a7c15ULL;
}

// Keys whose hashes agree in the tag (lower half) and in the first entry (upper bits) are told apart by the key itself.
TEST(RequestMergeTest, KeysWithTheSameTagStayApart) {
  ASSERT_EQ(Mix64(UnMix64(12345)), 12345u);
  const uint64_t mixed = Mix64(kDirectorySalt);
  std::vector<int64_t> ids;
  for (uint64_t middle = 0; ids.size() < 6; ++middle) {
    const uint64_t hash = (uint64_t{0xabc} << 52) | (middle << 32) | 0x1234567u;
    const auto id = static_cast<int64_t>(UnMix64(hash) ^ mixed);
    if (id < 0) continue;
    ASSERT_EQ(SlotDirectory::Hash(Key{id, 0}), hash);
    ids.push_back(id);
  }
  std::vector<int64_t> twice = ids;
  twice.insert(twice.end(), ids.begin(), ids.end());
  RequestMerge merge(1, 0, 1);
  MergedKeys merged;
  ASSERT_TRUE(MergeInto(&merge, twice, std::vector<int32_t>(12, 0), &merged).ok());
  EXPECT_EQ(Ids(merged), ids);
  EXPECT_EQ(merged.inverse, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5}));
}

TEST(RequestMergeTest, LargestIdIsAKeyLikeAnyOther) {
  RequestMerge merge(2, 0, 1);
  MergedKeys merged;
  const int64_t top = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> ids = {top, top, top - 1, top};
  ASSERT_TRUE(MergeInto(&merge, ids, {0, 0, 0, 1}, &merged).ok());
  EXPECT_EQ(merged.inverse, (std::vector<int32_t>{0, 0, 1, 2}));
  EXPECT_EQ(merged.unique, (std::vector<int64_t>{2, 1}));
}

TEST(RequestMergeTest, NumbersGoOverTheirWrap) {
  RequestMerge merge(1, 0, 1);
  MergedKeys merged;
  const std::vector<int32_t> tables(4, 0);
  const std::vector<int64_t> first = {4, 7, 9, 4}, second = {9, 5, 5, 4};
  ASSERT_TRUE(MergeInto(&merge, first, tables, &merged).ok());
  EXPECT_EQ(RequestMergeTestPeer::base(merge), 3u);
  RequestMergeTestPeer::SetBase(&merge, std::numeric_limits<uint32_t>::max() - 4);
  ASSERT_TRUE(MergeInto(&merge, second, tables, &merged).ok());  // The last numbers there are.
  EXPECT_EQ(Ids(merged), (std::vector<int64_t>{9, 5, 4}));
  EXPECT_EQ(merged.inverse, (std::vector<int32_t>{0, 1, 1, 2}));
  ASSERT_TRUE(MergeInto(&merge, first, tables, &merged).ok());  // None are left: they start anew.
  EXPECT_EQ(Ids(merged), (std::vector<int64_t>{4, 7, 9}));
  EXPECT_EQ(merged.inverse, (std::vector<int32_t>{0, 1, 2, 0}));
  EXPECT_EQ(RequestMergeTestPeer::base(merge), 3u);
}

}  // namespace
}  // namespace hvd_ctr
