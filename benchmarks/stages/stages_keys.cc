// Stages on keys: dedupe and partition, owner union, directory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/stages/harness.h"
#include "benchmarks/stages/machine_limits.h"
#include "benchmarks/stages/stages.h"
#include "benchmarks/stages/workload.h"
#include "tf_ops/core/cache_plan.h"
#include "tf_ops/core/request_merge.h"

namespace hvd_ctr::bench {
namespace {

constexpr int64_t kBatches = 12;

std::vector<std::vector<int64_t>> Batches(Ids ids, int64_t batch, int32_t rank) {
  std::vector<std::vector<int64_t>> batches;
  for (int64_t i = 0; i < kBatches; ++i) batches.push_back(MakeIds(ids, batch, rank, i));
  return batches;
}

void DedupeStage(int repeats, Ids kind, int64_t batch) {
  const auto batches = Batches(kind, batch, 0);
  const std::vector<IdRule> rules = Rules(kFeatures);
  Preparation preparation(kFeatures);
  std::vector<int32_t> virtual_ids;
  const auto run = [&](Timer* timer) {
    int64_t items = 0;
    for (const std::vector<int64_t>& ids : batches) {
      const std::vector<IdColumn> columns = RowMajorColumns(ids, &virtual_ids);
      timer->Start();
      preparation.Run(columns, rules, virtual_ids);
      timer->Stop();
      items += static_cast<int64_t>(ids.size());
    }
    return items;
  };
  std::vector<uint64_t> packed(batches[0].size());
  const auto bare = [&](Timer* timer) {
    timer->Start();
    for (const std::vector<int64_t>& ids : batches) PackIds(ids.data(), batch * kFeatures, kFeatures, packed.data());
    timer->Stop();
    return kBatches * batch * kFeatures;
  };
  Report("dedupe + partition", internal::StrCat("B=", batch, " ", Name(kind)), "ns/id", Sweeps(repeats, run),
         Sweeps(repeats, bare), "packing of (table, id)");
}

/// What rank 0 is asked for by both ranks, in each of the batches.
std::vector<ReceivedKeys> ReceivedBatches(Ids kind, int64_t batch) {
  std::vector<ReceivedKeys> received;
  const std::vector<IdRule> rules = Rules(kFeatures);
  Preparation first(kFeatures), second(kFeatures);
  std::vector<int32_t> virtual_ids;
  for (int64_t i = 0; i < kBatches; ++i) {
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<int64_t> ids = MakeIds(kind, batch, rank, i);
      const std::vector<IdColumn> columns = RowMajorColumns(ids, &virtual_ids);
      (rank == 0 ? first : second).Run(columns, rules, virtual_ids);
    }
    std::vector<int64_t> words;
    std::vector<int32_t> splits;
    Exchange({&first, &second}, 0, &words, &splits);
    received.emplace_back();
    Check(UnpackKeys(words, splits, kFeatures, {}, &received.back()));
  }
  return received;
}

void UnionStage(int repeats, Ids kind, int64_t batch) {
  const std::vector<ReceivedKeys> batches = ReceivedBatches(kind, batch);
  RequestMerge merge(kFeatures, 0, kRanks);
  MergedKeys merged;
  const auto run = [&](Timer* timer) {
    int64_t items = 0;
    for (const ReceivedKeys& received : batches) {
      timer->Start();
      Check(merge.Run(received.ids, received.tables, &merged));
      timer->Stop();
      items += static_cast<int64_t>(received.ids.size());
    }
    return items;
  };
  Report("owner union", internal::StrCat("B=", batch, " ", Name(kind)), "ns/key", Sweeps(repeats, run));
}

/// All keys that rank 0 owns are cached (4.2 million); a batch's keys are found, planned and noted as used.
class FullDirectory {
 public:
  FullDirectory() {
    for (int32_t t = 0; t < kFeatures; ++t) {
      for (int64_t id = 0; id < Cardinalities()[static_cast<size_t>(t)]; ++id) {
        if (OwnerOf(t, id, kRanks) == 0) keys_.push_back({id, t});
      }
    }
    std::shuffle(keys_.begin(), keys_.end(), std::mt19937_64(1));
    const auto slots = static_cast<int64_t>(keys_.size());
    Check(directory_.Allocate(slots));
    policy_ = MakeEvictionPolicy(EvictionPolicyKind::kLru, slots);
    pins_.assign(keys_.size(), 0);
    dirty_.assign(keys_.size(), 0);
    std::vector<Slot> used;
    for (const Key& key : keys_) used.push_back(directory_.Insert(key, SlotDirectory::Hash(key)));
    policy_->Use(used);
  }

  int64_t slots() const { return static_cast<int64_t>(keys_.size()); }

  void Hit(const MergedKeys& batch) {
    const PlanRequest request{batch.keys, batch.hashes, pins_, dirty_, 0};
    if (!PlanBatch(directory_, policy_.get(), request, &scratch_, &plan_) || !plan_.loads.empty()) std::abort();
    CommitPlan(plan_, batch.keys, batch.hashes, static_cast<int64_t>(batch.keys.size()), &directory_, policy_.get());
  }

 private:
  std::vector<Key> keys_;
  SlotDirectory directory_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> pins_;
  std::vector<uint8_t> dirty_;
  PlanScratch scratch_;
  CachePlan plan_;
};

void DirectoryStage(int repeats, Ids kind, FullDirectory* directory) {
  std::vector<MergedKeys> batches;
  RequestMerge merge(kFeatures, 0, kRanks);
  for (const ReceivedKeys& received : ReceivedBatches(kind, 4096)) {
    batches.emplace_back();
    Check(merge.Run(received.ids, received.tables, &batches.back()));
  }
  const auto run = [&](Timer* timer) {
    int64_t items = 0;
    for (const MergedKeys& batch : batches) {
      timer->Start();
      directory->Hit(batch);
      timer->Stop();
      items += static_cast<int64_t>(batch.keys.size());
    }
    return items;
  };
  const Series measured = Sweeps(repeats, run);

  AlignedBlock block;
  const int64_t bytes = 32 * directory->slots();  // Two entries of 16 bytes per slot.
  if (!block.Allocate(bytes)) std::abort();
  std::memset(block.data(), 1, static_cast<size_t>(bytes));
  std::vector<uint32_t> positions;
  for (const MergedKeys& batch : batches) {
    for (const uint64_t hash : batch.hashes) {
      positions.push_back(static_cast<uint32_t>(ReduceRange(hash, static_cast<uint64_t>(bytes / 64))));
    }
  }
  volatile uint64_t sink = 0;
  const auto bare = [&](Timer* timer) {
    timer->Start();
    sink = sink + ReadRandomLines(static_cast<const uint64_t*>(block.data()), positions);
    timer->Stop();
    return static_cast<int64_t>(positions.size());
  };
  Report("directory hit with recency", Name(kind), "ns/key", measured, Sweeps(repeats, bare), "read of a random line");
}

}  // namespace

void RunKeyStages(int repeats) {
  for (const Ids kind : {Ids::kWorkload, Ids::kUniform}) {
    for (const int64_t batch : {int64_t{4096}, int64_t{16384}}) {
      DedupeStage(repeats, kind, batch);
      UnionStage(repeats, kind, batch);
    }
  }
  FullDirectory directory;
  for (const Ids kind : {Ids::kWorkload, Ids::kUniform}) DirectoryStage(repeats, kind, &directory);
}

}  // namespace hvd_ctr::bench
