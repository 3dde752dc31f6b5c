#include "tf_ops/core/eviction_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "tests/cpp/policy_names.h"

namespace hvd_ctr {
namespace {

void Use(EvictionPolicy* policy, const std::vector<Slot>& slots) { policy->Use(slots); }

// Slots in a set that is sorted anew for every question; for clock, a hand that is moved step by step.
class SlowPolicy {
 public:
  SlowPolicy(EvictionPolicyKind kind, int64_t slots)
      : kind_(kind), uses_(static_cast<size_t>(slots)), last_(static_cast<size_t>(slots)), used_(static_cast<size_t>(slots)) {}
  void Use(const std::vector<Slot>& slots) {
    for (const Slot slot : slots) {
      used_[static_cast<size_t>(slot)] = uses_[static_cast<size_t>(slot)] > 0;
      ++uses_[static_cast<size_t>(slot)];
      last_[static_cast<size_t>(slot)] = ++clock_;
    }
    since_ageing_ += slots.size();
    if (kind_ != EvictionPolicyKind::kLfu || since_ageing_ < 16 * uses_.size()) return;
    since_ageing_ = 0;
    for (int64_t& uses : uses_) uses = (uses + 1) / 2;
  }
  void Remove(Slot slot) {
    // The sweep that found this victim has happened.
    if (std::find(swept_victims_.begin(), swept_victims_.end(), slot) != swept_victims_.end()) {
      used_ = swept_used_;
      hand_ = swept_hand_;
      swept_victims_.clear();
    }
    uses_[static_cast<size_t>(slot)] = 0;
    used_[static_cast<size_t>(slot)] = false;
  }
  std::vector<Slot> Victims(int64_t count, const BusySlots& busy) {
    if (kind_ == EvictionPolicyKind::kClock) return Sweep(count, busy);
    std::vector<std::tuple<int64_t, int64_t, Slot>> order;
    for (size_t s = 0; s < uses_.size(); ++s) {
      const auto slot = static_cast<Slot>(s);
      if (uses_[s] > 0 && !busy(slot)) order.emplace_back(kind_ == EvictionPolicyKind::kLfu ? uses_[s] : 0, last_[s], slot);
    }
    std::sort(order.begin(), order.end());
    std::vector<Slot> victims;
    for (const auto& entry : order) {
      if (static_cast<int64_t>(victims.size()) == count) break;
      victims.push_back(std::get<2>(entry));
    }
    return victims;
  }
  bool cached(size_t slot) const { return uses_[slot] > 0; }

 private:
  std::vector<Slot> Sweep(int64_t count, const BusySlots& busy) {
    swept_used_ = used_;
    swept_hand_ = hand_;
    swept_victims_.clear();
    for (size_t step = 0; step < 2 * uses_.size() && static_cast<int64_t>(swept_victims_.size()) < count; ++step) {
      const size_t at = swept_hand_;
      swept_hand_ = (swept_hand_ + 1) % uses_.size();
      const auto slot = static_cast<Slot>(at);
      const bool picked = std::find(swept_victims_.begin(), swept_victims_.end(), slot) != swept_victims_.end();
      if (uses_[at] == 0 || picked || busy(slot)) continue;
      if (swept_used_[at]) {
        swept_used_[at] = false;
      } else {
        swept_victims_.push_back(slot);
      }
    }
    return swept_victims_;
  }

