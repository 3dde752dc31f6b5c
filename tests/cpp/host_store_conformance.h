// What every HostStore must do. Include it in the test of a store, derive from HostStoreTraits and instantiate:
//
//   struct MyStore { static std::unique_ptr<HostStore> Make(int32_t record_floats, int32_t tables); static int64_t budget(); };
//   INSTANTIATE_TYPED_TEST_SUITE_P(My, HostStoreConformance, MyStore);
//
// budget(): most bytes of RAM the store may hold, or a huge number.
#ifndef HVD_CTR_TESTS_CPP_HOST_STORE_CONFORMANCE_H_
#define HVD_CTR_TESTS_CPP_HOST_STORE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/cpp/mix_cache_fixture.h"
#include "tf_ops/core/host_store.h"

namespace hvd_ctr {

inline std::vector<float> RecordOf(const Key& key, int32_t floats, float version = 0.0f) {
  std::vector<float> record;
  for (int32_t i = 0; i < floats; ++i)
    record.push_back(static_cast<float>(key.id % 1000003) * 4.0f + static_cast<float>(key.table) + version +
                     static_cast<float>(i) * 0.125f);
  return record;
}

inline Status TryStoreKeys(HostStore* store, const std::vector<Key>& keys, int32_t floats, float version = 0.0f) {
  InlineRunner runner;
  std::vector<float> records;
  for (const Key& key : keys) {
    const std::vector<float> record = RecordOf(key, floats, version);
    records.insert(records.end(), record.begin(), record.end());
  }
  return store->Store(keys, records.data(), &runner);
}

inline void StoreKeys(HostStore* store, const std::vector<Key>& keys, int32_t floats, float version = 0.0f) {
  ASSERT_OK(TryStoreKeys(store, keys, floats, version));
}

inline int64_t RemoveKeys(HostStore* store, const std::vector<Key>& keys) { return store->Remove(keys); }

template <typename Store>
class HostStoreConformance : public testing::Test {};
TYPED_TEST_SUITE_P(HostStoreConformance);

TYPED_TEST_P(HostStoreConformance, RowsExistOnceStoredAndAbsentOnesAreLeftUntouched) {
  InlineRunner runner;
  auto store = TypeParam::Make(3, 2);
  StoreKeys(store.get(), {{5, 0}, {5, 1}}, 3);
  const std::vector<Key> keys = {{5, 1}, {6, 0}, {5, 0}};
  std::vector<float> records(9, -1.0f);
  std::vector<uint8_t> found(3, 9);
  ASSERT_OK(store->Load(keys, records.data(), found.data(), &runner));
  EXPECT_EQ(found, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(std::vector<float>(records.begin(), records.begin() + 3), RecordOf({5, 1}, 3));
  EXPECT_EQ(std::vector<float>(records.begin() + 3, records.begin() + 6), std::vector<float>(3, -1.0f));
  EXPECT_EQ(std::vector<float>(records.begin() + 6, records.end()), RecordOf({5, 0}, 3));
  std::fill(found.begin(), found.end(), 9);
  store->Contains(keys, found.data());
  EXPECT_EQ(found, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(store->row_count(), 2);
  EXPECT_EQ(store->row_count(1), 1);
  EXPECT_EQ(store->row_count(7), 0);
}

TYPED_TEST_P(HostStoreConformance, ScanReturnsATableInTheOrderOfCreationInChunks) {
  auto store = TypeParam::Make(2, 2);
  StoreKeys(store.get(), {{9, 0}, {1, 1}, {4, 0}}, 2);
  StoreKeys(store.get(), {{7, 0}, {9, 0}, {2, 1}, {std::numeric_limits<int64_t>::max(), 0}}, 2,
            0.5f);  // 9 again: overwritten, keeps its place.
  std::vector<int64_t> ids;
  std::vector<float> records;
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, 3, &ids, &records));
  EXPECT_EQ(cursor, 3);
  ASSERT_OK(store->Scan(0, &cursor, 3, &ids, &records));
  EXPECT_EQ(cursor, -1);
  EXPECT_EQ(ids, (std::vector<int64_t>{9, 4, 7, std::numeric_limits<int64_t>::max()}));
  ASSERT_EQ(records.size(), 8u);
  EXPECT_EQ(std::vector<float>(records.begin(), records.begin() + 2), RecordOf({9, 0}, 2, 0.5f));
  EXPECT_EQ(std::vector<float>(records.begin() + 2, records.begin() + 4), RecordOf({4, 0}, 2));
}

TYPED_TEST_P(HostStoreConformance, ScanOfAnEmptyTableEndsAtOnceAndBadArgumentsAreNamed) {
  auto store = TypeParam::Make(2, 2);
  std::vector<int64_t> ids;
  std::vector<float> records;
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(1, &cursor, 10, &ids, &records));
  EXPECT_EQ(cursor, -1);
  EXPECT_TRUE(ids.empty());
  const Status again = store->Scan(1, &cursor, 10, &ids, &records);
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(again, "cursor -1")) << again.message();
  cursor = 0;
  EXPECT_TRUE(Mentions(store->Scan(2, &cursor, 10, &ids, &records), "table 2"));
  EXPECT_EQ(store->Scan(0, &cursor, 0, &ids, &records).code(), StatusCode::kInvalidArgument);
}

