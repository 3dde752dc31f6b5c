// Creation of rows through MixCache::Prefetch, and the whole work of one rank, with two logical ranks in this process and memcpy
// in place of the exchange between them.
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/stages/harness.h"
#include "benchmarks/stages/machine_limits.h"
#include "benchmarks/stages/stages.h"
#include "benchmarks/stages/workload.h"
#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cpu/pool_rows.h"

namespace hvd_ctr::bench {
namespace {

constexpr int64_t kSlots = int64_t{1} << 21;

/// The CPU backend; touch: with all records written once, so that the system's first-touch cost is not part of a measurement.

class Touched final : public DeviceBackend {
 public:
  explicit Touched(bool touch) : touch_(touch), inner_(MakeCpuBackend()) {}
  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) override {
    HVD_CTR_RETURN_IF_ERROR(inner_->Allocate(slots, dim, state_floats, row_type));
    InlineRunner runner;
    const std::vector<float> records(static_cast<size_t>(4096 * (dim + state_floats)), 0.0f);
    std::vector<Slot> some;
    for (int64_t begin = 0; touch_ && begin < slots; begin += 4096) {
      some.resize(static_cast<size_t>(std::min<int64_t>(4096, slots - begin)));
      std::iota(some.begin(), some.end(), static_cast<Slot>(begin));
      HVD_CTR_RETURN_IF_ERROR(inner_->StoreRecords(some, records.data(), &runner));
    }
    return Status::Ok();
  }
  int64_t allocated_bytes() const override { return inner_->allocated_bytes(); }
  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    return inner_->StoreRecords(slots, records, runner);
  }
  Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init, TaskRunner* runner) override {
    return inner_->StoreFirstRecords(slots, keys, init, runner);
  }
  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    return inner_->FetchRecords(slots, records, runner);
  }
  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override {
    return inner_->GatherRows(slots, rows, runner);
  }
  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override {
    return inner_->SegmentSum(gradients, inverse, unique, sums, runner);
  }
  Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                    Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                    TaskRunner* runner) override {
    return inner_->UpdateRows(slots, tables, gradients, optimizers, step, learning_rate_scale, runner);
  }

 private:
  const bool touch_;
  std::unique_ptr<DeviceBackend> inner_;
};

std::unique_ptr<MixCache> NewCache(const MixCacheOptions& options, bool touch) {
  auto store = MakeHostStore(options);
  Check(store.status());
  auto cache = MakeMixCache(options, std::make_unique<Touched>(touch), std::move(store.value()));
  Check(cache.status());
  return std::move(cache.value());
}

/// `count` keys that rank 0 owns and that no earlier call gave, in table groups, as one peer would send them.
ReceivedKeys NewKeys(int64_t count, int64_t* next_id) {
  ReceivedKeys received;
  received.peers.resize(kRanks);
  for (int32_t t = 0; t < kFeatures; ++t) {
    const int64_t share = count * (t + 1) / kFeatures - count * t / kFeatures;
    for (int64_t i = 0; i < share; ++*next_id) {
      const auto id = static_cast<int64_t>(Mix64(static_cast<uint64_t>(*next_id)) >> 1);
      if (OwnerOf(t, id, kRanks) != 0) continue;
      received.ids.push_back(id);
      received.tables.push_back(t);
      ++i;
    }
  }
  received.peers[0].key_count = count;
  return received;
}

