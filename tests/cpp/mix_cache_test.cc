#include "tf_ops/core/mix_cache.h"

#include <chrono>
#include <limits>

#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

class MixCacheTest : public OnEveryBackend {};

// Invariant 2: each ticket ends exactly once; a second use names it.
TEST_P(MixCacheTest, TicketsEndExactlyOnce) {
  InlineRunner runner;
  auto cache = MakeCache(CacheOptions(4, {Table("t")}));
  int64_t first = 0;
  int64_t second = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 2), &first, &runner));
  ASSERT_OK(cache->Prefetch(Range(1, 3), &second, &runner));
  EXPECT_NE(first, second);
  EXPECT_EQ(cache->Stats().pinned_slots, 3);
  const std::vector<float> gradients(4, 1.0f);
  ASSERT_OK(cache->Apply(first, gradients.data(), 1.0f, &runner));
  EXPECT_EQ(cache->Stats().pinned_slots, 2) << "row 1 is still held by the second ticket";
  ASSERT_OK(cache->Release(second));
  EXPECT_EQ(cache->Stats().pinned_slots, 0);
  EXPECT_EQ(cache->Stats().pinned_peak, 3);
  std::vector<float> rows(4);
  std::vector<int32_t> splits;
  for (const Status& status : {cache->Apply(first, gradients.data(), 1.0f, &runner), cache->Release(first),
                               cache->TicketSplits(first, &splits), cache->Lookup(first, rows.data(), &runner)}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(Mentions(status, "ticket " + std::to_string(first) + ", which was applied or released before"))
        << status.message();
  }
  const Status unknown = cache->Release(99);
  EXPECT_EQ(unknown.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(unknown, "ticket 99, which was never handed out")) << unknown.message();
  EXPECT_EQ(cache->step(), 1);
}

// Invariant 3, and the message a user sees.
TEST_P(MixCacheTest, BatchLargerThanTheCacheFailsAtOnceWithNumbersAndField) {
  InlineRunner runner;
  MixCacheOptions options = CacheOptions(100, {Table("user"), Table("item")});
  options.name = "dim16";
  options.prefetch_wait_seconds = 60.0;
  auto cache = MakeCache(options);
  ReceivedKeys received = Range(0, 50, 0);
  const ReceivedKeys items = Range(0, 200, 1);
  received.ids.insert(received.ids.end(), items.ids.begin(), items.ids.end());
  received.tables.insert(received.tables.end(), items.tables.begin(), items.tables.end());
  received.peers[0].key_count = 250;
  int64_t ticket = -1;
  const auto start = std::chrono::steady_clock::now();
  const Status status = cache->Prefetch(received, &ticket, &runner);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(
      status.message(),
      "mix_cache 'dim16' on rank 0: this batch needs 250 rows (most of them, 200, from table 'item'), have 100 slots; raise "
      "embedding.cache.slots to at least 250 or lower train.global_batch");
  EXPECT_EQ(Totals(*cache).requested, 0);
  EXPECT_EQ(cache->Stats().pinned_slots, 0);
  Step(cache.get(), Range(0, 100));
}

// Invariant 3: what does not fit beside the pinned rows fails after the wait, and leaves the cache as it was.
TEST_P(MixCacheTest, NoRoomBesidePinnedRowsFailsAfterTheWaitAndChangesNothing) {
  InlineRunner runner;
  MixCacheOptions options = CacheOptions(6, {Table("t")});
  options.prefetch_wait_seconds = 0.05;
  auto cache = MakeCache(options);
  int64_t held = 0;
  int64_t ticket = -1;
  ASSERT_OK(cache->Prefetch(Range(0, 4), &held, &runner));
  const MixCacheStats before = cache->Stats();
  const auto start = std::chrono::steady_clock::now();
  const Status status = cache->Prefetch(Range(3, 7), &ticket, &runner);
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, std::chrono::milliseconds(50));
  EXPECT_LT(waited, std::chrono::seconds(10));
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Mentions(status, "needs 4 rows, and 4 of 6 slots are held by 1 batches in flight (1 of them")) << status.message();
  EXPECT_TRUE(Mentions(status, "raise embedding.cache.slots to at least 7")) << status.message();
  EXPECT_EQ(ticket, -1);
  const MixCacheStats after = cache->Stats();
  EXPECT_EQ(after.pinned_slots, before.pinned_slots);
  EXPECT_EQ(after.tables[0].unique, before.tables[0].unique);
  EXPECT_EQ(after.tables[0].cached_rows, before.tables[0].cached_rows);
  ASSERT_OK(cache->Release(held));
  ASSERT_OK(cache->Prefetch(Range(3, 7), &ticket, &runner));
  EXPECT_EQ(ticket, held + 1);
}