TYPED_TEST_P(HostStoreConformance, RefusesKeysOfUnknownTablesAndNegativeIds) {
  InlineRunner runner;
  auto store = TypeParam::Make(1, 2);
  const float record = 1.0f;
  for (const Key key : {Key{1, 2}, Key{1, -1}, Key{-4, 0}}) {
    const Status status = store->Store(Span<const Key>(&key, 1), &record, &runner);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Mentions(status, std::to_string(key.id))) << status.message();
  }
  EXPECT_EQ(store->row_count(), 0);
}

TYPED_TEST_P(HostStoreConformance, RemovedRowsAreGoneAndTheirPlacesAreTakenAgain) {
  InlineRunner runner;
  auto store = TypeParam::Make(2, 2);
  StoreKeys(store.get(), {{9, 0}, {1, 1}, {4, 0}, {7, 0}}, 2);
  EXPECT_EQ(RemoveKeys(store.get(), {{9, 0}, {9, 1}, {7, 0}, {1234, 0}}), 2);
  EXPECT_EQ(store->row_count(), 2);
  EXPECT_EQ(store->row_count(0), 1);
  const std::vector<Key> keys = {{9, 0}, {4, 0}, {7, 0}, {1, 1}};
  std::vector<float> records(8, -1.0f);
  std::vector<uint8_t> found(4, 9);
  ASSERT_OK(store->Load(keys, records.data(), found.data(), &runner));
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 1, 0, 1}));
  EXPECT_EQ(records[0], -1.0f) << "left untouched";
  EXPECT_EQ(std::vector<float>(records.begin() + 2, records.begin() + 4), RecordOf({4, 0}, 2));
  store->Contains(keys, found.data());
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 1, 0, 1}));

  StoreKeys(store.get(), {{5, 0}, {9, 0}, {6, 0}}, 2, 0.5f);
  std::vector<int64_t> ids;
  records.clear();
  int64_t cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, 10, &ids, &records));
  EXPECT_EQ(cursor, -1);
  EXPECT_EQ(ids, (std::vector<int64_t>{9, 4, 5, 6}));
  EXPECT_EQ(std::vector<float>(records.begin(), records.begin() + 2), RecordOf({9, 0}, 2, 0.5f));
  EXPECT_EQ(RemoveKeys(store.get(), {{9, 0}, {4, 0}, {5, 0}, {6, 0}}), 4);
  ids.clear();
  cursor = 0;
  ASSERT_OK(store->Scan(0, &cursor, 3, &ids, &records));
  EXPECT_EQ(cursor, 3);
  ASSERT_OK(store->Scan(0, &cursor, 3, &ids, &records));
  EXPECT_EQ(cursor, -1);
  EXPECT_TRUE(ids.empty());
}