void InsertStage(int repeats, bool touch) {
  constexpr int64_t kKeys = 8192, kBatches = 8;
  const auto cache = NewCache(CacheOptions(kFeatures, 16, kSlots, OptimizerKind::kAdagrad), touch);
  InlineRunner runner;
  int64_t next_id = 0;
  const auto run = [&](Timer* timer) {
    for (int64_t i = 0; i < kBatches; ++i) {
      const ReceivedKeys received = NewKeys(kKeys, &next_id);
      int64_t ticket = 0;
      timer->Start();
      Check(cache->Prefetch(received, &ticket, &runner));
      timer->Stop();
      Check(cache->Release(ticket));
    }
    return kBatches * kKeys;
  };
  const int most = static_cast<int>(kSlots / (kBatches * kKeys)) - 1;
  const Series measured = Sweeps(std::min(repeats, most), run);

  AlignedBlock block;
  constexpr int64_t kRecord = 32;
  if (!block.Allocate(kSlots * kRecord * static_cast<int64_t>(sizeof(float)))) std::abort();
  auto* arena = static_cast<float*>(block.data());
  std::vector<Slot> slots(static_cast<size_t>(kBatches * kKeys));
  Slot next = 0;
  if (touch) std::memset(arena, 0, static_cast<size_t>(block.bytes()));
  const auto bare = [&](Timer* timer) {
    std::iota(slots.begin(), slots.end(), next);
    next += static_cast<Slot>(slots.size());
    timer->Start();
    WriteRandomRecords(arena, kRecord, slots, kRecord);
    timer->Stop();
    return kBatches * kKeys;
  };
  Report("create rows", touch ? "memory in use" : "fresh memory", "ns/row", measured, Sweeps(std::min(repeats, most), bare),
         "writing the records");
}

/// One rank in the step: its side of the key exchange, its cache and its buffers.
struct Rank {
  Rank(int32_t number, MixCacheOptions options, int32_t tables) : preparation(tables) {
    options.rank = number;
    cache = NewCache(options, true);
  }

  Preparation preparation;
  std::unique_ptr<MixCache> cache;
  std::vector<int32_t> virtual_ids;
  std::vector<int64_t> words;
  std::vector<int32_t> splits;
  ReceivedKeys received;
  int64_t ticket = 0;
  std::vector<float> answers;         // (R, D) what it looked up for all ranks; then the gradients that all ranks sent.
  std::vector<float> rows;            // (U, D) in owner order; then their gradients.
  std::unique_ptr<Floats> expanded;   // (N, D), aligned as TensorFlow's tensors are.
  std::unique_ptr<Floats> gradients;  // (N, D)
};

/// Names and summed seconds of the parts of the step, for one rank.
struct Parts {
  enum { kPrepare, kUnpack, kPrefetch, kLookup, kExchange, kExpand, kSegmentSum, kApply, kCount };
  static constexpr const char* kNames[kCount] = {"dedupe + partition",      "unpack keys", "prefetch",    "lookup",
                                                 "copies for the exchange", "expand",      "segment sum", "apply"};
  Timer timers[kCount];
};

class StepRun {
 public:
  StepRun(int32_t tables, int32_t dim) : tables_(tables), dim_(dim), rules_(Rules(tables)) {
    const MixCacheOptions options = CacheOptions(tables, dim, kSlots, OptimizerKind::kAdagrad);
    for (int32_t r = 0; r < kRanks; ++r) ranks_.push_back(std::make_unique<Rank>(r, options, tables));
  }

  /// One step on columns (per rank); the gradients are those of half the sum of squares, so that rows move.
  void Step(const std::vector<std::vector<IdColumn>>& columns, Parts* parts) {
    for (int32_t r = 0; r < kRanks; ++r) {
      Rank& rank = *ranks_[static_cast<size_t>(r)];
      Timed(&parts->timers[Parts::kPrepare],
            [&] { rank.preparation.Run(columns[static_cast<size_t>(r)], rules_, rank.virtual_ids); });
    }
    for (int32_t r = 0; r < kRanks; ++r) Receive(r, parts);
    for (int32_t r = 0; r < kRanks; ++r) Expand(r, parts);
    for (int32_t r = 0; r < kRanks; ++r) SumSegments(r, parts);
    for (int32_t r = 0; r < kRanks; ++r) Apply(r, parts);
  }

  std::vector<int32_t>* virtual_ids(int32_t rank) { return &ranks_[static_cast<size_t>(rank)]->virtual_ids; }
  int64_t unique() const { return static_cast<int64_t>(ranks_[0]->preparation.unique().keys.size()); }

