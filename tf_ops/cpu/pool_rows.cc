#include "tf_ops/cpu/pool_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/row_loops.h"
#include "tf_ops/cpu/scatter_add.h"

#if defined(HVD_CTR_TARGET_AVX512)
#include <immintrin.h>
#endif

namespace hvd_ctr {
namespace {

/// What the weighted sum of a bag is divided by: 1 for sum; 0 when the bag has no id or its weights cancel.
float Divisor(const Bags& bags, int64_t begin, int64_t end) {
  if (bags.combiner == Combiner::kSum) return 1.0f;
  float total = 0.0f;
  for (int64_t p = begin; p < end; ++p) {
    if (bags.virtual_ids[p] >= 0) total += DivisorTerm(bags.combiner, bags.weight(p));
  }
  return DivisorOf(bags.combiner, total);
}

/// Average ids per bag times dim: floats of work per bag, for the split over threads.
int64_t WorkPerBag(const Bags& bags, int32_t dim) {
  return std::max<int64_t>(1, bags.virtual_ids.size() / std::max<int64_t>(1, bags.bags())) * dim;
}

struct PoolArgs {
  const Bags* bags;
  const float* rows;
  int32_t dim;
  float* out;
  BagPlaces places;
};

template <int32_t kDim>
HVD_CTR_SIMD_BODY void CopyBags(const PoolArgs& args, int64_t begin, int64_t end) {
  const int64_t dim = kDim > 0 ? kDim : args.dim;
  const int32_t* virtual_ids = args.bags->virtual_ids.data();
  BagWalk walk(args.places, begin);
  for (int64_t i = begin; i < end; ++i, walk.Next()) {
    float* out = args.out + walk.offset();
    if (virtual_ids[i] < 0) {
      ZeroRow(dim, out);
    } else {
      CopyRow(args.rows + virtual_ids[i] * dim, dim, out);
    }
  }
}

#if defined(HVD_CTR_TARGET_AVX512)
/// CopyBags with stores of whole cache lines past the caches. Rows are read from the cache, where they stand once each; `out` is
/// too large for it, and a usual store would first read the line that it overwrites.
HVD_CTR_TARGET_AVX512 void StreamBags(const PoolArgs& args, int64_t begin, int64_t end) {
  const int32_t* virtual_ids = args.bags->virtual_ids.data();
  BagWalk walk(args.places, begin);
  for (int64_t i = begin; i < end; ++i, walk.Next()) {
    float* out = args.out + walk.offset();
    const float* row = args.rows + std::max<int64_t>(virtual_ids[i], 0) * args.dim;
    const __mmask16 keep = virtual_ids[i] < 0 ? 0 : 0xffff;
    for (int64_t j = 0; j < args.dim; j += kLineFloats) _mm512_stream_ps(out + j, _mm512_maskz_loadu_ps(keep, row + j));
  }
  _mm_sfence();
}

/// Larger than a core's own cache.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

/// Whether StreamBags can copy these bags, and should.
bool Streams(const PoolArgs& args) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.out) / sizeof(float));
  const int64_t steps = args.places.inner_stride | args.places.outer_stride | args.dim;
  return ActiveSimdLevel() == SimdLevel::kAvx512 && (address | steps) % kLineFloats == 0 &&
         args.bags->bags() * args.dim * static_cast<int64_t>(sizeof(float)) >= kStreamBytes;
}
#else
void StreamBags(const PoolArgs&, int64_t, int64_t) {}
bool Streams(const PoolArgs&) { return false; }
#endif

/// kVectors * kWidth columns from j on of one bag: sum of weight * row in order, from zero, then divided. The sums stay in
/// registers.
template <int32_t kVectors, int32_t kWidth, bool kWeighted>
HVD_CTR_SIMD_BODY void SumColumns(const PoolArgs& args, int64_t dim, int64_t begin, int64_t end, float divisor, int64_t j,
                                  float* out) {
  using Vector = typename FloatVector<kWidth>::Type;
  const int32_t* virtual_ids = args.bags->virtual_ids.data();
  const float* weights = args.bags->weights.data();
  Vector sums[kVectors] = {};
  for (int64_t p = begin; p < end; ++p) {
    if (virtual_ids[p] < 0) continue;
    const float* row = args.rows + virtual_ids[p] * dim + j;
    for (int32_t i = 0; i < kVectors; ++i) {
      Vector part;
      std::memcpy(&part, row + i * kWidth, sizeof(part));
      if (kWeighted) part = weights[p] * part;
      sums[i] += part;
    }
  }
  for (int32_t i = 0; i < kVectors; ++i) {
    if (divisor != 1.0f) sums[i] = sums[i] / divisor;
    std::memcpy(out + j + i * kWidth, &sums[i], sizeof(sums[i]));
  }
}