// As many rows come as go, and each is a new one: memory does not grow.
TYPED_TEST_P(HostStoreConformance, MemoryOfRemovedRowsIsUsedAgain) {
  const int32_t floats = 16;
  auto store = TypeParam::Make(floats, 1);
  int64_t after_first = 0;
  for (int64_t round = 0; round < 60; ++round) {
    std::vector<Key> keys;
    for (int64_t id = 1000 * round; id < 1000 * (round + 1); ++id) keys.push_back({id, 0});
    StoreKeys(store.get(), keys, floats);
    if (round == 4) after_first = store->allocated_bytes();
    if (round < 4) continue;
    for (Key& key : keys) key.id -= 4000;
    ASSERT_EQ(store->Remove(keys), 1000);
    ASSERT_EQ(store->row_count(), 4000);
  }
  // One shard of the index may still grow; the hashes decide.
  EXPECT_LE(store->allocated_bytes(), after_first + after_first / 4);
}

struct PairHash {
  size_t operator()(const std::pair<int32_t, int64_t>& key) const {
    return static_cast<size_t>(HashKey(key.first, key.second, kDirectorySalt));
  }
};

/// Loads, stores, removes and scans in random order, against a map. Batches of 0 to 3000 keys out of about 120,000.
class HostStoreProgram {
 public:
  HostStoreProgram(HostStore* store, int64_t budget, int32_t floats, TaskRunner* runner)
      : store_(store), budget_(budget), floats_(floats), runner_(runner) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      MakeBatch();
      if (step % 7 == 6) {
        RemoveBatch();
      } else if (step % 2 == 0) {
        StoreBatch(static_cast<float>(step));
      } else {
        LoadBatch();
      }
      if (step % 10 == 9) ScanAll();
      ASSERT_EQ(store_->row_count(), static_cast<int64_t>(model_.size()));
      ASSERT_LE(store_->allocated_bytes(), budget_);
    }
    ScanAll();
  }

 private:
  void MakeBatch() {
    std::unordered_map<std::pair<int32_t, int64_t>, bool, PairHash> drawn;
    keys_.clear();
    const auto count = random_() % 3000;
    for (uint64_t i = 0; i < count; ++i) {
      const Key key{static_cast<int64_t>(random_() % 20000) << (random_() % 2 * 43), static_cast<int32_t>(random_() % 3)};
      if (drawn.emplace(std::make_pair(key.table, key.id), true).second) keys_.push_back(key);
    }
  }

  void StoreBatch(float version) {
    std::vector<float> records;
    for (const Key& key : keys_) {
      const std::vector<float> record = RecordOf(key, floats_, version);
      records.insert(records.end(), record.begin(), record.end());
      auto& row = model_[{key.table, key.id}];
      if (row.empty()) TakePlace(key);
      row = record;
    }
    ASSERT_OK(store_->Store(keys_, records.data(), runner_));
  }

  void TakePlace(const Key& key) {
    std::vector<int64_t>& order = order_[static_cast<size_t>(key.table)];
    std::vector<size_t>& holes = holes_[static_cast<size_t>(key.table)];
    if (holes.empty()) {
      order.push_back(key.id);
    } else {
      order[holes.back()] = key.id;
      holes.pop_back();
    }
  }

  void RemoveBatch() {
    int64_t removed = 0;
    for (const Key& key : keys_) {
      if (model_.erase({key.table, key.id}) == 0) continue;
      std::vector<int64_t>& order = order_[static_cast<size_t>(key.table)];
      const auto at = std::find(order.begin(), order.end(), key.id);
      holes_[static_cast<size_t>(key.table)].push_back(static_cast<size_t>(at - order.begin()));
      *at = -1;
      ++removed;
    }
    ASSERT_EQ(store_->Remove(keys_), removed);
  }

  void LoadBatch() {
    const auto floats = static_cast<size_t>(floats_);
    std::vector<float> records(keys_.size() * floats, -1.0f);
    std::vector<uint8_t> found(keys_.size());
    ASSERT_OK(store_->Load(keys_, records.data(), found.data(), runner_));
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto row = model_.find({keys_[i].table, keys_[i].id});
      ASSERT_EQ(found[i] != 0, row != model_.end());
      const std::vector<float> expected = row != model_.end() ? row->second : std::vector<float>(floats, -1.0f);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), records.begin() + static_cast<int64_t>(i * floats)));
    }
  }

  void ScanAll() {
    for (int32_t table = 0; table < 3; ++table) {
      std::vector<int64_t> ids;
      std::vector<float> records;
      for (int64_t cursor = 0; cursor >= 0;) {
        ASSERT_OK(store_->Scan(table, &cursor, 1 + static_cast<int64_t>(random_() % 9000), &ids, &records));
      }
      std::vector<int64_t> expected = order_[static_cast<size_t>(table)];
      expected.erase(std::remove(expected.begin(), expected.end(), -1), expected.end());
      ASSERT_EQ(ids, expected);
      for (size_t i = 0; i < ids.size(); ++i) {
        const std::vector<float>& row = model_.at({table, ids[i]});
        ASSERT_TRUE(std::equal(row.begin(), row.end(), records.begin() + static_cast<int64_t>(i) * floats_));
      }
    }
  }

  HostStore* store_;
  const int64_t budget_;
  const int32_t floats_;
  TaskRunner* runner_;
  std::mt19937_64 random_{5};
  std::vector<Key> keys_;
  std::unordered_map<std::pair<int32_t, int64_t>, std::vector<float>, PairHash> model_;
  std::array<std::vector<int64_t>, 3> order_;  // Ids by position, -1: a hole.
  std::array<std::vector<size_t>, 3> holes_;
};

