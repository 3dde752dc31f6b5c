// The host store on disk: conformance in every way of reading, budget, space in the file, and what happens when the disk fails.
#include "tf_ops/core/disk_host_store.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "tests/cpp/file_size_limit.h"
#include "tests/cpp/host_store_conformance.h"
#include "tests/cpp/process_memory.h"
#include "tests/cpp/temporary_folder.h"

namespace hvd_ctr {
namespace {

HostOptions Disk(int64_t ram_bytes, bool direct = true) {
  HostOptions host;
  host.kind = HostKind::kDisk;
  host.path = TestFolder();
  host.ram_bytes = ram_bytes;
  host.direct_io = direct;
  return host;
}

HostStoreSpec Spec(int32_t record_floats, int32_t tables = 1) {
  static std::atomic<int> number{0};
  HostStoreSpec spec;
  spec.owner = "mix_cache 'ads' on rank 3";
  spec.file_stem = "store" + std::to_string(number++);
  spec.record_floats = record_floats;
  spec.tables = tables;
  return spec;
}

std::string PathOf(const HostStoreSpec& spec) { return TestFolder() + "/" + spec.file_stem + ".rows"; }

std::unique_ptr<HostStore> Open(const HostStoreSpec& spec, const HostOptions& host,
                                const DiskStoreTuning& tuning = DiskStoreTuning()) {
  auto store = MakeDiskHostStore(spec, host, tuning);
  EXPECT_TRUE(store.ok()) << store.status().message();
  return std::move(store.value());
}

template <bool kUring, bool kDirect, int64_t kBudget>
struct OnDisk {
  static std::unique_ptr<HostStore> Make(int32_t record_floats, int32_t tables) {
    DiskStoreTuning tuning;
    tuning.use_uring = kUring;
    return Open(Spec(record_floats, tables), Disk(budget(), kDirect), tuning);
  }
  static int64_t budget() { return kBudget; }
};

using DirectUring = OnDisk<true, true, 2 << 20>;
using CachedUring = OnDisk<true, false, 2 << 20>;
using WithoutUring = OnDisk<false, true, 2 << 20>;
using AllInRam = OnDisk<true, true, 64 << 20>;
INSTANTIATE_TYPED_TEST_SUITE_P(DiskDirectUring, HostStoreConformance, DirectUring);
INSTANTIATE_TYPED_TEST_SUITE_P(DiskCachedUring, HostStoreConformance, CachedUring);
INSTANTIATE_TYPED_TEST_SUITE_P(DiskWithoutUring, HostStoreConformance, WithoutUring);
INSTANTIATE_TYPED_TEST_SUITE_P(DiskAllInRam, HostStoreConformance, AllInRam);

/// The least budget by the message that refuses a smaller one; 0: it was not refused.
int64_t LeastBudget(int32_t record_floats, int32_t tables, int64_t budget) {
  const auto refused = MakeDiskHostStore(Spec(record_floats, tables), Disk(budget));
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  const std::string text = "need at least ";
  const size_t at = refused.status().message().find(text);
  EXPECT_NE(at, std::string::npos) << refused.status().message();
  return at == std::string::npos ? 0 : std::stoll(refused.status().message().substr(at + text.size()));
}

// What the message and the plan say is what does: buffers grow with the budget, and each table has ids of its own.
TEST(DiskHostStoreTest, TheLeastBudgetHoldsTheFirstRowsOfEveryTable) {
  InlineRunner runner;
  for (const int32_t floats : {1, 33, 128, 1500, 5000}) {
    for (const int32_t tables : {1, 26, 200, 5000}) {
      SCOPED_TRACE(testing::Message() << floats << " floats, " << tables << " tables");
      const int64_t least = LeastBudget(floats, tables, 1);
      EXPECT_EQ(LeastBudget(floats, tables, least - 1), least);
      const HostStoreSpec spec = Spec(floats, tables);
      const std::vector<int64_t> none(static_cast<size_t>(tables), 0);
      EXPECT_NEAR(static_cast<double>(PlanHostStore(spec, Disk(1), none, 0).least_ram_bytes), static_cast<double>(least),
                  0.01 * static_cast<double>(least));
      auto store = Open(spec, Disk(least));
      if (store == nullptr) return;
      std::vector<Key> keys;
      for (int32_t table = 0; table < tables; ++table) keys.push_back({7, table});
      StoreKeys(store.get(), keys, floats, 3.0f);
      if (HasFatalFailure()) return;
      EXPECT_EQ(store->row_count(), tables);
      EXPECT_LE(store->allocated_bytes(), least);
    }
  }
}

TEST(DiskHostStoreTest, AnyLargerBudgetDoes) {
  for (const int32_t floats : {2, 256}) {
    const int64_t least = LeastBudget(floats, 26, 1);
    for (int64_t more = 0; more <= 64; ++more) {
      ASSERT_TRUE(MakeDiskHostStore(Spec(floats, 26), Disk(least + more * least / 64), DiskStoreTuning()).ok()) << more;
    }
  }
}

TEST(DiskHostStoreTest, RowsNeedWhatWasPlanned) {
  constexpr int64_t kRows = 30000;
  for (const int32_t floats : {2, 32, 256}) {
    for (const int32_t tables : {1, 26}) {
      SCOPED_TRACE(testing::Message() << floats << " floats, " << tables << " tables");
      const std::vector<int64_t> each(static_cast<size_t>(tables), kRows / tables);
      const int64_t needed = PlanHostStore(Spec(floats, tables), Disk(1 << 20), each, 0).needed_ram_bytes;
      std::vector<Key> keys;
      for (int32_t table = 0; table < tables; ++table) {
        for (int64_t id = 0; id < each[0]; ++id) keys.push_back({id, table});
      }
      StoreKeys(Open(Spec(floats, tables), Disk(needed)).get(), keys, floats);
      EXPECT_EQ(TryStoreKeys(Open(Spec(floats, tables), Disk(needed * 4 / 5)).get(), keys, floats, 0.0f).code(),
                StatusCode::kResourceExhausted);
    }
  }
}

// Records smaller than, equal to and larger than a sector, a block, a read; down to the least possible budget.
TEST(DiskHostStoreTest, AllRecordSizesEqualTheMap) {
  InlineRunner runner;
  for (const int32_t floats : {1, 33, 128, 129, 1500, 5000}) {
    SCOPED_TRACE(testing::Message() << floats << " floats");
    // Leaves nearly nothing for the cache.
    const int64_t budget = 2 * LeastBudget(floats, 3, 1) + (int64_t{1} << 20);
    auto store = Open(Spec(floats, 3), Disk(budget));
    HostStoreProgram(store.get(), budget, floats, &runner).Run(floats > 1000 ? 6 : 30);
    if (HasFatalFailure()) return;
    if (floats == 1) continue;  // Smaller than their index: all fit.
    EXPECT_GT(store->disk().rows_written, 0);
    EXPECT_GT(store->disk().rows_read, 0);
  }
}

// Freshness: whatever was stored last is loaded, wherever the record is by then.
TEST(DiskHostStoreTest, OverwritesAreFreshAndTheirSpaceIsUsedAgain) {
  InlineRunner runner;
  const int32_t floats = 128;
  const int64_t rows = 20000;
  const HostStoreSpec spec = Spec(floats);
  auto store = Open(spec, Disk(int64_t{3} << 20));
  std::mt19937_64 random(3);
  std::vector<float> version(static_cast<size_t>(rows), -1.0f);
  for (int step = 0; step < 200; ++step) {
    std::vector<Key> keys;
    // Every tenth row, drawn anew: segments lose their records one by one, never all at once.
    for (int64_t id = 0; id < rows; ++id) {
      if (random() % 10 == 0) keys.push_back({id, 0});
    }
    if (step % 4 != 3) {
      for (const Key& key : keys) version[static_cast<size_t>(key.id)] = static_cast<float>(step);
      StoreKeys(store.get(), keys, floats, static_cast<float>(step));
      continue;
    }
    std::vector<float> records(keys.size() * floats);
    std::vector<uint8_t> found(keys.size());
    ASSERT_OK(store->Load(keys, records.data(), found.data(), &runner));
    for (size_t i = 0; i < keys.size(); ++i) {
      const float expected = version[static_cast<size_t>(keys[i].id)];
      ASSERT_EQ(found[i] != 0, expected >= 0);
      if (found[i]) {
        ASSERT_EQ(records[i * floats], RecordOf(keys[i], floats, expected)[0]) << keys[i].id;
      }
    }
  }
  const DiskStats disk = store->disk();
  // 300,000 records were stored, most of them written; the file holds twice the rows and some segments at most.
  EXPECT_GT(disk.rows_written, 200000);
  EXPECT_LE(disk.bytes, 2 * rows * 512 + 16 * (int64_t{3} << 20) / 32);
  struct stat file;
  ASSERT_EQ(stat(PathOf(spec).c_str(), &file), 0);
  EXPECT_LE(file.st_size, disk.bytes);
}

// Rows that were removed are dead weight in the log, which compaction gives back to new ones.
TEST(DiskHostStoreTest, SpaceOfRemovedRowsIsUsedAgain) {
  InlineRunner runner;
  const int32_t floats = 128;
  const int64_t rows = 10000;
  auto store = Open(Spec(floats), Disk(int64_t{3} << 20));
  std::mt19937_64 random(3);
  std::vector<int64_t> alive;
  int64_t next = 0;
  for (int step = 0; step < 60; ++step) {
    std::vector<Key> created;
    for (; static_cast<int64_t>(alive.size()) < rows; ++next) {
      created.push_back({next, 0});
      alive.push_back(next);
    }
    StoreKeys(store.get(), created, floats);
    // A third, drawn at random: segments lose their records one by one.
    std::vector<Key> removed;
    std::vector<int64_t> kept;
    for (const int64_t id : alive) {
      if (random() % 3 == 0) {
        removed.push_back({id, 0});
      } else {
        kept.push_back(id);
      }
    }
    alive = kept;
    ASSERT_EQ(store->Remove(removed), static_cast<int64_t>(removed.size()));
  }
  EXPECT_GT(next, 190000);
  EXPECT_LE(store->disk().bytes, 2 * rows * 512 + 16 * (int64_t{3} << 20) / 32);
  std::vector<int64_t> ids;
  std::vector<float> records;
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, 2 * rows, &ids, &records));
  std::map<int64_t, float> found;
  for (size_t i = 0; i < ids.size(); ++i) found[ids[i]] = records[i * floats];
  ASSERT_EQ(found.size(), alive.size());
  for (const int64_t id : alive) ASSERT_EQ(found.at(id), RecordOf({id, 0}, 1)[0]);
}

