// ScatterAdd: the sum behind SegmentSum and PoolRowsGrad. sums[target[p]] += coefficient[p] * source[row(p)] for p ascending.
//
// Invariant: each target row is zeroed, then receives its terms in ascending order of p on one thread, so the bits do not depend
// on the number of threads. Threads share the targets out among themselves (hashed, so that the hot rows at the front spread) and
// each scans all positions.
#ifndef HVD_CTR_CPU_SCATTER_ADD_H_
#define HVD_CTR_CPU_SCATTER_ADD_H_

#include <cstdint>

#include "tf_ops/core/bag_places.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

struct ScatterArgs {
  const float* source = nullptr;  ///< Row r at source + places.at(r), dim floats.
  BagPlaces places = 0;
  int32_t dim = 0;
  Span<const int32_t> targets;           ///< (N) in [-1, unique); -1 is left out. Checked by the caller.
  const int32_t* source_rows = nullptr;  ///< (N) source row of position p; null: row p.
  const float* coefficients = nullptr;   ///< (N), only with source_rows; null: all 1.
  int64_t unique = 0;
  float* sums = nullptr;  ///< (unique, dim), overwritten.
};

void ScatterAdd(const ScatterArgs& args, TaskRunner* runner);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_SCATTER_ADD_H_
