#include "tf_ops/core/disk_host_store.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <utility>

#include "tf_ops/core/batch_reader.h"
#include "tf_ops/core/catalog_host_store.h"
#include "tf_ops/core/chunked_array.h"
#include "tf_ops/core/record_cache.h"
#include "tf_ops/core/record_file.h"
#include "tf_ops/core/segment_log.h"
#include "tf_ops/core/uring_queue.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kMostPartBytes = int64_t{2} << 20;  // Of a cache chunk, of a segment, of the reader's buffers.
constexpr int kExtentBits = 6;
int64_t PartBytes(int64_t ram_bytes) { return std::min(kMostPartBytes, ram_bytes / 32); }

class DiskHostStore final : public CatalogHostStore {
 public:
  DiskHostStore(const HostStoreSpec& spec, const HostOptions& host, const DiskStoreTuning& tuning,
                std::unique_ptr<RecordFile> file)
      : CatalogHostStore(spec, kExtentBits),
        limit_(host.ram_bytes),
        part_bytes_(tuning.part_bytes > 0 ? tuning.part_bytes : PartBytes(limit_)),
        most_chunks_(tuning.most_chunks > 0 ? tuning.most_chunks : std::numeric_limits<int64_t>::max()),
        record_bytes_(record_floats_ * static_cast<int64_t>(sizeof(float))),
        file_(std::move(file)),
        cache_(record_bytes_, part_bytes_, limit_),
        log_(file_.get(), record_bytes_, part_bytes_),
        reader_(record_bytes_, file_->block_bytes(), part_bytes_) {}

  /// Call once, before anything else.
  Status Allocate(bool use_uring) {
    const int64_t least = LeastBudget(record_bytes_, file_->block_bytes(), catalog_.tables());
    if (limit_ < least) {
      return MakeStatus(StatusCode::kInvalidArgument, owner_, ": embedding.host.ram_bytes is ", limit_, "; records of ",
                        record_bytes_, " bytes on disk in ", catalog_.tables(), " tables need at least ", least,
                        ", and each row takes up to 34 bytes of it");
    }
    const auto failed = [this](const Status& status) { return MakeStatus(status.code(), owner_, ": ", status.message()); };
    reads_.reserve(static_cast<size_t>(kSlice));
    if (const Status status = log_.Allocate(); !status.ok()) return failed(status);
    const Status status = reader_.Allocate(use_uring);
    return status.ok() ? status : failed(status);
  }

