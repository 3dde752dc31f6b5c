// PartitionByOwner against its definition: owners by OwnerOf, groups in order of owner, table, first occurrence.
#include "tf_ops/core/rank_partition.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

// Spans do not bind to temporaries.
void Partition(const std::vector<int64_t>& keys, const std::vector<int64_t>& table_offsets, int32_t world_size,
               PartitionResult* result) {
  PartitionByOwner(keys, table_offsets, world_size, result);
}

PartitionResult Model(const std::vector<int64_t>& keys, const std::vector<int64_t>& table_offsets, int32_t world_size) {
  const size_t tables = table_offsets.size() - 1;
  PartitionResult expected;
  expected.restore.assign(keys.size(), -1);
  for (int32_t w = 0; w < world_size; ++w) {
    const size_t before = expected.grouped.size();
    for (size_t t = 0; t < tables; ++t) {
      const size_t table_before = expected.grouped.size();
      for (int64_t i = table_offsets[t]; i < table_offsets[t + 1]; ++i) {
        if (OwnerOf(static_cast<int32_t>(t), keys[i], world_size) != w) continue;
        expected.restore[i] = static_cast<int32_t>(expected.grouped.size());
        expected.grouped.push_back(keys[i]);
      }
      expected.owner_table_counts.push_back(static_cast<int64_t>(expected.grouped.size() - table_before));
    }
    expected.splits.push_back(static_cast<int64_t>(expected.grouped.size() - before));
  }
  return expected;
}

void ExpectModel(const std::vector<int64_t>& keys, const std::vector<int64_t>& table_offsets, int32_t world_size,
                 PartitionResult* result) {
  PartitionByOwner(keys, table_offsets, world_size, result);
  const PartitionResult expected = Model(keys, table_offsets, world_size);
  const std::string where = "W = " + std::to_string(world_size) + ", U = " + std::to_string(keys.size());
  EXPECT_EQ(result->grouped, expected.grouped) << where;
  EXPECT_EQ(result->splits, expected.splits) << where;
  EXPECT_EQ(result->owner_table_counts, expected.owner_table_counts) << where;
  ASSERT_EQ(result->restore, expected.restore) << where;
}

TEST(RankPartitionTest, GroupsLikeTheHeaderExample) {
  // The header's owners {1, 0, 1}, with ids that have them.
  std::vector<int64_t> owned[2];
  for (int64_t id = 0; owned[0].size() < 1 || owned[1].size() < 2; ++id) owned[OwnerOf(0, id, 2)].push_back(id);
  const std::vector<int64_t> keys = {owned[1][0], owned[0][0], owned[1][1]};
  PartitionResult result;
  Partition(keys, {0, 3}, 2, &result);
  EXPECT_EQ(result.grouped, (std::vector<int64_t>{owned[0][0], owned[1][0], owned[1][1]}));
  EXPECT_EQ(result.splits, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(result.owner_table_counts, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(result.restore, (std::vector<int32_t>{1, 0, 2}));
}

TEST(RankPartitionTest, OneRankKeepsTheOrder) {
  PartitionResult result;
  Partition({5, 4, 9}, {0, 2, 2, 3}, 1, &result);
  EXPECT_EQ(result.grouped, (std::vector<int64_t>{5, 4, 9}));
  EXPECT_EQ(result.splits, (std::vector<int64_t>{3}));
  EXPECT_EQ(result.owner_table_counts, (std::vector<int64_t>{2, 0, 1}));
  EXPECT_EQ(result.restore, (std::vector<int32_t>{0, 1, 2}));
}

TEST(RankPartitionTest, NothingToPartition) {
  PartitionResult result;
  for (const int32_t world_size : {1, 3}) {
    ExpectModel({}, {0, 0, 0}, world_size, &result);
    ExpectModel({}, {0}, world_size, &result);
  }
}

TEST(RankPartitionTest, RandomKeysEqualTheModel) {
  std::mt19937_64 random(5);
  PartitionResult result;  // Reused: nothing of an earlier call may remain.
  for (int round = 0; round < 200; ++round) {
    const int64_t tables = 1 + static_cast<int64_t>(random() % 4);
    std::vector<int64_t> keys, offsets = {0};
    for (int64_t t = 0; t < tables; ++t) {
      for (uint64_t n = random() % 100; n > 0; --n) keys.push_back(static_cast<int64_t>(random() >> 1));
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    ExpectModel(keys, offsets, 1 + static_cast<int32_t>(random() % 9), &result);
    for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(result.grouped[result.restore[i]], keys[i]);
  }
}

TEST(RankPartitionTest, MoreRanksThanKeys) {
  PartitionResult result;
  ExpectModel({0, 1, 1}, {0, 2, 3}, 64, &result);
}

}  // namespace
}  // namespace hvd_ctr
