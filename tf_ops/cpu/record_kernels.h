// The loops of the CPU backend over its arena of records, one call per range of slots, compiled for every SimdLevel and RowType.
#ifndef HVD_CTR_CPU_RECORD_KERNELS_H_
#define HVD_CTR_CPU_RECORD_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/row_type.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// The arena: record s at arena + s * stride, row (dim) of row_type, then state (float32).
struct Records {
  uint8_t* arena = nullptr;
  int64_t stride = 0;        ///< Bytes between records.
  int64_t state_offset = 0;  ///< Bytes from a record to its state. Float32 rows: right behind the row.
  int32_t dim = 0;
  int32_t record_floats = 0;
  RowType row_type = RowType::kFloat32;

  uint8_t* at(Slot slot) const { return arena + static_cast<int64_t>(slot) * stride; }
};

/// Copies the leading `floats` floats of each slot's record to out (n, floats), the row alone (dim) or all of it; zeros for
/// kNoSlot.
void ReadRecords(const Records& records, Span<const Slot> slots, int64_t floats, float* out);
/// Copies from (n, record_floats) to the records; kNoSlot is skipped.
void WriteRecords(const Records& records, Span<const Slot> slots, const float* from);

/// Keys (n) whose first records are to be written. row: scratch (dim), not used for float32 rows.
struct FirstRun {
  const Records* records;
  Span<const Slot> slots;
  const Key* keys;
  const RowInit* tables;
  float* row;
};

/// First record of each key at its slot; kNoSlot is skipped.
void WriteFirstRecords(const FirstRun& run);

/// Rows of one table: slots (n), gradients (n, dim). row: scratch (dim), not used for float32 rows.
struct UpdateRun {
  const Records* records;
  const Slot* slots;
  const float* gradients;
  int64_t n;
  const RowUpdate* update;
  float* row;
};

/// Applies the row optimizer; kNoSlot is skipped.
void UpdateRecords(OptimizerKind kind, const UpdateRun& run);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_RECORD_KERNELS_H_
