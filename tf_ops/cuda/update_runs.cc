#include "tf_ops/cuda/update_runs.h"

#include <new>

#include "tf_ops/core/row_math.h"

namespace hvd_ctr {

int32_t CountRuns(Span<const int32_t> tables) {
  int32_t runs = tables.empty() ? 0 : 1;
  for (int64_t k = 1; k < tables.size(); ++k) runs += tables[k] != tables[k - 1];
  return runs;
}

void FillRuns(Span<const int32_t> tables, Span<const RowOptimizerOptions> optimizers, int32_t* starts, int32_t* run_tables,
              UpdateRequest* request) {
  int64_t run = 0;
  for (int64_t begin = 0; begin < tables.size();) {
    int64_t end = begin + 1;
    while (end < tables.size() && tables[end] == tables[begin]) ++end;
    const RowOptimizerOptions& options = optimizers[tables[begin]];
    request->ranges[static_cast<int32_t>(options.kind)].Include(begin, end);
    request->needs_row_values |= options.kind == OptimizerKind::kRowWiseAdagrad;
    request->needs_row_values |= options.kind == OptimizerKind::kAdam && options.row_step;
    starts[run] = static_cast<int32_t>(begin);
    run_tables[run] = tables[begin];
    ++run;
    begin = end;
  }
}

void FillUpdates(Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale, TableUpdate* updates) {
  for (int64_t t = 0; t < optimizers.size(); ++t) {
    const RowOptimizerOptions& options = optimizers[t];
    new (updates + t) TableUpdate{options.kind, MakeRowUpdate(options, step, options.learning_rate * learning_rate_scale)};
  }
}

}  // namespace hvd_ctr