  static HostStorePlan Plan(const HostStoreSpec& spec, const HostOptions& host, Span<const int64_t> rows, int64_t appended) {
    const int64_t record_bytes = spec.record_floats * static_cast<int64_t>(sizeof(float));
    const int64_t part_bytes = PartBytes(host.ram_bytes);
    const RecordCache cache(record_bytes, part_bytes, host.ram_bytes);
    const SegmentLog log(nullptr, record_bytes, part_bytes);
    int64_t total = 0;
    for (const int64_t count : rows) total += count;
    HostStorePlan plan;
    plan.index_bytes = IndexBytes(rows);
    plan.buffer_bytes = BufferBytes(record_bytes, part_bytes, kUsualBlockBytes);
    plan.record_bytes = cache.allocated_bytes();
    plan.least_ram_bytes = LeastBudget(record_bytes, kUsualBlockBytes, static_cast<int32_t>(rows.size()));
    // The index grows by a shard at a time.
    const int64_t grown = plan.index_bytes + plan.index_bytes / RowCatalog::kShards;
    plan.needed_ram_bytes = std::max(plan.least_ram_bytes, LeastBudget(record_bytes, kUsualBlockBytes, grown, 1));
    const int64_t left = host.ram_bytes - plan.index_bytes - plan.buffer_bytes - plan.record_bytes;
    const int64_t wanted = (total + cache.chunk_slots() - 1) / cache.chunk_slots();
    const int64_t chunks = std::min(wanted, std::max<int64_t>(1, left / cache.chunk_bytes()));
    plan.record_bytes += chunks * cache.chunk_bytes();
    plan.cached_rows = std::min(total, chunks * cache.chunk_slots());
    plan.disk_bytes = log.PlannedFileBytes(total - plan.cached_rows, appended);
    plan.disk_row_bytes = log.stride();
    return plan;
  }

  Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* /*runner*/) const override {
    std::lock_guard<std::shared_mutex> lock(mutex_);
    for (int64_t begin = 0; begin < keys.size(); begin += kSlice) {
      const int64_t count = std::min(kSlice, keys.size() - begin);
      HVD_CTR_RETURN_IF_ERROR(LoadSlice(keys.subspan(begin, count), records + begin * record_floats_, found + begin));
    }
    return Status::Ok();
  }

  Status Store(Span<const Key> keys, const float* records, TaskRunner* /*runner*/) override {
    std::lock_guard<std::shared_mutex> lock(mutex_);
    RowCatalog::Block block;
    for (int64_t begin = 0; begin < keys.size(); begin += RowCatalog::kBlock) {
      const Span<const Key> part = keys.subspan(begin, std::min(RowCatalog::kBlock, keys.size() - begin));
      catalog_.Find(part, &block);
      for (const uint32_t row : Rows(block, part.size())) {
        if (row != RowCatalog::kNoRow) __builtin_prefetch(&places_[row]);
      }
      for (int64_t i = 0; i < part.size(); ++i) {
        const auto at = static_cast<size_t>(i);
        HVD_CTR_RETURN_IF_ERROR(StoreOne(part[i], block.hashes[at], block.rows[at], records + (begin + i) * record_floats_));
      }
    }
    return Status::Ok();
  }

  DiskStats disk() const override {
    std::lock_guard<std::shared_mutex> lock(mutex_);
    return DiskStats{log_.file_bytes(), rows_read_, log_.rows_written()};
  }

  Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
              std::vector<float>* records) const override {
    std::lock_guard<std::shared_mutex> lock(mutex_);
    int64_t end = 0;
    HVD_CTR_RETURN_IF_ERROR(ScanRange(table, *cursor, max_rows, &end));
    const size_t ids_before = ids->size();
    const size_t floats_before = records->size();
    records->resize(floats_before + static_cast<size_t>((end - *cursor) * record_floats_));
    float* record = records->data() + floats_before;
    Status status;
    for (int64_t begin = *cursor; begin < end && status.ok(); begin += kSlice) {
      int64_t count = 0;
      reads_.clear();
      for (int64_t i = begin; i < std::min(end, begin + kSlice); ++i) {
        const uint32_t row = catalog_.RowAt(table, i);
        if (catalog_.id(row) < 0) continue;
        ids->push_back(catalog_.id(row));
        CopyOrQueue(row, count, record + count * record_floats_);
        ++count;
      }
      status = ReadQueued(record);
      record += count * record_floats_;
    }
    records->resize(static_cast<size_t>(record - records->data()));
    if (!status.ok()) {
      ids->resize(ids_before);
      records->resize(floats_before);
      return status;
    }
    *cursor = NextCursor(table, end);
    return Status::Ok();
  }

 private:
  static constexpr int64_t kSlice = 4096;  // Rows read at a time; bounds the scratch memory.
  static constexpr uint32_t kInRam = SegmentLog::kMostPlaces;
  static constexpr uint32_t kNowhere = 0xffffffffu;  // The place of a removed row; no other row can have it.
  static constexpr int64_t kUsualBlockBytes = 512;   // Of direct access; matters for records near the size of a buffer only.
  static constexpr int64_t kFirstShardsBytes = (int64_t{256} * 16 * 8) + 4096;

  // Of log, reader and what is queued to be read.
  static int64_t BufferBytes(int64_t record_bytes, int64_t part_bytes, int64_t block_bytes) {
    const SegmentLog log(nullptr, record_bytes, part_bytes);
    const BatchReader reader(record_bytes, block_bytes, part_bytes);
    return log.planned_bytes() + reader.planned_bytes() + kSlice * static_cast<int64_t>(sizeof(RecordRead));
  }

  // Index, ids and places of these rows.
  static int64_t IndexBytes(Span<const int64_t> rows) {
    return RowCatalog::PlannedBytes(rows, kExtentBits) +
           ChunkedArray<uint32_t>::PlannedBytes(RowCatalog::PlannedRowLimit(rows, kExtentBits));
  }

  // The smallest budget with which any larger one does, too, for an index of that size and as many chunks of the cache. Buffers
  // and chunks are parts of the budget and grow in steps, so a budget may do that is smaller than one that does not.
  static int64_t LeastBudget(int64_t record_bytes, int64_t block_bytes, int64_t index_bytes, int64_t chunks) {
    const auto needed = [&](int64_t budget) {
      const RecordCache cache(record_bytes, PartBytes(budget), budget);
      return BufferBytes(record_bytes, PartBytes(budget), block_bytes) + index_bytes + cache.allocated_bytes() +
             chunks * cache.chunk_bytes() + kSpareBytes;
    };
    int64_t budget = 32 * kMostPartBytes;
    while (needed(budget) > budget) budget *= 2;
    // No budget from the new one to the old one needs more than the new one.
    for (int64_t less = needed(budget); less < budget; less = needed(budget)) budget = less;
    return budget;
  }

  // For the first rows of every table, one chunk of the cache, and room for one more while the index grows.
  static int64_t LeastBudget(int64_t record_bytes, int64_t block_bytes, int32_t tables) {
    const std::vector<int64_t> first(static_cast<size_t>(tables), 1);
    return LeastBudget(record_bytes, block_bytes, kFirstShardsBytes + IndexBytes(first), 2);
  }

  int64_t HeldBytes() const override {
    return catalog_.allocated_bytes() + places_.allocated_bytes() + cache_.allocated_bytes() + log_.allocated_bytes() +
           reader_.allocated_bytes() + static_cast<int64_t>(reads_.capacity() * sizeof(RecordRead));
  }

  // What the log had of it is dead weight until its segment is used again or compacted.
  void ForgetRecord(uint32_t row) override {
    const uint32_t place = std::exchange(places_[row], kNowhere);
    if ((place & kInRam) != 0) {
      cache_.Release(place & ~kInRam);
    } else {
      log_.Forget(place);
    }
  }

  // With what the log may take at any time.
  int64_t PlannedBytes() const { return HeldBytes() + log_.growth_bytes(); }

  static Span<const uint32_t> Rows(const RowCatalog::Block& block, int64_t count) {
    return Span<const uint32_t>(block.rows.data(), count);
  }

  Status LoadSlice(Span<const Key> keys, float* records, uint8_t* found) const {
    reads_.clear();
    RowCatalog::Block block;
    for (int64_t begin = 0; begin < keys.size(); begin += RowCatalog::kBlock) {
      const int64_t count = std::min(RowCatalog::kBlock, keys.size() - begin);
      catalog_.Find(keys.subspan(begin, count), &block);
      for (const uint32_t row : Rows(block, count)) {
        if (row != RowCatalog::kNoRow) __builtin_prefetch(&places_[row]);
      }
      for (int64_t i = begin; i < begin + count; ++i) {
        const uint32_t row = block.rows[static_cast<size_t>(i - begin)];
        found[i] = row != RowCatalog::kNoRow;
        if (row == RowCatalog::kNoRow) continue;
        CopyOrQueue(row, i, records + i * record_floats_);
        // The device has it now: this copy is the first to go.
        if ((places_[row] & kInRam) != 0) cache_.MakeCold(places_[row] & ~kInRam);
      }
    }
    return ReadQueued(records);
  }

  // The record of a row to `out`, now or by ReadQueued as record number `tag`.
  void CopyOrQueue(uint32_t row, int64_t tag, float* out) const {
    const uint32_t place = places_[row];
    const void* record = (place & kInRam) != 0 ? cache_.record(place & ~kInRam) : log_.Buffered(place);
    if (record != nullptr) {
      std::memcpy(out, record, static_cast<size_t>(record_bytes_));
    } else {
      reads_.push_back(RecordRead{log_.Offset(place), tag});
    }
  }

  void SortQueued() const {
    std::sort(reads_.begin(), reads_.end(), [](const RecordRead& a, const RecordRead& b) { return a.offset < b.offset; });
  }

  Status ReadQueued(float* records) const {
    SortQueued();
    return reader_.Read(*file_, reads_, [this, records](int64_t tag, const char* record) {
      std::memcpy(records + tag * record_floats_, record, static_cast<size_t>(record_bytes_));
      ++rows_read_;
    });
  }

  Status StoreOne(const Key& key, uint64_t hash, uint32_t row, const float* record) {
    if (row != RowCatalog::kNoRow && (places_[row] & kInRam) != 0) {
      const uint32_t slot = places_[row] & ~kInRam;
      std::memcpy(cache_.record(slot), record, static_cast<size_t>(record_bytes_));
      cache_.MakeHot(slot);
      return Status::Ok();
    }
    const bool creates = row == RowCatalog::kNoRow;
    int64_t growth = 0;  // Of the index.
    if (creates) HVD_CTR_RETURN_IF_ERROR(PrepareRow(key, hash, &growth));
    HVD_CTR_RETURN_IF_ERROR(FreeSlot(growth));
    if (creates && !catalog_.Create(key, hash, &row)) return NoMemory();
    const uint32_t slot = cache_.TakeFree(row);
    std::memcpy(cache_.record(slot), record, static_cast<size_t>(record_bytes_));
    if (!creates) log_.Forget(places_[row]);
    places_[row] = slot | kInRam;
    return Status::Ok();
  }

  // After it, creating this row takes at most *growth bytes more, and they are within the budget.
  Status PrepareRow(const Key& key, uint64_t hash, int64_t* growth) {
    const Status allowed = catalog_.Check(key);
    if (!allowed.ok()) return MakeStatus(allowed.code(), owner_, ": ", allowed.message());
    const uint32_t row = catalog_.NextRow(key.table);
    *growth = catalog_.GrowthBytes(key, hash);
    const int64_t more = *growth + places_.GrowthBytes(row);
    HVD_CTR_RETURN_IF_ERROR(ShrinkCache(more));
    if (PlannedBytes() + more > limit_) return OverBudget(more);
    return places_.Reserve(row) ? Status::Ok() : NoMemory();
  }

  // After it, a slot of the cache is free, and there are `growth` bytes for the index if there were.
  Status FreeSlot(int64_t growth) {
    HVD_CTR_RETURN_IF_ERROR(ShrinkCache(growth));
    if (cache_.has_free()) return Status::Ok();
    if (cache_.chunks() < most_chunks_ &&
        PlannedBytes() + growth + cache_.chunk_bytes() + (cache_.chunks() > 0 ? kSpareBytes : 0) <= limit_) {
      if (cache_.AddChunk()) return Status::Ok();
      if (cache_.chunks() == 0) return NoMemory();
    }
    if (cache_.chunks() == 0) return OverBudget(growth);
    return Evict(cache_.Victim());
  }

  // Gives chunks of the cache back, all but one, until `more` bytes fit into the budget.
  Status ShrinkCache(int64_t more) {
    while (PlannedBytes() + more > limit_ && cache_.chunks() > 1) {
      for (auto slot = static_cast<uint32_t>(cache_.slots()); slot-- > cache_.first_of_last();) {
        if (cache_.row(slot) != RecordCache::kNoRow) HVD_CTR_RETURN_IF_ERROR(Evict(slot));
      }
      cache_.RemoveChunk();
    }
    return Status::Ok();
  }

  Status Evict(uint32_t slot) {
    bool wrote = false;
    HVD_CTR_RETURN_IF_ERROR(log_.MakeRoom(&wrote));
    if (wrote && log_.wants_compaction()) HVD_CTR_RETURN_IF_ERROR(MoveEmptiestSegment());
    const uint32_t row = cache_.row(slot);
    places_[row] = log_.Append(row, cache_.record(slot));
    cache_.Release(slot);
    return Status::Ok();
  }

  // Appends what is needed of one segment to the open one, which was just begun: it has room, since the segment is not full.
  Status MoveEmptiestSegment() {
    const uint32_t segment = log_.EmptiestSegment();
    if (segment == SegmentLog::kNoSegment || log_.needed_records(segment) >= log_.records_per_segment()) return Status::Ok();
    Span<const uint32_t> rows;
    HVD_CTR_RETURN_IF_ERROR(log_.ReadRows(segment, &rows));
    const uint32_t first = log_.FirstPlace(segment);
    for (int64_t begin = 0; begin < rows.size(); begin += kSlice) {
      reads_.clear();
      for (int64_t i = begin; i < std::min(rows.size(), begin + kSlice); ++i) {
        const uint32_t place = first + static_cast<uint32_t>(i);
        if (rows[i] >= catalog_.row_limit() || places_[rows[i]] != place) continue;
        reads_.push_back(RecordRead{log_.Offset(place), int64_t{rows[i]}});
      }
      HVD_CTR_RETURN_IF_ERROR(reader_.Read(*file_, reads_, [this](int64_t tag, const char* record) {
        const auto row = static_cast<uint32_t>(tag);
        log_.Forget(std::exchange(places_[row], log_.Append(row, record)));
        ++rows_read_;
      }));
    }
    if (log_.needed_records(segment) == 0) return Status::Ok();
    return MakeStatus(StatusCode::kDataLoss, owner_, ": ", file_->path(), " is damaged: ", log_.needed_records(segment),
                      " rows are missing in the list of segment ", segment);
  }

  Status OverBudget(int64_t more) const {
    return MakeStatus(StatusCode::kResourceExhausted, owner_, ": no room for more than ", catalog_.row_count(), " rows of ",
                      record_bytes_, " bytes with state: their index takes ",
                      catalog_.allocated_bytes() + places_.allocated_bytes(), " bytes and needs ", more, " more, buffers take ",
                      log_.allocated_bytes() + reader_.allocated_bytes(), " bytes, the budget is ", limit_,
                      " bytes; raise embedding.host.ram_bytes, or use more ranks");
  }

  Status NoMemory() const {
    return MakeStatus(StatusCode::kResourceExhausted, owner_, ": no memory for more than ", catalog_.row_count(),
                      " rows (held: ", HeldBytes(), " bytes); lower embedding.host.ram_bytes, use more ranks or a machine with ",
                      "more memory");
  }

  // Room that the index can take before a chunk has to go again.
  static constexpr int64_t kSpareBytes = 64 << 10;

  const int64_t limit_;
  const int64_t part_bytes_;
  const int64_t most_chunks_;
  const int64_t record_bytes_;
  std::unique_ptr<RecordFile> file_;
  ChunkedArray<uint32_t> places_;  // By row: kInRam + slot of the cache, or place in the log.
  // Reading changes these, not what the store holds.
  mutable RecordCache cache_;
  SegmentLog log_;
  mutable BatchReader reader_;
  mutable std::vector<RecordRead> reads_;
  mutable int64_t rows_read_ = 0;
};

}  // namespace

