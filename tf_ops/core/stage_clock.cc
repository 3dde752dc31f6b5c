#include "tf_ops/core/stage_clock.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

namespace hvd_ctr {

namespace {

/// One thread writes, one at a time reads.
class Ring {
 public:
  void Push(const StageEvent& event) {
    const int64_t written = written_.load(std::memory_order_relaxed);
    if (written - read_.load(std::memory_order_acquire) == StageClock::kRingEvents) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    events_[static_cast<size_t>(written % StageClock::kRingEvents)] = event;
    written_.store(written + 1, std::memory_order_release);
  }

  void Drain(std::vector<StageEvent>* events, int64_t* lost) {
    const int64_t written = written_.load(std::memory_order_acquire);
    for (int64_t i = read_.load(std::memory_order_relaxed); i < written; ++i) {
      events->push_back(events_[static_cast<size_t>(i % StageClock::kRingEvents)]);
    }
    read_.store(written, std::memory_order_release);
    *lost += lost_.exchange(0, std::memory_order_relaxed);
  }

 private:
  std::array<StageEvent, StageClock::kRingEvents> events_;
  std::atomic<int64_t> written_{0};
  std::atomic<int64_t> read_{0};
  std::atomic<int64_t> lost_{0};
};

/// The rings of all threads. Those of ended threads stay until they are drained.
struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Ring>> rings;
};

Registry& Rings() {
  // Never destroyed: threads may record until the process ends.
  static auto* const registry = new Registry;
  return *registry;
}

std::shared_ptr<Ring> NewRing() {
  auto ring = std::make_shared<Ring>();
  Registry& registry = Rings();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.rings.push_back(ring);
  return ring;
}

}  // namespace

std::atomic<bool> StageClock::on_{false};

void StageClock::Record(Stage stage, int64_t begin_ns, int64_t end_ns) {
  thread_local const std::shared_ptr<Ring> ring = NewRing();
  ring->Push({stage, begin_ns, end_ns});
}

void StageClock::Drain(std::vector<StageEvent>* events, int64_t* lost) {
  Registry& registry = Rings();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  // Judged before draining: a thread that ends in between has its last events kept for the next time.
  const auto ended = std::stable_partition(registry.rings.begin(), registry.rings.end(),
                                           [](const std::shared_ptr<Ring>& ring) { return ring.use_count() > 1; });
  for (const std::shared_ptr<Ring>& ring : registry.rings) ring->Drain(events, lost);
  registry.rings.erase(ended, registry.rings.end());
}

}  // namespace hvd_ctr
