// ThreadRunner: a TaskRunner on real threads, for tests that results do not depend on the number of threads and for
// ThreadSanitizer.
//
//   ThreadRunner runner(3);
//   backend->GatherRows(slots, rows, &runner);
#ifndef HVD_CTR_TESTS_CPP_THREAD_RUNNER_H_
#define HVD_CTR_TESTS_CPP_THREAD_RUNNER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Splits [0, n) into up to `threads` ranges of at least `grain` and starts one thread for each.
class ThreadRunner final : public TaskRunner {
 public:
  explicit ThreadRunner(int threads) : threads_(threads) {}

  int threads() const override { return threads_; }

  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) override {
    const int64_t ranges = std::max<int64_t>(1, std::min<int64_t>(threads_, n / std::max<int64_t>(1, grain)));
    std::vector<std::thread> pool;
    for (int64_t i = 0; i < ranges && n > 0; ++i) pool.emplace_back(fn, n * i / ranges, n * (i + 1) / ranges);
    for (std::thread& thread : pool) thread.join();
  }

 private:
  int threads_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_THREAD_RUNNER_H_
