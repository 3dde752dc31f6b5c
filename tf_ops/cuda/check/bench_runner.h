// BenchRunner: a TaskRunner with threads of its own and a stream for the caller's device work.
#ifndef HVD_CTR_CUDA_CHECK_BENCH_RUNNER_H_
#define HVD_CTR_CUDA_CHECK_BENCH_RUNNER_H_

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tf_ops/core/types.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// ParallelFor is for one calling thread at a time.
class BenchRunner final : public TaskRunner {
 public:
  BenchRunner(int threads, Stream stream) : stream_(stream) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
  }
  ~BenchRunner() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const override { return static_cast<int>(workers_.size()) + 1; }
  void* stream() const override { return stream_; }

  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) override {
    const int64_t ranges = std::max<int64_t>(1, std::min<int64_t>(threads(), n / std::max<int64_t>(1, grain)));
    if (n <= 0) return;
    if (ranges == 1) return fn(0, n);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fn_ = &fn;
      n_ = n;
      ranges_ = ranges;
      next_ = 0;
      open_ = ranges;
    }
    changed_.notify_all();
    std::unique_lock<std::mutex> lock(mutex_);
    while (next_ < ranges_) RunNext(&lock);
    changed_.wait(lock, [this] { return open_ == 0; });
  }

 private:
  /// Needs the lock, and next_ < ranges_.
  void RunNext(std::unique_lock<std::mutex>* lock) {
    const int64_t i = next_++;
    const std::function<void(int64_t, int64_t)>& fn = *fn_;
    const int64_t begin = n_ * i / ranges_, end = n_ * (i + 1) / ranges_;
    lock->unlock();
    fn(begin, end);
    lock->lock();
    if (--open_ == 0) changed_.notify_all();
  }
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || next_ < ranges_; });
      if (stop_) return;
      RunNext(&lock);
    }
  }

  const Stream stream_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Under mutex_: the loop that is on.
  const std::function<void(int64_t, int64_t)>* fn_ = nullptr;
  int64_t n_ = 0;
  int64_t ranges_ = 0;
  int64_t next_ = 0;
  int64_t open_ = 0;
  bool stop_ = false;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_BENCH_RUNNER_H_
