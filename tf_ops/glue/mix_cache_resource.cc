#include "tf_ops/glue/mix_cache_resource.h"

namespace hvd_ctr {

int64_t MixCacheResource::Prefetch(const ReceivedKeys& received, TaskRunner* runner) {
  ++open_tickets_;  // Before the call: two prefetches at once may wait for each other's pins.
  int64_t ticket = 0;
  const Status status = cache_->Prefetch(received, &ticket, runner);
  if (status.ok()) return ticket;
  --open_tickets_;
  std::lock_guard<std::mutex> lock(mutex_);
  failures_[next_failed_ticket_] = FailedPrefetch{status, AskedRows(received)};
  return next_failed_ticket_--;
}

Status MixCacheResource::Apply(int64_t ticket, const float* gradients, float learning_rate_scale, TaskRunner* runner) {
  FailedPrefetch failure;
  if (ForgetFailure(ticket, &failure)) {
    return MakeStatus(StatusCode::kFailedPrecondition, "MixCache '", options().name, "': ticket ", ticket,
                      " cannot be applied, its prefetch failed: ", failure.status.message());
  }
  const Status status = cache_->Apply(ticket, gradients, learning_rate_scale, runner);
  if (status.ok()) --open_tickets_;
  return status;
}

Status MixCacheResource::Release(int64_t ticket) {
  FailedPrefetch failure;
  if (ForgetFailure(ticket, &failure)) return Status::Ok();
  const Status status = cache_->Release(ticket);
  if (status.ok()) --open_tickets_;
  return status;
}

bool MixCacheResource::FindFailure(int64_t ticket, FailedPrefetch* failure) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = failures_.find(ticket);
  if (found == failures_.end()) return false;
  *failure = found->second;
  return true;
}

bool MixCacheResource::ForgetFailure(int64_t ticket, FailedPrefetch* failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = failures_.find(ticket);
  if (found == failures_.end()) return false;
  *failure = std::move(found->second);
  failures_.erase(found);
  return true;
}

void MixCacheResource::CountSkippedInRead(const ReceivedKeys& received) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const PeerMessage& peer : received.peers) {
    for (size_t t = 0; t < skipped_in_reads_.size(); ++t) skipped_in_reads_[t] += peer.info.invalid_counts[t];
  }
}

std::vector<int64_t> MixCacheResource::skipped_in_reads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return skipped_in_reads_;
}

std::string MixCacheResource::DebugString() const {
  return internal::StrCat("MixCache '", options().name, "', ", options().slots, " slots of dim ", options().dim);
}

int64_t MixCacheResource::MemoryUsed() const {
  const MixCacheStats stats = cache_->Stats();
  return stats.device_bytes + stats.host_bytes;
}

absl::Status LookupMixCache(tensorflow::OpKernelContext* ctx, tensorflow::core::RefCountPtr<MixCacheResource>* resource) {
  // Not tensorflow::LookupResource, which wants the op to be on the handle's device.
  const absl::StatusOr<MixCacheResource*> found = tensorflow::HandleFromInput(ctx, 0).GetResource<MixCacheResource>();
  TF_RETURN_IF_ERROR(found.status());
  if (*found == nullptr) return absl::NotFoundError("the handle is not one of HvdCtrMixCache");
  (*found)->Ref();
  resource->reset(*found);
  return absl::OkStatus();
}

std::vector<int32_t> AskedRows(const ReceivedKeys& received) {
  std::vector<int32_t> asked;
  asked.reserve(received.peers.size());
  for (const PeerMessage& peer : received.peers) asked.push_back(static_cast<int32_t>(peer.key_count));
  return asked;
}

}  // namespace hvd_ctr
