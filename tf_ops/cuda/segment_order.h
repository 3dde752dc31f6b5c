// The order in which SegmentSum adds: which positions belong to each segment, ascending. Made on the host.
//
//   SegmentOrder order = MakeSegmentOrder(inverse, unique, positions, starts);      // positions (R), starts (unique + 1)
#ifndef HVD_CTR_CUDA_SEGMENT_ORDER_H_
#define HVD_CTR_CUDA_SEGMENT_ORDER_H_

#include <cstdint>

#include "tf_ops/core/types.h"

namespace hvd_ctr {

enum class SegmentOrder {
  kIdentity,  ///< Segment k is position k alone; nothing was written.
  kSingles,   ///< Segment k is positions[k] alone; starts was not written.
  kSegments,  ///< Segment k is positions[starts[k]] .. positions[starts[k + 1] - 1].
};

/// Whether it is kIdentity. One pass over inverse.
bool IsIdentity(Span<const int32_t> inverse, int64_t unique);

/// inverse (R, less than 2^31) in [-1, unique), -1 is left out; positions (R) and starts (unique + 1) are written.
SegmentOrder MakeSegmentOrder(Span<const int32_t> inverse, int64_t unique, int32_t* positions, int32_t* starts);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_SEGMENT_ORDER_H_
