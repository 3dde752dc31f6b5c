#include "tf_ops/core/row_catalog.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace hvd_ctr {
namespace {

uint32_t Find(const RowCatalog& catalog, const Key& key) {
  RowCatalog::Block block;
  catalog.Find(Span<const Key>(&key, 1), &block);
  return block.rows[0];
}

uint32_t Create(RowCatalog* catalog, const Key& key) {
  RowCatalog::Block block;
  catalog->Find(Span<const Key>(&key, 1), &block);
  EXPECT_EQ(block.rows[0], RowCatalog::kNoRow);
  EXPECT_TRUE(catalog->Check(key).ok());
  const uint32_t next = catalog->NextRow(key.table);
  const int64_t most = catalog->allocated_bytes() + catalog->GrowthBytes(key, block.hashes[0]);
  uint32_t row = RowCatalog::kNoRow;
  EXPECT_TRUE(catalog->Create(key, block.hashes[0], &row));
  EXPECT_EQ(row, next);
  EXPECT_LE(catalog->allocated_bytes(), most);
  return row;
}

TEST(RowCatalogTest, RowsOfATableAreConsecutiveInExtents) {
  RowCatalog catalog(3, 2);
  // Tables in turn: extents of four rows go to the table that needs one.
  std::vector<uint32_t> rows;
  for (int64_t id = 0; id < 10; ++id) {
    for (const int32_t table : {2, 0}) rows.push_back(Create(&catalog, {id, table}));
  }
  EXPECT_EQ(rows, (std::vector<uint32_t>{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 20, 17, 21}));
  EXPECT_EQ(catalog.row_count(), 20);
  EXPECT_EQ(catalog.row_count(0), 10);
  EXPECT_EQ(catalog.row_count(1), 0);
  EXPECT_EQ(catalog.row_limit(), 24u);
  for (int64_t position = 0; position < 10; ++position) {
    EXPECT_EQ(catalog.id(catalog.RowAt(0, position)), position);
    EXPECT_EQ(Find(catalog, {position, 0}), catalog.RowAt(0, position));
    EXPECT_EQ(Find(catalog, {position, 1}), RowCatalog::kNoRow);
  }
}

// Two keys that the index cannot tell apart by their hash: it keeps 32 bits of it, and 8 more pick the shard.
TEST(RowCatalogTest, KeysOfEqualHashesAreToldApartByTheirIds) {
  struct Hashed {
    uint64_t kept;
    int64_t id;
  };
  std::vector<Hashed> all;
  for (int64_t id = 0; id < 4000000; ++id) {
    const uint64_t hash = HashKey(0, id, kHostStoreSalt);
    all.push_back({(hash >> 56 << 32) | static_cast<uint32_t>(hash), id});
  }
  std::sort(all.begin(), all.end(), [](const Hashed& a, const Hashed& b) { return a.kept < b.kept; });
  int pairs = 0;
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i - 1].kept != all[i].kept) continue;
    ++pairs;
    const Key first{all[i - 1].id, 0};
    const Key second{all[i].id, 0};
    RowCatalog catalog(1, 6);
    const uint32_t row = Create(&catalog, first);
    ASSERT_EQ(Find(catalog, second), RowCatalog::kNoRow);
    ASSERT_NE(Create(&catalog, second), row);
    EXPECT_EQ(Find(catalog, first), row);
    EXPECT_EQ(Find(catalog, second), row + 1);
  }
  EXPECT_GT(pairs, 0);
}

}  // namespace
}  // namespace hvd_ctr