 private:
  template <typename Function>
  static void Timed(Timer* timer, const Function& function) {
    timer->Start();
    function();
    timer->Stop();
  }

  void Receive(int32_t r, Parts* parts) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    Timed(&parts->timers[Parts::kExchange],
          [&] { Exchange({&ranks_[0]->preparation, &ranks_[1]->preparation}, r, &rank.words, &rank.splits); });
    Timed(&parts->timers[Parts::kUnpack], [&] { Check(UnpackKeys(rank.words, rank.splits, tables_, {}, &rank.received)); });
    Timed(&parts->timers[Parts::kPrefetch], [&] { Check(rank.cache->Prefetch(rank.received, &rank.ticket, &runner_)); });
    rank.answers.resize(rank.received.ids.size() * static_cast<size_t>(dim_));
    Timed(&parts->timers[Parts::kLookup], [&] { Check(rank.cache->Lookup(rank.ticket, rank.answers.data(), &runner_)); });
  }

  /// Rows of rank r between its own buffer and those of the owners; to_owners: gradients on their way back.
  void CopyRows(int32_t r, bool to_owners) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    float* own = rank.rows.data();
    for (int32_t w = 0; w < kRanks; ++w) {
      Rank& owner = *ranks_[static_cast<size_t>(w)];
      const PeerMessage& asked = owner.received.peers[static_cast<size_t>(r)];
      float* theirs = owner.answers.data() + asked.key_offset * dim_;
      const auto bytes = static_cast<size_t>(asked.key_count * dim_) * sizeof(float);
      std::memcpy(to_owners ? theirs : own, to_owners ? own : theirs, bytes);
      own += asked.key_count * dim_;
    }
  }

  Bags BagsOf(const Rank& rank) const {
    Bags bags;
    bags.virtual_ids = rank.virtual_ids;
    return bags;
  }

  void Expand(int32_t r, Parts* parts) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    const auto unique = static_cast<int64_t>(rank.preparation.unique().keys.size());
    rank.rows.resize(static_cast<size_t>(unique * dim_));
    const auto floats = static_cast<int64_t>(rank.virtual_ids.size()) * dim_;  // The same in each step.
    if (rank.expanded == nullptr) {
      rank.expanded = std::make_unique<Floats>(floats);
      rank.gradients = std::make_unique<Floats>(floats);
    }
    Timed(&parts->timers[Parts::kExchange], [&] { CopyRows(r, false); });
    Timed(&parts->timers[Parts::kExpand],
          [&] { Check(PoolRows(BagsOf(rank), rank.rows.data(), unique, dim_, rank.expanded->data(), dim_, &runner_)); });
  }

  void SumSegments(int32_t r, Parts* parts) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    const auto unique = static_cast<int64_t>(rank.preparation.unique().keys.size());
    // What the dense model does in between: reads the rows, writes their gradients.
    const size_t floats = rank.virtual_ids.size() * static_cast<size_t>(dim_);
    std::memcpy(rank.gradients->data(), rank.expanded->data(), floats * sizeof(float));
    Timed(&parts->timers[Parts::kSegmentSum],
          [&] { Check(PoolRowsGrad(BagsOf(rank), rank.gradients->data(), dim_, unique, dim_, rank.rows.data(), &runner_)); });
    Timed(&parts->timers[Parts::kExchange], [&] { CopyRows(r, true); });
  }

  void Apply(int32_t r, Parts* parts) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    Timed(&parts->timers[Parts::kApply], [&] { Check(rank.cache->Apply(rank.ticket, rank.answers.data(), 1.0f, &runner_)); });
  }

  const int32_t tables_;
  const int32_t dim_;
  const std::vector<IdRule> rules_;
  InlineRunner runner_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

constexpr int64_t kWarm = 15;

