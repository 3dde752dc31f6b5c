// Promise: caching never changes the numbers. Random programs of all MixCache calls against ReferenceRows, bit for bit.
#include <deque>
#include <random>

#include "tests/cpp/mix_cache_fixture.h"
#include "tests/cpp/policy_names.h"
#include "tests/cpp/temporary_folder.h"
#include "tf_ops/core/disk_host_store.h"

namespace hvd_ctr {
namespace {

struct Open {
  int64_t ticket = 0;
  ReceivedKeys received;
};

struct Case {
  EvictionPolicyKind policy;
  OptimizerKind optimizer;
  int32_t world_size;
  int threads;
  HostKind host = HostKind::kRam;
  bool life = false;  // Tables with min_count, max_idle_steps and max_rows.
  RowType rows = RowType::kFloat32;
  NamedBackend backend = TestBackends()[0];
};

// A store on disk that keeps next to nothing in RAM: four records at most, and segments of two.
std::unique_ptr<MixCache> MakeDiskCache(const MixCacheOptions& options, BackendFactory backend) {
  HostStoreSpec spec;
  spec.record_floats = RecordFloats(options);
  spec.tables = static_cast<int32_t>(options.tables.size());
  DiskStoreTuning tuning;
  tuning.part_bytes = 4 * (spec.record_floats * static_cast<int64_t>(sizeof(float)) + 8);
  tuning.most_chunks = 1;
  auto store = MakeDiskHostStore(spec, options.host, tuning);
  EXPECT_TRUE(store.ok()) << store.status().message();
  auto cache = MakeMixCache(options, backend(), std::move(store.value()));
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return std::move(cache.value());
}

class Program {
 public:
  Program(const Case& parameters, uint32_t seed)
      : random_(seed),
        options_(Options(parameters)),
        runner_(parameters.threads),
        cache_(options_.host.kind == HostKind::kDisk ? MakeDiskCache(options_, parameters.backend.make)
                                                     : MakeCache(options_, parameters.backend.make)),
        model_(options_) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      if (options_.policy == EvictionPolicyKind::kLookahead && Dice(3) == 0) Announce();
      if (options_.policy == EvictionPolicyKind::kFreq && Dice(20) == 0) SetFrequencies();
      if (options_.policy == EvictionPolicyKind::kFreq && Dice(20) == 0) WarmStart();
      const uint32_t dice = Dice(100);
      if (dice < 35) {
        Prefetch();
      } else if (dice < 60) {
        LookupAndApply();
      } else if (dice < 68) {
        Release();
      } else if (dice < 84) {
        Read();
      } else if (dice < 89) {
        ASSERT_OK(cache_->Flush(&runner_));
      } else if (dice < 93) {
        CompareExport();
      } else {
        Import();
      }
      CheckCounters();
    }
    CompareExport();
    EXPECT_EQ(Totals(*cache_).not_admitted, model_.not_admitted());
    EXPECT_GT(prefetched_, steps / 20);
    EXPECT_EQ(deleted_ > steps / 20, life_);
    EXPECT_EQ(noted_ > steps / 50, options_.policy == EvictionPolicyKind::kLookahead);
    EXPECT_EQ(cache_->Stats().disk_rows_read > 0, options_.host.kind == HostKind::kDisk);
  }

 private:
  MixCacheOptions Options(const Case& parameters) {
    std::vector<TableOptions> tables = {Table("user", parameters.optimizer, 0.1f), Table("item", OptimizerKind::kSgd, 0.3f),
                                        Table("city", OptimizerKind::kAdagrad, 0.2f)};
    tables[0].optimizer.row_step = true;
    tables[1].initializer.kind = InitializerKind::kConstant;
    tables[2].initializer.kind = InitializerKind::kNormal;
    MixCacheOptions options = CacheOptions(3 + static_cast<int64_t>(Dice(14)), tables, 1 + static_cast<int32_t>(Dice(5)));
    life_ = parameters.life;
    if (life_) {
      options.tables[0].min_count = 1 + Dice(4);
      options.tables[0].max_idle_steps = 1 + Dice(8);
      options.tables[1].max_rows = 2 + Dice(6);
      options.tables[1].min_count = 1 + Dice(3);
      options.tables[2].max_rows = 2 + Dice(9);
      options.tables[2].max_idle_steps = 1 + Dice(12);
      for (TableOptions& table : options.tables) table.sweep_every_steps = 1 + Dice(4);
    }
    options.row_type = parameters.rows;
    options.policy = parameters.policy;
    options.window = 3;
    options.world_size = parameters.world_size;
    options.rank = parameters.world_size - 1;
    options.seed = Dice(1000);
    options.host.kind = parameters.host;
    options.host.path = TestFolder();
    options.host.ram_bytes = int64_t{1} << 20;
    return options;
  }

