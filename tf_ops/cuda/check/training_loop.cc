#include "tf_ops/cuda/check/training_loop.h"

namespace hvd_ctr {

ReceivedKeys LoopBatches::At(int64_t batch) const {
  ReceivedKeys received;
  const int64_t hot = rows - misses;
  for (int64_t id = 0; id < hot; ++id) received.ids.push_back(id);
  const int64_t first = hot + batch % kRound * misses;
  for (int64_t i = 0; i < misses; ++i) received.ids.push_back(first + i);
  received.tables.assign(received.ids.size(), 0);
  PeerMessage peer;
  peer.key_count = rows;
  received.peers.push_back(peer);
  return received;
}

MixCacheOptions LoopBatches::Options() const {
  MixCacheOptions options;
  options.name = "check";
  options.dim = kDim;
  options.slots = rows - misses + kKept * misses;
  options.seed = 7;
  options.prefetch_wait_seconds = 20.0;
  TableOptions table;
  table.name = "t";
  options.tables.push_back(table);
  return options;
}

Prefetcher::Prefetcher(MixCache* cache, const LoopBatches& batches, int64_t first, int64_t last, TaskRunner* runner)
    : cache_(cache), batches_(batches), runner_(runner), thread_([this, first, last] { Work(first, last); }) {}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Prefetcher::Work(int64_t first, int64_t last) {
  for (int64_t batch = first; batch < last; ++batch) {
    int64_t ticket = 0;
    const ReceivedKeys received = batches_.At(batch);
    const Status status = cache_->Prefetch(received, &ticket, runner_);
    std::unique_lock<std::mutex> lock(mutex_);
    status_ = status;
    if (status.ok()) ready_ = ticket;
    changed_.notify_all();
    changed_.wait(lock, [this] { return stop_ || !ready_.has_value(); });
    if (stop_ || !status_.ok()) return;
  }
}

Status Prefetcher::Take(int64_t* ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return ready_.has_value() || !status_.ok(); });
  HVD_CTR_RETURN_IF_ERROR(status_);
  *ticket = *ready_;
  ready_.reset();
  changed_.notify_all();
  return Status::Ok();
}

}  // namespace hvd_ctr