template <SimdLevel kLevel, bool kWeighted, int32_t kDim>
HVD_CTR_SIMD_BODY void SumBag(const PoolArgs& args, int64_t begin, int64_t end, float divisor, float* out) {
  constexpr int32_t kLanes = SimdFloats(kLevel);
  const int64_t dim = kDim > 0 ? kDim : args.dim;
  if (divisor == 0.0f) return ZeroRow(dim, out);
  int64_t j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) SumColumns<4, kLanes, kWeighted>(args, dim, begin, end, divisor, j, out);
  for (; j + kLanes <= dim; j += kLanes) SumColumns<1, kLanes, kWeighted>(args, dim, begin, end, divisor, j, out);
  for (; kLanes > 4 && j + 4 <= dim; j += 4) SumColumns<1, 4, kWeighted>(args, dim, begin, end, divisor, j, out);
  for (; j < dim; ++j) SumColumns<1, 1, kWeighted>(args, dim, begin, end, divisor, j, out);
}

template <SimdLevel kLevel, bool kWeighted, int32_t kDim>
HVD_CTR_SIMD_BODY void SumBags(const PoolArgs& args, int64_t first, int64_t last) {
  BagWalk walk(args.places, first);
  for (int64_t i = first; i < last; ++i, walk.Next()) {
    const int64_t begin = args.bags->begin(i);
    const int64_t end = args.bags->end(i);
    const float divisor = Divisor(*args.bags, begin, end);
    SumBag<kLevel, kWeighted, kDim>(args, begin, end, divisor, args.out + walk.offset());
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void PoolRangeBody(const PoolArgs& args, int64_t begin, int64_t end) {
  if (!args.bags->is_copy()) {
    if (!args.bags->weights.empty()) return SumBags<kLevel, true, 0>(args, begin, end);
    return args.dim == 16 ? SumBags<kLevel, false, 16>(args, begin, end) : SumBags<kLevel, false, 0>(args, begin, end);
  }
  switch (args.dim) {
    case 16:
      return CopyBags<16>(args, begin, end);
    case 32:
      return CopyBags<32>(args, begin, end);
    case 64:
      return CopyBags<64>(args, begin, end);
    case 128:
      return CopyBags<128>(args, begin, end);
    default:
      return CopyBags<0>(args, begin, end);
  }
}

/// Dot product in 16 lanes (column j in lane j mod 16), then the lanes in order: a fixed order that still vectorises.
HVD_CTR_SIMD_BODY float Dot(const float* a, const float* b, int64_t dim) {
  float lanes[kPoolDotLanes] = {};
  int64_t j = 0;
  for (; j + kPoolDotLanes <= dim; j += kPoolDotLanes) {
    for (int32_t i = 0; i < kPoolDotLanes; ++i) lanes[i] += a[j + i] * b[j + i];
  }
  for (int32_t i = 0; j + i < dim; ++i) lanes[i] += a[j + i] * b[j + i];
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void DotRangeBody(const PoolArgs& args, const float* d_out, int64_t first, int64_t last, float* dots) {
  const Bags& bags = *args.bags;
  BagWalk walk(args.places, first);
  for (int64_t i = first; i < last; ++i, walk.Next()) {
    const float* d_bag = d_out + walk.offset();
    for (int64_t p = bags.begin(i); p < bags.end(i); ++p) {
      const int64_t v = bags.virtual_ids[p];
      dots[p] = v < 0 ? 0.0f : Dot(args.rows + v * args.dim, d_bag, args.dim);
    }
  }
}

HVD_CTR_SIMD_KERNEL(void, PoolRange, (const PoolArgs& args, int64_t begin, int64_t end), (args, begin, end))
HVD_CTR_SIMD_KERNEL(void, DotRange, (const PoolArgs& args, const float* d_out, int64_t first, int64_t last, float* dots),
                    (args, d_out, first, last, dots))

/// Turns the dots of one bag (d_weights[p] = row_p . d_out) into derivatives by the weights.
void WeightGradOfBag(const Bags& bags, int64_t begin, int64_t end, float* d_weights) {
  if (bags.combiner == Combiner::kSum) return;
  const float divisor = Divisor(bags, begin, end);
  float weighted = 0.0f;
  for (int64_t p = begin; p < end; ++p) {
    if (bags.virtual_ids[p] >= 0) weighted += bags.weight(p) * d_weights[p];
  }
  for (int64_t p = begin; p < end; ++p) {
    d_weights[p] = bags.virtual_ids[p] < 0 ? 0.0f : WeightGradOf(bags.combiner, d_weights[p], bags.weight(p), weighted, divisor);
  }
}

/// Per position: the bag it is in, its target row (-1 where the bag pools to zeros) and its coefficient weight / divisor.
struct Terms {
  std::vector<int32_t> bags;
  std::vector<int32_t> targets;
  std::vector<float> coefficients;

  void Resize(size_t n) {
    bags.resize(n);
    targets.resize(n);
    coefficients.resize(n);
  }
};

void FillTerms(const Bags& bags, TaskRunner* runner, Terms* terms) {
  int32_t* const bag_of = terms->bags.data();
  int32_t* const targets = terms->targets.data();
  float* const coefficients = terms->coefficients.data();
  ForRows(runner, bags.bags(), WorkPerBag(bags, 1), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t end = bags.end(i);
      const float divisor = Divisor(bags, bags.begin(i), end);
      for (int64_t p = bags.begin(i); p < end; ++p) {
        bag_of[p] = static_cast<int32_t>(i);
        targets[p] = divisor == 0.0f ? kNoVirtualId : bags.virtual_ids[p];
        coefficients[p] = divisor == 0.0f ? 0.0f : bags.weight(p) / divisor;
      }
    }
  });
}

}  // namespace