TEST(DiskHostStoreTest, WhatWasNeverStoredIsAnsweredWithoutTheDisk) {
  InlineRunner runner;
  auto store = Open(Spec(128), Disk(int64_t{2} << 20));
  std::vector<Key> keys;
  for (int64_t id = 0; id < 10000; ++id) keys.push_back({id, 0});
  StoreKeys(store.get(), keys, 128);
  ASSERT_GT(store->disk().rows_written, 5000);
  ASSERT_EQ(store->disk().rows_read, 0);
  for (Key& key : keys) key.id += 1000000;
  std::vector<float> records(keys.size() * 128);
  std::vector<uint8_t> found(keys.size());
  ASSERT_OK(store->Load(keys, records.data(), found.data(), &runner));
  EXPECT_EQ(std::count(found.begin(), found.end(), 1), 0);
  EXPECT_EQ(store->disk().rows_read, 0);
}

// FC 59, 60: the index counts; when nothing is left beside it, the error has the numbers, and all rows are intact.
TEST(DiskHostStoreTest, BudgetHoldsUntilTheIndexFillsIt) {
  InlineRunner runner;
  const int32_t floats = 16;
  const int64_t budget = int64_t{2} << 20;
  auto store = Open(Spec(floats), Disk(budget));
  Status status;
  while (status.ok()) {
    std::vector<Key> keys;
    for (int64_t i = 0; i < 500; ++i) keys.push_back({store->row_count() + i, 0});
    status = TryStoreKeys(store.get(), keys, floats);
    ASSERT_LE(store->allocated_bytes(), budget);
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  const int64_t rows = store->row_count();
  for (const std::string& text : {std::string("mix_cache 'ads' on rank 3"), std::to_string(rows) + " rows of 64 bytes",
                                  std::to_string(budget), std::string("embedding.host.ram_bytes")}) {
    EXPECT_TRUE(Mentions(status, text)) << text << " / " << status.message();
  }
  EXPECT_GT(rows, budget / 2 / 34);
  EXPECT_LT(rows, budget / 20);
  StoreKeys(store.get(), {{0, 0}, {rows / 2, 0}}, floats, 0.5f);
  std::vector<int64_t> ids;
  std::vector<float> records;
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, rows, &ids, &records));
  for (int64_t id = 0; id < rows; ++id) {
    ASSERT_EQ(ids[static_cast<size_t>(id)], id);
    const std::vector<float> expected = RecordOf({id, 0}, floats, id == 0 || id == rows / 2 ? 0.5f : 0.0f);
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), records.begin() + id * floats)) << id;
  }
}

