#include "tf_ops/core/cache_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace hvd_ctr {
namespace {

// Directory, policy, pins and dirty flags without any row.
class Planner {
 public:
  explicit Planner(int64_t slots, EvictionPolicyKind kind = EvictionPolicyKind::kLru)
      : policy_(MakeEvictionPolicy(kind, slots)), pins_(static_cast<size_t>(slots), 0), dirty_(static_cast<size_t>(slots), 0) {
    EXPECT_TRUE(directory_.Allocate(slots).ok());
  }

  bool Plan(const std::vector<Key>& keys) {
    keys_ = keys;
    hashes_.clear();
    for (const Key& key : keys) hashes_.push_back(SlotDirectory::Hash(key));
    const auto pinned = std::count_if(pins_.begin(), pins_.end(), [](int32_t pins) { return pins > 0; });
    return PlanBatch(directory_, policy_.get(), {keys_, hashes_, pins_, dirty_, pinned}, &scratch_, &plan_);
  }
  void Commit() { CommitPlan(plan_, keys_, hashes_, static_cast<int64_t>(keys_.size()), &directory_, policy_.get()); }
  void Run(const std::vector<Key>& keys) {
    ASSERT_TRUE(Plan(keys));
    Commit();
  }
  void Pin(const Key& key, int32_t by = 1) { pins_[static_cast<size_t>(directory_.Find(key))] += by; }
  void Dirty(const Key& key) { dirty_[static_cast<size_t>(directory_.Find(key))] = 1; }

