// Which positions of a batch belong to each virtual id, in ascending order: the order in which gradients are summed, fixed on the
// host.
#ifndef HVD_CTR_CUDA_BAG_SEGMENTS_H_
#define HVD_CTR_CUDA_BAG_SEGMENTS_H_

#include <cstdint>

#include "tf_ops/core/bags.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// Room of the caller for the result of SortByVirtualId.
struct BagSegments {
  int32_t* starts = nullptr;  ///< (U + 1): entries starts[v] .. starts[v + 1] - 1 belong to id v.
  int32_t* bags = nullptr;    ///< (N) bag of each entry, or null where it is not wanted. Dropped ids have no entry, so the last
                              ///< are not written.
  int32_t* positions = nullptr;  ///< (N) position of each entry, or null.
};

/// INVALID_ARGUMENT where ids or bags are too many for their int32 numbers.
Status CheckBagCounts(const char* call, const Bags& bags);

/// bags must pass CheckBags and CheckBagCounts.
void SortByVirtualId(const Bags& bags, int64_t unique, const BagSegments& segments);

/// bag_of (N): the bag of each position.
void FillBagOfPosition(const Bags& bags, int32_t* bag_of);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_BAG_SEGMENTS_H_
