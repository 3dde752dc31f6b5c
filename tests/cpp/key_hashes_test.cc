#include "tf_ops/core/key_hashes.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

TEST(KeyHashesTest, EqualTheHashesOfSingleKeysOnEveryLevel) {
  std::mt19937_64 random(3);
  for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    ForceSimdLevel(level);
    for (const int64_t count : {0, 1, 3, 8, 17, 64, 1000}) {
      std::vector<int64_t> ids(count);
      for (int64_t& id : ids) id = static_cast<int64_t>(random() >> (random() % 63 + 1));
      if (count > 2) ids[1] = std::numeric_limits<int64_t>::max();
      for (const int32_t table : {0, 7, 100000}) {
        std::vector<uint64_t> hashes(count, 1);
        HashKeys(table, ids.data(), count, kDirectorySalt, hashes.data());
        for (int64_t i = 0; i < count; ++i) EXPECT_EQ(hashes[i], HashKey(table, ids[i], kDirectorySalt));
        for (const int32_t ranks : {1, 2, 3, 8, 1000, 65536, std::numeric_limits<int32_t>::max()}) {
          std::vector<int32_t> owners(count, -1);
          OwnersOfKeys(table, ids.data(), count, ranks, owners.data());
          for (int64_t i = 0; i < count; ++i) EXPECT_EQ(owners[i], OwnerOf(table, ids[i], ranks)) << ranks;
        }
      }
    }
  }
  ForceSimdLevel(ProcessSimdChoice().level);
}

}  // namespace
}  // namespace hvd_ctr
