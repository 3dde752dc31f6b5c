#include "tf_ops/cpu/factorized_dense.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/core/backend_checks.h"
#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {
namespace {

/// Rows whose sums are in registers at once.
constexpr int64_t kRows = 8;
/// Vectors of one sample that are.
constexpr int64_t kVectors = 8;

/// Units that are worked on together. Sums or products of all distinct rows for so few of them stay in a core's own caches, where
/// ranks that share the last one are not in each other's way.
constexpr int64_t kBlockUnits = 64;

const float* KernelOf(const FactorizedShape& shape, const float* kernel, int64_t feature) {
  return kernel + (shape.beside + feature * shape.dim) * shape.units;
}

/// `count` vectors of kWidth floats.
template <int32_t kWidth>
using VectorOf = typename FloatVector<kWidth>::Type;

// ---- many small matrix products ----

/// out (rows, columns), row-major with `columns` = whole lines, = left (rows, depth) right (depth, columns), or += with `add`.
struct Product {
  const float* left;
  int64_t left_stride;
  int64_t depth;
  const float* right;
  int64_t columns;
  float* out;
  bool add;
};

template <SimdLevel kLevel, int64_t kCount>
HVD_CTR_SIMD_BODY void MultiplyBlock(const Product& p, int64_t first) {
  constexpr int32_t kWidth = SimdFloats(kLevel);
  const float* const left = p.left + first * p.left_stride;
  for (int64_t j = 0; j < p.columns; j += kWidth) {
    VectorOf<kWidth> sums[kCount] = {};
    for (int64_t i = 0; p.add && i < kCount; ++i) std::memcpy(&sums[i], p.out + (first + i) * p.columns + j, sizeof(sums[i]));
    for (int64_t k = 0; k < p.depth; ++k) {
      VectorOf<kWidth> right;
      std::memcpy(&right, p.right + k * p.columns + j, sizeof(right));
      for (int64_t i = 0; i < kCount; ++i) sums[i] += left[i * p.left_stride + k] * right;
    }
    for (int64_t i = 0; i < kCount; ++i) std::memcpy(p.out + (first + i) * p.columns + j, &sums[i], sizeof(sums[i]));
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void MultiplyRowsBody(const Product& p, int64_t begin, int64_t end) {
  for (; begin + kRows <= end; begin += kRows) MultiplyBlock<kLevel, kRows>(p, begin);
  for (; begin < end; ++begin) MultiplyBlock<kLevel, 1>(p, begin);
}

HVD_CTR_SIMD_KERNEL(void, MultiplyRows, (const Product& p, int64_t begin, int64_t end), (p, begin, end))

/// For each distinct row r, of feature i: out[r] = left[r] right_i, where the features' right sides (depth, columns) stand one
/// after the other from product.right on.
void MultiplyByFeature(const FactoredIds& ids, const Product& product, TaskRunner* runner) {
  ForRows(runner, ids.distinct.size(), product.depth * product.columns / 8, [&](int64_t begin, int64_t end) {
    Product of_feature = product;
    for (int64_t i = 0; i < ids.features.size(); ++i, of_feature.right += product.depth * product.columns) {
      const int64_t first = std::max<int64_t>(begin, ids.begins[i]);
      const int64_t last = std::min<int64_t>(end, ids.begins[i + 1]);
      if (first < last) MultiplyRows(of_feature, first, last);
    }
  });
}

/// The block's columns of d_kernel for one factored feature: the sum over its distinct rows of row^T sums[row].
struct KernelGrad {
  const float* rows;  ///< (S, dim)
  const float* sums;  ///< (S, stride)
  int64_t dim, stride, columns;
  int64_t begin, end;  ///< Of the feature in S.
  float* out;          ///< (dim, columns), rows out_stride apart.
  int64_t out_stride;
};

template <SimdLevel kLevel, int64_t kCount>
HVD_CTR_SIMD_BODY void KernelGradBlock(const KernelGrad& g, int64_t k, int64_t j) {
  constexpr int32_t kWidth = SimdFloats(kLevel);
  VectorOf<kWidth> totals[kCount] = {};
  for (int64_t r = g.begin; r < g.end; ++r) {
    VectorOf<kWidth> sum;
    std::memcpy(&sum, g.sums + r * g.stride + j, sizeof(sum));
    for (int64_t i = 0; i < kCount; ++i) totals[i] += g.rows[r * g.dim + k + i] * sum;
  }
  const auto bytes = static_cast<size_t>(std::min<int64_t>(kWidth, g.columns - j)) * sizeof(float);
  for (int64_t i = 0; i < kCount; ++i) std::memcpy(g.out + (k + i) * g.out_stride + j, &totals[i], bytes);
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void KernelGradColumnsBody(const KernelGrad& g) {
  for (int64_t j = 0; j < g.columns; j += SimdFloats(kLevel)) {
    int64_t k = 0;
    for (; k + kRows <= g.dim; k += kRows) KernelGradBlock<kLevel, kRows>(g, k, j);
    for (; k < g.dim; ++k) KernelGradBlock<kLevel, 1>(g, k, j);
  }
}

HVD_CTR_SIMD_KERNEL(void, KernelGradColumns, (const KernelGrad& g), (g))

// ---- one pass over the samples ----

/// A block of columns of the samples.
struct SampleColumns {
  const FactoredIds* ids;
  int64_t columns;  ///< Of the block.
  int64_t stride;   ///< Floats of a row of products or sums: the columns in whole lines.
  int64_t units;    ///< Floats of a sample.
};

/// Columns [first, last) of sample b, by args.OnColumns<count, width>(b, column) for runs of vectors.
template <SimdLevel kLevel, typename Args>
HVD_CTR_SIMD_BODY void ForColumns(const Args& args, int64_t b, int64_t first, int64_t last) {
  constexpr int32_t kWidth = SimdFloats(kLevel);
  int64_t j = first;
  for (; j + kVectors * kWidth <= last; j += kVectors * kWidth) args.template OnColumns<kVectors, kWidth>(b, j);
  for (; j + 4 * kWidth <= last; j += 4 * kWidth) args.template OnColumns<4, kWidth>(b, j);
  for (; j + kWidth <= last; j += kWidth) args.template OnColumns<1, kWidth>(b, j);
  for (; j < last; ++j) args.template OnColumns<1, 1>(b, j);
}

struct SumArgs {
  SampleColumns block;
  const float* products;  ///< (S + 1, stride); the last row is zero, for dropped ids.
  const float* bias;
  bool relu;
  const float* direct;  ///< The block's first column of sample 0, as out.
  float* out;

  /// Writes kCount vectors of kWidth columns from j on of sample b.
  template <int64_t kCount, int32_t kWidth>
  HVD_CTR_SIMD_BODY void OnColumns(int64_t b, int64_t j) const;
};

template <int64_t kCount, int32_t kWidth>
HVD_CTR_SIMD_BODY void SumArgs::OnColumns(int64_t b, int64_t j) const {
  using Vector = VectorOf<kWidth>;
  const int64_t factored = block.ids->features.size();
  const int32_t* const slots = block.ids->slots.data() + b * factored;
  Vector totals[kCount];
  std::memcpy(totals, direct + b * block.units + j, sizeof(totals));
  for (int64_t i = 0; i < factored; ++i) {
    const float* product = products + slots[i] * block.stride + j;
    for (int64_t v = 0; v < kCount; ++v) {
      Vector part;
      std::memcpy(&part, product + v * kWidth, sizeof(part));
      totals[v] += part;
    }
  }
  for (int64_t v = 0; v < kCount; ++v) {
    if (bias != nullptr) {
      Vector part;
      std::memcpy(&part, bias + j + v * kWidth, sizeof(part));
      totals[v] += part;
    }
    // NaN stays NaN.
    if (relu) totals[v] = totals[v] <= 0.0f ? Vector{} : totals[v];
    std::memcpy(out + b * block.units + j + v * kWidth, &totals[v], sizeof(Vector));
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void SumSamplesBody(const SumArgs& args, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) ForColumns<kLevel>(args, b, 0, args.block.columns);
}

HVD_CTR_SIMD_KERNEL(void, SumSamples, (const SumArgs& args, int64_t begin, int64_t end), (args, begin, end))

struct SpreadArgs {
  SampleColumns block;
  const float* d_out;  ///< The block's first column of sample 0.
  float* sums;         ///< (S + 1, stride); dropped ids go to the last row, which nobody reads.

  /// Adds kCount vectors of kWidth columns from j on of sample b to the sums of its rows.
  template <int64_t kCount, int32_t kWidth>
  HVD_CTR_SIMD_BODY void OnColumns(int64_t b, int64_t j) const;
};

template <int64_t kCount, int32_t kWidth>
HVD_CTR_SIMD_BODY void SpreadArgs::OnColumns(int64_t b, int64_t j) const {
  using Vector = VectorOf<kWidth>;
  const int64_t factored = block.ids->features.size();
  const int32_t* const slots = block.ids->slots.data() + b * factored;
  Vector parts[kCount];
  std::memcpy(parts, d_out + b * block.units + j, sizeof(parts));
  for (int64_t i = 0; i < factored; ++i) {
    float* const to = sums + slots[i] * block.stride + j;
    for (int64_t v = 0; v < kCount; ++v) {
      Vector sum;
      std::memcpy(&sum, to + v * kWidth, sizeof(sum));
      sum += parts[v];
      std::memcpy(to + v * kWidth, &sum, sizeof(sum));
    }
  }
}

/// Columns [first, last) of the block, of all samples in order: threads share columns and no sum.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void SpreadSamplesBody(const SpreadArgs& args, int64_t first, int64_t last) {
  for (int64_t b = 0; b < args.block.ids->samples; ++b) ForColumns<kLevel>(args, b, first, last);
}

HVD_CTR_SIMD_KERNEL(void, SpreadSamples, (const SpreadArgs& args, int64_t first, int64_t last), (args, first, last))

// ---- scratch ----

/// Memory cut off the front of a call's scratch, in whole lines.
class Scratch {
 public:
  explicit Scratch(float* memory) : next_(memory) {}
  float* Take(int64_t floats) {
    float* const taken = next_;
    next_ += WholeLines(floats);
    return taken;
  }

 private:
  float* next_;
};

/// The rows of the plan, one after the other: (S, dim).
void PackRows(const FactoredIds& ids, const float* rows, int64_t dim, float* packed) {
  for (int64_t r = 0; r < ids.distinct.size(); ++r) std::copy_n(rows + ids.distinct[r] * dim, dim, packed + r * dim);
}

/// (features, dim, block.stride): the block's columns of the factored features' kernels, with zeros behind.
void PackKernels(const SampleColumns& block, int64_t first, const FactorizedShape& shape, const float* kernel, float* packed) {
  for (const int32_t feature : block.ids->features) {
    const float* from = KernelOf(shape, kernel, feature) + first;
    for (int64_t k = 0; k < shape.dim; ++k, from += shape.units, packed += block.stride) {
      std::copy_n(from, block.columns, packed);
      std::fill(packed + block.columns, packed + block.stride, 0.0f);
    }
  }
}

/// (features, block.columns, stride): the same transposed, with zeros behind the dim.
void PackTransposed(const SampleColumns& block, int64_t first, const FactorizedShape& shape, const float* kernel, int64_t stride,
                    float* packed) {
  for (const int32_t feature : block.ids->features) {
    const float* from = KernelOf(shape, kernel, feature) + first;
    for (int64_t h = 0; h < block.columns; ++h, packed += stride) {
      for (int64_t k = 0; k < shape.dim; ++k) packed[k] = from[k * shape.units + h];
      std::fill(packed + shape.dim, packed + stride, 0.0f);
    }
  }
}

/// Calls fn(block, first unit) for each block of units.
template <typename Fn>
void ForBlocks(const FactoredIds& ids, const FactorizedShape& shape, const Fn& fn) {
  for (int64_t first = 0; first < shape.units; first += kBlockUnits) {
    const int64_t columns = std::min(kBlockUnits, shape.units - first);
    fn(SampleColumns{&ids, columns, WholeLines(columns), shape.units}, first);
  }
}

/// Floats of a row of products or sums in the widest block. Scratch matrices have whole lines, so that vectors of any level cover
/// them.
int64_t BlockStride(const FactorizedShape& shape) { return WholeLines(std::min(kBlockUnits, shape.units)); }

}  // namespace

Status CheckFactoredIds(const char* call, const FactoredIds& ids, const FactorizedShape& shape) {
  const int64_t factored = ids.features.size(), distinct = ids.distinct.size();
  bool fits = shape.dim >= 1 && shape.units >= 1 && shape.beside >= 0 && ids.begins.size() == factored + 1 &&
              ids.slots.size() == factored * ids.samples && ids.begins[0] == 0 && ids.begins[factored] == distinct;
  for (int64_t i = 0; fits && i < factored; ++i) {
    fits = ids.begins[i] <= ids.begins[i + 1] && ids.features[i] < shape.features &&
           ids.features[i] > (i == 0 ? -1 : ids.features[i - 1]);
  }
  fits = fits && FirstOutside(ids.distinct, shape.unique) < 0 && FirstOutside(ids.slots, distinct + 1) < 0;
  fits = fits && (distinct == 0 || *std::min_element(ids.distinct.begin(), ids.distinct.end()) >= 0);
  fits = fits && (ids.slots.empty() || *std::min_element(ids.slots.begin(), ids.slots.end()) >= 0);
  if (fits) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, call, ": the plan (", factored, " features, ", distinct, " distinct rows, ",
                    ids.slots.size(), " slots) does not belong to ", ids.samples, " samples of ", shape.features, " features, ",
                    shape.unique, " rows of dim ", shape.dim, " and ", shape.units,
                    " units; take it from a FactorPlan of the same ids");
}

Status CheckFeatures(const char* call, Span<const int32_t> direct, Span<const int32_t> factored, int64_t features) {
  int64_t d = 0, i = 0;
  for (int64_t f = 0; f < features; ++f) {
    if (d < direct.size() && direct[d] == f) {
      ++d;
    } else if (i < factored.size() && factored[i] == f) {
      ++i;
    } else {
      break;
    }
  }
  if (d + i == features && d == direct.size() && i == factored.size()) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, call, ": ", direct.size(), " direct and ", factored.size(),
                    " factored features are not the ", features, " features of a FactorPlan, each once and ascending");
}

int64_t FactorizedSumScratch(const FactoredIds& ids, const FactorizedShape& shape) {
  const int64_t stride = BlockStride(shape), distinct = ids.distinct.size();
  return WholeLines(distinct * shape.dim) + ids.features.size() * shape.dim * stride + (distinct + 1) * stride;
}

void FactorizedSum(const FactoredIds& ids, const FactorizedShape& shape, const float* rows, const float* kernel,
                   const float* bias, bool relu, const float* direct, float* out, float* scratch, TaskRunner* runner) {
  const int64_t distinct = ids.distinct.size();
  Scratch memory(scratch);
  float* const packed_rows = memory.Take(distinct * shape.dim);
  float* const kernels = memory.Take(ids.features.size() * shape.dim * BlockStride(shape));
  float* const products = memory.Take((distinct + 1) * BlockStride(shape));
  PackRows(ids, rows, shape.dim, packed_rows);
  ForBlocks(ids, shape, [&](const SampleColumns& block, int64_t first) {
    PackKernels(block, first, shape, kernel, kernels);
    MultiplyByFeature(ids, {packed_rows, shape.dim, shape.dim, kernels, block.stride, products, false}, runner);
    ZeroRow(block.stride, products + distinct * block.stride);
    const SumArgs args{block, products, bias == nullptr ? nullptr : bias + first, relu, direct + first, out + first};
    ForRows(runner, ids.samples, (ids.features.size() + 2) * block.columns,
            [&args](int64_t begin, int64_t end) { SumSamples(args, begin, end); });
  });
}

int64_t FactorizedGradScratch(const FactoredIds& ids, const FactorizedShape& shape) {
  const int64_t stride = BlockStride(shape), dim_stride = WholeLines(shape.dim), distinct = ids.distinct.size();
  return WholeLines(distinct * shape.dim) + ids.features.size() * stride * dim_stride + (distinct + 1) * stride +
         distinct * dim_stride;
}

void FactorizedGrad(const FactoredIds& ids, const FactorizedShape& shape, const float* rows, const float* kernel,
                    const float* d_out, float* d_rows, float* d_kernel, float* scratch, TaskRunner* runner) {
  const int64_t dim_stride = WholeLines(shape.dim), distinct = ids.distinct.size();
  Scratch memory(scratch);
  float* const packed_rows = memory.Take(distinct * shape.dim);
  float* const transposed = memory.Take(ids.features.size() * BlockStride(shape) * dim_stride);
  float* const sums = memory.Take((distinct + 1) * BlockStride(shape));
  float* const row_sums = memory.Take(distinct * dim_stride);
  PackRows(ids, rows, shape.dim, packed_rows);
  ForBlocks(ids, shape, [&](const SampleColumns& block, int64_t first) {
    const int64_t stride = block.stride;
    ForRows(runner, distinct + 1, stride,
            [&](int64_t begin, int64_t end) { ZeroRow((end - begin) * stride, sums + begin * stride); });
    const SpreadArgs spread{block, d_out + first, sums};
    runner->Run(stride / kLineFloats, 1, [&](int64_t begin, int64_t end) {
      SpreadSamples(spread, begin * kLineFloats, std::min(end * kLineFloats, block.columns));
    });
    runner->Run(ids.features.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* const to = d_kernel + (KernelOf(shape, kernel, ids.features[i]) - kernel) + first;
        KernelGradColumns(
            {packed_rows, sums, shape.dim, stride, block.columns, ids.begins[i], ids.begins[i + 1], to, shape.units});
      }
    });
    PackTransposed(block, first, shape, kernel, dim_stride, transposed);
    MultiplyByFeature(ids, {sums, stride, block.columns, transposed, dim_stride, row_sums, first > 0}, runner);
  });
  // A row may belong to several features: one after the other.
  for (int64_t r = 0; r < distinct; ++r) {
    float* const to = d_rows + ids.distinct[r] * shape.dim;
    for (int64_t d = 0; d < shape.dim; ++d) to[d] += row_sums[r * dim_stride + d];
  }
}

}  // namespace hvd_ctr
