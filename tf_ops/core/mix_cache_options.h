// Checks of MixCacheOptions before a cache is built.
#ifndef HVD_CTR_CORE_MIX_CACHE_OPTIONS_H_
#define HVD_CTR_CORE_MIX_CACHE_OPTIONS_H_

#include "tf_ops/core/options.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// INVALID_ARGUMENT naming cache, table, field, value and what is allowed, for the first field that is wrong.
Status CheckMixCacheOptions(const MixCacheOptions& options);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_MIX_CACHE_OPTIONS_H_
