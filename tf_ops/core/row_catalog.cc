#include "tf_ops/core/row_catalog.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

namespace hvd_ctr {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

}  // namespace

RowCatalog::RowCatalog(int32_t tables, int extent_bits) : extent_bits_(extent_bits) {
  tables_.resize(static_cast<size_t>(tables));
}

// The first row with this tag: nearly always the right one, which makes it worth a prefetch.
uint32_t RowCatalog::Guess(uint64_t hash) const {
  const Shard& shard = ShardOf(hash);
  if (shard.mask == 0) return kNoRow;
  const auto tag = static_cast<uint32_t>(hash);
  const Entry* entries = shard.entries();
  for (uint64_t at = tag & shard.mask; entries[at].row != kNoRow; at = (at + 1) & shard.mask) {
    if (entries[at].tag == tag) return entries[at].row;
  }
  return kNoRow;
}

uint32_t RowCatalog::FindOne(const Key& key, uint64_t hash) const {
  const Shard& shard = ShardOf(hash);
  if (shard.mask == 0) return kNoRow;
  const auto tag = static_cast<uint32_t>(hash);
  const Entry* entries = shard.entries();
  for (uint64_t at = tag & shard.mask; entries[at].row != kNoRow; at = (at + 1) & shard.mask) {
    const uint32_t row = entries[at].row;
    if (entries[at].tag == tag && ids_[row] == key.id && extent_tables_[row >> extent_bits_] == key.table) return row;
  }
  return kNoRow;
}

// Three passes over a block, so that misses of index and ids overlap.
void RowCatalog::Find(Span<const Key> keys, Block* block) const {
  const auto count = static_cast<size_t>(keys.size());
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = Hash(keys.data()[i]);
    block->hashes[i] = hash;
    const Shard& shard = ShardOf(hash);
    if (shard.mask != 0) __builtin_prefetch(&shard.entries()[static_cast<uint32_t>(hash) & shard.mask]);
  }
  for (size_t i = 0; i < count; ++i) {
    block->rows[i] = Guess(block->hashes[i]);
    if (block->rows[i] != kNoRow) __builtin_prefetch(&ids_[block->rows[i]]);
  }
  for (size_t i = 0; i < count; ++i) {
    if (block->rows[i] != kNoRow) block->rows[i] = FindOne(keys.data()[i], block->hashes[i]);
  }
}

Status RowCatalog::Check(const Key& key) const {
  if (key.table < 0 || key.table >= tables() || key.id < 0) {
    return MakeStatus(StatusCode::kInvalidArgument, "key (table ", key.table, ", id ", key.id,
                      ") is not allowed; tables are 0 .. ", tables() - 1, ", ids 0 .. 2^63-1");
  }
  if (NeedsExtent(key.table) && (int64_t{extents_} + 1) << extent_bits_ >= static_cast<int64_t>(kNoRow)) {
    return MakeStatus(StatusCode::kResourceExhausted, row_count_, " rows is the most one rank can hold; use more ranks");
  }
  return Status::Ok();
}

uint64_t RowCatalog::GrownEntries(const Shard& shard) {
  if (shard.mask != 0 && 4 * (shard.size + 1) <= 3 * (shard.mask + 1)) return 0;
  return shard.mask == 0 ? kFirstEntries : 2 * (shard.mask + 1);
}

int64_t RowCatalog::GrowthBytes(const Key& key, uint64_t hash) const {
  auto bytes = static_cast<int64_t>(GrownEntries(ShardOf(hash)) * sizeof(Entry));
  if (NeedsExtent(key.table)) {
    const uint32_t last = ((extents_ + 1) << extent_bits_) - 1;
    bytes += ids_.GrowthBytes(last) + extent_tables_.GrowthBytes(extents_) + kDequeBytes;
  }
  return bytes;
}

uint32_t RowCatalog::NextRow(int32_t table) const {
  const Table& of = tables_[static_cast<size_t>(table)];
  if (of.hole != kNoRow) return of.hole;
  return NeedsExtent(table) ? extents_ << extent_bits_ : RowAt(table, of.positions - 1) + 1;
}

bool RowCatalog::GrowShard(Shard* shard) {
  const uint64_t count = GrownEntries(*shard);
  if (count == 0) return true;
  Shard larger;
  const auto bytes = static_cast<int64_t>(count * sizeof(Entry));
  // Mapped for itself as soon as it fills a page: on the heap, what the smaller shards leave behind would add up.
  const bool pages = bytes >= kPageBytes && bytes < kHugePageBytes;
  if (!(pages ? larger.block.AllocatePages(bytes) : larger.block.Allocate(bytes))) return false;
  larger.mask = count - 1;
  larger.size = shard->size;
  Entry* entries = larger.entries();
  std::fill(entries, entries + count, Entry{0, kNoRow});
  for (uint64_t i = 0; shard->mask != 0 && i <= shard->mask; ++i) {
    const Entry& entry = shard->entries()[i];
    if (entry.row == kNoRow) continue;
    uint64_t at = entry.tag & larger.mask;
    while (entries[at].row != kNoRow) at = (at + 1) & larger.mask;
    entries[at] = entry;
  }
  index_bytes_ += larger.block.bytes() - shard->block.bytes();
  *shard = std::move(larger);
  return true;
}

