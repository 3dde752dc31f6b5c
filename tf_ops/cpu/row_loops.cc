#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {
namespace {

/// The greatest of value + 1, where -1 wraps to 0; unsigned, so what is below -1 is great.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY uint32_t HighestBody(const int32_t* values, int64_t n) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < n; ++i) highest = std::max(highest, static_cast<uint32_t>(values[i]) + 1u);
  return highest;
}

HVD_CTR_SIMD_KERNEL(uint32_t, Highest, (const int32_t* values, int64_t n), (values, n))

}  // namespace

int64_t FirstOutside(Span<const int32_t> values, int64_t limit) {
  const uint32_t bound = static_cast<uint32_t>(std::clamp<int64_t>(limit, 0, INT32_MAX));
  if (Highest(values.data(), values.size()) <= bound) return -1;
  for (int64_t i = 0; i < values.size(); ++i) {
    if (static_cast<uint32_t>(values[i]) + 1u > bound) return i;
  }
  return -1;
}

}  // namespace hvd_ctr
