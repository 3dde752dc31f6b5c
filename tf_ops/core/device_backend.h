// DeviceBackend: the device tier. Holds S records of (row | optimizer state) and runs the five row kernels. It knows slots, never
// ids; it decides nothing. Every backend passes tests/cpp/backend_conformance.h.
//
// Record: dim floats of row followed by state_floats floats of optimizer state, contiguous (`record_floats` in all). So it is in
// host memory and in every call. On the device the row's values are of the RowType (row_type.h), and the state is float32: what
// stores a row (StoreRecords, StoreFirstRecords, UpdateRows) rounds it, what reads one widens it, which is exact. UpdateRows
// computes in float32 on the widened row.
//
// Memory: `rows`, `gradients` and `sums` are where the backend's kernels run, its device memory; slots, keys, tables, inverse,
// positions and records are host memory, which the caller may reuse as soon as a call returns. For the CPU both are the same.
// Order: calls are synchronous for the CPU. A device backend orders those on device memory on the caller's stream
// (TaskRunner::stream), and the others with respect to them; FetchRecords' records are there when it returns.
// Slots outside [0, S) other than kNoSlot are INVALID_ARGUMENT. Results are bit-identical for any TaskRunner.
#ifndef HVD_CTR_CORE_DEVICE_BACKEND_H_
#define HVD_CTR_CORE_DEVICE_BACKEND_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tf_ops/core/options.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/row_type.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Floats of a row, and of a record: the row and what follows it.
struct RecordWidth {
  int32_t dim = 0;
  int64_t record_floats = 0;
};

/// What first records are made of.
struct RecordInit {
  Span<const RowInit> tables;  ///< (T)
  int32_t dim = 0;
  int64_t record_floats = 0;
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Allocates `slots` records of dim columns of row_type and state_floats floats. Call once. RESOURCE_EXHAUSTED with the bytes
  /// asked for.
  virtual Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type = RowType::kFloat32) = 0;
  virtual int64_t allocated_bytes() const = 0;

  /// Loads n records from host memory: records (n, record_floats) -> slots (n). Slots must be distinct.
  virtual Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) = 0;
  /// Stores the first record of each key (InitialRecordOf): keys (n) -> slots (n), distinct; kNoSlot is skipped. A backend does
  /// it where the records are; this makes them in host memory and stores them from there.
  virtual Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init, TaskRunner* runner) {
    std::vector<float> records(static_cast<size_t>(keys.size() * init.record_floats));
    for (int64_t i = 0; i < keys.size(); ++i) {
      InitialRecordOf(init.tables[keys[i].table], keys[i].id, init.dim, init.record_floats,
                      records.data() + i * init.record_floats);
    }
    return StoreRecords(slots, records.data(), runner);
  }
  /// Reads n records back: slots (n) -> records (n, record_floats).
  virtual Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const = 0;
  /// rows (R, D): rows[i] = row at slots[i]; kNoSlot gives zeros.
  virtual Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const = 0;
  /// sums (K, D): sums[k] = sum over i ascending with inverse[i] == k of gradients[i]; inverse (R) in [-1, K), -1 is left out.
  virtual Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                            TaskRunner* runner) const = 0;
  /// Applies the row optimizer of tables[k] to slots (K, distinct) with gradients (K, D). `step` is the global update count
  /// including this one (1 at the first); learning rates are multiplied by learning_rate_scale. optimizers has one entry per
  /// table.
  virtual Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                            Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                            TaskRunner* runner) = 0;

  /// Device memory of at least `floats` floats for sums between SegmentSum and UpdateRows. It is the backend's and the same for
  /// all; valid until the next call of Workspace.
  virtual Status Workspace(int64_t floats, float** memory) {
    if (workspace_.size() < static_cast<size_t>(floats)) workspace_.resize(static_cast<size_t>(floats));
    *memory = workspace_.data();
    return Status::Ok();
  }
  /// Host memory that Workspace holds.
  int64_t workspace_bytes() const { return static_cast<int64_t>(workspace_.capacity() * sizeof(float)); }
  /// rows[positions[i]] = the row of record i: positions (n), distinct, of rows (?, dim); records (n, record_floats) in host
  /// memory.
  virtual Status PlaceRows(Span<const int32_t> positions, const float* records, const RecordWidth& width, float* rows,
                           TaskRunner* runner) const {
    runner->Run(positions.size(), 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float* record = records + i * width.record_floats;
        std::copy(record, record + width.dim, rows + int64_t{positions[i]} * width.dim);
      }
    });
    return Status::Ok();
  }
  /// Between the two, StoreRecords, StoreFirstRecords and FetchRecords are for slots that no GatherRows or UpdateRows uses which
  /// is called meanwhile. So a device backend need not make one wait for the other; without them the results are the same.
  virtual Status BeginMoves() { return Status::Ok(); }
  virtual Status EndMoves() { return Status::Ok(); }

 private:
  std::vector<float> workspace_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_DEVICE_BACKEND_H_
