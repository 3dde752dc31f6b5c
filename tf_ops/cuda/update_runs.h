// What UpdateRows sends to the device beside slots and gradients: the runs of equal table, and each table's TableUpdate.
#ifndef HVD_CTR_CUDA_UPDATE_RUNS_H_
#define HVD_CTR_CUDA_UPDATE_RUNS_H_

#include <cstdint>

#include "tf_ops/core/options.h"
#include "tf_ops/core/types.h"
#include "tf_ops/cuda/row_launches.h"

namespace hvd_ctr {

/// Runs of equal value in tables (K).
int32_t CountRuns(Span<const int32_t> tables);

/// starts, run_tables (CountRuns): first row and table of each run. Sets the request's ranges and needs_row_values.
void FillRuns(Span<const int32_t> tables, Span<const RowOptimizerOptions> optimizers, int32_t* starts, int32_t* run_tables,
              UpdateRequest* request);

/// updates (T).
void FillUpdates(Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale, TableUpdate* updates);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_UPDATE_RUNS_H_
