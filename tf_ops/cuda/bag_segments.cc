#include "tf_ops/cuda/bag_segments.h"

#include <algorithm>
#include <limits>

namespace hvd_ctr {

Status CheckBagCounts(const char* call, const Bags& bags) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (bags.virtual_ids.size() <= kMost && bags.bags() <= kMost) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, call, ": ", bags.virtual_ids.size(), " ids in ", bags.bags(),
                    " bags; a device takes at most ", kMost, " of each in one call");
}

void SortByVirtualId(const Bags& bags, int64_t unique, const BagSegments& segments) {
  // starts[v + 1] first counts the entries of v - 1, so that after the sums it is where v begins; filling moves it to v's end,
  // which is where v + 1 begins.
  int32_t* const starts = segments.starts;
  std::fill_n(starts, unique + 1, 0);
  const int32_t* const ids = bags.virtual_ids.data();
  const int64_t n = bags.virtual_ids.size();
  for (int64_t p = 0; p < n; ++p) {
    if (ids[p] >= 0 && int64_t{ids[p]} + 1 < unique) ++starts[int64_t{ids[p]} + 2];
  }
  for (int64_t v = 2; v <= unique; ++v) starts[v] += starts[v - 1];
  for (int64_t i = 0; i < bags.bags(); ++i) {
    for (int64_t p = bags.begin(i); p < bags.end(i); ++p) {
      if (ids[p] < 0) continue;
      const int32_t entry = starts[int64_t{ids[p]} + 1]++;
      if (segments.bags != nullptr) segments.bags[entry] = static_cast<int32_t>(i);
      if (segments.positions != nullptr) segments.positions[entry] = static_cast<int32_t>(p);
    }
  }
}

void FillBagOfPosition(const Bags& bags, int32_t* bag_of) {
  for (int64_t i = 0; i < bags.bags(); ++i) std::fill(bag_of + bags.begin(i), bag_of + bags.end(i), static_cast<int32_t>(i));
}

}  // namespace hvd_ctr
