#include "tf_ops/cuda/segment_order.h"

#include <algorithm>

#include "tf_ops/cuda/bag_segments.h"

namespace hvd_ctr {
namespace {

/// False where a segment has none or several of the positions; there are as many of either.
bool MakeSingles(Span<const int32_t> inverse, int64_t unique, int32_t* positions) {
  std::fill(positions, positions + unique, -1);
  for (int64_t i = 0; i < inverse.size(); ++i) {
    if (inverse[i] < 0) continue;
    if (positions[inverse[i]] >= 0) return false;
    positions[inverse[i]] = static_cast<int32_t>(i);
  }
  return true;
}

}  // namespace

bool IsIdentity(Span<const int32_t> inverse, int64_t unique) {
  if (inverse.size() != unique) return false;
  for (int64_t i = 0; i < unique; ++i) {
    if (inverse[i] != i) return false;
  }
  return true;
}

SegmentOrder MakeSegmentOrder(Span<const int32_t> inverse, int64_t unique, int32_t* positions, int32_t* starts) {
  if (IsIdentity(inverse, unique)) return SegmentOrder::kIdentity;
  const int64_t used = inverse.size() - std::count_if(inverse.begin(), inverse.end(), [](int32_t k) { return k < 0; });
  if (used == unique && MakeSingles(inverse, unique, positions)) return SegmentOrder::kSingles;
  Bags bags;  // Of one id each.
  bags.virtual_ids = inverse;
  SortByVirtualId(bags, unique, {starts, nullptr, positions});
  return SegmentOrder::kSegments;
}

}  // namespace hvd_ctr