  SlotDirectory directory_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> pins_;
  std::vector<uint8_t> dirty_;
  PlanScratch scratch_;
  std::vector<Key> keys_;
  std::vector<uint64_t> hashes_;
  CachePlan plan_;
};

const Key kA{100, 0};
const Key kB{100, 1};
const Key kC{102, 0};
const Key kD{103, 0};

TEST(CachePlanTest, HeaderExample) {
  Planner planner(3);
  planner.Run({kA, kB, kC});
  planner.Run({kA});
  planner.Pin(kB);
  planner.Dirty(kC);
  ASSERT_TRUE(planner.Plan({kB, kD}));
  EXPECT_EQ(planner.plan_.slots, (std::vector<Slot>{1, 2}));
  EXPECT_EQ(planner.plan_.loads, std::vector<int32_t>{1});
  ASSERT_EQ(planner.plan_.evictions.size(), 1u);
  EXPECT_EQ(planner.plan_.evictions[0].key, kC);
  EXPECT_EQ(planner.plan_.evictions[0].slot, 2);
  EXPECT_TRUE(planner.plan_.evictions[0].dirty);
}

TEST(CachePlanTest, PlanAloneChangesNothing) {
  Planner planner(2);
  planner.Run({kA, kB});
  ASSERT_TRUE(planner.Plan({kC, kD}));
  const CachePlan first = planner.plan_;
  EXPECT_EQ(planner.directory_.Find(kA), 0);
  EXPECT_EQ(planner.directory_.Find(kC), kNoSlot);
  ASSERT_TRUE(planner.Plan({kC, kD}));
  EXPECT_EQ(planner.plan_.slots, first.slots);
  ASSERT_EQ(planner.plan_.evictions.size(), 2u);
  EXPECT_EQ(planner.plan_.evictions[0].key, kA);
}

TEST(CachePlanTest, DoesNotFitBesidePinnedSlots) {
  Planner planner(3);
  planner.Run({kA, kB, kC});
  planner.Pin(kA);
  planner.Pin(kB);
  EXPECT_FALSE(planner.Plan({kD, Key{104, 0}}));
  EXPECT_FALSE(planner.Plan({kC, kD}));  // c is requested itself, so nothing is left to evict.
  EXPECT_TRUE(planner.Plan({kA, kD}));   // a is pinned and requested: c makes room.
  planner.Pin(kB, -1);
  EXPECT_TRUE(planner.Plan({kC, kD}));
  EXPECT_EQ(planner.plan_.evictions[0].key, kB);
}

TEST(CachePlanTest, EmptyBatch) {
  Planner planner(1);
  planner.Run({});
  EXPECT_TRUE(planner.plan_.slots.empty());
  EXPECT_TRUE(planner.plan_.evictions.empty());
}

TEST(CachePlanTest, CommitEvictionsAloneFreesTheSlots) {
  Planner planner(2);
  planner.Run({kA, kB});
  ASSERT_TRUE(planner.Plan({kC}));
  CommitEvictions(planner.plan_, &planner.directory_, planner.policy_.get());
  EXPECT_EQ(planner.directory_.Find(kA), kNoSlot);
  EXPECT_EQ(planner.directory_.Find(kC), kNoSlot);
  EXPECT_EQ(planner.directory_.free_slots(), 1);
  planner.Run({kA});
  EXPECT_TRUE(planner.plan_.evictions.empty());
}

// Invariant 1, over random programs with pins: one-to-one, loads = requested minus cached, evicted slots neither pinned nor
// requested, evictions only when free slots run out, and the committed directory holds what the plan says.
class CachePlanRandomTest : public testing::TestWithParam<EvictionPolicyKind> {};

TEST_P(CachePlanRandomTest, PlanInvariants) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const int64_t slots = 2 + static_cast<int64_t>(random() % 30);
    Planner planner(slots, GetParam());
    int fitted = 0;
    for (int step = 0; step < 300; ++step) {
      std::vector<Key> keys;
      const auto count = random() % static_cast<uint32_t>(slots + 1);
      for (uint32_t i = 0; i < 3 * count && keys.size() < count; ++i) {
        const Key key{static_cast<int64_t>(random() % 60), static_cast<int32_t>(random() % 2)};
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
      }
      for (size_t s = 0; s < planner.pins_.size(); ++s) {
        planner.pins_[s] = planner.directory_.occupied(static_cast<Slot>(s)) && random() % 4 == 0;
        planner.dirty_[s] = random() % 2;
      }
      std::set<Slot> kept;  // Pinned or requested.
      for (size_t s = 0; s < planner.pins_.size(); ++s) {
        if (planner.pins_[s] > 0) kept.insert(static_cast<Slot>(s));
      }
      std::vector<int32_t> missing;
      for (size_t k = 0; k < keys.size(); ++k) {
        const Slot slot = planner.directory_.Find(keys[k]);
        if (slot == kNoSlot) {
          missing.push_back(static_cast<int32_t>(k));
        } else {
          kept.insert(slot);
        }
      }
      const int64_t free_slots = planner.directory_.free_slots();
      const bool fits = missing.empty() || static_cast<int64_t>(kept.size() + missing.size()) <= slots;
      ASSERT_EQ(planner.Plan(keys), fits) << "seed " << seed << " step " << step;
      if (!fits) continue;
      ++fitted;
      ASSERT_EQ(planner.plan_.loads, missing);
      ASSERT_EQ(static_cast<int64_t>(planner.plan_.evictions.size()),
                std::max<int64_t>(0, static_cast<int64_t>(missing.size()) - free_slots));
      ASSERT_EQ(std::set<Slot>(planner.plan_.slots.begin(), planner.plan_.slots.end()).size(), keys.size());
      for (const Eviction& eviction : planner.plan_.evictions) {
        ASSERT_EQ(kept.count(eviction.slot), 0u);
        ASSERT_EQ(planner.directory_.Find(eviction.key), eviction.slot);
        ASSERT_EQ(eviction.dirty, planner.dirty_[static_cast<size_t>(eviction.slot)] != 0);
      }
      const std::vector<Eviction> evictions = planner.plan_.evictions;
      planner.Commit();
      for (size_t k = 0; k < keys.size(); ++k) ASSERT_EQ(planner.directory_.Find(keys[k]), planner.plan_.slots[k]);
      for (const Eviction& eviction : evictions) ASSERT_EQ(planner.directory_.Find(eviction.key), kNoSlot);
    }
    EXPECT_GT(fitted, 50);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, CachePlanRandomTest, testing::Values(EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu),
                         [](const auto& info) { return info.param == EvictionPolicyKind::kLru ? "Lru" : "Lfu"; });

}  // namespace
}  // namespace hvd_ctr
