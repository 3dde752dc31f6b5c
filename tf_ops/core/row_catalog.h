// RowCatalog: which keys a host store holds, and the number of each one's row. It answers "never stored" from memory alone.
//
// Rows are numbered in the order of creation in extents of 2^extent_bits rows; an extent belongs to one table. A removed row
// leaves a hole, which the table's next new row fills, the hole made last first. Per row it takes 8 bytes for the id and an index
// entry of 8 bytes {hash, row} at 37.5 to 75 % load: 19 to 30 bytes. The index has 256 open-addressing shards that grow one at a
// time, so its peak while growing is one shard (1/256 of the index) above what is then in use (FC 60). Ask GrowthBytes before
// Create to keep within a budget.
//
//   RowCatalog::Block block;
//   catalog.Find(keys.subspan(0, 32), &block);                    // at most kBlock keys
//   if (block.rows[i] == RowCatalog::kNoRow) catalog.Create(keys[i], block.hashes[i], &row);
//
// Not thread-safe for writers; const functions may run at once.
#ifndef HVD_CTR_CORE_ROW_CATALOG_H_
#define HVD_CTR_CORE_ROW_CATALOG_H_

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/chunked_array.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class RowCatalog {
 public:
  static constexpr uint32_t kNoRow = 0xffffffffu;
  static constexpr int64_t kBlock = 32;
  /// Parts of the index, which grow one at a time.
  static constexpr int64_t kShards = 256;

  /// Answers for up to kBlock keys.
  struct Block {
    std::array<uint64_t, static_cast<size_t>(kBlock)> hashes;
    std::array<uint32_t, static_cast<size_t>(kBlock)> rows;
  };

  RowCatalog(int32_t tables, int extent_bits);

  /// Rows of at most kBlock keys, kNoRow where a key has none.
  void Find(Span<const Key> keys, Block* block) const;

  /// INVALID_ARGUMENT for a key that no row can have: unknown table, negative id. RESOURCE_EXHAUSTED when all row numbers are
  /// used.
  Status Check(const Key& key) const;
  /// Most bytes that Create would allocate beyond allocated_bytes(), also for a moment.
  int64_t GrowthBytes(const Key& key, uint64_t hash) const;
  /// Row number that the next Create of this table gives.
  uint32_t NextRow(int32_t table) const;
  /// Preconditions: Check is OK, the key has no row. False: no memory; nothing has changed.
  bool Create(const Key& key, uint64_t hash, uint32_t* row);
  /// Precondition: the row exists. Its position is a hole from now on.
  void Remove(uint32_t row);

  int64_t row_count() const { return row_count_; }
  int64_t row_count(int32_t table) const;
  int32_t tables() const { return static_cast<int32_t>(tables_.size()); }
  /// Positions of the table in the order of creation, 0 .. positions-1, holes among them.
  int64_t positions(int32_t table) const { return tables_[static_cast<size_t>(table)].positions; }
  /// Row number at this position of the table.
  uint32_t RowAt(int32_t table, int64_t position) const;
  /// Negative: the row was removed.
  int64_t id(uint32_t row) const { return ids_[row]; }
  /// Row numbers given out are below this; some below it may be unused.
  uint32_t row_limit() const { return extents_ << extent_bits_; }

  /// Range of a scan: checks table, cursor (a position) and max_rows, gives the positions [*cursor, *end).
  Status ScanRange(int32_t table, int64_t cursor, int64_t max_rows, int64_t* end) const;

  int64_t allocated_bytes() const;
  /// allocated_bytes() of a catalog that holds rows[t] rows of table t, expected over the hashes of the keys.
  static int64_t PlannedBytes(Span<const int64_t> rows, int extent_bits);
  /// Row numbers that these rows take: row_limit() then.
  static int64_t PlannedRowLimit(Span<const int64_t> rows, int extent_bits);

 private:
  static constexpr int kShardBits = 8;
  static_assert(int64_t{1} << kShardBits == kShards);
  static constexpr int kShardShift = 64 - kShardBits;
  static constexpr uint64_t kFirstEntries = 16;
  static constexpr int64_t kDequeBytes = 640;  // Of an empty std::deque; a block of it holds 512 bytes.

  // The upper bits of a hash pick a shard, the lower ones the place in it; `tag`, the lower 32 bits, tells most other keys apart.
  struct Entry {
    uint32_t tag;
    uint32_t row;  // kNoRow: empty.
  };
  struct Shard {
    AlignedBlock block;
    uint64_t mask = 0;  // Entries - 1; 0: nothing allocated yet.
    uint64_t size = 0;
    Entry* entries() const { return static_cast<Entry*>(block.data()); }
  };
  struct Table {
    std::deque<uint32_t> extents;
    int64_t positions = 0;
    int64_t rows = 0;        // Positions that are no holes.
    uint32_t hole = kNoRow;  // The hole made last; ids_ there holds ~ of the one made before it.
  };

  static uint64_t Hash(const Key& key) { return HashKey(key.table, key.id, kHostStoreSalt); }
  const Shard& ShardOf(uint64_t hash) const { return shards_[hash >> kShardShift]; }
  uint32_t Guess(uint64_t hash) const;
  uint32_t FindOne(const Key& key, uint64_t hash) const;
  bool NeedsExtent(int32_t table) const {
    const Table& of = tables_[static_cast<size_t>(table)];
    return of.hole == kNoRow && (of.positions & ExtentMask()) == 0;
  }
  int64_t ExtentMask() const { return (int64_t{1} << extent_bits_) - 1; }
  static uint64_t GrownEntries(const Shard& shard);
  bool GrowShard(Shard* shard);
  bool AddExtent(int32_t table);
  static int64_t ListBytes(int64_t extents, int64_t tables);

  const int extent_bits_;
  std::array<Shard, size_t{1} << kShardBits> shards_;
  std::vector<Table> tables_;
  ChunkedArray<int64_t> ids_;            // By row.
  ChunkedArray<int32_t> extent_tables_;  // By extent.
  uint32_t extents_ = 0;
  int64_t row_count_ = 0;
  int64_t index_bytes_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ROW_CATALOG_H_
