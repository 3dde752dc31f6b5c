// Flush, Export and Import of MixCache: what a checkpoint is made of.
#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

class MixCacheExportTest : public OnEveryBackend {};

// Field case 52: restore of 1000 rows through a cache of 16.
TEST_P(MixCacheExportTest, RestoreBiggerThanTheCache) {
  InlineRunner runner;
  for (const EvictionPolicyKind policy : {EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu}) {
    MixCacheOptions options = CacheOptions(16, {Table("t", OptimizerKind::kAdagrad)}, 2);
    options.policy = policy;
    auto cache = MakeCache(options);
    std::vector<int64_t> ids;
    std::vector<float> rows;
    std::vector<float> state;
    for (int64_t id = 0; id < 1000; ++id) {
      ids.push_back(id * 1000003);
      for (int d = 0; d < 2; ++d) {
        rows.push_back(static_cast<float>(2 * id + d));
        state.push_back(static_cast<float>(5000 + 2 * id + d));
      }
    }
    int64_t foreign = -1;
    ASSERT_OK(cache->Import(0, ids, rows.data(), state.data(), &foreign, &runner));
    EXPECT_EQ(foreign, 0);
    EXPECT_EQ(Totals(*cache).host_rows, 1000);
    for (int64_t begin = 0; begin < 1000; begin += 10) {
      std::vector<Key> keys;
      for (int64_t i = begin; i < begin + 10; ++i) keys.push_back({ids[static_cast<size_t>(i)], 0});
      int64_t ticket = 0;
      ASSERT_OK(cache->Prefetch(Received({keys}), &ticket, &runner));
      EXPECT_EQ(LookupRows(cache.get(), ticket, 10), std::vector<float>(rows.begin() + 2 * begin, rows.begin() + 2 * begin + 20));
      ASSERT_OK(cache->Release(ticket));
    }
    EXPECT_EQ(Totals(*cache).created, 0);
    EXPECT_EQ(Totals(*cache).write_backs, 0) << "rows that were only read are not written back";
    const auto exported = ExportAll(cache.get(), 0, 64);
    ASSERT_EQ(exported.size(), 1000u);
    EXPECT_EQ(exported.at(ids[7]), (std::vector<float>{14.0f, 15.0f, 5014.0f, 5015.0f}));
  }
}

// Field case 62: export in the middle of training holds the newest rows and state, and training goes on.
TEST_P(MixCacheExportTest, ExportSeesDirtyRowsAndStateAndTrainingGoesOn) {
  const MixCacheOptions options = CacheOptions(32, {Table("t", OptimizerKind::kAdagrad, 0.1f)}, 3);
  auto cache = MakeCache(options);
  ReferenceRows reference(options);
  for (int step = 0; step < 6; ++step) {
    Step(cache.get(), Range(step, step + 8), 0.5f);
    reference.Apply(Range(step, step + 8), std::vector<float>(24, 0.5f), 1.0f);
    if (step % 3 == 2) {
      EXPECT_EQ(ExportAll(cache.get(), 0), reference.RowsOf(0));
    }
  }
  EXPECT_EQ(Totals(*cache).evictions, 0);
}

TEST_P(MixCacheExportTest, ImportOverwritesCachedRowsAndRefusesPinnedOnesNamingTheTicket) {
  InlineRunner runner;
  auto cache = MakeCache(CacheOptions(4, {Table("t", OptimizerKind::kAdagrad)}, 1));
  Step(cache.get(), Range(0, 3));
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(Range(2, 3), &ticket, &runner));
  const std::vector<int64_t> ids = {1, 2, 5};
  const std::vector<float> rows = {10.0f, 20.0f, 50.0f};
  const std::vector<float> before = ReadRows(cache.get(), Range(0, 6));
  int64_t foreign = -1;
  const Status refused = cache->Import(0, ids, rows.data(), nullptr, &foreign, &runner);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(refused, "ticket " + std::to_string(ticket) + " uses the row")) << refused.message();
  EXPECT_EQ(ReadRows(cache.get(), Range(0, 6)), before) << "a refused import changes nothing";
  ASSERT_OK(cache->Release(ticket));
  const int64_t loads = Totals(*cache).loads;
  ASSERT_OK(cache->Import(0, ids, rows.data(), nullptr, &foreign, &runner));
  EXPECT_EQ(Totals(*cache).loads - loads, 2) << "rows 1 and 2 are cached, row 5 is not";
  const int64_t written = Totals(*cache).write_backs;
  const auto exported = ExportAll(cache.get(), 0);
  EXPECT_EQ(Totals(*cache).write_backs - written, 1) << "row 0 is dirty; rows 1 and 2 are the same on the host by now";
  EXPECT_EQ(exported.at(1), (std::vector<float>{10.0f, 0.1f})) << "no state given: the initial one";
  EXPECT_EQ(exported.at(5), (std::vector<float>{50.0f, 0.1f}));
  ASSERT_OK(cache->Prefetch(Range(1, 3), &ticket, &runner));
  EXPECT_EQ(LookupRows(cache.get(), ticket, 2), (std::vector<float>{10.0f, 20.0f}));
}

TEST_P(MixCacheExportTest, ImportAndExportRefuseBadArguments) {
  InlineRunner runner;
  TableOptions table = Table("t");
  table.rows = 10;
  auto cache = MakeCache(CacheOptions(4, {table}, 1));
  const std::vector<float> rows(3, 1.0f);
  int64_t foreign = 0;
  const std::vector<int64_t> beyond = {1, 10};
  Status status = cache->Import(0, beyond, rows.data(), nullptr, &foreign, &runner);
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_TRUE(Mentions(status, "id 10 into table 't'; allowed are 0 .. 9")) << status.message();
  const std::vector<int64_t> twice = {1, 2, 1};
  EXPECT_TRUE(Mentions(cache->Import(0, twice, rows.data(), nullptr, &foreign, &runner), "id 1 twice"));
  const std::vector<int64_t> negative = {-1};
  EXPECT_EQ(cache->Import(0, negative, rows.data(), nullptr, &foreign, &runner).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(cache->Import(1, beyond, rows.data(), nullptr, &foreign, &runner), "table 1; allowed are 0 .. 0"));
  EXPECT_EQ(Totals(*cache).host_rows, 0);
  ExportChunk chunk;
  int64_t cursor = 0;
  EXPECT_EQ(cache->Export(0, &cursor, 0, &chunk, &runner).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Export(-1, &cursor, 5, &chunk, &runner).code(), StatusCode::kInvalidArgument);
  ASSERT_OK(cache->Export(0, &cursor, 5, &chunk, &runner));
  EXPECT_EQ(cursor, -1);
}

INSTANTIATE_TEST_SUITE_P(Backends, MixCacheExportTest, testing::ValuesIn(TestBackends()), BackendName);

}  // namespace
}  // namespace hvd_ctr
