#include "tf_ops/cpu/interactions.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kLanes = kLineFloats;
using Lanes = FloatVector<kLanes>::Type;

HVD_CTR_SIMD_BODY void Load(const float* from, Lanes* lanes) { std::memcpy(lanes, from, sizeof(Lanes)); }
HVD_CTR_SIMD_BODY void Store(const Lanes& lanes, float* to) { std::memcpy(to, &lanes, sizeof(Lanes)); }

/// A sample's vectors with zeros behind each, up to whole lanes: copied to `scratch` unless D is whole lanes already.
HVD_CTR_SIMD_BODY const float* Padded(const float* vectors, int64_t features, int64_t dim, int64_t stride, float* scratch) {
  if (stride == dim) return vectors;
  for (int64_t f = 0; f < features; ++f) {
    CopyRow(vectors + f * dim, dim, scratch + f * stride);
    ZeroRow(stride - dim, scratch + f * stride + dim);
  }
  return scratch;
}

/// The lanes of columns first .. first + 15 to a row of `dim` floats, without those that are only padding.
HVD_CTR_SIMD_BODY void StoreColumns(const Lanes& lanes, int64_t first, int64_t dim, float* row) {
  if (first + kLanes <= dim) return Store(lanes, row + first);
  std::memcpy(row + first, &lanes, static_cast<size_t>(dim - first) * sizeof(float));
}

/// scratch: (D, F rounded up to whole lanes), for the transposed sample: lanes then run over the partners of a vector.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void DotPairsRangeBody(const SampleVectors& v, float* out, float* scratch, int64_t begin, int64_t end) {
  const int64_t features = v.features, dim = v.dim, pairs = v.pairs(), stride = WholeLines(features);
  for (int64_t b = begin; b < end; ++b) {
    const float* vectors = v.data + b * features * dim;
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t f = 0; f < features; ++f) scratch[d * stride + f] = vectors[f * dim + d];
    }
    float* row = out + b * pairs;
    float* const last = row + pairs;
    for (int64_t f = 1; f < features; row += f, ++f) {
      for (int64_t g = 0; g < f; g += kLanes) {
        Lanes sums{};
        for (int64_t d = 0; d < dim; ++d) {
          Lanes column;
          Load(scratch + d * stride + g, &column);
          sums += vectors[f * dim + d] * column;
        }
        // Lanes beyond the row are overwritten by the next rows, but must not reach into the next sample.
        const int64_t count = std::min(kLanes, f - g);
        if (row + g + kLanes <= last) {
          Store(sums, row + g);
        } else {
          std::memcpy(row + g, &sums, static_cast<size_t>(count) * sizeof(float));
        }
      }
    }
  }
}

HVD_CTR_SIMD_KERNEL(void, DotPairsRange, (const SampleVectors& v, float* out, float* scratch, int64_t begin, int64_t end),
                    (v, out, scratch, begin, end))

/// scratch: (F, D rounded up) for the padded sample, then (F, F) for the upstream gradients of all ordered pairs.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void DotPairsGradRangeBody(const SampleVectors& v, const float* d_out, float* d_vectors, float* scratch,
                                             int64_t begin, int64_t end) {
  const int64_t features = v.features, dim = v.dim, stride = WholeLines(dim);
  float* const of_pairs = scratch + features * stride;
  for (int64_t b = begin; b < end; ++b) {
    const float* vectors = Padded(v.data + b * features * dim, features, dim, stride, scratch);
    const float* upstream = d_out + b * v.pairs();
    for (int64_t f = 0; f < features; ++f) {
      of_pairs[f * features + f] = 0.0f;
      for (int64_t g = 0; g < f; ++g) of_pairs[f * features + g] = of_pairs[g * features + f] = *upstream++;
    }
    for (int64_t f = 0; f < features; ++f) {
      float* row = d_vectors + (b * features + f) * dim;
      for (int64_t first = 0; first < dim; first += kLanes) {
        Lanes sums{};
        for (int64_t g = 0; g < features; ++g) {
          Lanes other;
          Load(vectors + g * stride + first, &other);
          sums += of_pairs[f * features + g] * other;
        }
        StoreColumns(sums, first, dim, row);
      }
    }
  }
}

HVD_CTR_SIMD_KERNEL(void, DotPairsGradRange,
                    (const SampleVectors& v, const float* d_out, float* d_vectors, float* scratch, int64_t begin, int64_t end),
                    (v, d_out, d_vectors, scratch, begin, end))

