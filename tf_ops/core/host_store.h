// HostStore: the host tier, this rank's share of all rows of one MixCache: records (row | state) keyed by (table, id), created
// lazily. A row exists once it was stored. Thread-safe: one internal lock; callers batch.
//
// Two stores: all records in RAM (ram_host_store.cc), or in a file with a second-level cache of them in RAM (disk_host_store.h).
// Both answer "never stored" from memory, keep their memory within HostOptions::ram_bytes at every moment, also while growing,
// and stay readable after an error: rows stored before keep their values.
#ifndef HVD_CTR_CORE_HOST_STORE_H_
#define HVD_CTR_CORE_HOST_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/core/options.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Of a store on disk, since its creation; zeros for one in RAM.
struct DiskStats {
  int64_t bytes = 0;         ///< Size of the file now.
  int64_t rows_read = 0;     ///< Records read from the file.
  int64_t rows_written = 0;  ///< Records written to the file.
};

class HostStore {
 public:
  virtual ~HostStore() = default;

  /// records (n, record_floats) of the keys that exist; found[i] = 1 where key i exists, else 0 and its record is left untouched.
  /// DATA_LOSS naming path, bytes and cause if a record cannot be read; then the contents of records are undefined.
  virtual Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* runner) const = 0;
  /// Creates or overwrites n records. Keys are distinct. RESOURCE_EXHAUSTED when the budget, memory or the disk is full: some of
  /// the records may have been stored then, all others have the values they had, and a later call may succeed.
  virtual Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) = 0;
  /// Deletes those of the n keys (distinct) that exist; returns how many. Cannot fail, as no disk is touched; their memory, and
  /// their space in a file, is used again.
  virtual int64_t Remove(Span<const Key> keys) = 0;
  /// found[i] = 1 where key i exists.
  virtual void Contains(Span<const Key> keys, uint8_t* found) const = 0;
  virtual int64_t row_count() const = 0;
  virtual int64_t row_count(int32_t table) const = 0;
  /// Bytes of RAM held: records, index, buffers.
  virtual int64_t allocated_bytes() const = 0;
  virtual DiskStats disk() const { return DiskStats(); }
  /// Visits rows in the order of creation: the next max_rows positions of `table` from *cursor (0 at the start) on; *cursor is
  /// set to where to go on, or -1 at the end. Appends ids and records, fewer than max_rows (or none) where rows were removed; a
  /// new row takes the position of the one removed last. A cursor is a position in that order: after a read error, which
  /// leaves *cursor and the vectors as they were, a later position skips the rows that cannot be read.
  virtual Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
                      std::vector<float>* records) const = 0;
};

/// What a store holds and how it is named in messages.
struct HostStoreSpec {
  std::string owner = "host store";  ///< For messages.
  std::string file_stem = "rows";    ///< Name of the file of rows, without suffix; unique among all stores in one folder.
  int32_t record_floats = 1;
  int32_t tables = 1;
};

/// Bytes of one store, planned.
struct HostStorePlan {
  int64_t record_bytes = 0;      ///< RAM for records: the arena, or the second-level cache of a store on disk.
  int64_t index_bytes = 0;       ///< RAM for the index.
  int64_t buffer_bytes = 0;      ///< RAM for buffers, whatever the rows.
  int64_t cached_rows = 0;       ///< Records that the second-level cache holds; all rows for a store in RAM.
  int64_t disk_bytes = 0;        ///< The file.
  int64_t disk_row_bytes = 0;    ///< Of which one record takes.
  int64_t least_ram_bytes = 0;   ///< ram_bytes below this are refused: buffers, first rows of each table (disk).
  int64_t needed_ram_bytes = 0;  ///< ram_bytes below this do not do for these rows.
};

/// What a store takes that holds rows[t] rows of table t: HostStore::allocated_bytes and DiskStats::bytes, expected over the
/// hashes of the keys. A store that these rows do not fit into is planned as if its budget were larger.
/// appended: records written to the file so far, those overwritten since included; 0: each row once.
HostStorePlan PlanHostStore(const HostStoreSpec& spec, const HostOptions& host, Span<const int64_t> rows, int64_t appended);
// Parts of it: ram_host_store.cc, disk_host_store.cc.
HostStorePlan PlanRamHostStore(const HostStoreSpec& spec, int64_t ram_bytes, Span<const int64_t> rows);
HostStorePlan PlanDiskHostStore(const HostStoreSpec& spec, const HostOptions& host, Span<const int64_t> rows, int64_t appended);

/// Rows in RAM: chunked arena (never moves, grows by chunks) and RowCatalog. ram_bytes 0: no limit.
std::unique_ptr<HostStore> MakeRamHostStore(const HostStoreSpec& spec, int64_t ram_bytes);
std::unique_ptr<HostStore> MakeRamHostStore(int32_t record_floats, int32_t tables);

/// Of the store that MakeHostStore makes.
HostStoreSpec MakeHostStoreSpec(const MixCacheOptions& options);
/// The store that options.host asks for; errors as in MakeDiskHostStore.
Result<std::unique_ptr<HostStore>> MakeHostStore(const MixCacheOptions& options);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_HOST_STORE_H_