  uint32_t Dice(uint32_t sides) { return static_cast<uint32_t>(random_() % sides); }

  Key RandomKey() { return {static_cast<int64_t>(Dice(12)) << (Dice(2) * 50), static_cast<int32_t>(Dice(3))}; }

  ReceivedKeys RandomBatch() {
    std::vector<std::vector<Key>> ranks(static_cast<size_t>(options_.world_size));
    for (std::vector<Key>& keys : ranks) {
      const uint32_t count = Dice(9);
      for (uint32_t i = 0; i < count; ++i) keys.push_back(RandomKey());
      std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.table < b.table; });
    }
    ReceivedKeys received = Received(ranks);
    for (size_t i = 0; life_ && i < received.ids.size(); ++i) received.counts.push_back(1 + static_cast<int32_t>(Dice(2)));
    return received;
  }

  std::set<std::pair<int32_t, int64_t>> OwnedKeys(const ReceivedKeys& received) const {
    std::set<std::pair<int32_t, int64_t>> keys;
    for (size_t i = 0; i < received.ids.size(); ++i) {
      if (model_.Owned(received.tables[i], received.ids[i])) keys.insert({received.tables[i], received.ids[i]});
    }
    return keys;
  }

  std::set<std::pair<int32_t, int64_t>> PinnedKeys() const {
    std::set<std::pair<int32_t, int64_t>> keys;
    for (const Open& open : open_) {
      const auto held = OwnedKeys(open.received);
      keys.insert(held.begin(), held.end());
    }
    return keys;
  }

  void Announce() {
    const ReceivedKeys received = RandomBatch();
    bool noted = false;
    ASSERT_OK(cache_->Announce(received, &noted));
    if (noted) announced_.push_back(received);
    noted_ += noted;
  }

  // Mostly the batch announced first, at times none that was announced.
  ReceivedKeys NextBatch() {
    if (announced_.empty() || Dice(10) == 0) return RandomBatch();
    const ReceivedKeys received = announced_.front();
    announced_.pop_front();
    return received;
  }

  void SetFrequencies() {
    const auto table = static_cast<int32_t>(Dice(3));
    std::vector<int64_t> ids;
    std::vector<int64_t> counts;
    int64_t expected_foreign = 0;
    for (int64_t id = 0; id < 20; ++id) {
      ids.push_back(id);
      counts.push_back(Dice(6));
      expected_foreign += !model_.Owned(table, id);
    }
    int64_t foreign = -1;
    ASSERT_OK(cache_->SetFrequencies(table, ids, counts, &foreign));
    ASSERT_EQ(foreign, expected_foreign);
  }

  void WarmStart() {
    int64_t rows = -1;
    ASSERT_OK(cache_->WarmStart(&rows, &runner_));
    warmed_ += rows;
  }

  // Fits exactly if the rows of all open batches and of this one fit together; a failure leaves no trace.
  void Prefetch() {
    Open open;
    open.received = NextBatch();
    auto needed = PinnedKeys();
    const auto mine = OwnedKeys(open.received);
    needed.insert(mine.begin(), mine.end());
    const bool fits = static_cast<int64_t>(needed.size()) <= options_.slots || mine.empty();
    const Status status = cache_->Prefetch(open.received, &open.ticket, &runner_);
    if (!fits) {
      ASSERT_EQ(status.code(), StatusCode::kResourceExhausted);
      return;
    }
    ASSERT_OK(status);
    ++prefetched_;
    unique_ += static_cast<int64_t>(mine.size());
    requested_ += static_cast<int64_t>(open.received.ids.size());
    for (size_t i = 0; i < open.received.ids.size(); ++i)
      foreign_ += !model_.Owned(open.received.tables[i], open.received.ids[i]);
    std::vector<int32_t> splits;
    ASSERT_OK(cache_->TicketSplits(open.ticket, &splits));
    for (size_t w = 0; w < splits.size(); ++w) ASSERT_EQ(splits[w], open.received.peers[w].key_count);
    open_.push_back(open);
  }

  Open TakeOpen() {
    const size_t at = Dice(4) == 0 ? Dice(static_cast<uint32_t>(open_.size())) : 0;
    Open open = open_[at];
    open_.erase(open_.begin() + static_cast<int64_t>(at));
    return open;
  }

  void LookupAndApply() {
    if (open_.empty()) return;
    const Open open = TakeOpen();
    ASSERT_EQ(LookupRows(cache_.get(), open.ticket, open.received.ids.size()), model_.Read(open.received));
    std::vector<float> gradients(open.received.ids.size() * static_cast<size_t>(options_.dim));
    for (float& gradient : gradients) gradient = static_cast<float>(Dice(2001)) * 0.0013f - 1.3f;
    const float scale = 0.25f * static_cast<float>(Dice(8));
    ASSERT_OK(cache_->Apply(open.ticket, gradients.data(), scale, &runner_));
    model_.Apply(open.received, gradients, scale);
    Sweep();
    ASSERT_EQ(cache_->Apply(open.ticket, gradients.data(), scale, &runner_).code(), StatusCode::kFailedPrecondition);
  }

  // With other tickets open, whose rows may be deleted under them. Other ranks have rows too.
  void Sweep() {
    std::vector<int64_t> ages;
    ASSERT_OK(cache_->RowAges(&ages));
    ASSERT_EQ(ages, model_.Ages());
    for (int64_t begin = 0; options_.world_size > 1 && begin < static_cast<int64_t>(ages.size()); begin += kAgeBins) {
      for (int i = 0; i < 3; ++i) ages[static_cast<size_t>(begin + Dice(6))] += Dice(2);
    }
    int64_t deleted = -1;
    ASSERT_OK(cache_->Sweep(ages, &deleted, &runner_));
    ASSERT_EQ(deleted, model_.Sweep(ages));
    deleted_ += deleted;
    const MixCacheTableStats totals = Totals(*cache_);
    ASSERT_EQ(totals.deleted_idle + totals.deleted_max_rows, deleted_);
  }

  void Release() {
    if (open_.empty()) return;
    const Open open = TakeOpen();
    ASSERT_OK(cache_->Release(open.ticket));
    ASSERT_EQ(cache_->Release(open.ticket).code(), StatusCode::kFailedPrecondition);
  }

  void Read() {
    const ReceivedKeys received = RandomBatch();
    ASSERT_EQ(ReadRows(cache_.get(), received), model_.Read(received));
  }

  void CompareExport() {
    for (int32_t table = 0; table < 3; ++table) {
      ASSERT_EQ(ExportAll(cache_.get(), table, 1 + Dice(9)), model_.RowsOf(table));
      if (!life_) continue;
      for (const bool rows : {true, false}) {
        ASSERT_EQ(ExportLife(cache_.get(), table, rows, 1 + Dice(9)), model_.LifeOf(table, rows));
      }
      ASSERT_EQ(cache_->Stats().tables[static_cast<size_t>(table)].waiting_ids,
                static_cast<int64_t>(model_.LifeOf(table, false).size()));
    }
  }

  void Import() {
    const auto table = static_cast<int32_t>(Dice(3));
    const auto state_floats = static_cast<size_t>(cache_->state_floats(table));
    const auto pinned = PinnedKeys();
    std::vector<int64_t> ids;
    std::vector<float> rows;
    std::vector<float> state;
    bool refused = false;
    int64_t expected_foreign = 0;
    for (int64_t id = 0; id < 12; ++id) {
      if (Dice(3) != 0) continue;
      ids.push_back(id);
      refused = refused || pinned.count({table, id}) > 0;
      expected_foreign += !model_.Owned(table, id);
      for (int32_t d = 0; d < options_.dim; ++d) rows.push_back(static_cast<float>(Dice(1000)) * 0.37f);
      for (size_t s = 0; s < state_floats; ++s) state.push_back(static_cast<float>(1 + Dice(50)));
    }
    const bool with_state = Dice(2) == 0;
    int64_t foreign = -1;
    const Status status = cache_->Import(table, ids, rows.data(), with_state ? state.data() : nullptr, &foreign, &runner_);
    if (refused) {
      ASSERT_EQ(status.code(), StatusCode::kFailedPrecondition);
      return;
    }
    ASSERT_OK(status);
    ASSERT_EQ(foreign, expected_foreign);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!model_.Owned(table, ids[i])) continue;
      std::vector<float> record(static_cast<size_t>(options_.dim) + state_floats);
      const auto row = rows.begin() + static_cast<int64_t>(i) * options_.dim;
      std::copy(row, row + options_.dim, record.begin());
      if (with_state) {
        std::copy_n(state.begin() + static_cast<int64_t>(i * state_floats), state_floats, record.begin() + options_.dim);
      } else {
        InitialState(options_.tables[static_cast<size_t>(table)].optimizer, options_.dim, record.data() + options_.dim);
      }
      model_.Set(table, ids[i], record);
    }
    if (life_ && Dice(2) == 0) ImportLife(table);
  }

  void ImportLife(int32_t table) {
    std::vector<int64_t> ids;
    std::vector<RowLife::Id> life;
    int64_t expected_foreign = 0;
    ASSERT_OK(cache_->Flush(&runner_));  // A row that only the device has is not seen.
    for (int64_t id = 0; id < 12; ++id) {
      if (Dice(3) != 0) continue;
      ids.push_back(id);
      life.push_back({static_cast<int64_t>(Dice(5)), static_cast<int64_t>(Dice(static_cast<uint32_t>(model_.step()) + 2))});
      expected_foreign += !model_.Owned(table, id);
      if (model_.Owned(table, id)) model_.SetLife(table, id, life.back());
    }
    int64_t foreign = -1;
    ASSERT_OK(cache_->ImportLife(table, ids, life, &foreign));
    ASSERT_EQ(foreign, expected_foreign);
  }

  void CheckCounters() {
    const MixCacheStats stats = cache_->Stats();
    MixCacheTableStats sum;
    for (const MixCacheTableStats& table : stats.tables) {
      ASSERT_EQ(table.unique, table.hits + table.misses);
      if (warmed_ == 0 && deleted_ == 0) {
        ASSERT_EQ(table.cached_rows, table.misses - table.evictions);
      }
      ASSERT_LE(table.created, table.misses);
      sum.misses += table.misses;
      sum.evictions += table.evictions;
      sum.unique += table.unique;
      sum.requested += table.requested;
      sum.cached_rows += table.cached_rows;
    }
    ASSERT_LE(sum.cached_rows, warmed_ + sum.misses - sum.evictions);
    ASSERT_GE(sum.cached_rows + deleted_, warmed_ + sum.misses - sum.evictions);
    ASSERT_EQ(sum.unique, unique_);
    ASSERT_EQ(sum.requested, requested_);
    ASSERT_LE(sum.cached_rows, options_.slots);
    ASSERT_EQ(stats.foreign_keys, foreign_);
    ASSERT_EQ(stats.pinned_slots, static_cast<int64_t>(PinnedKeys().size()));
    ASSERT_LE(stats.pinned_slots, stats.pinned_peak);
    ASSERT_EQ(stats.steps, model_.step());
  }

  std::mt19937_64 random_;
  bool life_ = false;
  const MixCacheOptions options_;
  ThreadRunner runner_;
  std::unique_ptr<MixCache> cache_;
  ReferenceRows model_;
  std::vector<Open> open_;
  std::deque<ReceivedKeys> announced_;
  int noted_ = 0;
  int64_t warmed_ = 0;
  int64_t deleted_ = 0;
  int64_t unique_ = 0;
  int64_t requested_ = 0;
  int64_t foreign_ = 0;
  int prefetched_ = 0;
};

