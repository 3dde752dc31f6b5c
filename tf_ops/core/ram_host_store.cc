// The host store in RAM. Records lie in slabs of 1 to 8 chunks (a chunk is at most 2 MB and 1/64 of the budget, or one record)
// that never move; RowCatalog finds them. So growing never copies a record.
#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/catalog_host_store.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

int64_t RecordBytes(int32_t record_floats) { return int64_t{record_floats} * static_cast<int64_t>(sizeof(float)); }

// Rows of one extent take about a page: a table that has one row only wastes no more than that.
int ExtentBits(int64_t record_bytes) {
  int bits = 0;
  while (bits < 6 && (record_bytes << (bits + 1)) <= 4096) ++bits;
  return bits;
}

// Records by row number, in chunks of a power of two rows that never move.
class RecordArena {
 public:
  enum class Room { kThere, kOverBudget, kNoMemory };

  RecordArena(int32_t record_floats, int64_t ram_bytes) : record_floats_(record_floats) {
    const int64_t most = std::min(kMaxChunkBytes, ram_bytes / 64);
    chunk_bits_ = ExtentBits(record_bytes());
    while ((record_bytes() << (chunk_bits_ + 1)) <= most) ++chunk_bits_;
  }

  float* record(uint32_t row) const {
    return chunks_[row >> chunk_bits_] + static_cast<int64_t>(row & ((uint32_t{1} << chunk_bits_) - 1)) * record_floats_;
  }

  /// Makes room for rows 0 .. row, with at most `left` bytes more. If that is not possible, nothing has changed.
  Room Reserve(uint32_t row, int64_t left) {
    if ((row >> chunk_bits_) < chunks_.size()) return Room::kThere;
    const int64_t count = std::min(left / chunk_bytes(), SlabChunks(static_cast<int64_t>(chunks_.size())));
    if (count < 1) return Room::kOverBudget;
    AlignedBlock slab;
    if (!slab.Allocate(count * chunk_bytes())) return Room::kNoMemory;
    slabs_.emplace_back();
    chunks_.reserve(std::max(chunks_.capacity(), 2 * chunks_.size() + static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; ++i) {
      chunks_.push_back(static_cast<float*>(slab.data()) + i * (int64_t{record_floats_} << chunk_bits_));
    }
    bytes_ += slab.bytes();
    slabs_.back() = std::move(slab);
    return Room::kThere;
  }

  /// allocated_bytes() with room for rows 0 .. rows-1.
  int64_t PlannedBytes(int64_t rows) const {
    const int64_t needed = (rows + (int64_t{1} << chunk_bits_) - 1) >> chunk_bits_;
    int64_t chunks = 0;
    int64_t listed = 0;
    while (chunks < needed) {
      const int64_t count = SlabChunks(chunks);
      listed = std::max(listed, 2 * chunks + count);
      chunks += count;
    }
    return chunks * chunk_bytes() + listed * static_cast<int64_t>(sizeof(float*));
  }

  int64_t record_bytes() const { return RecordBytes(record_floats_); }
  int64_t allocated_bytes() const { return bytes_ + static_cast<int64_t>(chunks_.capacity() * sizeof(float*)); }

 private:
  static constexpr int64_t kMaxChunkBytes = int64_t{2} << 20;

  int64_t chunk_bytes() const { return record_bytes() << chunk_bits_; }

  // Slabs of several chunks give room for huge pages; an eighth of what there is bounds the unused part.
  static int64_t SlabChunks(int64_t chunks) { return std::clamp<int64_t>(chunks / 8, 1, 8); }

  const int32_t record_floats_;
  int chunk_bits_ = 0;
  std::vector<AlignedBlock> slabs_;
  std::vector<float*> chunks_;
  int64_t bytes_ = 0;
};

class RamHostStore final : public CatalogHostStore {
 public:
  RamHostStore(const HostStoreSpec& spec, int64_t ram_bytes)
      : CatalogHostStore(spec, ExtentBits(RecordBytes(spec.record_floats))),
        limit_(ram_bytes > 0 ? ram_bytes : kNoLimit),
        arena_(spec.record_floats, limit_) {
    rows_.reserve(static_cast<size_t>(kSlice));
  }

