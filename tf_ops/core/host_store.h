// HostStore: the host tier, this rank's share of all rows of one MixCache: records (row | state) keyed by (table, id), created
// lazily. A row exists once it was stored. Thread-safe: one internal lock; callers batch.
#ifndef HVD_CTR_CORE_HOST_STORE_H_
#define HVD_CTR_CORE_HOST_STORE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class HostStore {
 public:
  virtual ~HostStore() = default;

  /// records (n, record_floats) of the keys that exist; found[i] = 1 where key i exists, else 0 and its record is left untouched.
  virtual Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* runner) const = 0;
  /// Creates or overwrites n records. Keys are distinct.
  virtual Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) = 0;
  virtual int64_t row_count() const = 0;
  virtual int64_t row_count(int32_t table) const = 0;
  /// Bytes held: records and index.
  virtual int64_t allocated_bytes() const = 0;
  /// Visits rows in the order of creation: up to max_rows rows of `table` from *cursor (0 at the start) on; *cursor is set to
  /// where to go on, or -1 at the end. Appends ids and records.
  virtual Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
                      std::vector<float>* records) const = 0;
};

/// Rows in RAM: chunked arena (never moves, grows by chunks) and an open-addressing index.
std::unique_ptr<HostStore> MakeRamHostStore(int32_t record_floats, int32_t tables);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_HOST_STORE_H_
