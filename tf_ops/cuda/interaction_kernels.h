// Kernels of the feature interactions, with the bits of cpu/interactions.cc: a thread per output element, or per 16-th of one
// where the CPU sums in 16 lanes. Vectors are (B, F, D). Launched by device_pool_impl.h.
#ifndef HVD_CTR_CUDA_INTERACTION_KERNELS_H_
#define HVD_CTR_CUDA_INTERACTION_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/hash.h"
#include "tf_ops/cuda/kernel_geometry.h"

namespace hvd_ctr {

/// Lanes of the column sum in PairSum. Changing it changes bits.
constexpr int32_t kPairSumLanes = 16;

/// out (B, pairs). Layout: samples * (F - 1) rows; row r is the pairs (f, 0) .. (f, f - 1) of sample r / (F - 1), f = 1 + r % (F
/// - 1).
struct DotPairsKernel {
  RowLayout layout;
  const float* vectors;
  int64_t features;
  int64_t dim;
  float* out;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t row = layout.row(block, thread);
    if (row >= layout.rows) return;
    const int64_t sample = row / (features - 1), f = 1 + row % (features - 1);
    const float* const first = vectors + sample * features * dim;
    float* const to = out + sample * (features * (features - 1) / 2) + f * (f - 1) / 2;
    for (int64_t g = layout.lane(thread); g < f; g += layout.lanes()) {
      float sum = 0.0f;
      for (int64_t d = 0; d < dim; ++d) sum += first[f * dim + d] * first[g * dim + d];
      to[g] = sum;
    }
  }
};

/// d_vectors (B, F, D). Layout: samples * F rows of D columns.
struct DotPairsGradKernel {
  RowLayout layout;
  const float* vectors;
  const float* d_out;
  int64_t features;
  int64_t dim;
  float* d_vectors;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t row = layout.row(block, thread);
    if (row >= layout.rows) return;
    const int64_t sample = row / features, f = row % features;
    const float* const first = vectors + sample * features * dim;
    const float* const upstream = d_out + sample * (features * (features - 1) / 2);
    for (int32_t j = layout.lane(thread); j < layout.pieces; j += layout.lanes()) {
      float sum = 0.0f;
      for (int64_t g = 0; g < features; ++g) {
        const int64_t high = f > g ? f : g, low = f > g ? g : f;
        const float of_pair = f == g ? 0.0f : upstream[high * (high - 1) / 2 + low];
        sum += of_pair * first[g * dim + j];
      }
      d_vectors[row * dim + j] = sum;
    }
  }
};

/// lanes (B, 16) of |sum of the vectors|^2 - sum of the |vector|^2. Layout: samples, kPairSumLanes pieces.
struct PairSumLanesKernel {
  RowLayout layout;
  const float* vectors;
  int64_t features;
  int64_t dim;
  float* lanes;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t sample = layout.row(block, thread);
    if (sample >= layout.rows) return;
    const int32_t lane = layout.lane(thread);
    const float* const first = vectors + sample * features * dim;
    float total = 0.0f;
    for (int64_t j = lane; j < dim; j += kPairSumLanes) {
      float sum = 0.0f, squares = 0.0f;
      for (int64_t f = 0; f < features; ++f) {
        const float value = first[f * dim + j];
        sum += value;
        squares += value * value;
      }
      total += sum * sum - squares;
    }
    lanes[sample * kPairSumLanes + lane] = total;
  }
};

/// out (B) = half the lanes, in order; a thread per sample.
struct PairSumKernel {
  int64_t count;
  const float* lanes;
  float* out;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t sample = ThreadIndex(block, thread);
    if (sample >= count) return;
    float value = 0.0f;
    for (int32_t lane = 0; lane < kPairSumLanes; ++lane) value += lanes[sample * kPairSumLanes + lane];
    out[sample] = 0.5f * value;
  }
};

/// d_vectors (B, F, D). Layout: samples of D columns.
struct PairSumGradKernel {
  RowLayout layout;
  const float* vectors;
  const float* d_out;
  int64_t features;
  int64_t dim;
  float* d_vectors;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t sample = layout.row(block, thread);
    if (sample >= layout.rows) return;
    const int64_t first = sample * features * dim;
    for (int32_t j = layout.lane(thread); j < layout.pieces; j += layout.lanes()) {
      float sum = 0.0f;
      for (int64_t f = 0; f < features; ++f) sum += vectors[first + f * dim + j];
      for (int64_t f = 0; f < features; ++f) {
        d_vectors[first + f * dim + j] = d_out[sample] * (sum - vectors[first + f * dim + j]);
      }
    }
  }
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_INTERACTION_KERNELS_H_
