// A device or host store that fails in the middle of row movement: the cache says so, keeps no pins and loses no row.
#include <new>

#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

// Counts down to the call that fails; negative: none does.
struct Faults {
  int load = -1;
  int store = -1;
  int fetch_records = -1;
  int store_records = -1;
  bool no_memory = false;  // The call throws.

  Status Check(int* countdown, const char* what) const {
    if (*countdown < 0 || (*countdown)-- > 0) return Status::Ok();
    if (no_memory) throw std::bad_alloc();
    return MakeStatus(StatusCode::kInternal, "injected fault in ", what);
  }
};

std::string PlaceName(int Faults::* place) {
  if (place == &Faults::load) return "Load";
  if (place == &Faults::store) return "Store";
  return place == &Faults::fetch_records ? "FetchRecords" : "StoreRecords";
}

class FaultyStore final : public HostStore {
 public:
  FaultyStore(std::unique_ptr<HostStore> store, Faults* faults) : store_(std::move(store)), faults_(faults) {}
  Status Load(Span<const Key> keys, float* records, uint8_t* found, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(faults_->Check(&faults_->load, "Load"));
    return store_->Load(keys, records, found, runner);
  }
  Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(faults_->Check(&faults_->store, "Store"));
    return store_->Store(keys, records, runner);
  }
  int64_t Remove(Span<const Key> keys) override { return store_->Remove(keys); }
  void Contains(Span<const Key> keys, uint8_t* found) const override { store_->Contains(keys, found); }
  int64_t row_count() const override { return store_->row_count(); }
  int64_t row_count(int32_t table) const override { return store_->row_count(table); }
  int64_t allocated_bytes() const override { return store_->allocated_bytes(); }
  Status Scan(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
              std::vector<float>* records) const override {
    return store_->Scan(table, cursor, max_rows, ids, records);
  }

 private:
  std::unique_ptr<HostStore> store_;
  Faults* faults_;
};

class FaultyBackend final : public DeviceBackend {
 public:
  FaultyBackend(std::unique_ptr<DeviceBackend> backend, Faults* faults) : backend_(std::move(backend)), faults_(faults) {}
  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) override {
    return backend_->Allocate(slots, dim, state_floats, row_type);
  }
  int64_t allocated_bytes() const override { return backend_->allocated_bytes(); }
  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    // Fails half-way, after it has overwritten some slots.
    const bool fails = faults_->store_records == 0;
    if (fails) HVD_CTR_RETURN_IF_ERROR(backend_->StoreRecords(slots.subspan(0, (slots.size() + 1) / 2), records, runner));
    HVD_CTR_RETURN_IF_ERROR(faults_->Check(&faults_->store_records, "StoreRecords"));
    return backend_->StoreRecords(slots, records, runner);
  }
  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(faults_->Check(&faults_->fetch_records, "FetchRecords"));
    return backend_->FetchRecords(slots, records, runner);
  }
  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override {
    return backend_->GatherRows(slots, rows, runner);
  }
  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override {
    return backend_->SegmentSum(gradients, inverse, unique, sums, runner);
  }
  Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                    Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                    TaskRunner* runner) override {
    return backend_->UpdateRows(slots, tables, gradients, optimizers, step, learning_rate_scale, runner);
  }

 private:
  std::unique_ptr<DeviceBackend> backend_;
  Faults* faults_;
};

class MixCacheFaultsTest : public testing::TestWithParam<int Faults::*> {
 protected:
  void Make(int64_t slots) {
    options_ = CacheOptions(slots, {Table("t", OptimizerKind::kAdagrad, 0.1f)}, 3);
    auto cache = MakeMixCache(options_, std::make_unique<FaultyBackend>(MakeCpuBackend(), &faults_),
                              std::make_unique<FaultyStore>(MakeRamHostStore(RecordFloats(options_), 1), &faults_));
    ASSERT_OK(cache.status());
    cache_ = std::move(cache.value());
    reference_ = std::make_unique<ReferenceRows>(options_);
  }
  void Train(const ReceivedKeys& batch) {
    Step(cache_.get(), batch, 0.5f);
    reference_->Apply(batch, std::vector<float>(batch.ids.size() * 3, 0.5f), 1.0f);
  }

  Faults faults_;
  MixCacheOptions options_;
  std::unique_ptr<MixCache> cache_;
  std::unique_ptr<ReferenceRows> reference_;
};

