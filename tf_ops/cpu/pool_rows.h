// Expand and pool, with gradients: unique rows (U, D) + virtual ids -> one pooled vector per bag.
// A bag is the ids of one feature in one sample. Virtual id kNoVirtualId contributes nothing and does not count in a mean.
#ifndef HVD_CTR_CPU_POOL_ROWS_H_
#define HVD_CTR_CPU_POOL_ROWS_H_

#include <cstdint>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"
#include "tf_ops/cpu/bag_places.h"

namespace hvd_ctr {

/// Values are passed from Python: never renumber.
enum class Combiner : int32_t { kSum = 0, kMean = 1, kSqrtN = 2 };

/// Bags over a flat list of virtual ids (N).
struct Bags {
  Span<const int32_t> virtual_ids;  ///< (N)
  /// (bags+1) offsets into virtual_ids; empty: every bag is exactly one id (bag i = position i), the fast path.
  Span<const int64_t> splits;
  /// Per-id weights (N), or empty (all 1). mean divides by the weight sum, sqrtn by the root of the sum of squared weights;
  /// a bag whose divisor is 0 pools to zeros with zero gradients (FC 27).
  Span<const float> weights;
  Combiner combiner = Combiner::kSum;
  int64_t bags() const { return splits.empty() ? virtual_ids.size() : splits.size() - 1; }
};

/// out: bag i is written at out + places.at(i), dim floats. The places of two bags must not overlap.
Status PoolRows(const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out, const BagPlaces& places,
                TaskRunner* runner);

/// d_rows (U, D) = overwritten with the sum over positions in ascending order; d_out bag i at d_out + places.at(i).
Status PoolRowsGrad(const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim, float* d_rows,
                    TaskRunner* runner);

/// d_weights (N): derivative of the loss by each per-id weight, the normaliser's part included (FC 45).
Status PoolRowsWeightGrad(const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places, int64_t unique,
                          int32_t dim, float* d_weights, TaskRunner* runner);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_POOL_ROWS_H_