  static HostStorePlan Plan(const HostStoreSpec& spec, int64_t ram_bytes, Span<const int64_t> rows) {
    const RecordArena arena(spec.record_floats, ram_bytes > 0 ? ram_bytes : kNoLimit);
    const int extent_bits = ExtentBits(arena.record_bytes());
    HostStorePlan plan;
    plan.record_bytes = arena.PlannedBytes(RowCatalog::PlannedRowLimit(rows, extent_bits));
    plan.index_bytes = RowCatalog::PlannedBytes(rows, extent_bits);
    plan.buffer_bytes = kSlice * static_cast<int64_t>(sizeof(uint32_t));
    // The index grows by a shard at a time.
    plan.needed_ram_bytes = plan.record_bytes + plan.buffer_bytes + plan.index_bytes + plan.index_bytes / RowCatalog::kShards;
    for (const int64_t count : rows) plan.cached_rows += count;
    return plan;
  }

  Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* runner) const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    runner->Run(keys.size(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block += RowCatalog::kBlock)
        LoadBlock(keys, block, std::min(end, block + RowCatalog::kBlock), records, found);
    });
    return Status::Ok();
  }

  Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) override {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    for (int64_t begin = 0; begin < keys.size(); begin += kSlice) {
      const int64_t count = std::min(kSlice, keys.size() - begin);
      HVD_CTR_RETURN_IF_ERROR(StoreSlice(keys.subspan(begin, count), records + begin * record_floats_, runner));
    }
    return Status::Ok();
  }

  Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
              std::vector<float>* records) const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    int64_t end = 0;
    HVD_CTR_RETURN_IF_ERROR(ScanRange(table, *cursor, max_rows, &end));
    for (int64_t i = *cursor; i < end; ++i) {
      const uint32_t row = catalog_.RowAt(table, i);
      if (catalog_.id(row) < 0) continue;
      const float* record = arena_.record(row);
      ids->push_back(catalog_.id(row));
      records->insert(records->end(), record, record + record_floats_);
    }
    *cursor = NextCursor(table, end);
    return Status::Ok();
  }

 private:
  static constexpr int64_t kGrain = 1024;
  static constexpr int64_t kAhead = 16;
  static constexpr int64_t kSlice = 4096;  // Keys stored at a time; bounds the scratch memory.

  int64_t HeldBytes() const override {
    return arena_.allocated_bytes() + catalog_.allocated_bytes() + static_cast<int64_t>(rows_.capacity() * sizeof(uint32_t));
  }

  void PrefetchRecord(uint32_t row) const {
    const char* record = reinterpret_cast<const char*>(arena_.record(row));
    for (int64_t line = 0; line < arena_.record_bytes(); line += 64) __builtin_prefetch(record + line);
  }

  void LoadBlock(Span<const Key> keys, int64_t begin, int64_t end, float* records, uint8_t* found) const {
    RowCatalog::Block block;
    catalog_.Find(keys.subspan(begin, end - begin), &block);
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = block.rows[static_cast<size_t>(i - begin)];
      found[i] = row != RowCatalog::kNoRow;
      if (row != RowCatalog::kNoRow) PrefetchRecord(row);
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = block.rows[static_cast<size_t>(i - begin)];
      if (row == RowCatalog::kNoRow) continue;
      std::memcpy(records + i * record_floats_, arena_.record(row), static_cast<size_t>(arena_.record_bytes()));
    }
  }

  Status StoreSlice(Span<const Key> keys, const float* records, TaskRunner* runner) {
    int64_t ready = 0;
    Status status;
    try {
      status = FindOrCreate(keys, &ready);
    } catch (const std::bad_alloc&) {
      status = NoMemory();
    }
    // Also after a failure: a row that exists must have its value. Readers wait for the copy.
    runner->Run(ready, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) PrefetchRecord(rows_[static_cast<size_t>(i + kAhead)]);
        std::memcpy(arena_.record(rows_[static_cast<size_t>(i)]), records + i * record_floats_,
                    static_cast<size_t>(arena_.record_bytes()));
      }
    });
    return status;
  }

  // Fills rows_[0 .. *ready); *ready is n unless the status is an error.
  Status FindOrCreate(Span<const Key> keys, int64_t* ready) {
    const int64_t count = keys.size();
    rows_.resize(static_cast<size_t>(count));
    RowCatalog::Block block;
    for (int64_t begin = 0; begin < count; begin += RowCatalog::kBlock) {
      const int64_t end = std::min(count, begin + RowCatalog::kBlock);
      catalog_.Find(keys.subspan(begin, end - begin), &block);
      for (int64_t i = begin; i < end; ++i) {
        uint32_t row = block.rows[static_cast<size_t>(i - begin)];
        if (row == RowCatalog::kNoRow) {
          HVD_CTR_RETURN_IF_ERROR(Create(keys[i], block.hashes[static_cast<size_t>(i - begin)], &row));
        }
        rows_[static_cast<size_t>(i)] = row;
        *ready = i + 1;
      }
    }
    return Status::Ok();
  }

  Status Create(const Key& key, uint64_t hash, uint32_t* row) {
    const Status allowed = catalog_.Check(key);
    if (!allowed.ok()) return MakeStatus(allowed.code(), owner_, ": ", allowed.message());
    const int64_t left = limit_ - HeldBytes() - catalog_.GrowthBytes(key, hash);
    if (left < 0) return OverBudget();
    const RecordArena::Room room = arena_.Reserve(catalog_.NextRow(key.table), left);
    if (room == RecordArena::Room::kOverBudget) return OverBudget();
    if (room == RecordArena::Room::kNoMemory || !catalog_.Create(key, hash, row)) return NoMemory();
    return Status::Ok();
  }

  Status OverBudget() const {
    return MakeStatus(StatusCode::kResourceExhausted, owner_, ": no room for more than ", catalog_.row_count(), " rows of ",
                      arena_.record_bytes(), " bytes with state: with their index they take ", HeldBytes(),
                      " bytes, the budget is ", limit_,
                      " bytes; raise embedding.host.ram_bytes, set embedding.host.kind to disk, or use more ranks");
  }

  Status NoMemory() const {
    return MakeStatus(StatusCode::kResourceExhausted, owner_, ": no memory for more than ", catalog_.row_count(), " rows of ",
                      arena_.record_bytes(), " bytes (held: ", HeldBytes(),
                      " bytes); set embedding.host.kind to disk, use more ranks or a machine with more memory");
  }

  const int64_t limit_;
  RecordArena arena_;
  std::vector<uint32_t> rows_;  // Scratch of Store.
};

}  // namespace

HostStorePlan PlanRamHostStore(const HostStoreSpec& spec, int64_t ram_bytes, Span<const int64_t> rows) {
  return RamHostStore::Plan(spec, ram_bytes, rows);
}

std::unique_ptr<HostStore> MakeRamHostStore(const HostStoreSpec& spec, int64_t ram_bytes) {
  return std::make_unique<RamHostStore>(spec, ram_bytes);
}

std::unique_ptr<HostStore> MakeRamHostStore(int32_t record_floats, int32_t tables) {
  HostStoreSpec spec;
  spec.record_floats = record_floats;
  spec.tables = tables;
  return MakeRamHostStore(spec, 0);
}

}  // namespace hvd_ctr