// Invariant 5: a first value is a function of seed, table name, id and column. Not of slots, order, rank count or the table's
// position.
TEST_P(MixCacheTest, FirstValuesDoNotDependOnPlacement) {
  InlineRunner runner;
  auto one = MakeCache(CacheOptions(16, {Table("a"), Table("b")}, 3));
  auto swapped = MakeCache(CacheOptions(5, {Table("b"), Table("a")}, 3));
  const std::vector<float> rows = ReadRows(one.get(), Range(0, 5, 0));
  for (const int64_t id : {4, 2, 0, 1, 3}) {
    int64_t ticket = 0;
    ASSERT_OK(swapped->Prefetch(Range(id, id + 1, 1), &ticket, &runner));
    EXPECT_EQ(LookupRows(swapped.get(), ticket, 1), std::vector<float>(rows.begin() + id * 3, rows.begin() + (id + 1) * 3));
    ASSERT_OK(swapped->Release(ticket));
  }
  EXPECT_NE(ReadRows(one.get(), Range(0, 5, 1)), rows);
}

// Invariant 6: foreign keys give zero rows, get no update, are created nowhere and are counted.
TEST_P(MixCacheTest, ForeignKeysAreDroppedAndCounted) {
  InlineRunner runner;
  MixCacheOptions options = CacheOptions(64, {Table("t")}, 1);
  options.world_size = 2;
  std::vector<std::map<int64_t, std::vector<float>>> exported;
  for (int32_t rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    auto cache = MakeCache(options);
    std::vector<Key> keys;
    for (int64_t id = 0; id < 20; ++id) keys.push_back({id, 0});
    const ReceivedKeys received = Received({keys, {}});
    int64_t ticket = 0;
    ASSERT_OK(cache->Prefetch(received, &ticket, &runner));
    const std::vector<float> rows = LookupRows(cache.get(), ticket, 20);
    const std::vector<float> gradients(20, 1.0f);
    ASSERT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
    exported.push_back(ExportAll(cache.get(), 0));
    for (int64_t id = 0; id < 20; ++id) {
      const bool owned = OwnerOf(0, id, 2) == rank;
      EXPECT_EQ(exported.back().count(id), owned ? 1u : 0u);
      EXPECT_EQ(rows[static_cast<size_t>(id)] == 0.0f, !owned);
      if (owned) {
        EXPECT_EQ(exported.back()[id][0], rows[static_cast<size_t>(id)] - 0.5f);
      }
    }
    EXPECT_EQ(cache->Stats().foreign_keys, 20 - static_cast<int64_t>(exported.back().size()));
    int64_t foreign = -1;
    const std::vector<int64_t> ids = received.ids;
    ASSERT_OK(cache->Import(0, ids, gradients.data(), nullptr, &foreign, &runner));
    EXPECT_EQ(foreign, 20 - static_cast<int64_t>(exported.back().size()));
  }
  EXPECT_EQ(exported[0].size() + exported[1].size(), 20u);
}

// Field case 1 at the owner: gradients of ranks that ask for the same row are summed before the row optimizer sees them.
TEST_P(MixCacheTest, GradientsOfAllRanksAreSummedPerRow) {
  InlineRunner runner;
  TableOptions table = Table("t", OptimizerKind::kSgd, 1.0f);
  table.initializer = {InitializerKind::kConstant, 0.0f};
  auto options = CacheOptions(8, {table}, 2);
  options.world_size = 1;
  auto cache = MakeCache(options);
  ReceivedKeys received = Received({{{4, 0}, {4, 0}, {7, 0}, {4, 0}, {9, 0}}});
  Step(cache.get(), received);
  const auto rows = ExportAll(cache.get(), 0);
  EXPECT_EQ(rows.at(4), (std::vector<float>{-3.0f, -3.0f}));
  EXPECT_EQ(rows.at(7), (std::vector<float>{-1.0f, -1.0f}));
  EXPECT_EQ(rows.at(9), (std::vector<float>{-1.0f, -1.0f}));
}

