// MixCacheResource: a MixCache as a TensorFlow resource, held by an anonymous ref-counted handle: it lives as long as a copy of
// the handle does (an eager tensor in Python, a capture of a tf.function, an op that is running).
//
// The handle belongs to the host, also where the cached rows are on a GPU: TensorFlow places ops with the resources that they
// take, and all but the three that carry rows (Lookup, Read, Apply) are the host's work. Were they on the GPU, TensorFlow would
// take their figures there and back, and each time wait for what the GPU is busy with.
//
// It also remembers prefetches that failed on this rank only. Their tickets are negative; Lookup answers them with the error as
// rows, so that the other ranks, which are already on their way into the row exchange, fail with the same message instead of
// waiting.
#ifndef HVD_CTR_GLUE_MIX_CACHE_RESOURCE_H_
#define HVD_CTR_GLUE_MIX_CACHE_RESOURCE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/glue/device_memory.h"

namespace hvd_ctr {

/// Why a prefetch failed, and how many rows each peer asked for in it (W).
struct FailedPrefetch {
  Status status;
  std::vector<int32_t> asked;
};

class MixCacheResource final : public tensorflow::ResourceBase {
 public:
  /// place: of the backend's rows.
  MixCacheResource(std::unique_ptr<MixCache> cache, RowsPlace place)
      : cache_(std::move(cache)), place_(std::move(place)), skipped_in_reads_(cache_->options().tables.size(), 0) {}

  MixCache* cache() { return cache_.get(); }
  const RowsPlace& place() const { return place_; }
  const MixCacheOptions& options() const { return cache_->options(); }

  /// MixCache::Prefetch; a failure becomes a negative ticket.
  int64_t Prefetch(const ReceivedKeys& received, TaskRunner* runner);
  Status Apply(int64_t ticket, const float* gradients, float learning_rate_scale, TaskRunner* runner);
  Status Release(int64_t ticket);
  /// True and *failure for the ticket of a failed prefetch that was not released yet.
  bool FindFailure(int64_t ticket, FailedPrefetch* failure) const;
  /// Counts the ids that a Read's headers say were skipped; evaluation is to tell of them too.
  void CountSkippedInRead(const ReceivedKeys& received);
  /// Those counts, per table (T).
  std::vector<int64_t> skipped_in_reads() const;
  /// False only while no ticket is open: then no prefetch has to wait for another batch's pins.
  bool PrefetchMayWait() const { return open_tickets_.load() > 0; }

  std::string DebugString() const override;
  int64_t MemoryUsed() const override;

 private:
  /// Removes the ticket of a failed prefetch; false if there is none.
  bool ForgetFailure(int64_t ticket, FailedPrefetch* failure);

  const std::unique_ptr<MixCache> cache_;
  const RowsPlace place_;
  std::atomic<int64_t> open_tickets_{0};
  mutable std::mutex mutex_;
  int64_t next_failed_ticket_ = -1;
  std::unordered_map<int64_t, FailedPrefetch> failures_;
  std::vector<int64_t> skipped_in_reads_;
};

/// The resource behind input `handle` (0), with a reference of its own.
absl::Status LookupMixCache(tensorflow::OpKernelContext* ctx, tensorflow::core::RefCountPtr<MixCacheResource>* resource);

/// Keys that each peer asked for (W).
std::vector<int32_t> AskedRows(const ReceivedKeys& received);

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_MIX_CACHE_RESOURCE_H_