void StepStage(int repeats, Ids kind, int64_t batch, int32_t dim) {
  StepRun run(kFeatures, dim);
  const int64_t steps = std::max<int64_t>(15, 2 * repeats);
  Series whole;
  std::vector<Series> parts(Parts::kCount);
  for (int64_t s = 0; s < kWarm + steps; ++s) {
    std::vector<std::vector<int64_t>> ids;
    for (int32_t r = 0; r < kRanks; ++r) ids.push_back(MakeIds(kind, batch, r, s));
    std::vector<std::vector<IdColumn>> columns;
    for (int32_t r = 0; r < kRanks; ++r) columns.push_back(RowMajorColumns(ids[static_cast<size_t>(r)], run.virtual_ids(r)));
    Parts step;
    run.Step(columns, &step);
    if (s < kWarm) continue;
    double sum = 0.0;
    for (int p = 0; p < Parts::kCount; ++p) {
      const double ms = step.timers[p].seconds() * 1e3 / kRanks;
      parts[static_cast<size_t>(p)].Add(ms);
      sum += ms;
    }
    whole.Add(sum);
  }
  const std::string variant = internal::StrCat("B=", batch, " D=", dim, " ", Name(kind));
  Report("work per step", variant, "ms", whole);
  for (int p = 0; p < Parts::kCount; ++p) {
    Report(internal::StrCat("  ", Parts::kNames[p]), variant, "ms", parts[static_cast<size_t>(p)]);
  }
}

/// The same ids in 26 and in 1,000 tables, steps in turn.
void TablesStage(int repeats) {
  constexpr int32_t kMany = 1000;
  StepRun few(kFeatures, 16), many(kMany, 16);
  const int64_t steps = std::max<int64_t>(15, 2 * repeats);
  Series ms_few, ms_many;
  std::vector<Series> ratios(Parts::kCount + 1);
  for (int64_t s = 0; s < kWarm + steps; ++s) {
    Parts parts[2];
    for (const bool is_many : {false, true}) {
      StepRun& run = is_many ? many : few;
      std::vector<SplitIds> split;
      for (int32_t r = 0; r < kRanks; ++r) {
        split.push_back(SplitByTable(MakeIds(Ids::kWorkload, 4096, r, s), is_many ? kMany : kFeatures));
      }
      std::vector<std::vector<IdColumn>> columns;
      for (int32_t r = 0; r < kRanks; ++r) columns.push_back(SplitColumns(split[static_cast<size_t>(r)], run.virtual_ids(r)));
      run.Step(columns, &parts[is_many]);
    }
    if (s < kWarm) continue;
    double sums[2] = {};
    for (int p = 0; p < Parts::kCount; ++p) {
      for (int i = 0; i < 2; ++i) sums[i] += parts[i].timers[p].seconds() * 1e3 / kRanks;
      ratios[static_cast<size_t>(p)].Add(parts[1].timers[p].seconds() / parts[0].timers[p].seconds());
    }
    ratios[Parts::kCount].Add(sums[1] / sums[0]);
    ms_few.Add(sums[0]);
    ms_many.Add(sums[1]);
  }
  Report("work per step", "26 tables, feature by feature", "ms", ms_few);
  Report("work per step", "1000 tables, feature by feature", "ms", ms_many);
  Report("1000 tables / 26", "work per step", "times", ratios[Parts::kCount]);
  for (int p = 0; p < Parts::kCount; ++p) {
    Report("  1000 tables / 26", Parts::kNames[p], "times", ratios[static_cast<size_t>(p)]);
  }
}

}  // namespace

void RunInsertStages(int repeats) {
  InsertStage(repeats, true);
  InsertStage(repeats, false);
}

void RunStepStages(int repeats) {
  StepStage(repeats, Ids::kWorkload, 4096, 16);
  StepStage(repeats, Ids::kWorkload, 16384, 16);
  StepStage(repeats, Ids::kUniform, 4096, 16);
  TablesStage(repeats);
}

}  // namespace hvd_ctr::bench