// FC 59: dim 5 with Adam, 64 MiB. What the process really takes, also at its peak, is the budget and less than 4 MiB; and what
// the store says it holds is within a tenth of it.
TEST(DiskHostStoreTest, ProcessMemoryStaysWithinTheBudget) {
  if (!kMemoryIsPlain) GTEST_SKIP() << "sanitizers take memory of their own";
  const int64_t budget = int64_t{64} << 20;
  const int32_t floats = 15;
  InlineRunner runner;
  std::vector<Key> keys(4096);
  std::vector<float> records(keys.size() * floats, 1.0f);
  std::vector<uint8_t> found(keys.size(), 1);
  malloc_trim(0);  // What earlier tests freed would be used again, and not seen.
  const int64_t before = ResidentBytes();
  auto store = Open(Spec(floats), Disk(budget));
  int64_t peak = 0;
  std::mt19937_64 random(9);
  for (int64_t first = 0; first < 1500000; first += 4096) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = {first + static_cast<int64_t>(i), 0};
    ASSERT_OK(store->Store(keys, records.data(), &runner));
    peak = std::max(peak, ResidentBytes() - before);
    ASSERT_LE(store->allocated_bytes(), budget);
    for (Key& key : keys) key.id = static_cast<int64_t>(random() % static_cast<uint64_t>(first + 4096));
    if (first % (4096 * 16) == 0) {
      ASSERT_OK(store->Load(keys, records.data(), found.data(), &runner));
    }
  }
  peak = std::max(peak, ResidentBytes() - before);
  RecordProperty("peak_bytes", std::to_string(peak));
  RecordProperty("held_bytes", std::to_string(store->allocated_bytes()));
  EXPECT_LE(peak, budget + (int64_t{4} << 20));
  EXPECT_GE(ResidentBytes() - before, store->allocated_bytes() * 9 / 10);
  EXPECT_GT(store->allocated_bytes(), budget * 9 / 10);
}

