// Check of a list of indices: one place for what is a valid virtual id, slot or segment.
#ifndef HVD_CTR_CORE_INDEX_CHECK_H_
#define HVD_CTR_CORE_INDEX_CHECK_H_

#include <algorithm>
#include <cstdint>

#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Position of the first value outside [-1, limit), or -1 if there is none. One vectorised pass when all is well.
inline int64_t FirstOutside(Span<const int32_t> values, int64_t limit) {
  const uint32_t bound = static_cast<uint32_t>(std::clamp<int64_t>(limit, 0, INT32_MAX));
  uint32_t highest = 0;
  for (const int32_t value : values) highest = std::max(highest, static_cast<uint32_t>(value) + 1u);  // -1 wraps to 0.
  if (highest <= bound) return -1;
  for (int64_t i = 0; i < values.size(); ++i) {
    if (static_cast<uint32_t>(values[i]) + 1u > bound) return i;
  }
  return -1;
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_INDEX_CHECK_H_
