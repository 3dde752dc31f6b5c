// StageClock: when the stages of a step ran, for `--profile`.
//
// Off, a timer costs one relaxed load and a branch. On, it costs two readings of the clock and a store into a ring that belongs
// to the calling thread alone: no lock, no allocation after a thread's first event. A ring that nobody drains in time drops new
// events and counts them; it never overwrites, blocks or grows.
//
//   Status PrefetchSerially(...) {
//     StageTimer timer(Stage::kPlan);                     // until the end of the scope
//   ...
//   StageClock::Start();
//   ... steps ...
//   StageClock::Drain(&events, &lost);                    // now and then, and at the end
//   StageClock::Stop();
//
// Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share, as does Python's time.monotonic_ns().
#ifndef HVD_CTR_CORE_STAGE_CLOCK_H_
#define HVD_CTR_CORE_STAGE_CLOCK_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace hvd_ctr {

/// Stages that are timed in C++ or by HvdCtrStageMark, in the order of a batch's way. Timers of one thread nest: what lies within
/// another stage is not the outer one's.
enum class Stage : int32_t {
  kDedupe,
  kPartition,  ///< With packing the messages.
  kKeyExchange,
  kPlan,  ///< Unpack, merge, plan, announce.
  kHostIo,
  kWriteBack,
  kWaiting,  ///< For slots that a step is to release.
  kLookup,
  kRowExchange,
  kPool,
  kLoss,  ///< No duration: the moment at which the loss is known.
  kPoolGradient,
  kDenseAllreduce,
  kGradientExchange,
  kSegmentSum,
  kUpdate,
};

/// Names by number; one table for C++ and Python.
inline constexpr std::array<const char*, 16> kStageNames = {
    "dedupe",       "partition", "key exchange", "plan",          "host I/O",        "write-back",        "waiting",     "lookup",
    "row exchange", "pool",      "loss",         "pool gradient", "dense allreduce", "gradient exchange", "segment sum", "update",
};
static_assert(kStageNames.size() == static_cast<size_t>(Stage::kUpdate) + 1);

struct StageEvent {
  Stage stage = Stage::kDedupe;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

class StageClock {
 public:
  /// Events that a thread can hold between two drains.
  static constexpr int64_t kRingEvents = 8192;

  static void Start() { on_.store(true, std::memory_order_relaxed); }
  /// Timers that run are still recorded.
  static void Stop() { on_.store(false, std::memory_order_relaxed); }
  static bool on() { return on_.load(std::memory_order_relaxed); }

  static int64_t NowNs() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  /// Keeps an event of the calling thread, whether the clock is on or not.
  static void Record(Stage stage, int64_t begin_ns, int64_t end_ns);

  /// Appends the events of all threads since the last drain, each thread's in the order in which they ended, and adds the number
  /// of those that found no room to *lost. Any thread may call it, also while others record.
  static void Drain(std::vector<StageEvent>* events, int64_t* lost);

 private:
  static std::atomic<bool> on_;
};

/// Records its scope as a stage, if the clock was on at its beginning.
class StageTimer {
 public:
  explicit StageTimer(Stage stage) : stage_(stage), begin_ns_(StageClock::on() ? StageClock::NowNs() : 0) {}
  ~StageTimer() {
    if (begin_ns_ != 0) StageClock::Record(stage_, begin_ns_, StageClock::NowNs());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  const Stage stage_;
  const int64_t begin_ns_;
};

/// function(), timed: for one call among others of a scope.
template <typename Function>
auto TimeStage(Stage stage, const Function& function) {
  const StageTimer timer(stage);
  return function();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_STAGE_CLOCK_H_