// Field case 50: prefetched ahead, two batches of 8 rows alternate in 8 to 16 slots. With too few slots for both the second waits
// (here: is refused, because nobody else releases), never evicts a row in use.
TEST_P(MixCacheTest, PrefetchNeverEvictsRowsInUse) {
  InlineRunner runner;
  for (const int64_t slots : {8, 12, 16}) {
    const MixCacheOptions options = CacheOptions(slots, {Table("t", OptimizerKind::kAdagrad, 0.1f)}, 4);
    auto cache = MakeCache(options);
    ReferenceRows reference(options);
    const ReceivedKeys batches[] = {Range(0, 8), Range(8, 16)};
    std::vector<float> gradients(32);
    int64_t ahead = -1;
    for (int step = 0; step < 50; ++step) {
      const ReceivedKeys& batch = batches[step % 2];
      int64_t ticket = ahead;
      if (ahead < 0) ASSERT_OK(cache->Prefetch(batch, &ticket, &runner));
      ahead = -1;
      const Status next = cache->Prefetch(batches[(step + 1) % 2], &ahead, &runner);
      ASSERT_EQ(next.ok(), slots >= 16) << next.message();
      ASSERT_EQ(LookupRows(cache.get(), ticket, 8), reference.Read(batch));
      for (size_t i = 0; i < gradients.size(); ++i)
        gradients[i] = 0.01f * static_cast<float>(i) - 0.1f * static_cast<float>(step % 3);
      ASSERT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
      reference.Apply(batch, gradients, 1.0f);
    }
    if (ahead >= 0) ASSERT_OK(cache->Release(ahead));
    EXPECT_EQ(ExportAll(cache.get(), 0), reference.RowsOf(0));
  }
}

// Field case 53: a cache as large as the table hits always from the second pass on, and moves nothing.
TEST_P(MixCacheTest, CacheAsLargeAsTheTableHitsAlways) {
  auto cache = MakeCache(CacheOptions(1000, {Table("t")}));
  for (int64_t begin = 0; begin < 1000; begin += 50) Step(cache.get(), Range(begin, begin + 50));
  const MixCacheTableStats first = Totals(*cache);
  EXPECT_EQ(first.misses, 1000);
  EXPECT_EQ(first.created, 1000);
  for (int64_t begin = 0; begin < 1000; begin += 50) Step(cache.get(), Range(begin, begin + 50));
  const MixCacheTableStats second = Totals(*cache);
  EXPECT_EQ(second.hits - first.hits, 1000);
  EXPECT_EQ(second.misses, first.misses);
  EXPECT_EQ(second.evictions, 0);
  EXPECT_EQ(second.write_backs, 0);
  EXPECT_EQ(second.hits + second.misses, second.unique);
  EXPECT_EQ(second.cached_rows, 1000);
}

// Field case 55: capacity 4, value = id for ids 0..9 one after another, then flush.
TEST_P(MixCacheTest, WriteBacksAreExactlyTheDirtyEvictedRows) {
  InlineRunner runner;
  for (const EvictionPolicyKind policy : {EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu}) {
    TableOptions table = Table("t", OptimizerKind::kSgd, 1.0f);
    table.initializer = {InitializerKind::kConstant, 0.0f};
    MixCacheOptions options = CacheOptions(4, {table}, 1);
    options.policy = policy;
    auto cache = MakeCache(options);
    for (int64_t id = 0; id < 10; ++id) Step(cache.get(), Range(id, id + 1), -static_cast<float>(id));
    EXPECT_EQ(Totals(*cache).evictions, 6);
    EXPECT_EQ(Totals(*cache).write_backs, 6);
    EXPECT_EQ(Totals(*cache).host_rows, 6);
    ASSERT_OK(cache->Flush(&runner));
    EXPECT_EQ(Totals(*cache).write_backs, 10);
    ASSERT_OK(cache->Flush(&runner));
    EXPECT_EQ(Totals(*cache).write_backs, 10) << "a second flush has nothing to write";
    const auto rows = ExportAll(cache.get(), 0);
    ASSERT_EQ(rows.size(), 10u);
    for (int64_t id = 0; id < 10; ++id) EXPECT_EQ(rows.at(id), std::vector<float>{static_cast<float>(id)});
    // Clean rows are dropped without being written again.
    for (int64_t id = 0; id < 10; ++id) {
      int64_t ticket = 0;
      ASSERT_OK(cache->Prefetch(Range(id, id + 1), &ticket, &runner));
      EXPECT_EQ(LookupRows(cache.get(), ticket, 1), std::vector<float>{static_cast<float>(id)});
      ASSERT_OK(cache->Release(ticket));
    }
    EXPECT_EQ(Totals(*cache).write_backs, 10);
    EXPECT_GT(Totals(*cache).evictions, 10);
  }
}