class MixCacheRandomTest : public testing::TestWithParam<Case> {};

TEST_P(MixCacheRandomTest, EveryRowEqualsTheReferenceBitForBit) {
  const bool device = GetParam().backend.make != &MakeCpuBackend;
  const bool basic = !GetParam().life && GetParam().rows == RowType::kFloat32;
  for (uint32_t seed = 0; seed < (device ? 5 : basic ? 25 : 8); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Program(GetParam(), seed).Run(300);
    if (HasFatalFailure()) return;
  }
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const Case& given = info.param;
  return PolicyName(given.policy) + "Optimizer" + std::to_string(static_cast<int>(given.optimizer)) + "Ranks" +
         std::to_string(given.world_size) + (given.host == HostKind::kDisk ? "Disk" : "") + (given.life ? "Life" : "") +
         (given.rows == RowType::kFloat32 ? "" : RowTypeName(given.rows)) + given.backend.name;
}

INSTANTIATE_TEST_SUITE_P(Programs, MixCacheRandomTest,
                         testing::Values(Case{EvictionPolicyKind::kLru, OptimizerKind::kAdagrad, 1, 1},
                                         Case{EvictionPolicyKind::kLfu, OptimizerKind::kAdam, 1, 1},
                                         Case{EvictionPolicyKind::kLru, OptimizerKind::kFtrl, 2, 1},
                                         Case{EvictionPolicyKind::kLfu, OptimizerKind::kSgd, 3, 1},
                                         Case{EvictionPolicyKind::kLru, OptimizerKind::kRowWiseAdagrad, 2, 3},
                                         Case{EvictionPolicyKind::kClock, OptimizerKind::kAdagrad, 1, 1},
                                         Case{EvictionPolicyKind::kClock, OptimizerKind::kAdam, 2, 3},
                                         Case{EvictionPolicyKind::kFreq, OptimizerKind::kAdagrad, 1, 1},
                                         Case{EvictionPolicyKind::kFreq, OptimizerKind::kFtrl, 2, 3},
                                         Case{EvictionPolicyKind::kLookahead, OptimizerKind::kAdam, 1, 1},
                                         Case{EvictionPolicyKind::kLookahead, OptimizerKind::kSgd, 2, 3},
                                         Case{EvictionPolicyKind::kLru, OptimizerKind::kAdagrad, 1, 1, HostKind::kDisk},
                                         Case{EvictionPolicyKind::kLfu, OptimizerKind::kAdam, 2, 1, HostKind::kDisk},
                                         Case{EvictionPolicyKind::kFreq, OptimizerKind::kAdagrad, 2, 1, HostKind::kDisk},
                                         Case{EvictionPolicyKind::kLookahead, OptimizerKind::kAdam, 1, 1, HostKind::kDisk},
                                         Case{EvictionPolicyKind::kLru, OptimizerKind::kAdagrad, 1, 1, HostKind::kRam, true},
                                         Case{EvictionPolicyKind::kLfu, OptimizerKind::kAdam, 2, 3, HostKind::kRam, true},
                                         Case{EvictionPolicyKind::kClock, OptimizerKind::kFtrl, 3, 1, HostKind::kRam, true},
                                         Case{EvictionPolicyKind::kFreq, OptimizerKind::kAdagrad, 2, 1, HostKind::kRam, true},
                                         Case{EvictionPolicyKind::kLookahead, OptimizerKind::kAdam, 1, 1, HostKind::kRam, true},
                                         Case{EvictionPolicyKind::kLru, OptimizerKind::kAdam, 2, 1, HostKind::kDisk, true},
                                         Case{EvictionPolicyKind::kLookahead, OptimizerKind::kSgd, 1, 1, HostKind::kDisk, true}),
                         &CaseName);