TEST_P(MixCacheFaultsTest, FailedPrefetchKeepsNoPinsAndLosesNoRow) {
  InlineRunner runner;
  // 6000 of 12000 rows move in two chunks; the first or the second one fails, or finds no memory.
  for (const int64_t rows : {int64_t{4}, int64_t{12000}}) {
    for (int fault = 0; fault < (rows > 4 ? 4 : 2); ++fault) {
      const int countdown = fault / 2;
      faults_.no_memory = fault % 2 == 1;
      Make(rows);
      Train(Range(0, rows));
      const MixCacheStats before = cache_->Stats();
      faults_.*GetParam() = countdown;
      int64_t ticket = -1;
      const Status status = cache_->Prefetch(Range(rows / 2, rows / 2 + rows), &ticket, &runner);
      ASSERT_EQ(status.code(), faults_.no_memory ? StatusCode::kResourceExhausted : StatusCode::kInternal);
      EXPECT_TRUE(Mentions(status, faults_.no_memory ? "no host memory" : "injected fault")) << status.message();
      EXPECT_EQ(ticket, -1);
      const MixCacheStats after = cache_->Stats();
      EXPECT_EQ(after.pinned_slots, 0);
      EXPECT_EQ(after.tables[0].unique, before.tables[0].unique);
      EXPECT_EQ(after.tables[0].cached_rows, after.tables[0].misses - after.tables[0].evictions);
      EXPECT_EQ(ReadRows(cache_.get(), Range(0, 2 * rows)), reference_->Read(Range(0, 2 * rows)));
      EXPECT_EQ(ExportAll(cache_.get(), 0, 1000), reference_->RowsOf(0));
      Train(Range(rows / 2, rows / 2 + rows));
      Train(Range(0, rows));
      EXPECT_EQ(ExportAll(cache_.get(), 0, 1000), reference_->RowsOf(0));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, MixCacheFaultsTest,
                         testing::Values(&Faults::load, &Faults::store, &Faults::fetch_records, &Faults::store_records),
                         [](const auto& info) { return PlaceName(info.param); });

using MixCacheFlushFaultsTest = MixCacheFaultsTest;

TEST_P(MixCacheFlushFaultsTest, FailedFlushIsReportedAndTheNextOneWritesTheRest) {
  InlineRunner runner;
  Make(6000);
  Train(Range(0, 6000));
  faults_.*GetParam() = 1;
  EXPECT_EQ(cache_->Flush(&runner).code(), StatusCode::kInternal);
  EXPECT_LT(cache_->Stats().tables[0].write_backs, 6000);
  ASSERT_OK(cache_->Flush(&runner));
  EXPECT_EQ(cache_->Stats().tables[0].write_backs, 6000);
  EXPECT_EQ(ExportAll(cache_.get(), 0, 1000), reference_->RowsOf(0));
}

INSTANTIATE_TEST_SUITE_P(Places, MixCacheFlushFaultsTest, testing::Values(&Faults::store, &Faults::fetch_records),
                         [](const auto& info) { return PlaceName(info.param); });

// Rows of a batch in flight cannot be set back: the sweep says so, and what is saved afterwards is what should be there.
TEST(MixCacheSweepFaultsTest, ADeviceThatFailsInASweepIsReportedAndTheRowsAreDeletedAllTheSame) {
  InlineRunner runner;
  Faults faults;
  MixCacheOptions options = CacheOptions(16, {Table("t")}, 3);
  options.tables[0].max_idle_steps = 1;
  options.tables[0].sweep_every_steps = 3;
  auto made = MakeMixCache(options, std::make_unique<FaultyBackend>(MakeCpuBackend(), &faults), MakeRamHostStore(3, 1));
  ASSERT_OK(made.status());
  MixCache* cache = made.value().get();
  ReferenceRows reference(options);
  const std::vector<float> gradients(12, 0.5f);
  for (const int64_t first : {0, 4, 8}) {
    Step(cache, Range(first, first + 4), 0.5f);
    reference.Apply(Range(first, first + 4), gradients, 1.0f);
  }
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(Range(0, 6), &ticket, &runner));
  faults.store_records = 0;
  int64_t deleted = 0;
  EXPECT_TRUE(Mentions(cache->Sweep({}, &deleted, &runner), "injected fault in StoreRecords"));
  EXPECT_EQ(reference.Sweep({}), 4);
  ASSERT_OK(cache->Release(ticket));
  EXPECT_EQ(ExportAll(cache, 0), reference.RowsOf(0));
  EXPECT_EQ(Totals(*cache).deleted_idle, 4);
}

TEST(MixCacheSweepFaultsTest, AgesOfAnotherCacheAreRefused) {
  InlineRunner runner;
  MixCacheOptions options = CacheOptions(4, {Table("a"), Table("b")});
  options.tables[1].max_rows = 2;
  auto cache = MakeCache(options);
  int64_t deleted = 0;
  for (const size_t size : {size_t{0}, size_t{5}, size_t{2 * kAgeBins}}) {
    const std::vector<int64_t> ages(size);
    const Status status = cache->Sweep(ages, &deleted, &runner);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Mentions(status, std::to_string(size) + " row ages; needed are 8448")) << status.message();
  }
  const std::vector<int64_t> ids = {1, -1};
  const std::vector<RowLife::Id> life = {{1, 1}, {1, 1}};
  int64_t foreign = 0;
  EXPECT_TRUE(Mentions(cache->ImportLife(1, ids, life, &foreign), "of id -1"));
  EXPECT_EQ(cache->ImportLife(1, ids, Span<const RowLife::Id>(life).subspan(0, 1), &foreign).code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(cache->ImportLife(2, {}, {}, &foreign), "table 2"));
}

}  // namespace
}  // namespace hvd_ctr