bool RowCatalog::AddExtent(int32_t table) {
  const uint32_t last = ((extents_ + 1) << extent_bits_) - 1;
  if (!ids_.Reserve(last) || !extent_tables_.Reserve(extents_)) return false;
  try {
    tables_[static_cast<size_t>(table)].extents.push_back(extents_);
  } catch (const std::bad_alloc&) {
    return false;
  }
  extent_tables_[extents_++] = table;
  return true;
}

bool RowCatalog::Create(const Key& key, uint64_t hash, uint32_t* row) {
  Shard* shard = &shards_[hash >> kShardShift];
  if (!GrowShard(shard)) return false;
  Table& table = tables_[static_cast<size_t>(key.table)];
  if (NeedsExtent(key.table) && !AddExtent(key.table)) return false;
  ++table.rows;
  if (table.hole != kNoRow) {
    *row = std::exchange(table.hole, static_cast<uint32_t>(~ids_[table.hole]));
  } else {
    *row = RowAt(key.table, table.positions++);
  }
  ids_[*row] = key.id;
  const auto tag = static_cast<uint32_t>(hash);
  uint64_t at = tag & shard->mask;
  while (shard->entries()[at].row != kNoRow) at = (at + 1) & shard->mask;
  shard->entries()[at] = Entry{tag, *row};
  ++shard->size;
  ++row_count_;
  return true;
}

void RowCatalog::Remove(uint32_t row) {
  const Key key{ids_[row], extent_tables_[row >> extent_bits_]};
  const uint64_t hash = Hash(key);
  Shard* shard = &shards_[hash >> kShardShift];
  Entry* entries = shard->entries();
  uint64_t at = hash & shard->mask;
  while (entries[at].row != row) at = (at + 1) & shard->mask;
  // Moves back every later entry of the run that may stand in the hole: one whose home is not between hole and its place.
  for (uint64_t next = (at + 1) & shard->mask; entries[next].row != kNoRow; next = (next + 1) & shard->mask) {
    if (((next - entries[next].tag) & shard->mask) < ((next - at) & shard->mask)) continue;
    entries[at] = entries[next];
    at = next;
  }
  entries[at].row = kNoRow;
  --shard->size;
  Table& table = tables_[static_cast<size_t>(key.table)];
  ids_[row] = ~int64_t{std::exchange(table.hole, row)};
  --table.rows;
  --row_count_;
}

int64_t RowCatalog::row_count(int32_t table) const {
  return table < 0 || table >= tables() ? 0 : tables_[static_cast<size_t>(table)].rows;
}

uint32_t RowCatalog::RowAt(int32_t table, int64_t position) const {
  const uint32_t extent = tables_[static_cast<size_t>(table)].extents[static_cast<size_t>(position >> extent_bits_)];
  return (extent << extent_bits_) + static_cast<uint32_t>(position & ExtentMask());
}

Status RowCatalog::ScanRange(int32_t table, int64_t cursor, int64_t max_rows, int64_t* end) const {
  if (table < 0 || table >= tables()) {
    return MakeStatus(StatusCode::kInvalidArgument, "table ", table, " does not exist; allowed are 0 .. ", tables() - 1);
  }
  const int64_t size = positions(table);
  if (cursor < 0 || cursor > size || max_rows < 1) {
    return MakeStatus(StatusCode::kInvalidArgument, "cannot scan table ", table, " from cursor ", cursor, " for ", max_rows,
                      " rows; allowed are cursors 0 .. ", size, " and at least 1 row");
  }
  *end = cursor + std::min(max_rows, size - cursor);
  return Status::Ok();
}

int64_t RowCatalog::PlannedRowLimit(Span<const int64_t> rows, int extent_bits) {
  int64_t extents = 0;
  for (const int64_t count : rows) extents += (count + (int64_t{1} << extent_bits) - 1) >> extent_bits;
  return extents << extent_bits;
}

int64_t RowCatalog::PlannedBytes(Span<const int64_t> rows, int extent_bits) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  constexpr double kParts = double{kShards};
  const double mean = static_cast<double>(total) / kParts;
  const double spread = std::sqrt(mean * (1 - 1 / kParts)) + 1e-9;
  // Share of the shards with more than `size` rows: binomial, taken as normal.
  const auto above = [mean, spread](double size) { return 0.5 * std::erfc((size + 0.5 - mean) / (spread * std::sqrt(2.0))); };
  double entries = total > 0 ? kFirstEntries * above(0) : 0.0;
  // GrownEntries doubles a shard when it holds more than three quarters of its entries.
  for (double size = kFirstEntries; 0.75 * size < mean + 8 * spread; size *= 2) entries += size * above(0.75 * size);
  const int64_t limit = PlannedRowLimit(rows, extent_bits);
  const int64_t extents = limit >> extent_bits;
  return static_cast<int64_t>(kParts * entries * sizeof(Entry)) + ChunkedArray<int64_t>::PlannedBytes(limit) +
         ChunkedArray<int32_t>::PlannedBytes(extents) + ListBytes(extents, rows.size());
}

// An extent's number takes 4 bytes in its table's list, an empty list about kDequeBytes.
int64_t RowCatalog::ListBytes(int64_t extents, int64_t tables) { return 5 * extents + tables * kDequeBytes; }

int64_t RowCatalog::allocated_bytes() const {
  return index_bytes_ + ids_.allocated_bytes() + extent_tables_.allocated_bytes() +
         ListBytes(int64_t{extents_}, static_cast<int64_t>(tables_.size()));
}

}  // namespace hvd_ctr
