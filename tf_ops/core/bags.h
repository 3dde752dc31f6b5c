// Bags: which rows a pooled vector is made of, and the arithmetic of one bag. Shared by the backends, so that they refuse the
// same arguments with the same words and round alike. The pooling itself: cpu/pool_rows.h, cuda/device_pool.h.
#ifndef HVD_CTR_CORE_BAGS_H_
#define HVD_CTR_CORE_BAGS_H_

#include <cmath>
#include <cstdint>

#include "tf_ops/core/bag_places.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

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
  /// Positions of bag i: begin(i) .. end(i) - 1.
  int64_t begin(int64_t i) const { return splits.empty() ? i : splits[i]; }
  int64_t end(int64_t i) const { return splits.empty() ? i + 1 : splits[i + 1]; }
  float weight(int64_t p) const { return weights.empty() ? 1.0f : weights[p]; }
  /// One unweighted id per bag: every combiner is a copy.
  bool is_copy() const { return splits.empty() && weights.empty(); }
};

/// INVALID_ARGUMENT that begins with `call` and names the value, or OK. Reads ids and splits, no weight.
Status CheckBags(const char* call, const Bags& bags, int64_t unique, int32_t dim, const BagPlaces& places);

/// Lanes of the scalar product in the gradient by the weights: column j in lane j mod 16, then the lanes in order. Changing it
/// changes bits.
constexpr int32_t kPoolDotLanes = 16;

/// What an id of this weight adds to the total that the divisor of its bag is made of (mean and sqrtn; from 0, ids in order).
HVD_CTR_HD inline float DivisorTerm(Combiner combiner, float weight) {
  return combiner == Combiner::kMean ? weight : weight * weight;
}

/// 0: the bag pools to zeros, and no gradient passes.
HVD_CTR_HD inline float DivisorOf(Combiner combiner, float total) {
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

/// Derivative by the weight of one id, from its dot = row . d_out, and weighted S = sum_p w_p dot_p over the ids of the bag:
///   sum: dot.   mean, W = sum w: (dot - S/W) / W.   sqrtn, q = sqrt(sum w^2): (dot - w S/q^2) / q.
HVD_CTR_HD inline float WeightGradOf(Combiner combiner, float dot, float weight, float weighted, float divisor) {
  if (combiner == Combiner::kSum) return dot;
  if (divisor == 0.0f) return 0.0f;
  if (combiner == Combiner::kMean) return (dot - weighted / divisor) / divisor;
  return (dot - weight / divisor * (weighted / divisor)) / divisor;
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_BAGS_H_