TEST(DiskHostStoreTest, FileIsRemovedAtTheEndAndALeftoverIsReused) {
  const HostStoreSpec spec = Spec(4);
  std::ofstream(PathOf(spec)) << "left by a run that was killed";
  {
    auto store = Open(spec, Disk(int64_t{1} << 20));
    StoreKeys(store.get(), {{1, 0}}, 4);
    EXPECT_EQ(access(PathOf(spec).c_str(), F_OK), 0);
  }
  EXPECT_NE(access(PathOf(spec).c_str(), F_OK), 0);
}

TEST(DiskHostStoreTest, AFileInUseIsRefusedAndLeftAlone) {
  const HostStoreSpec spec = Spec(128);
  auto store = Open(spec, Disk(int64_t{2} << 20));
  std::vector<Key> keys;
  for (int64_t id = 0; id < 10000; ++id) keys.push_back({id, 0});
  StoreKeys(store.get(), keys, 128);
  ASSERT_GT(store->disk().bytes, 0);
  const auto second = MakeDiskHostStore(spec, Disk(int64_t{2} << 20));
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(second.status(), PathOf(spec) + " is in use")) << second.status().message();
  EXPECT_TRUE(Mentions(second.status(), "embedding.host.path")) << second.status().message();
  std::vector<int64_t> ids;
  std::vector<float> records;
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, 10000, &ids, &records));
  EXPECT_EQ(ids.size(), keys.size());
}

TEST(DiskHostStoreTest, MissingFolderIsNamed) {
  HostOptions host = Disk(int64_t{2} << 20);
  host.path += "/absent";
  const auto store = MakeDiskHostStore(Spec(4), host);
  EXPECT_EQ(store.status().code(), StatusCode::kNotFound);
  for (const std::string& text :
       {host.path, std::string("No such file or directory"), std::string("mix_cache 'ads' on rank 3")}) {
    EXPECT_TRUE(Mentions(store.status(), text)) << store.status().message();
  }
}

