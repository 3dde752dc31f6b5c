#include "tf_ops/core/memory_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/cpp/temporary_folder.h"
#include "tf_ops/core/chunked_array.h"
#include "tf_ops/core/eviction_policy.h"
#include "tf_ops/core/host_store.h"
#include "tf_ops/core/key_map.h"
#include "tf_ops/core/row_catalog.h"
#include "tf_ops/core/slot_directory.h"

namespace hvd_ctr {
namespace {

void ExpectNear(int64_t planned, int64_t real, double share) {
  EXPECT_NEAR(static_cast<double>(planned), static_cast<double>(real), share * static_cast<double>(real));
}

// Stores rows 0 .. rows-1 of each table.
void Fill(HostStore* store, int32_t record_floats, const std::vector<int64_t>& rows) {
  InlineRunner runner;
  for (size_t table = 0; table < rows.size(); ++table) {
    std::vector<Key> keys;
    for (int64_t id = 0; id < rows[table]; ++id) keys.push_back({id, static_cast<int32_t>(table)});
    const std::vector<float> records(keys.size() * static_cast<size_t>(record_floats), 1.0f);
    ASSERT_TRUE(store->Store(keys, records.data(), &runner).ok());
  }
}

TEST(MemoryPlanTest, FixedSizesAreExact) {
  for (const int64_t slots : {1, 7, 8, 9, 1000, 65536, 100000}) {
    SlotDirectory directory;
    ASSERT_TRUE(directory.Allocate(slots).ok());
    EXPECT_EQ(SlotDirectory::PlannedBytes(slots), directory.allocated_bytes());
    for (const auto kind : {EvictionPolicyKind::kLru, EvictionPolicyKind::kClock, EvictionPolicyKind::kLookahead}) {
      EXPECT_EQ(PlanPolicyBytes(kind, slots, PolicyDemand()), MakeEvictionPolicy(kind, slots, 8)->allocated_bytes());
    }
    const auto lfu = MakeEvictionPolicy(EvictionPolicyKind::kLfu, slots);
    ExpectNear(PlanPolicyBytes(EvictionPolicyKind::kLfu, slots, PolicyDemand()), lfu->allocated_bytes() + 24, 1e-9);
  }
  for (const int64_t keys : {1, 10, 11, 682, 683, 50000}) {
    KeyMap map;
    map.Reserve(keys);
    EXPECT_EQ(KeyMap::PlannedBytes(keys), map.allocated_bytes());
  }
  ChunkedArray<int64_t> array;
  EXPECT_EQ(ChunkedArray<int64_t>::PlannedBytes(0), array.allocated_bytes());
  for (uint32_t i = 0; i < 30000; ++i) {
    ASSERT_TRUE(array.Reserve(i));
    ASSERT_EQ(ChunkedArray<int64_t>::PlannedBytes(int64_t{i} + 1), array.allocated_bytes());
  }
}

TEST(MemoryPlanTest, AnnouncementsAndCountsAreInThePolicysBytes) {
  constexpr int64_t kSlots = 512;
  std::vector<Key> keys;
  std::vector<uint64_t> hashes;
  std::vector<int64_t> counts;
  for (int64_t id = 0; id < 300; ++id) {
    keys.push_back({id, 0});
    hashes.push_back(SlotDirectory::Hash(keys.back()));
    counts.push_back(id + 1);
  }
  const std::vector<Slot> slots(keys.size(), kNoSlot);
  const auto lookahead = MakeEvictionPolicy(EvictionPolicyKind::kLookahead, kSlots, 4);
  ASSERT_EQ(lookahead->Expect(kSlots, kSlots), Expectation::kNoted);  // What comes before it fits.
  ASSERT_EQ(lookahead->Expect(300, kSlots - 1), Expectation::kWantsKeys);
  lookahead->Announce({keys, hashes, slots, 300});
  PolicyDemand demand;
  demand.coming = 300;
  EXPECT_EQ(PlanPolicyBytes(EvictionPolicyKind::kLookahead, kSlots, demand), lookahead->allocated_bytes());
  const auto freq = MakeEvictionPolicy(EvictionPolicyKind::kFreq, kSlots);
  ASSERT_TRUE(freq->SetFrequencies(keys, counts));
  demand.counted = 300;
  EXPECT_EQ(PlanPolicyBytes(EvictionPolicyKind::kFreq, kSlots, demand), freq->allocated_bytes() + 24);
}

TEST(MemoryPlanTest, RowsInRam) {
  for (const int32_t record_floats : {1, 9, 32, 128, 1100}) {
    HostStoreSpec spec;
    spec.record_floats = record_floats;
    spec.tables = 3;
    for (const int64_t rows : {1, 100, 3000, 20000}) {
      const std::vector<int64_t> each = {rows, 2 * rows + 17, 0};
      const auto store = MakeRamHostStore(spec, 0);
      Fill(store.get(), record_floats, each);
      const HostStorePlan plan = PlanHostStore(spec, HostOptions(), each, 0);
      ExpectNear(plan.record_bytes + plan.index_bytes + plan.buffer_bytes, store->allocated_bytes(), rows < 1000 ? 0.12 : 0.03);
      EXPECT_EQ(plan.cached_rows, 3 * rows + 17);
      if (rows < 1000) continue;
      HostOptions limited;  // Smaller chunks.
      limited.ram_bytes = plan.needed_ram_bytes;
      const int64_t needed = PlanHostStore(spec, limited, each, 0).needed_ram_bytes;
      Fill(MakeRamHostStore(spec, needed * 51 / 50).get(), record_floats, each);
      std::vector<Key> keys;
      for (int64_t id = 0; id < 3 * rows + 17; ++id) keys.push_back({id, 0});
      const std::vector<float> records(keys.size() * static_cast<size_t>(record_floats), 1.0f);
      InlineRunner runner;
      const auto small = MakeRamHostStore(spec, needed * 9 / 10);
      EXPECT_EQ(small->Store(keys, records.data(), &runner).code(), StatusCode::kResourceExhausted);
      EXPECT_EQ(plan.disk_bytes, 0);
    }
  }
}

TEST(MemoryPlanTest, RowsOnDisk) {
  HostStoreSpec spec;
  spec.record_floats = 64;
  spec.tables = 2;
  HostOptions host;
  host.kind = HostKind::kDisk;
  host.path = TestFolder();
  for (const int64_t ram_bytes : {4 << 20, 16 << 20}) {
    host.ram_bytes = ram_bytes;
    for (const int64_t rows : {2000, 20000, 40000}) {
      MixCacheOptions options;
      options.dim = 32;
      options.tables.resize(2);
      options.host = host;
      options.name = internal::StrCat("plan", ram_bytes, "-", rows);
      auto store = MakeHostStore(options);
      ASSERT_TRUE(store.ok()) << store.status().message();
      const std::vector<int64_t> each = {rows, rows / 2};
      Fill(store.value().get(), 64, each);
      const HostStorePlan plan = PlanHostStore(spec, host, each, 0);
      ExpectNear(plan.record_bytes + plan.index_bytes + plan.buffer_bytes, store.value()->allocated_bytes(), 0.03);
      EXPECT_LE(plan.least_ram_bytes, ram_bytes);
      const int64_t disk = store.value()->disk().bytes;
      ExpectNear(plan.disk_bytes, disk, disk > (8 << 20) ? 0.06 : 0.35);
      EXPECT_EQ(plan.disk_row_bytes, 256);
    }
  }
}

TEST(MemoryPlanTest, MoreRowsThanFitArePlannedAsIfTheyDid) {
  HostStoreSpec spec;
  HostOptions host;
  host.kind = HostKind::kDisk;
  host.ram_bytes = 4 << 20;
  const std::vector<int64_t> rows = {1000000000};
  const HostStorePlan plan = PlanHostStore(spec, host, rows, 0);
  EXPECT_GT(plan.index_bytes, 23 * rows[0]);
  EXPECT_LT(plan.index_bytes, 34 * rows[0]);
  EXPECT_GT(plan.disk_bytes, 16 * (rows[0] - plan.cached_rows));
}

}  // namespace
}  // namespace hvd_ctr
