// The loops of the CPU backend over its arena of records, one call per range of slots, compiled for every SimdLevel.
#ifndef HVD_CTR_CPU_RECORD_KERNELS_H_
#define HVD_CTR_CPU_RECORD_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// The arena: record s at arena + s * stride, row (dim) then state.
struct Records {
  float* arena = nullptr;
  int64_t stride = 0;  ///< Floats between records.
  int32_t dim = 0;
  int32_t record_floats = 0;

  float* at(Slot slot) const { return arena + static_cast<int64_t>(slot) * stride; }
};

/// Copies the leading `floats` floats of each slot's record to out (n, floats); zeros for kNoSlot.
void ReadRecords(const Records& records, Span<const Slot> slots, int64_t floats, float* out);
/// Copies from (n, record_floats) to the records; kNoSlot is skipped.
void WriteRecords(const Records& records, Span<const Slot> slots, const float* from);
/// First record of each key (n) at its slot (n); kNoSlot is skipped.
void WriteFirstRecords(const Records& records, Span<const Slot> slots, const Key* keys, Span<const RowInit> tables);

/// Rows of one table: slots (n), gradients (n, dim).
struct UpdateRun {
  const Records* records;
  const Slot* slots;
  const float* gradients;
  int64_t n;
  const RowUpdate* update;
};

/// Applies the row optimizer; kNoSlot is skipped.
void UpdateRecords(OptimizerKind kind, const UpdateRun& run);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_RECORD_KERNELS_H_