TYPED_TEST_P(HostStoreConformance, RandomProgramEqualsMapForAnyNumberOfThreads) {
  for (const int threads : {1, 3}) {
    ThreadRunner runner(threads);
    auto store = TypeParam::Make(5, 3);
    HostStoreProgram(store.get(), TypeParam::budget(), 5, &runner).Run(40);
  }
}

// Readers beside a writer: a row that is found has one of the values that were stored, whole.
TYPED_TEST_P(HostStoreConformance, ReadersNeverSeeHalfARecord) {
  const int32_t floats = 40;
  auto store = TypeParam::Make(floats, 1);
  std::vector<Key> keys;
  for (int64_t id = 0; id < 500; ++id) keys.push_back({id, 0});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    InlineRunner runner;
    for (int version = 0; version < 30; ++version) {
      const std::vector<float> records(keys.size() * floats, static_cast<float>(version));
      EXPECT_OK(store->Store(keys, records.data(), &runner));
      EXPECT_EQ(store->Remove(Span<const Key>(keys).subspan(version * 10, 100)), 100);
    }
    done = true;
  });
  InlineRunner runner;
  std::vector<float> records(keys.size() * floats);
  std::vector<uint8_t> found(keys.size());
  do {
    EXPECT_OK(store->Load(keys, records.data(), found.data(), &runner));
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_TRUE(!found[i] || records[i * floats] == records[(i + 1) * floats - 1]) << i;
    }
    EXPECT_GE(store->allocated_bytes(), 0);
  } while (!done);
  writer.join();
}

REGISTER_TYPED_TEST_SUITE_P(HostStoreConformance, RowsExistOnceStoredAndAbsentOnesAreLeftUntouched,
                            RemovedRowsAreGoneAndTheirPlacesAreTakenAgain, MemoryOfRemovedRowsIsUsedAgain,
                            ScanReturnsATableInTheOrderOfCreationInChunks, ScanOfAnEmptyTableEndsAtOnceAndBadArgumentsAreNamed,
                            RefusesKeysOfUnknownTablesAndNegativeIds, RandomProgramEqualsMapForAnyNumberOfThreads,
                            ReadersNeverSeeHalfARecord);

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_HOST_STORE_CONFORMANCE_H_