TEST(DiskHostStoreTest, AFullDiskIsAnErrorAllRowsStayReadableAndRoomHelps) {
  for (const bool uring : {true, false}) {
    const int32_t floats = 128;
    const HostStoreSpec spec = Spec(floats);
    DiskStoreTuning tuning;
    tuning.use_uring = uring;
    auto store = Open(spec, Disk(int64_t{3} << 20), tuning);
    int64_t rows = 0;
    Status status;
    std::vector<int64_t> ids;
    std::vector<float> records;
    int64_t cursor = 0;
    {
      const FileSizeLimit limit(int64_t{2} << 20);
      for (; status.ok() && rows < 100000; rows += status.ok()) status = TryStoreKeys(store.get(), {{rows, 0}}, floats);
      ASSERT_EQ(status.code(), StatusCode::kResourceExhausted);
      for (const std::string& text :
           {PathOf(spec), std::string("File too large"), std::string("mix_cache 'ads' on rank 3"), std::string("offset")}) {
        EXPECT_TRUE(Mentions(status, text)) << text << " / " << status.message();
      }
      EXPECT_EQ(store->row_count(), rows);
      EXPECT_GT(rows, 4000);
      EXPECT_EQ(TryStoreKeys(store.get(), {{rows, 0}}, floats).code(), StatusCode::kResourceExhausted);
      ASSERT_OK(store->Scan(0, &cursor, rows, &ids, &records));
      for (int64_t id = 0; id < rows; ++id) ASSERT_EQ(records[static_cast<size_t>(id * floats)], RecordOf({id, 0}, 1)[0]);
    }
    std::vector<Key> more;
    for (int64_t id = 0; id < rows + 5000; ++id) more.push_back({id, 0});
    StoreKeys(store.get(), more, floats, 2.0f);
    ids.clear();
    records.clear();
    cursor = 0;
    ASSERT_OK(store->Scan(0, &cursor, rows + 5000, &ids, &records));
    ASSERT_EQ(ids.size(), more.size());
    for (const Key& key : more) ASSERT_EQ(records[static_cast<size_t>(key.id * floats)], RecordOf(key, 1, 2.0f)[0]);
  }
}

TEST(DiskHostStoreTest, ReadErrorsAreNamedAndTheRestStaysReadable) {
  InlineRunner runner;
  for (const bool uring : {true, false}) {
    for (const bool cut : {true, false}) {
      const int32_t floats = 128;
      const HostStoreSpec spec = Spec(floats);
      DiskStoreTuning tuning;
      tuning.use_uring = uring;
      auto store = Open(spec, Disk(int64_t{3} << 20), tuning);
      std::vector<Key> keys;
      for (int64_t id = 0; id < 20000; ++id) keys.push_back({id, 0});
      StoreKeys(store.get(), keys, floats);
      ASSERT_GT(store->disk().rows_written, 10000);
      if (cut) {
        ASSERT_EQ(truncate(PathOf(spec).c_str(), 0), 0);
      } else {
        BreakReads(PathOf(spec));
      }
      std::vector<float> records(keys.size() * floats);
      std::vector<uint8_t> found(keys.size());
      const Status status = store->Load(keys, records.data(), found.data(), &runner);
      EXPECT_EQ(status.code(), StatusCode::kDataLoss);
      for (const std::string& text :
           {PathOf(spec), std::string(cut ? "short read" : "Bad file descriptor"), std::string("offset"), std::string("bytes")}) {
        EXPECT_TRUE(Mentions(status, text)) << text << " / " << status.message();
      }
      // Row by row, as somebody would who saves what is left: the rows in RAM come, the others are errors that change nothing.
      std::vector<int64_t> ids;
      records.clear();
      for (int64_t at = 0; at < 20000; ++at) {
        int64_t cursor = at;
        if (!store->Scan(0, &cursor, 1, &ids, &records).ok()) {
          EXPECT_EQ(cursor, at);
        }
      }
      EXPECT_GT(ids.size(), 2000u);
      EXPECT_LT(ids.size(), 10000u);
      ASSERT_EQ(records.size(), ids.size() * floats);
      for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(records[i * floats], RecordOf({ids[i], 0}, 1)[0]);
    }
  }
}

}  // namespace
}  // namespace hvd_ctr
