// The step allocates nothing once its buffers have grown: from a batch's ids to the updated rows, for every policy, with
// evictions and write-backs to a store in memory.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/mix_cache_fixture.h"
#include "tests/cpp/policy_names.h"
#include "tf_ops/core/id_dedupe.h"
#include "tf_ops/core/key_exchange.h"
#include "tf_ops/core/rank_partition.h"
#include "tf_ops/cpu/pool_rows.h"

namespace {
std::atomic<int64_t> allocations{0};

void* Counted(std::size_t size) {
  ++allocations;
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) std::abort();
  return memory;
}
}  // namespace

// Not inlined: GCC takes inlined halves of a replaced pair for a mismatch.
__attribute__((noinline)) void* operator new(std::size_t size) { return Counted(size); }
__attribute__((noinline)) void* operator new[](std::size_t size) { return Counted(size); }
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete[](void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace hvd_ctr {
namespace {

constexpr int32_t kTables = 3, kFeatures = 4, kDim = 16;
constexpr int64_t kBatch = 200, kBatches = 5, kHot = 3;

/// Two ranks ask this one, which owns half of their keys: it is both of them in turn, and what goes to the other is dropped.
class Step {
 public:
  Step(EvictionPolicyKind policy, int64_t slots, BackendFactory backend = &MakeCpuBackend) {
    MixCacheOptions options = CacheOptions(slots, {}, kDim);
    for (int32_t t = 0; t < kTables; ++t) {
      options.tables.push_back(Table("t" + std::to_string(t), t == 1 ? OptimizerKind::kAdam : OptimizerKind::kAdagrad));
    }
    options.policy = policy;
    options.world_size = 2;
    cache_ = MakeCache(options, backend);
    std::mt19937_64 random(6);
    for (int64_t i = 0; i < kBatches; ++i) {
      batches_.emplace_back(kBatch * kFeatures);
      for (int64_t& id : batches_.back()) id = static_cast<int64_t>(random() % 300) + 150 * i;
    }
    virtual_ids_.resize(kBatch * kFeatures);
    info_.invalid_counts.assign(kTables, 0);
    for (int64_t i = 0; i <= kBatch * kFeatures / kHot; ++i) splits_of_bags_.push_back(std::min(i * kHot, kBatch * kFeatures));
    splits_of_bags_.back() = kBatch * kFeatures;
  }

  MixCache* cache() { return cache_.get(); }

  /// From the ids of a batch to updated rows.
  void Run(int64_t number) {
    Request(number);
    int64_t ticket = 0;
    Must(cache_->Prefetch(received_, &ticket, &runner_));
    answers_.resize(received_.ids.size() * kDim);
    Must(cache_->Lookup(ticket, answers_.data(), &runner_));
    PoolAndBack();
    Must(cache_->Apply(ticket, answers_.data(), 1.0f, &runner_));
  }

  /// What the others' announcement of a batch costs.
  void Announce(int64_t number) {
    Request(number);
    bool noted = false;
    Must(cache_->Announce(received_, &noted));
  }

 private:
  static void Must(const Status& status) {
    if (status.ok()) return;
    ADD_FAILURE() << status.message();
  }

  /// Fills received_ with what both ranks (with the same batch) ask of rank 0.
  void Request(int64_t number) {
    const std::vector<int64_t>& ids = batches_[static_cast<size_t>(number % kBatches)];
    columns_.clear();
    for (int32_t f = 0; f < kFeatures; ++f) {
      IdColumn column;
      column.ids = ids.data() + f;
      column.virtual_ids = virtual_ids_.data() + f;
      column.count = kBatch;
      column.stride = kFeatures;
      column.table = std::min(f, kTables - 1);
      columns_.push_back(column);
    }
    Must(dedupe_.Run(columns_, rules_, &unique_));
    PartitionByOwner(unique_.keys, unique_.table_offsets, 2, &partition_);
    for (int32_t& id : virtual_ids_) id = partition_.restore[static_cast<size_t>(id)];
    PackKeys(info_, partition_, {}, 2, &words_, &splits_);
    both_.assign(words_.begin(), words_.begin() + splits_[0]);
    both_.insert(both_.end(), words_.begin(), words_.begin() + splits_[0]);
    both_splits_.assign(2, splits_[0]);
    Must(UnpackKeys(both_, both_splits_, kTables, {}, &received_));
  }

  /// Expand, pool and their gradients on the rows of all keys; those of the other rank are zeros here.
  void PoolAndBack() {
    const auto unique = static_cast<int64_t>(unique_.keys.size());
    rows_.assign(static_cast<size_t>(unique * kDim), 0.5f);
    out_.resize(virtual_ids_.size() * kDim);
    Bags bags;
    bags.virtual_ids = virtual_ids_;
    Must(PoolRows(bags, rows_.data(), unique, kDim, out_.data(), kDim, &runner_));
    Must(PoolRowsGrad(bags, out_.data(), kDim, unique, kDim, rows_.data(), &runner_));
    bags.splits = splits_of_bags_;
    bags.combiner = Combiner::kMean;
    Must(PoolRows(bags, rows_.data(), unique, kDim, out_.data(), kDim, &runner_));
    Must(PoolRowsGrad(bags, out_.data(), kDim, unique, kDim, rows_.data(), &runner_));
  }

  InlineRunner runner_;
  std::unique_ptr<MixCache> cache_;
  std::vector<std::vector<int64_t>> batches_;
  std::vector<IdRule> rules_ = std::vector<IdRule>(kTables);
  std::vector<IdColumn> columns_;
  std::vector<int32_t> virtual_ids_;
  std::vector<int64_t> splits_of_bags_;
  IdDedupe dedupe_;
  DedupeResult unique_;
  PartitionResult partition_;
  BatchInfo info_;
  std::vector<int64_t> words_, both_;
  std::vector<int32_t> splits_, both_splits_;
  ReceivedKeys received_;
  std::vector<float> answers_, rows_, out_;
};

class SteadyState : public testing::TestWithParam<EvictionPolicyKind> {};

// Few slots: each step evicts, writes back and loads. Twice through all batches, so that the host store has all rows.
TEST_P(SteadyState, StepAllocatesNothing) {
  const std::pair<int64_t, BackendFactory> cases[] = {
      {700, &MakeCpuBackend}, {4096, &MakeCpuBackend}, {700, &MakeCudaOnCpuBackend}};
  for (const auto& [slots, backend] : cases) {
    Step step(GetParam(), slots, backend);
    for (int64_t i = 0; i < 4 * kBatches; ++i) step.Run(i);
    const int64_t before = allocations;
    for (int64_t i = 0; i < 2 * kBatches; ++i) step.Run(i);
    EXPECT_EQ(allocations - before, 0) << slots << " slots";
    int64_t evictions = 0;
    for (const MixCacheTableStats& table : step.cache()->Stats().tables) evictions += table.evictions;
    EXPECT_EQ(evictions > 0, slots == 700);
  }
}

TEST(SteadyStateTest, AnnouncementsAllocateNothing) {
  Step step(EvictionPolicyKind::kLookahead, 700);
  const auto run = [&step](int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      step.Announce(i + 2);
      step.Run(i);
    }
  };
  step.Announce(0);
  step.Announce(1);
  run(100 * kBatches);
  const int64_t before = allocations;
  run(20 * kBatches);
  EXPECT_EQ(allocations - before, 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, SteadyState,
                         testing::Values(EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu, EvictionPolicyKind::kClock,
                                         EvictionPolicyKind::kFreq, EvictionPolicyKind::kLookahead),
                         [](const auto& info) { return PolicyName(info.param); });

}  // namespace
}  // namespace hvd_ctr