/// scratch: (F, D rounded up) for the padded sample.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void PairSumRangeBody(const SampleVectors& v, float* out, float* scratch, int64_t begin, int64_t end) {
  const int64_t features = v.features, dim = v.dim, stride = WholeLines(dim);
  for (int64_t b = begin; b < end; ++b) {
    const float* vectors = Padded(v.data + b * features * dim, features, dim, stride, scratch);
    Lanes total{};
    for (int64_t first = 0; first < dim; first += kLanes) {
      Lanes sum{}, squares{};
      for (int64_t f = 0; f < features; ++f) {
        Lanes vector;
        Load(vectors + f * stride + first, &vector);
        sum += vector;
        squares += vector * vector;
      }
      total += sum * sum - squares;
    }
    float value = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) value += total[lane];
    out[b] = 0.5f * value;
  }
}

HVD_CTR_SIMD_KERNEL(void, PairSumRange, (const SampleVectors& v, float* out, float* scratch, int64_t begin, int64_t end),
                    (v, out, scratch, begin, end))

/// scratch: (F, D rounded up) for the padded sample.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void PairSumGradRangeBody(const SampleVectors& v, const float* d_out, float* d_vectors, float* scratch,
                                            int64_t begin, int64_t end) {
  const int64_t features = v.features, dim = v.dim, stride = WholeLines(dim);
  for (int64_t b = begin; b < end; ++b) {
    const float* vectors = Padded(v.data + b * features * dim, features, dim, stride, scratch);
    for (int64_t first = 0; first < dim; first += kLanes) {
      Lanes sum{};
      for (int64_t f = 0; f < features; ++f) {
        Lanes vector;
        Load(vectors + f * stride + first, &vector);
        sum += vector;
      }
      for (int64_t f = 0; f < features; ++f) {
        Lanes vector;
        Load(vectors + f * stride + first, &vector);
        StoreColumns(d_out[b] * (sum - vector), first, dim, d_vectors + (b * features + f) * dim);
      }
    }
  }
}

HVD_CTR_SIMD_KERNEL(void, PairSumGradRange,
                    (const SampleVectors& v, const float* d_out, float* d_vectors, float* scratch, int64_t begin, int64_t end),
                    (v, d_out, d_vectors, scratch, begin, end))

/// Calls fn(scratch, begin, end) over the samples.
template <typename Fn>
void ForSamples(const SampleVectors& v, int64_t floats_per_sample, int64_t scratch_floats, TaskRunner* runner, const Fn& fn) {
  ForRows(runner, v.samples, floats_per_sample, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(scratch_floats));
    fn(scratch.data(), begin, end);
  });
}

}  // namespace

void DotPairs(const SampleVectors& vectors, float* out, TaskRunner* runner) {
  const int64_t work = vectors.features * vectors.dim + vectors.pairs();
  ForSamples(vectors, work, vectors.dim * WholeLines(vectors.features), runner,
             [&](float* scratch, int64_t begin, int64_t end) { DotPairsRange(vectors, out, scratch, begin, end); });
}

void DotPairsGrad(const SampleVectors& vectors, const float* d_out, float* d_vectors, TaskRunner* runner) {
  const int64_t work = vectors.features * vectors.dim + vectors.pairs();
  const int64_t floats = vectors.features * (WholeLines(vectors.dim) + vectors.features);
  ForSamples(vectors, work, floats, runner, [&](float* scratch, int64_t begin, int64_t end) {
    DotPairsGradRange(vectors, d_out, d_vectors, scratch, begin, end);
  });
}

void PairSum(const SampleVectors& vectors, float* out, TaskRunner* runner) {
  ForSamples(vectors, vectors.features * vectors.dim, vectors.features * WholeLines(vectors.dim), runner,
             [&](float* scratch, int64_t begin, int64_t end) { PairSumRange(vectors, out, scratch, begin, end); });
}

void PairSumGrad(const SampleVectors& vectors, const float* d_out, float* d_vectors, TaskRunner* runner) {
  ForSamples(
      vectors, vectors.features * vectors.dim, vectors.features * WholeLines(vectors.dim), runner,
      [&](float* scratch, int64_t begin, int64_t end) { PairSumGradRange(vectors, d_out, d_vectors, scratch, begin, end); });
}

}  // namespace hvd_ctr
