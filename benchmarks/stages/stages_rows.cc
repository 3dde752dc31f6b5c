// Stages on rows: gather, expand, pool, segment sum, optimizers.
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "benchmarks/stages/harness.h"
#include "benchmarks/stages/machine_limits.h"
#include "benchmarks/stages/stages.h"
#include "benchmarks/stages/workload.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cpu/pool_rows.h"

namespace hvd_ctr::bench {
namespace {

constexpr int64_t kBatch = 4096;
constexpr int64_t kBatches = 10;
constexpr int64_t kArenaBytes = int64_t{540} << 20;

/// For each batch the slots of the keys that rank 0 owns, spread over S slots; distinct within a batch.
std::vector<std::vector<Slot>> SlotBatches(Ids kind, int64_t slots) {
  std::vector<Slot> spread(static_cast<size_t>(slots));
  std::iota(spread.begin(), spread.end(), 0);
  std::shuffle(spread.begin(), spread.end(), std::mt19937_64(2));
  std::unordered_map<uint64_t, Slot> known;
  std::vector<std::vector<Slot>> batches;
  for (int64_t i = 0; i < kBatches; ++i) {
    batches.emplace_back();
    for (const Key& key : UniqueKeys(MakeIds(kind, kBatch, 0, i))) {
      if (OwnerOf(key.table, key.id, kRanks) != 0) continue;
      const auto next = static_cast<Slot>(known.size());
      if (next == slots) std::abort();
      batches.back().push_back(spread[static_cast<size_t>(known.emplace(HashKey(key.table, key.id, 1), next).first->second)]);
    }
  }
  return batches;
}

int64_t CountAll(const std::vector<std::vector<Slot>>& batches) {
  int64_t items = 0;
  for (const std::vector<Slot>& slots : batches) items += static_cast<int64_t>(slots.size());
  return items;
}

/// A backend whose memory is touched, and a bare arena of the same shape.
struct Arena {
  Arena(int32_t dim, const RowOptimizerOptions& optimizer)
      : record_floats(dim + StateFloats(optimizer, dim)),
        stride(LayOutCpuRecords(RowType::kFloat32, dim, record_floats - dim).stride_bytes / static_cast<int64_t>(sizeof(float))),
        slots(kArenaBytes / (stride * static_cast<int64_t>(sizeof(float)))),
        backend(MakeCpuBackend()),
        bare(slots * stride) {
    Check(backend->Allocate(slots, dim, static_cast<int32_t>(record_floats) - dim));
    std::vector<float> records(static_cast<size_t>(4096 * record_floats), 0.1f);
    std::vector<Slot> some;
    for (int64_t begin = 0; begin < slots; begin += 4096) {
      some.resize(static_cast<size_t>(std::min<int64_t>(4096, slots - begin)));
      std::iota(some.begin(), some.end(), static_cast<Slot>(begin));
      Check(backend->StoreRecords(some, records.data(), &runner));
    }
  }