std::vector<Case> NarrowCases() {
  std::vector<Case> cases;
  for (const RowType rows : {RowType::kFloat16, RowType::kBfloat16}) {
    cases.push_back({EvictionPolicyKind::kLru, OptimizerKind::kAdagrad, 1, 1, HostKind::kRam, false, rows});
    cases.push_back({EvictionPolicyKind::kLfu, OptimizerKind::kAdam, 2, 3, HostKind::kDisk, false, rows});
    cases.push_back({EvictionPolicyKind::kFreq, OptimizerKind::kFtrl, 2, 1, HostKind::kRam, false, rows});
    cases.push_back({EvictionPolicyKind::kLookahead, OptimizerKind::kRowWiseAdagrad, 1, 1, HostKind::kRam, true, rows});
    cases.push_back({EvictionPolicyKind::kClock, OptimizerKind::kSgd, 2, 1, HostKind::kDisk, true, rows});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(NarrowRows, MixCacheRandomTest, testing::ValuesIn(NarrowCases()), &CaseName);

std::vector<Case> DeviceCases() {
  std::vector<Case> cases;
  for (const NamedBackend& backend :
       {NamedBackend{"CudaOnCpu", &MakeCudaOnCpuBackend}, NamedBackend{"Strict", &MakeStrictBackend}}) {
    using Policy = EvictionPolicyKind;
    using Kind = OptimizerKind;
    cases.push_back({Policy::kLru, Kind::kAdagrad, 1, 3, HostKind::kRam, false, RowType::kFloat32, backend});
    cases.push_back({Policy::kLfu, Kind::kAdam, 2, 1, HostKind::kRam, true, RowType::kFloat32, backend});
    cases.push_back({Policy::kFreq, Kind::kFtrl, 3, 1, HostKind::kRam, false, RowType::kFloat32, backend});
    cases.push_back({Policy::kLookahead, Kind::kRowWiseAdagrad, 2, 1, HostKind::kDisk, true, RowType::kFloat32, backend});
    cases.push_back({Policy::kClock, Kind::kSgd, 1, 1, HostKind::kDisk, false, RowType::kFloat32, backend});
    cases.push_back({Policy::kLru, Kind::kAdam, 2, 1, HostKind::kRam, true, RowType::kFloat16, backend});
    cases.push_back({Policy::kLookahead, Kind::kAdagrad, 2, 1, HostKind::kRam, false, RowType::kBfloat16, backend});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Devices, MixCacheRandomTest, testing::ValuesIn(DeviceCases()), &CaseName);

}  // namespace
}  // namespace hvd_ctr