// Invariant 9 (field case 49): reading unseen and seen keys through a full cache changes nothing, not even the next eviction.
TEST_P(MixCacheTest, ReadChangesNothing) {
  InlineRunner runner;
  const MixCacheOptions options = CacheOptions(4, {Table("t", OptimizerKind::kAdagrad)}, 2);
  auto cache = MakeCache(options);
  auto undisturbed = MakeCache(options);
  ReferenceRows reference(options);
  for (int round = 0; round < 5; ++round) {
    const ReceivedKeys batch = Range(2 * round, 2 * round + 3);
    Step(cache.get(), batch);
    Step(undisturbed.get(), batch);
    reference.Apply(batch, std::vector<float>(6, 1.0f), 1.0f);
    const MixCacheTableStats before = Totals(*cache);
    EXPECT_EQ(ReadRows(cache.get(), Range(0, 9000)), reference.Read(Range(0, 9000)));
    for (int i = 0; i < 10; ++i) ReadRows(cache.get(), Range(2 * round, 2 * round + 1));
    const MixCacheTableStats after = Totals(*cache);
    EXPECT_EQ(after.requested, before.requested);
    EXPECT_EQ(after.hits, before.hits);
    EXPECT_EQ(after.host_rows, before.host_rows);
    EXPECT_EQ(after.cached_rows, before.cached_rows);
    EXPECT_EQ(after.write_backs, before.write_backs);
  }
  EXPECT_EQ(cache->step(), 5);
  EXPECT_EQ(Totals(*cache).hits, Totals(*undisturbed).hits);
  EXPECT_EQ(Totals(*cache).evictions, Totals(*undisturbed).evictions);
  EXPECT_EQ(ExportAll(cache.get(), 0), ExportAll(undisturbed.get(), 0));
}

TEST_P(MixCacheTest, EmptyBatchCountsAStep) {
  InlineRunner runner;
  auto cache = MakeCache(CacheOptions(2, {Table("t")}));
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 0), &ticket, &runner));
  ASSERT_OK(cache->Lookup(ticket, nullptr, &runner));
  ASSERT_OK(cache->Apply(ticket, nullptr, 1.0f, &runner));
  EXPECT_EQ(cache->step(), 1);
  EXPECT_EQ(cache->Stats().steps, 1);
}

TEST_P(MixCacheTest, ABatchThatIsNeverTrainedLeavesNoRow) {
  InlineRunner runner;
  const MixCacheOptions options = CacheOptions(4, {Table("t", OptimizerKind::kAdagrad)}, 2);
  auto cache = MakeCache(options);
  ReferenceRows reference(options);
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 3), &ticket, &runner));
  ASSERT_OK(cache->Release(ticket));
  EXPECT_EQ(Totals(*cache).created, 3);
  EXPECT_TRUE(ExportAll(cache.get(), 0).empty());
  ASSERT_OK(cache->Prefetch(Range(3, 7), &ticket, &runner));  // evicts them
  EXPECT_EQ(Totals(*cache).write_backs, 0);
  EXPECT_EQ(ReadRows(cache.get(), Range(0, 3)), reference.Read(Range(0, 3)));
}

TEST_P(MixCacheTest, StepIsRestoredAndDrivesTheOptimizer) {
  InlineRunner runner;
  const MixCacheOptions options = CacheOptions(4, {Table("t", OptimizerKind::kAdam)}, 2);
  auto cache = MakeCache(options);
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 1), &ticket, &runner));
  const Status status = cache->SetStep(9);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(status, "the first is 1")) << status.message();
  ASSERT_OK(cache->Release(ticket));
  EXPECT_EQ(cache->SetStep(-1).code(), StatusCode::kInvalidArgument);
  ASSERT_OK(cache->SetStep(9));
  EXPECT_EQ(cache->step(), 9);
  ReferenceRows reference(options);
  for (int step = 0; step < 9; ++step) reference.Apply(Range(0, 0), {}, 1.0f);
  Step(cache.get(), Range(0, 1), 0.3f);
  reference.Apply(Range(0, 1), {0.3f, 0.3f}, 1.0f);
  EXPECT_EQ(cache->step(), 10);
  EXPECT_EQ(ExportAll(cache.get(), 0), reference.RowsOf(0));
}