HostStorePlan PlanDiskHostStore(const HostStoreSpec& spec, const HostOptions& host, Span<const int64_t> rows, int64_t appended) {
  return DiskHostStore::Plan(spec, host, rows, appended);
}

Result<std::unique_ptr<HostStore>> MakeDiskHostStore(const HostStoreSpec& spec, const HostOptions& host,
                                                     const DiskStoreTuning& tuning) {
  const bool use_uring = tuning.use_uring && UringQueue::Open(1) != nullptr;
  RecordFile::Options options;
  options.folder = host.path;
  options.name = spec.file_stem + ".rows";
  options.owner = spec.owner;
  options.direct = host.direct_io && use_uring;  // Without io_uring it is the page cache that reads ahead.
  Result<std::unique_ptr<RecordFile>> file = RecordFile::Open(options);
  if (!file.ok()) return file.status();
  try {
    auto store = std::make_unique<DiskHostStore>(spec, host, tuning, std::move(file.value()));
    const Status allocated = store->Allocate(use_uring);
    if (!allocated.ok()) return allocated;
    return std::unique_ptr<HostStore>(std::move(store));
  } catch (const std::bad_alloc&) {
    return MakeStatus(StatusCode::kResourceExhausted, spec.owner, ": no memory for a store on disk");
  }
}

}  // namespace hvd_ctr