  EvictionPolicyKind kind_;
  std::vector<int64_t> uses_;
  std::vector<int64_t> last_;
  std::vector<bool> used_;  // clock: since it was filled or the hand passed.
  size_t hand_ = 0;
  std::vector<Slot> swept_victims_;  // What the last question would do.
  std::vector<bool> swept_used_;
  size_t swept_hand_ = 0;
  size_t since_ageing_ = 0;
  int64_t clock_ = 0;
};

class EvictionPolicyTest : public testing::TestWithParam<EvictionPolicyKind> {
 protected:
  void SetUpSlots(int64_t slots) {
    policy_ = MakeEvictionPolicy(GetParam(), slots);
    pins_.assign(static_cast<size_t>(slots), 0);
    marks_.assign(static_cast<size_t>(slots), 0);
  }
  BusySlots Busy(uint32_t mark = 1) const { return {pins_, marks_, mark}; }
  std::vector<Slot> Victims(int64_t count, uint32_t mark = 1) {
    std::vector<Slot> victims;
    policy_->PickVictims(count, Busy(mark), &victims);
    return victims;
  }
  void Use(const std::vector<Slot>& slots) { policy_->Use(slots); }

  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> pins_;
  std::vector<uint32_t> marks_;
};

TEST_P(EvictionPolicyTest, OldestOfEqualUsesGoesFirst) {
  SetUpSlots(4);
  Use({2, 0, 3, 1});
  const bool round = GetParam() == EvictionPolicyKind::kClock;  // Its hand goes round the slots instead.
  EXPECT_EQ(Victims(2), round ? (std::vector<Slot>{0, 1}) : (std::vector<Slot>{2, 0}));
  EXPECT_EQ(Victims(9), round ? (std::vector<Slot>{0, 1, 2, 3}) : (std::vector<Slot>{2, 0, 3, 1}));
}

TEST_P(EvictionPolicyTest, EmptyPolicyHasNoVictims) {
  SetUpSlots(3);
  EXPECT_TRUE(Victims(2).empty());
  Use({1});
  EXPECT_EQ(Victims(0), std::vector<Slot>{});
  policy_->Remove(1);
  EXPECT_TRUE(Victims(2).empty());
}

TEST_P(EvictionPolicyTest, PinnedAndRequestedSlotsAreSkippedAndKeepTheirPlace) {
  SetUpSlots(4);
  Use({0, 1, 2, 3});
  pins_[0] = 2;
  marks_[1] = 5;
  EXPECT_EQ(Victims(4, 5), (std::vector<Slot>{2, 3}));
  EXPECT_EQ(Victims(4, 6), (std::vector<Slot>{1, 2, 3}));
  pins_[0] = 0;
  EXPECT_EQ(Victims(4, 6), (std::vector<Slot>{0, 1, 2, 3}));
}

TEST_P(EvictionPolicyTest, MemoryStaysTheSameHoweverOftenSlotsAreUsed) {
  SetUpSlots(8);
  Use({0, 1, 2, 3, 4, 5, 6, 7});
  Victims(8);
  const int64_t bytes = policy_->allocated_bytes();
  for (int i = 0; i < 5000; ++i) {
    Use({static_cast<Slot>(i % 8), static_cast<Slot>((i + 3) % 8)});
    policy_->Remove(static_cast<Slot>(i % 8));
    Use({static_cast<Slot>(i % 8)});
  }
  Victims(8);
  EXPECT_LE(policy_->allocated_bytes(), 4 * bytes);
}

// The policies are exact: every answer equals the sorted model's, also when it is asked twice, and with slots that are removed,
// reused and used many times between two answers.
TEST_P(EvictionPolicyTest, RandomProgramEqualsSortedModel) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const int64_t slots = 1 + static_cast<int64_t>(random() % 24);
    SetUpSlots(slots);
    SlowPolicy model(GetParam(), slots);
    std::vector<Slot> all(static_cast<size_t>(slots));
    for (int64_t s = 0; s < slots; ++s) all[static_cast<size_t>(s)] = static_cast<Slot>(s);
    for (uint32_t step = 1; step < 400; ++step) {
      std::shuffle(all.begin(), all.end(), random);
      const std::vector<Slot> used(all.begin(), all.begin() + static_cast<int64_t>(random() % static_cast<uint32_t>(slots + 1)));
      Use(used);
      model.Use(used);
      for (int32_t& pin : pins_) pin = random() % 4 == 0;
      for (uint32_t& mark : marks_) mark = random() % 4 == 0 ? step : 0;
      const auto count = static_cast<int64_t>(random() % static_cast<uint32_t>(slots + 2));
      const std::vector<Slot> victims = Victims(count, step);
      ASSERT_EQ(victims, model.Victims(count, Busy(step))) << "seed " << seed << " step " << step;
      ASSERT_EQ(Victims(count, step), victims) << "asked twice";
      const size_t removed = victims.empty() ? 0 : random() % (victims.size() + 1);
      for (size_t i = 0; i < removed; ++i) {
        policy_->Remove(victims[i]);
        model.Remove(victims[i]);
      }
      const size_t other = random() % static_cast<size_t>(slots);
      if (random() % 5 == 0 && model.cached(other)) {
        policy_->Remove(static_cast<Slot>(other));
        model.Remove(static_cast<Slot>(other));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, EvictionPolicyTest,
                         testing::Values(EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu, EvictionPolicyKind::kClock,
                                         EvictionPolicyKind::kFreq, EvictionPolicyKind::kLookahead),
                         [](const auto& info) { return PolicyName(info.param); });

TEST(LruPolicyTest, UseMovesToTheEnd) {
  auto policy = MakeEvictionPolicy(EvictionPolicyKind::kLru, 3);
  const std::vector<int32_t> pins(3, 0);
  const std::vector<uint32_t> marks(3, 0);
  Use(policy.get(), {0, 1, 2});
  Use(policy.get(), {0});
  std::vector<Slot> victims;
  policy->PickVictims(3, {pins, marks, 1}, &victims);
  EXPECT_EQ(victims, (std::vector<Slot>{1, 2, 0}));
}

TEST(LfuPolicyTest, FewestUsesFirstAndANewLifeStartsAtOne) {
  auto policy = MakeEvictionPolicy(EvictionPolicyKind::kLfu, 3);
  const std::vector<int32_t> pins(3, 0);
  const std::vector<uint32_t> marks(3, 0);
  for (int i = 0; i < 3; ++i) Use(policy.get(), {0});
  Use(policy.get(), {1, 2});
  Use(policy.get(), {1});
  std::vector<Slot> victims;
  policy->PickVictims(3, {pins, marks, 1}, &victims);
  EXPECT_EQ(victims, (std::vector<Slot>{2, 1, 0}));
  policy->Remove(0);
  Use(policy.get(), {0});
  victims.clear();
  policy->PickVictims(3, {pins, marks, 1}, &victims);
  EXPECT_EQ(victims, (std::vector<Slot>{2, 0, 1}));
}

TEST(LfuPolicyTest, OldPopularityIsHalvedAway) {
  auto policy = MakeEvictionPolicy(EvictionPolicyKind::kLfu, 2);
  const std::vector<int32_t> pins(2, 0);
  const std::vector<uint32_t> marks(2, 0);
  for (int i = 0; i < 20; ++i) Use(policy.get(), {0});
  // 32 uses of 2 slots make the first halving: slot 0 has 10 then, slot 1 has 6.
  for (int i = 0; i < 12; ++i) Use(policy.get(), {1});
  std::vector<Slot> victims;
  policy->PickVictims(1, {pins, marks, 1}, &victims);
  EXPECT_EQ(victims, (std::vector<Slot>{1}));
  for (int i = 0; i < 5; ++i) Use(policy.get(), {1});
  victims.clear();
  policy->PickVictims(1, {pins, marks, 1}, &victims);
  EXPECT_EQ(victims, (std::vector<Slot>{0}));
}

TEST(ClockPolicyTest, TheHandPassesByUsedSlotsOnce) {
  auto policy = MakeEvictionPolicy(EvictionPolicyKind::kClock, 4);
  const std::vector<int32_t> pins(4, 0);
  const std::vector<uint32_t> marks(4, 0);
  const auto evict = [&](int64_t count) {
    std::vector<Slot> victims;
    policy->PickVictims(count, {pins, marks, 1}, &victims);
    for (const Slot slot : victims) policy->Remove(slot);
    return victims;
  };
  Use(policy.get(), {0, 1, 2, 3});
  Use(policy.get(), {0, 2});
  EXPECT_EQ(evict(1), (std::vector<Slot>{1}));  // Passes 0, stands at 2.
  Use(policy.get(), {1});
  EXPECT_EQ(evict(1), (std::vector<Slot>{3}));  // Passes 2, stands at 0.
  Use(policy.get(), {3});
  EXPECT_EQ(evict(3), (std::vector<Slot>{0, 1, 2}));
}

}  // namespace
}  // namespace hvd_ctr
