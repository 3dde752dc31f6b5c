// MixCache over the tiers: rows in RAM, rows on disk, and a budget or a disk that is full.
#include <random>

#include "tests/cpp/file_size_limit.h"
#include "tests/cpp/mix_cache_fixture.h"
#include "tests/cpp/temporary_folder.h"

namespace hvd_ctr {
namespace {

constexpr int32_t kDim = 32;

MixCacheOptions Options(int64_t slots, HostKind host, int64_t ram_bytes) {
  MixCacheOptions options =
      CacheOptions(slots, {Table("user", OptimizerKind::kAdagrad, 0.1f), Table("item", OptimizerKind::kAdam, 0.1f)}, kDim);
  static int number = 0;
  options.name = "tiers/" + std::to_string(number++);  // Not a file name as it is.
  options.host.kind = host;
  options.host.path = host == HostKind::kDisk ? TestFolder() : "";
  options.host.ram_bytes = ram_bytes;
  return options;
}

// A few hot ids and a moving window of cold ones, in both tables.
ReceivedKeys Batch(std::mt19937_64* random, int step) {
  std::vector<Key> keys;
  for (int32_t table = 0; table < 2; ++table) {
    for (int i = 0; i < 300; ++i) {
      const auto draw = (*random)();
      const auto id = static_cast<int64_t>(draw % 3 == 0 ? draw / 3 % 50 : draw / 3 % 12000 + static_cast<uint64_t>(step) * 20);
      keys.push_back({id, table});
    }
  }
  return Received({keys});
}

class MixCacheDiskTest : public OnEveryBackend {};

// Promise: the tier changes no bit. Each batch's rows, then all rows with their state.
TEST_P(MixCacheDiskTest, DiskAndRamTiersAreEqualBitForBit) {
  InlineRunner runner;
  const int64_t budget = int64_t{2} << 20;
  auto ram = MakeCache(Options(700, HostKind::kRam, 0));
  auto disk = MakeCache(Options(700, HostKind::kDisk, budget));
  std::mt19937_64 random(1);
  for (int step = 0; step < 150; ++step) {
    const ReceivedKeys batch = Batch(&random, step);
    std::vector<std::vector<float>> rows;
    std::vector<float> gradients(batch.ids.size() * kDim);
    for (float& gradient : gradients) gradient = static_cast<float>(random() % 2001) * 0.0013f - 1.3f;
    for (MixCache* cache : {ram.get(), disk.get()}) {
      int64_t ticket = 0;
      ASSERT_OK(cache->Prefetch(batch, &ticket, &runner));
      rows.push_back(LookupRows(cache, ticket, batch.ids.size()));
      ASSERT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
    }
    ASSERT_EQ(rows[0], rows[1]) << step;
    const ReceivedKeys other = Batch(&random, step + 1);
    ASSERT_EQ(ReadRows(ram.get(), other), ReadRows(disk.get(), other)) << step;
  }
  const MixCacheStats stats = disk->Stats();
  EXPECT_GT(stats.disk_rows_written, 10000);
  EXPECT_GT(stats.disk_rows_read, 10000);
  EXPECT_GT(stats.disk_bytes, 4 * budget);
  EXPECT_LT(stats.host_bytes, budget + (int64_t{1} << 20)) << "the budget, and the cache's own metadata";
  EXPECT_EQ(ram->Stats().disk_bytes, 0);
  EXPECT_EQ(Totals(*ram).misses, Totals(*disk).misses);
  for (const int32_t table : {0, 1}) {
    const auto expected = ExportAll(ram.get(), table, 5000);
    EXPECT_GT(expected.size(), 8000u);
    EXPECT_EQ(ExportAll(disk.get(), table, 5000), expected);
  }
}

void Train(MixCache* cache, ReferenceRows* reference, const ReceivedKeys& batch) {
  Step(cache, batch, 0.5f);
  reference->Apply(batch, std::vector<float>(batch.ids.size() * kDim, 0.5f), 1.0f);
}

// Trains on new rows until a batch is refused; returns why. Then nothing is pinned, and every row, also those that only the
// device has, can be read and saved elsewhere.
Status TrainUntilFull(MixCache* cache, const MixCacheOptions& options) {
  InlineRunner runner;
  ReferenceRows reference(options);
  Status status;
  int64_t first = 0;
  for (; first < 100000; first += 500) {
    int64_t ticket = 0;
    status = cache->Prefetch(Range(first, first + 500, first / 500 % 2), &ticket, &runner);
    if (!status.ok()) break;
    EXPECT_OK(cache->Release(ticket));
    Train(cache, &reference, Range(first, first + 500, first / 500 % 2));
  }
  EXPECT_GT(first, 1000);
  EXPECT_EQ(cache->Stats().pinned_slots, 0);
  const MixCacheTableStats totals = Totals(*cache);
  EXPECT_LT(totals.host_rows, first) << "some rows are on the device only";
  EXPECT_EQ(cache->Flush(&runner).code(), StatusCode::kResourceExhausted);
  for (const int32_t table : {0, 1}) {
    EXPECT_EQ(ExportAll(cache, table, 333), reference.RowsOf(table));
    EXPECT_EQ(ReadRows(cache, Range(0, first, table)), reference.Read(Range(0, first, table)));
  }
  // Rows that are there still train.
  Train(cache, &reference, Range(first - 500, first, (first / 500 - 1) % 2));
  EXPECT_EQ(ExportAll(cache, 0, 333), reference.RowsOf(0));
  EXPECT_EQ(ExportAll(cache, 1, 333), reference.RowsOf(1));
  return status;
}

TEST_P(MixCacheDiskTest, AFullDiskIsNamedAndAllRowsCanBeSavedElsewhere) {
  InlineRunner runner;
  const MixCacheOptions options = Options(800, HostKind::kDisk, int64_t{2} << 20);
  auto cache = MakeCache(options);
  {
    const FileSizeLimit limit(int64_t{3} << 20);
    const Status status = TrainUntilFull(cache.get(), options);
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    for (const std::string& text : {TestFolder(), std::string("File too large"), "mix_cache '" + options.name + "' on rank 0"}) {
      EXPECT_TRUE(Mentions(status, text)) << text << " / " << status.message();
    }
  }
  ASSERT_OK(cache->Flush(&runner));  // There is room again.
  Step(cache.get(), Range(200000, 200500));
}

TEST_P(MixCacheDiskTest, AFullRamBudgetIsNamedAndAllRowsCanBeSavedElsewhere) {
  const MixCacheOptions options = Options(800, HostKind::kRam, int64_t{2} << 20);
  auto cache = MakeCache(options);
  const Status status = TrainUntilFull(cache.get(), options);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  for (const std::string& text : {std::string("embedding.host.ram_bytes"), std::to_string(int64_t{2} << 20),
                                  "mix_cache '" + options.name + "' on rank 0"}) {
    EXPECT_TRUE(Mentions(status, text)) << text << " / " << status.message();
  }
}

TEST_P(MixCacheDiskTest, AReadErrorIsNamedAndTheCacheGoesOnWithWhatItHas) {
  InlineRunner runner;
  MixCacheOptions options = Options(800, HostKind::kDisk, int64_t{2} << 20);
  options.name = "broken";
  auto cache = MakeCache(options);
  ReferenceRows reference(options);
  for (int64_t first = 0; first < 20000; first += 500) Train(cache.get(), &reference, Range(first, first + 500));
  BreakReads(TestFolder() + "/broken.rank0of1.rows");
  int64_t ticket = 0;
  const Status status = cache->Prefetch(Range(0, 500), &ticket, &runner);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_TRUE(Mentions(status, TestFolder() + "/broken.rank0of1.rows: Bad file descriptor")) << status.message();
  EXPECT_EQ(cache->Stats().pinned_slots, 0);
  std::vector<float> rows(500 * kDim);
  EXPECT_EQ(cache->Read(Range(0, 500), rows.data(), &runner).code(), StatusCode::kDataLoss);
  Train(cache.get(), &reference, Range(19500, 20000));
  EXPECT_EQ(ReadRows(cache.get(), Range(19500, 20000)), reference.Read(Range(19500, 20000)));
}

INSTANTIATE_TEST_SUITE_P(Backends, MixCacheDiskTest, testing::ValuesIn(TestBackends()), BackendName);

}  // namespace
}  // namespace hvd_ctr
