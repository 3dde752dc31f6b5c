// Expand and pool, with gradients: unique rows (U, D) + virtual ids -> one pooled vector per bag.
// A bag is the ids of one feature in one sample. Virtual id kNoVirtualId contributes nothing and does not count in a mean.
#ifndef HVD_CTR_CPU_POOL_ROWS_H_
#define HVD_CTR_CPU_POOL_ROWS_H_

#include <cstdint>

#include "tf_ops/core/bags.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

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
