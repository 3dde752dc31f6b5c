#include "tf_ops/cpu/record_kernels.h"

#include "tf_ops/cpu/record_loops.h"

namespace hvd_ctr {

template class RecordLoops<Float32Rows>;

void ReadRecords(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
  WithRowType(records.row_type, [&](auto rows) { RecordLoops<decltype(rows)>::Read(records, slots, floats, out); });
}

void WriteRecords(const Records& records, Span<const Slot> slots, const float* from) {
  WithRowType(records.row_type, [&](auto rows) { RecordLoops<decltype(rows)>::Write(records, slots, from); });
}

void WriteFirstRecords(const FirstRun& run) {
  WithRowType(run.records->row_type, [&](auto rows) { RecordLoops<decltype(rows)>::WriteFirst(run); });
}

void UpdateRecords(OptimizerKind kind, const UpdateRun& run) {
  WithRowType(run.records->row_type, [&](auto rows) { RecordLoops<decltype(rows)>::Update(kind, run); });
}

}  // namespace hvd_ctr
