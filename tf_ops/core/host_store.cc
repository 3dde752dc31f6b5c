// RamHostStore. Records lie in slabs of 1 to 8 chunks (a chunk is at most 2 MB, or one record) that never move. The index has 256
// open-addressing shards, at most 75 % full, that grow one at a time. So growing never copies a record, and its peak is one shard
// (1/256 of the index) above what is then in use (FC 60).
#include "tf_ops/core/host_store.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

constexpr uint32_t kNoRow = 0xffffffffu;

// Key -> row number. The upper bits of the hash pick a shard, the lower ones the place in it.
class RowIndex {
 public:
  void Prefetch(uint64_t hash) const {
    const Shard& shard = ShardOf(hash);
    if (shard.mask != 0) __builtin_prefetch(&shard.entries()[hash & shard.mask]);
  }

  uint32_t Find(const Key& key, uint64_t hash) const {
    const Shard& shard = ShardOf(hash);
    if (shard.mask == 0) return kNoRow;
    return shard.entries()[Probe(shard, key, hash)].row;
  }

  /// Makes room for one more key with this hash. False: no memory; nothing has changed.
  bool Reserve(uint64_t hash) {
    Shard& shard = shards_[hash >> kShardShift];
    if (shard.mask != 0 && 4 * (shard.size + 1) <= 3 * (shard.mask + 1)) return true;
    Shard larger;
    const uint64_t count = shard.mask == 0 ? kFirstEntries : 2 * (shard.mask + 1);
    if (!larger.block.Allocate(static_cast<int64_t>(count * sizeof(Entry)))) return false;
    larger.mask = count - 1;
    larger.size = shard.size;
    std::fill(larger.entries(), larger.entries() + count, Entry{0, 0, kNoRow});
    for (uint64_t i = 0; shard.mask != 0 && i <= shard.mask; ++i) {
      const Entry& entry = shard.entries()[i];
      if (entry.row == kNoRow) continue;
      const Key key{entry.id, entry.table};
      larger.entries()[Probe(larger, key, HashKey(key.table, key.id, kHostStoreSalt))] = entry;
    }
    bytes_ += larger.block.bytes() - shard.block.bytes();
    shard = std::move(larger);
    return true;
  }

  /// Precondition: the key is not there and Reserve(hash) returned true just before.
  void Insert(const Key& key, uint64_t hash, uint32_t row) {
    Shard& shard = shards_[hash >> kShardShift];
    shard.entries()[Probe(shard, key, hash)] = Entry{key.id, key.table, row};
    ++shard.size;
  }

  int64_t allocated_bytes() const { return bytes_; }

 private:
  static constexpr int kShardBits = 8;
  static constexpr int kShardShift = 64 - kShardBits;
  static constexpr uint64_t kFirstEntries = 16;

  struct Entry {
    int64_t id;
    int32_t table;
    uint32_t row;  // kNoRow: empty.
  };
  struct Shard {
    AlignedBlock block;
    uint64_t mask = 0;  // Entries - 1; 0: nothing allocated yet.
    uint64_t size = 0;
    Entry* entries() const { return static_cast<Entry*>(block.data()); }
  };

  const Shard& ShardOf(uint64_t hash) const { return shards_[hash >> kShardShift]; }

  static uint64_t Probe(const Shard& shard, const Key& key, uint64_t hash) {
    const Entry* entries = shard.entries();
    uint64_t at = hash & shard.mask;
    while (entries[at].row != kNoRow && (entries[at].id != key.id || entries[at].table != key.table)) at = (at + 1) & shard.mask;
    return at;
  }

  std::array<Shard, size_t{1} << kShardBits> shards_;
  int64_t bytes_ = 0;
};

// Records by row number, in chunks of a power of two rows that never move.
class RecordArena {
 public:
  explicit RecordArena(int32_t record_floats) : record_floats_(record_floats) {
    const int64_t record_bytes = static_cast<int64_t>(record_floats) * static_cast<int64_t>(sizeof(float));
    while ((record_bytes << (chunk_bits_ + 1)) <= kMaxChunkBytes) ++chunk_bits_;
  }

  float* record(uint32_t row) const {
    return chunks_[row >> chunk_bits_] + static_cast<int64_t>(row & ((uint32_t{1} << chunk_bits_) - 1)) * record_floats_;
  }

