// Timing and reporting of one stage: repeated sweeps, the first one dropped, one JSON object per result on standard output.
//
//   Report("gather", "D=16 workload", "ns/row", Sweeps(run, rows), Sweeps(bare, rows), "random read of 128-byte records");
#ifndef HVD_CTR_BENCHMARKS_STAGES_HARNESS_H_
#define HVD_CTR_BENCHMARKS_STAGES_HARNESS_H_

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr::bench {

/// Values of one quantity, one per sweep.
class Series {
 public:
  void Add(double value) { values_.push_back(value); }
  bool empty() const { return values_.empty(); }
  size_t size() const { return values_.size(); }
  /// share: 0 .. 1; the nearest value.
  double Quantile(double share) const {
    std::vector<double> sorted = values_;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? 0.0 : sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5)];
  }
  double median() const { return Quantile(0.5); }

 private:
  std::vector<double> values_;
};

inline double SecondsNow() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Processor seconds that this thread has spent between Start and Stop, summed: what another process takes of the core meanwhile
/// does not count.
class Timer {
 public:
  void Start() { begin_ = ThreadSeconds(); }
  void Stop() { seconds_ += ThreadSeconds() - begin_; }
  double seconds() const { return seconds_; }

 private:
  static double ThreadSeconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  double begin_ = 0.0;
  double seconds_ = 0.0;
};

/// Nanoseconds per item of each sweep: repeats + 1 calls of sweep(timer), which starts and stops the timer around what counts and
/// returns the number of items. The first call warms up and is dropped.
inline Series Sweeps(int repeats, const std::function<int64_t(Timer*)>& sweep) {
  Series series;
  for (int i = 0; i <= repeats; ++i) {
    Timer timer;
    const int64_t items = sweep(&timer);
    if (i > 0) series.Add(timer.seconds() * 1e9 / static_cast<double>(std::max<int64_t>(1, items)));
  }
  return series;
}

/// limit: what the machine itself takes for the bytes that the stage has to move; may be empty.
inline void Report(const std::string& stage, const std::string& variant, const std::string& unit, const Series& measured,
                   const Series& limit = {}, const std::string& limit_is = "") {
  std::printf(
      "{\"stage\": \"%s\", \"case\": \"%s\", \"unit\": \"%s\", \"median\": %.6g, \"p10\": %.6g, \"p90\": %.6g, \"sweeps\": %zu",
      stage.c_str(), variant.c_str(), unit.c_str(), measured.median(), measured.Quantile(0.1), measured.Quantile(0.9),
      measured.size());
  if (!limit.empty()) std::printf(", \"limit\": %.6g, \"limit_is\": \"%s\"", limit.median(), limit_is.c_str());
  std::printf("}\n");
  std::fflush(stdout);
}

/// Floats that are touched, aligned to a cache line, and lie in huge pages where there are any.
class Floats {
 public:
  explicit Floats(int64_t count) {
    if (!block_.Allocate(count * static_cast<int64_t>(sizeof(float)))) std::abort();
    std::fill(data(), data() + count, 0.01f);
  }
  float* data() const { return static_cast<float*>(block_.data()); }

 private:
  AlignedBlock block_;
};

/// Ends the program with the message of a status that is not OK.
inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "stages: %s\n", status.message().c_str());
  std::exit(1);
}

}  // namespace hvd_ctr::bench

#endif  // HVD_CTR_BENCHMARKS_STAGES_HARNESS_H_
