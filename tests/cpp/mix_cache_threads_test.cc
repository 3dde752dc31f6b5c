// One thread prefetches several batches ahead, another trains: results equal the reference bit for bit whatever the timing. Meant
// to be run under ThreadSanitizer too.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>

#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

// Tickets on their way from the prefetching thread to the training thread.
class Queue {
 public:
  explicit Queue(size_t depth) : depth_(depth) {}
  void Push(int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tickets_.size() < depth_; });
    tickets_.push_back(ticket);
    changed_.notify_all();
  }
  int64_t Pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !tickets_.empty(); });
    const int64_t ticket = tickets_.front();
    tickets_.pop_front();
    changed_.notify_all();
    return ticket;
  }

 private:
  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<int64_t> tickets_;
};

std::vector<ReceivedKeys> Batches(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<ReceivedKeys> batches;
  for (int b = 0; b < count; ++b) {
    std::vector<Key> keys;
    for (int32_t table = 0; table < 2; ++table) {
      for (int i = 0; i < 6; ++i) keys.push_back({static_cast<int64_t>(random() % 8 * (random() % 8)), table});
    }
    batches.push_back(Received({keys}));
  }
  return batches;
}

std::vector<float> Gradients(const ReceivedKeys& batch, int step, int32_t dim) {
  std::vector<float> gradients(batch.ids.size() * static_cast<size_t>(dim));
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = 0.01f * static_cast<float>((7 * i + static_cast<size_t>(step)) % 13) - 0.05f;
  return gradients;
}

struct Case {
  EvictionPolicyKind policy;
  int64_t slots;
  size_t depth;
  bool life = false;
  NamedBackend backend = TestBackends()[0];
};

class MixCacheThreadsTest : public testing::TestWithParam<Case> {};

// Invariant 4: results do not depend on depth. With 14 slots and up to 12 rows a batch, prefetch mostly has to wait for the
// trainer.
TEST_P(MixCacheThreadsTest, PrefetchAheadEqualsTheReference) {
  MixCacheOptions options =
      CacheOptions(GetParam().slots, {Table("a", OptimizerKind::kAdagrad, 0.1f), Table("b", OptimizerKind::kAdam, 0.01f)}, 5);
  if (GetParam().life) {
    options.tables[0].min_count = 2;
    options.tables[0].max_idle_steps = 9;
    options.tables[1].max_rows = 12;
    for (TableOptions& table : options.tables) table.sweep_every_steps = 3;
  }
  options.policy = GetParam().policy;
  options.prefetch_wait_seconds = 60.0;
  auto cache = MakeCache(options, GetParam().backend.make);
  ReferenceRows reference(options);
  const int steps = 400;
  const std::vector<ReceivedKeys> batches = Batches(steps, 11);
  Queue queue(GetParam().depth);
  std::thread prefetcher([&] {
    ThreadRunner runner(2);
    for (const ReceivedKeys& batch : batches) {
      int64_t ticket = -1;
      EXPECT_OK(cache->Prefetch(batch, &ticket, &runner));
      queue.Push(ticket);
    }
  });
  std::atomic<bool> done{false};
  std::thread observer([&] {
    while (!done) {
      const MixCacheStats stats = cache->Stats();
      EXPECT_LE(stats.pinned_slots, options.slots);
      std::this_thread::yield();
    }
  });
  InlineRunner runner;
  int64_t deleted = 0;
  for (int step = 0; step < steps; ++step) {
    const ReceivedKeys& batch = batches[static_cast<size_t>(step)];
    const int64_t ticket = queue.Pop();
    EXPECT_EQ(LookupRows(cache.get(), ticket, batch.ids.size()), reference.Read(batch)) << "step " << step;
    // These wait for no prefetch that itself waits for this thread's tickets.
    if (step % 7 == 3) EXPECT_OK(cache->Flush(&runner));
    if (step % 5 == 2) {
      const ReceivedKeys& other = batches[static_cast<size_t>(step / 2)];
      EXPECT_EQ(ReadRows(cache.get(), other), reference.Read(other)) << "step " << step;
    }
    const std::vector<float> gradients = Gradients(batch, step, options.dim);
    EXPECT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
    reference.Apply(batch, gradients, 1.0f);
    std::vector<int64_t> ages;
    EXPECT_OK(cache->RowAges(&ages));
    EXPECT_EQ(ages, reference.Ages());
    int64_t rows = -1;
    EXPECT_OK(cache->Sweep(ages, &rows, &runner));  // Under the tickets that are open.
    EXPECT_EQ(rows, reference.Sweep(ages)) << "step " << step;
    deleted += rows;
  }
  EXPECT_EQ(deleted > 100, GetParam().life);
  prefetcher.join();
  done = true;
  observer.join();
  for (int32_t table = 0; table < 2; ++table) EXPECT_EQ(ExportAll(cache.get(), table), reference.RowsOf(table));
  EXPECT_EQ(cache->Stats().pinned_slots, 0);
}

INSTANTIATE_TEST_SUITE_P(Depths, MixCacheThreadsTest,
                         testing::Values(Case{EvictionPolicyKind::kLru, 14, 4}, Case{EvictionPolicyKind::kLfu, 14, 4},
                                         Case{EvictionPolicyKind::kLru, 40, 3}, Case{EvictionPolicyKind::kLfu, 40, 1},
                                         Case{EvictionPolicyKind::kLru, 14, 4, true}, Case{EvictionPolicyKind::kLfu, 40, 3, true},
                                         Case{EvictionPolicyKind::kLru, 14, 4, false, TestBackends()[1]},
                                         Case{EvictionPolicyKind::kLfu, 40, 3, true, TestBackends()[1]},
                                         Case{EvictionPolicyKind::kLfu, 14, 4, false, TestBackends()[2]},
                                         Case{EvictionPolicyKind::kLru, 40, 3, true, TestBackends()[2]}),
                         [](const auto& info) {
                           return std::string(info.param.policy == EvictionPolicyKind::kLru ? "Lru" : "Lfu") + "Slots" +
                                  std::to_string(info.param.slots) + "Depth" + std::to_string(info.param.depth) +
                                  (info.param.life ? "Life" : "") + info.param.backend.name;
                         });

// A prefetch that waits wakes up when a ticket ends, without waiting for the deadline.
TEST(MixCacheWaitTest, WaitingPrefetchGoesOnWhenRowsAreReleased) {
  InlineRunner runner;
  MixCacheOptions options = CacheOptions(4, {Table("t")});
  options.prefetch_wait_seconds = 60.0;
  auto cache = MakeCache(options);
  int64_t first = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 4), &first, &runner));
  std::atomic<bool> fetched{false};
  std::thread prefetcher([&] {
    InlineRunner inner;
    int64_t second = 0;
    EXPECT_OK(cache->Prefetch(Range(2, 6), &second, &inner));
    fetched = true;
    EXPECT_OK(cache->Release(second));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(fetched);
  ReadRows(cache.get(), Range(0, 10));
  EXPECT_OK(cache->Flush(&runner));
  int64_t deleted = 0;
  EXPECT_OK(cache->Sweep({}, &deleted, &runner));
  EXPECT_FALSE(fetched);
  ASSERT_OK(cache->Release(first));
  prefetcher.join();
  EXPECT_TRUE(fetched);
}

}  // namespace
}  // namespace hvd_ctr
