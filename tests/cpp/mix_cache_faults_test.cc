// A device or host store that fails in the middle of row movement: the cache says so, keeps no pins and loses no row.
#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

// Counts down to the call that fails; negative: none does.
struct Faults {
  int load = -1;
  int store = -1;
  int fetch_records = -1;
  int store_records = -1;

  static Status Check(int* countdown, const char* what) {
    if (*countdown < 0 || (*countdown)-- > 0) return Status::Ok();
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
    HVD_CTR_RETURN_IF_ERROR(Faults::Check(&faults_->load, "Load"));
    return store_->Load(keys, records, found, runner);
  }
  Status Store(Span<const Key> keys, const float* records, TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(Faults::Check(&faults_->store, "Store"));
    return store_->Store(keys, records, runner);
  }
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
  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats) override {
    return backend_->Allocate(slots, dim, state_floats);
  }
  int64_t allocated_bytes() const override { return backend_->allocated_bytes(); }
  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    const Status fault = Faults::Check(&faults_->store_records, "StoreRecords");
    if (fault.ok()) return backend_->StoreRecords(slots, records, runner);
    // Fails half-way, after it has overwritten some slots.
    HVD_CTR_RETURN_IF_ERROR(backend_->StoreRecords(slots.subspan(0, (slots.size() + 1) / 2), records, runner));
    return fault;
  }
  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(Faults::Check(&faults_->fetch_records, "FetchRecords"));
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
  // 6000 of 12000 rows move in two chunks; the first or the second one fails.
  for (const int64_t rows : {int64_t{4}, int64_t{12000}}) {
    for (int countdown = 0; countdown < (rows > 4 ? 2 : 1); ++countdown) {
      Make(rows);
      Train(Range(0, rows));
      const MixCacheStats before = cache_->Stats();
      faults_.*GetParam() = countdown;
      int64_t ticket = -1;
      const Status status = cache_->Prefetch(Range(rows / 2, rows / 2 + rows), &ticket, &runner);
      ASSERT_EQ(status.code(), StatusCode::kInternal);
      EXPECT_TRUE(Mentions(status, "injected fault")) << status.message();
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

}  // namespace
}  // namespace hvd_ctr