  /// Makes room for rows 0 .. row. False: no memory; nothing has changed.
  bool Reserve(uint32_t row) {
    if ((row >> chunk_bits_) < chunks_.size()) return true;
    // Slabs of several chunks give room for huge pages; an eighth of what there is bounds the unused part.
    const auto count = std::clamp<int64_t>(static_cast<int64_t>(chunks_.size()) / 8, 1, 8);
    const int64_t chunk_floats = static_cast<int64_t>(record_floats_) << chunk_bits_;
    AlignedBlock slab;
    if (!slab.Allocate(count * chunk_floats * static_cast<int64_t>(sizeof(float)))) return false;
    slabs_.emplace_back();
    chunks_.reserve(std::max(chunks_.capacity(), 2 * chunks_.size() + static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; ++i) chunks_.push_back(static_cast<float*>(slab.data()) + i * chunk_floats);
    bytes_ += slab.bytes();
    slabs_.back() = std::move(slab);
    return true;
  }

  int64_t record_bytes() const { return static_cast<int64_t>(record_floats_) * static_cast<int64_t>(sizeof(float)); }
  int64_t allocated_bytes() const { return bytes_ + static_cast<int64_t>(chunks_.capacity() * sizeof(float*)); }

 private:
  static constexpr int64_t kMaxChunkBytes = int64_t{2} << 20;

  const int32_t record_floats_;
  int chunk_bits_ = 0;
  std::vector<AlignedBlock> slabs_;
  std::vector<float*> chunks_;
  int64_t bytes_ = 0;
};

class RamHostStore final : public HostStore {
 public:
  RamHostStore(int32_t record_floats, int32_t tables) : record_floats_(record_floats), arena_(record_floats) {
    tables_.resize(static_cast<size_t>(tables));
  }

  Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* runner) const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    runner->ParallelFor(keys.size(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block += kBlock)
        LoadBlock(keys, block, std::min(end, block + kBlock), records, found);
    });
    return Status::Ok();
  }

  Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) override {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    int64_t ready = 0;
    Status status;
    try {
      status = FindOrCreate(keys, &ready);
    } catch (const std::bad_alloc&) {
      status = NoMemory();
    }
    // Also after a failure: a row that exists must have its value. Readers wait for the copy.
    runner->ParallelFor(ready, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) PrefetchRecord(rows_[static_cast<size_t>(i + kAhead)]);
        std::memcpy(arena_.record(rows_[static_cast<size_t>(i)]), records + i * record_floats_,
                    static_cast<size_t>(arena_.record_bytes()));
      }
    });
    return status;
  }

  int64_t row_count() const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return row_count_;
  }

  int64_t row_count(int32_t table) const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (table < 0 || table >= static_cast<int32_t>(tables_.size())) return 0;
    return static_cast<int64_t>(tables_[static_cast<size_t>(table)].size());
  }

  int64_t allocated_bytes() const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return arena_.allocated_bytes() + index_.allocated_bytes() + row_count_ * static_cast<int64_t>(sizeof(ListedRow)) +
           static_cast<int64_t>(rows_.capacity() * sizeof(uint32_t));
  }

  Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
              std::vector<float>* records) const override {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto tables = static_cast<int32_t>(tables_.size());
    if (table < 0 || table >= tables) {
      return MakeStatus(StatusCode::kInvalidArgument, "host store: table ", table, " does not exist; allowed are 0 .. ",
                        tables - 1);
    }
    const std::deque<ListedRow>& list = tables_[static_cast<size_t>(table)];
    const auto size = static_cast<int64_t>(list.size());
    if (*cursor < 0 || *cursor > size || max_rows < 1) {
      return MakeStatus(StatusCode::kInvalidArgument, "host store: cannot scan table ", table, " from cursor ", *cursor, " for ",
                        max_rows, " rows; allowed are cursors 0 .. ", size, " and at least 1 row");
    }
    const int64_t end = *cursor + std::min(max_rows, size - *cursor);
    for (int64_t i = *cursor; i < end; ++i) {
      const ListedRow& row = list[static_cast<size_t>(i)];
      const float* record = arena_.record(row.row());
      ids->push_back(row.id());
      records->insert(records->end(), record, record + record_floats_);
    }
    *cursor = end == size ? -1 : end;
    return Status::Ok();
  }

 private:
  static constexpr int64_t kGrain = 1024;
  static constexpr int64_t kBlock = 32;
  static constexpr int64_t kAhead = 16;

  // Id and row number in 12 bytes (a struct of both would take 16).
  class ListedRow {
   public:
    ListedRow(int64_t id, uint32_t row)
        : low_(static_cast<uint32_t>(id)), high_(static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32)), row_(row) {}
    int64_t id() const { return static_cast<int64_t>((static_cast<uint64_t>(high_) << 32) | low_); }
    uint32_t row() const { return row_; }

   private:
    uint32_t low_;
    uint32_t high_;
    uint32_t row_;
  };

  static uint64_t Hash(const Key& key) { return HashKey(key.table, key.id, kHostStoreSalt); }

  void PrefetchRecord(uint32_t row) const {
    const char* record = reinterpret_cast<const char*>(arena_.record(row));
    for (int64_t line = 0; line < arena_.record_bytes(); line += 64) __builtin_prefetch(record + line);
  }

  // Three passes over a block that fits in the first-level cache, so that misses of index and arena overlap.
  void LoadBlock(Span<const Key> keys, int64_t begin, int64_t end, float* records, uint8_t* found) const {
    std::array<uint64_t, kBlock> hashes;
    std::array<uint32_t, kBlock> rows;
    for (int64_t i = begin; i < end; ++i) {
      hashes[static_cast<size_t>(i - begin)] = Hash(keys[i]);
      index_.Prefetch(hashes[static_cast<size_t>(i - begin)]);
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = index_.Find(keys[i], hashes[static_cast<size_t>(i - begin)]);
      rows[static_cast<size_t>(i - begin)] = row;
      found[i] = row != kNoRow;
      if (row != kNoRow) PrefetchRecord(row);
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = rows[static_cast<size_t>(i - begin)];
      if (row == kNoRow) continue;
      std::memcpy(records + i * record_floats_, arena_.record(row), static_cast<size_t>(arena_.record_bytes()));
    }
  }

  // Fills rows_[0 .. *ready); *ready is n unless the status is an error.
  Status FindOrCreate(Span<const Key> keys, int64_t* ready) {
    const int64_t count = keys.size();
    rows_.resize(static_cast<size_t>(count));
    std::array<uint64_t, kBlock> hashes;
    for (int64_t block = 0; block < count; block += kBlock) {
      const int64_t end = std::min(count, block + kBlock);
      for (int64_t i = block; i < end; ++i) {
        hashes[static_cast<size_t>(i - block)] = Hash(keys[i]);
        index_.Prefetch(hashes[static_cast<size_t>(i - block)]);
      }
      for (int64_t i = block; i < end; ++i) {
        const uint64_t hash = hashes[static_cast<size_t>(i - block)];
        uint32_t row = index_.Find(keys[i], hash);
        if (row == kNoRow) HVD_CTR_RETURN_IF_ERROR(Create(keys[i], hash, &row));
        rows_[static_cast<size_t>(i)] = row;
        *ready = i + 1;
      }
    }
    return Status::Ok();
  }

  Status Create(const Key& key, uint64_t hash, uint32_t* row) {
    const auto tables = static_cast<int32_t>(tables_.size());
    if (key.table < 0 || key.table >= tables || key.id < 0) {
      return MakeStatus(StatusCode::kInvalidArgument, "host store: key (table ", key.table, ", id ", key.id,
                        ") is not allowed; tables are 0 .. ", tables - 1, ", ids 0 .. 2^63-1");
    }
    if (row_count_ >= static_cast<int64_t>(kNoRow)) {
      return MakeStatus(StatusCode::kResourceExhausted, "host store: ", row_count_,
                        " rows is the most one rank can hold; use more ranks");
    }
    *row = static_cast<uint32_t>(row_count_);
    if (!arena_.Reserve(*row) || !index_.Reserve(hash)) return NoMemory();
    tables_[static_cast<size_t>(key.table)].emplace_back(key.id, *row);
    index_.Insert(key, hash, *row);
    ++row_count_;
    return Status::Ok();
  }

  Status NoMemory() const {
    return MakeStatus(StatusCode::kResourceExhausted, "host store: no memory for more than ", row_count_, " rows of ",
                      arena_.record_bytes(), " bytes (held: ", arena_.allocated_bytes() + index_.allocated_bytes(),
                      " bytes); use more ranks or a machine with more memory");
  }

  const int64_t record_floats_;
  mutable std::shared_mutex mutex_;
  RecordArena arena_;
  RowIndex index_;
  std::vector<std::deque<ListedRow>> tables_;  // Rows of each table in the order of creation.
  int64_t row_count_ = 0;
  std::vector<uint32_t> rows_;  // Scratch of Store.
};

}  // namespace

std::unique_ptr<HostStore> MakeRamHostStore(int32_t record_floats, int32_t tables) {
  return std::make_unique<RamHostStore>(record_floats, tables);
}

}  // namespace hvd_ctr
