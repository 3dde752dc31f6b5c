// Widths of the outputs of HvdCtrStats: the fields of MixCacheTableStats and of MixCacheStats, in their order.
#ifndef HVD_CTR_GLUE_CACHE_STATS_LAYOUT_H_
#define HVD_CTR_GLUE_CACHE_STATS_LAYOUT_H_

#include <cstdint>

#include "tf_ops/core/mix_cache.h"

namespace hvd_ctr {

constexpr int64_t kTableStats = sizeof(MixCacheTableStats) / sizeof(int64_t);
constexpr int64_t kTotalStats = 10;
static_assert(kTableStats == 15, "HvdCtrStats, its documentation and hvd_ctr/ops/mix_cache_ops.py list fifteen fields");

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_CACHE_STATS_LAYOUT_H_