  const int64_t record_floats;
  const int64_t stride;
  const int64_t slots;
  std::unique_ptr<DeviceBackend> backend;
  Floats bare;
  InlineRunner runner;
};

void GatherStage(int repeats, int32_t dim, Ids kind, Arena* arena, const std::vector<std::vector<Slot>>& batches) {
  Floats rows(kBatch * kFeatures * dim);
  const auto run = [&](Timer* timer) {
    timer->Start();
    for (const std::vector<Slot>& slots : batches) Check(arena->backend->GatherRows(slots, rows.data(), &arena->runner));
    timer->Stop();
    return CountAll(batches);
  };
  const auto bare = [&](Timer* timer) {
    timer->Start();
    for (const std::vector<Slot>& slots : batches) {
      ReadRandomRecords(arena->bare.data(), arena->stride, slots, dim, rows.data());
    }
    timer->Stop();
    return CountAll(batches);
  };
  Report("gather", internal::StrCat("D=", dim, " ", Name(kind)), "ns/row", Sweeps(repeats, run), Sweeps(repeats, bare),
         "random read of the rows");
}

void UpdateStage(int repeats, const std::string& name, int32_t dim, Ids kind, const RowOptimizerOptions& optimizer, Arena* arena,
                 const std::vector<std::vector<Slot>>& batches) {
  Floats gradients(kBatch * kFeatures * dim);
  std::vector<int32_t> tables(static_cast<size_t>(kBatch * kFeatures), 0);
  const std::vector<RowOptimizerOptions> optimizers = {optimizer};
  int64_t step = 0;
  const auto run = [&](Timer* timer) {
    timer->Start();
    for (const std::vector<Slot>& slots : batches) {
      const Span<const int32_t> used(tables.data(), static_cast<int64_t>(slots.size()));
      Check(arena->backend->UpdateRows(slots, used, gradients.data(), optimizers, ++step, 1.0f, &arena->runner));
    }
    timer->Stop();
    return CountAll(batches);
  };
  const auto bare = [&](Timer* timer) {
    timer->Start();
    for (const std::vector<Slot>& slots : batches) {
      ModifyRandomRecords(arena->bare.data(), arena->stride, slots, arena->record_floats / 16 * 16);
    }
    timer->Stop();
    return CountAll(batches);
  };
  Report(name, internal::StrCat("D=", dim, " ", Name(kind)), "ns/row", Sweeps(repeats, run), Sweeps(repeats, bare),
         "random read-modify-write of the records");
}

void ArenaStages(int repeats) {
  for (const int32_t dim : {16, 64, 128}) {
    RowOptimizerOptions adagrad;
    Arena arena(dim, adagrad);
    for (const Ids kind : {Ids::kWorkload, Ids::kUniform}) {
      const auto batches = SlotBatches(kind, arena.slots);
      GatherStage(repeats, dim, kind, &arena, batches);
      UpdateStage(repeats, "Adagrad", dim, kind, adagrad, &arena, batches);
    }
  }
  RowOptimizerOptions adam;
  adam.kind = OptimizerKind::kAdam;
  Arena arena(16, adam);
  for (const Ids kind : {Ids::kWorkload, Ids::kUniform}) {
    UpdateStage(repeats, "Adam", 16, kind, adam, &arena, SlotBatches(kind, arena.slots));
  }
}

/// Virtual ids (N) and number of unique keys of one batch.
struct VirtualBatch {
  std::vector<int32_t> virtual_ids;
  int64_t unique = 0;
};

std::vector<VirtualBatch> VirtualBatches(int64_t batch) {
  std::vector<VirtualBatch> batches(static_cast<size_t>(kBatches));
  Preparation preparation(kFeatures);
  const std::vector<IdRule> rules = Rules(kFeatures);
  for (int64_t i = 0; i < kBatches; ++i) {
    VirtualBatch& made = batches[static_cast<size_t>(i)];
    const std::vector<int64_t> ids = MakeIds(Ids::kWorkload, batch, 0, i);
    const std::vector<IdColumn> columns = RowMajorColumns(ids, &made.virtual_ids);
    preparation.Run(columns, rules, made.virtual_ids);
    made.unique = static_cast<int64_t>(preparation.unique().keys.size());
  }
  return batches;
}

void ExpandStage(int repeats, int32_t dim, const std::vector<VirtualBatch>& batches) {
  const int64_t ids = kBatch * kFeatures;
  Floats rows(ids * dim), out(ids * dim);
  InlineRunner runner;
  const auto run = [&](Timer* timer) {
    timer->Start();
    for (const VirtualBatch& batch : batches) {
      Bags bags;
      bags.virtual_ids = batch.virtual_ids;
      Check(PoolRows(bags, rows.data(), batch.unique, dim, out.data(), dim, &runner));
    }
    timer->Stop();
    return kBatches * ids;
  };
  const auto bare = [&](Timer* timer) {
    timer->Start();
    for (int64_t i = 0; i < kBatches; ++i) StreamStore(out.data(), ids * dim);
    timer->Stop();
    return kBatches * ids;
  };
  Report("expand", internal::StrCat("D=", dim), "ns/id", Sweeps(repeats, run), Sweeps(repeats, bare), "non-temporal stores");
}

void PoolStage(int repeats, const std::vector<VirtualBatch>& batches) {
  constexpr int32_t kDim = 16, kHot = 10;
  const int64_t bags_count = kBatch * kFeatures / kHot;
  Floats rows(kBatch * kFeatures * kDim), out(bags_count * kDim);
  std::vector<int64_t> splits;
  for (int64_t i = 0; i <= bags_count; ++i) splits.push_back(i * kHot);
  // Bags of ten samples' ids of one feature: what a feature of ten ids looks like.
  std::vector<VirtualBatch> columns = batches;
  for (VirtualBatch& batch : columns) {
    std::vector<int32_t> by_feature;
    for (int64_t f = 0; f < kFeatures; ++f) {
      for (int64_t b = 0; b < kBatch; ++b) by_feature.push_back(batch.virtual_ids[static_cast<size_t>(b * kFeatures + f)]);
    }
    by_feature.resize(static_cast<size_t>(bags_count * kHot));
    batch.virtual_ids = by_feature;
  }
  InlineRunner runner;
  const auto run = [&](Timer* timer) {
    timer->Start();
    for (const VirtualBatch& batch : columns) {
      Bags bags;
      bags.virtual_ids = batch.virtual_ids;
      bags.splits = splits;
      Check(PoolRows(bags, rows.data(), batch.unique, kDim, out.data(), kDim, &runner));
    }
    timer->Stop();
    return kBatches * bags_count * kHot;
  };
  Report("pool of 10", "D=16", "ns/id", Sweeps(repeats, run));
}

void SegmentSumStage(int repeats, int32_t dim, bool evicted, const std::vector<VirtualBatch>& batches) {
  const auto ids = static_cast<int64_t>(batches[0].virtual_ids.size());
  Floats gradients(ids * dim), sums(ids * dim);
  InlineRunner runner;
  const auto bytes = ids * dim * static_cast<int64_t>(sizeof(float));
  volatile float sink = 0.0f;
  const auto prepare = [&] {
    if (evicted) {
      Evict(gradients.data(), bytes);
    } else {
      std::memset(gradients.data(), 0, static_cast<size_t>(bytes));
    }
  };
  const auto run = [&](Timer* timer) {
    for (const VirtualBatch& batch : batches) {
      prepare();
      Bags bags;
      bags.virtual_ids = batch.virtual_ids;
      timer->Start();
      Check(PoolRowsGrad(bags, gradients.data(), dim, batch.unique, dim, sums.data(), &runner));
      timer->Stop();
    }
    return kBatches * ids;
  };
  const auto bare = [&](Timer* timer) {
    for (int64_t i = 0; i < kBatches; ++i) {
      prepare();
      timer->Start();
      sink = sink + StreamRead(gradients.data(), ids * dim);
      timer->Stop();
    }
    return kBatches * ids;
  };
  Report("segment sum", internal::StrCat("D=", dim, " B=", ids / kFeatures, evicted ? " evicted" : " in cache"), "ns/id",
         Sweeps(repeats, run), Sweeps(repeats, bare), "read of the gradients");
}

}  // namespace

void RunRowStages(int repeats) {
  ArenaStages(repeats);
  const std::vector<VirtualBatch> batches = VirtualBatches(kBatch);
  for (const int32_t dim : {16, 64, 128}) ExpandStage(repeats, dim, batches);
  PoolStage(repeats, batches);
  for (const bool evicted : {false, true}) SegmentSumStage(repeats, 16, evicted, batches);
  for (const bool evicted : {false, true}) SegmentSumStage(repeats, 16, evicted, VirtualBatches(16384));
  for (const int32_t dim : {64, 128}) SegmentSumStage(repeats, dim, false, batches);
}

}  // namespace hvd_ctr::bench