Status PoolRows(const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out, const BagPlaces& places,
                TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckBags("PoolRows", bags, unique, dim, places));
  const PoolArgs args{&bags, rows, dim, out, places};
  const bool stream = bags.is_copy() && Streams(args);
  ForRows(runner, bags.bags(), WorkPerBag(bags, dim),
          [&args, stream](int64_t begin, int64_t end) { stream ? StreamBags(args, begin, end) : PoolRange(args, begin, end); });
  return Status::Ok();
}

Status PoolRowsGrad(const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim, float* d_rows,
                    TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckBags("PoolRowsGrad", bags, unique, dim, places));
  ScatterArgs args;
  args.source = d_out;
  args.places = places;
  args.dim = dim;
  args.targets = bags.virtual_ids;
  args.unique = unique;
  args.sums = d_rows;
  // Kept for the next call of this thread: fresh memory costs page faults.
  static thread_local Terms terms;
  if (!bags.is_copy()) {
    terms.Resize(static_cast<size_t>(bags.virtual_ids.size()));
    FillTerms(bags, runner, &terms);
    args.source_rows = terms.bags.data();
    args.targets = terms.targets;
    if (bags.combiner != Combiner::kSum || !bags.weights.empty()) args.coefficients = terms.coefficients.data();
  }
  ScatterAdd(args, runner);
  return Status::Ok();
}

Status PoolRowsWeightGrad(const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places, int64_t unique,
                          int32_t dim, float* d_weights, TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckBags("PoolRowsWeightGrad", bags, unique, dim, places));
  const PoolArgs args{&bags, rows, dim, nullptr, places};
  ForRows(runner, bags.bags(), WorkPerBag(bags, dim), [&](int64_t first, int64_t last) {
    DotRange(args, d_out, first, last, d_weights);
    for (int64_t i = first; i < last; ++i) WeightGradOfBag(bags, bags.begin(i), bags.end(i), d_weights);
  });
  return Status::Ok();
}

}  // namespace hvd_ctr
