// Feature interactions of click models, with gradients: what all pairs of a sample's vectors have in common.
// One pass per sample: nothing of the size (B, F, F) or of a second (B, F, D) is written in between.
#ifndef HVD_CTR_CPU_INTERACTIONS_H_
#define HVD_CTR_CPU_INTERACTIONS_H_

#include <cstdint>

#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Vectors of a batch: (B, F, D), row-major.
struct SampleVectors {
  const float* data = nullptr;
  int64_t samples = 0;   ///< B >= 0
  int64_t features = 0;  ///< F >= 1
  int64_t dim = 0;       ///< D >= 1
  int64_t pairs() const { return features * (features - 1) / 2; }
};

/// out (B, F (F-1) / 2): the scalar products of all pairs of vectors, in the order (1,0), (2,0), (2,1), (3,0), ...
void DotPairs(const SampleVectors& vectors, float* out, TaskRunner* runner);

/// d_vectors (B, F, D) from d_out (B, F (F-1) / 2).
void DotPairsGrad(const SampleVectors& vectors, const float* d_out, float* d_vectors, TaskRunner* runner);

/// out (B): the sum of the scalar products of all pairs, as half of |sum of the vectors|^2 - sum of the |vector|^2.
void PairSum(const SampleVectors& vectors, float* out, TaskRunner* runner);

/// d_vectors (B, F, D) from d_out (B): d_out times the sum of the other vectors.
void PairSumGrad(const SampleVectors& vectors, const float* d_out, float* d_vectors, TaskRunner* runner);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_INTERACTIONS_H_