// Tables with different state sizes share records; the unused tail is zero and never exported.
TEST_P(MixCacheTest, TablesOfDifferentOptimizersShareOneCache) {
  const MixCacheOptions options = CacheOptions(
      3, {Table("a", OptimizerKind::kSgd), Table("b", OptimizerKind::kAdam), Table("c", OptimizerKind::kRowWiseAdagrad)}, 4);
  auto host_store = MakeRamHostStore(RecordFloats(options), 3);
  const HostStore* host = host_store.get();
  auto made = MakeMixCache(options, GetParam().make(), std::move(host_store));
  ASSERT_OK(made.status());
  const std::unique_ptr<MixCache> cache = std::move(made.value());
  EXPECT_EQ(cache->state_floats(0), 0);
  EXPECT_EQ(cache->state_floats(1), 8);
  EXPECT_EQ(cache->state_floats(2), 1);
  ReferenceRows reference(options);
  for (int step = 0; step < 12; ++step) {
    // Every other time in reverse, so that staging memory that held a long state gets a row without state.
    std::vector<Key> keys = {{step % 5, 0}, {step % 5, 1}, {step % 3, 2}};
    if (step % 2 == 1) std::reverse(keys.begin(), keys.end());
    const ReceivedKeys batch = Received({keys});
    Step(cache.get(), batch, 0.1f * static_cast<float>(step + 1));
    reference.Apply(batch, std::vector<float>(12, 0.1f * static_cast<float>(step + 1)), 1.0f);
  }
  for (int32_t table = 0; table < 3; ++table) EXPECT_EQ(ExportAll(cache.get(), table), reference.RowsOf(table));
  int64_t cursor = 0;
  std::vector<int64_t> ids;
  std::vector<float> records;
  ASSERT_OK(host->Scan(0, &cursor, 100, &ids, &records));
  ASSERT_EQ(ids.size(), 5u);
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(std::all_of(records.begin() + static_cast<int64_t>(12 * i + 4),
                            records.begin() + static_cast<int64_t>(12 * i + 12), [](float value) { return value == 0.0f; }));
  }
}

TEST_P(MixCacheTest, RefusesInconsistentRequestsAndScales) {
  InlineRunner runner;
  auto cache = MakeCache(CacheOptions(4, {Table("t")}));
  int64_t ticket = 0;
  ReceivedKeys received = Range(0, 2);
  received.peers[0].key_count = 3;
  EXPECT_TRUE(Mentions(cache->Prefetch(received, &ticket, &runner), "announce 3 keys"));
  received.peers.clear();
  EXPECT_EQ(cache->Prefetch(received, &ticket, &runner).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache->Read(received, nullptr, &runner).code(), StatusCode::kInvalidArgument);
  ASSERT_OK(cache->Prefetch(Range(0, 1), &ticket, &runner));
  const std::vector<float> gradients(2, 1.0f);
  for (const float scale : {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(cache->Apply(ticket, gradients.data(), scale, &runner).code(), StatusCode::kInvalidArgument);
  }
  ASSERT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
}

TEST_P(MixCacheTest, CountsPerTableAndMemory) {
  InlineRunner runner;
  auto cache = MakeCache(CacheOptions(8, {Table("a"), Table("b")}));
  ReceivedKeys received = Received({{{1, 0}, {1, 0}, {2, 0}, {1, 1}}});
  received.peers[0].info.invalid_counts = {3, 0};
  Step(cache.get(), received);
  Step(cache.get(), received);
  const MixCacheStats stats = cache->Stats();
  EXPECT_EQ(stats.tables[0].requested, 6);
  EXPECT_EQ(stats.tables[0].unique, 4);
  EXPECT_EQ(stats.tables[0].hits, 2);
  EXPECT_EQ(stats.tables[0].misses, 2);
  EXPECT_EQ(stats.tables[0].invalid_ids, 6);
  EXPECT_EQ(stats.tables[1].requested, 2);
  EXPECT_EQ(stats.tables[1].unique, 2);
  EXPECT_EQ(stats.tables[1].cached_rows, 1);
  EXPECT_EQ(stats.tables[0].loads, 2);
  EXPECT_EQ(stats.record_bytes, 2 * static_cast<int64_t>(sizeof(float)));
  EXPECT_GE(stats.device_bytes, 8 * 2 * static_cast<int64_t>(sizeof(float)));
  EXPECT_GT(stats.host_bytes, 0);
}

// No memory is taken up in steady state: tickets and scratch are reused.
TEST_P(MixCacheTest, SteadyStateTakesNoMoreMemory) {
  auto cache = MakeCache(CacheOptions(64, {Table("t")}));
  for (int step = 0; step < 20; ++step) Step(cache.get(), Range(step % 4 * 10, step % 4 * 10 + 30));
  const int64_t bytes = cache->Stats().host_bytes;
  for (int step = 0; step < 200; ++step) Step(cache.get(), Range(step % 4 * 10, step % 4 * 10 + 30));
  EXPECT_EQ(cache->Stats().host_bytes, bytes);
}

INSTANTIATE_TEST_SUITE_P(Backends, MixCacheTest, testing::ValuesIn(TestBackends()), BackendName);

}  // namespace
}  // namespace hvd_ctr
