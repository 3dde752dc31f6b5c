// The policies that look at keys, freq and lookahead, through PlanBatch and CommitPlan against models that sort everything anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "tf_ops/core/cache_plan.h"

namespace hvd_ctr {
namespace {

using Ids = std::vector<int64_t>;

// A cache without rows: directory, policy and pins, as MixCache uses them.
class Cache {
 public:
  Cache(EvictionPolicyKind kind, int64_t slots, int32_t window) : policy_(MakeEvictionPolicy(kind, slots, window)) {
    EXPECT_TRUE(directory_.Allocate(slots).ok());
    pins_.assign(static_cast<size_t>(slots), 0);
    dirty_.assign(static_cast<size_t>(slots), 0);
  }

  bool Announce(const Ids& ids) {
    SetKeys(ids);
    std::vector<Slot> slots(keys_.size());
    directory_.Find(keys_, hashes_, slots.data());
    const auto requested = static_cast<int64_t>(keys_.size());
    const Expectation expectation = policy_->Expect(requested, directory_.free_slots());
    if (expectation == Expectation::kWantsKeys) policy_->Announce({keys_, hashes_, slots, requested});
    return expectation != Expectation::kRefused;
  }

  // Evicted ids in order; nothing happens to the cache if `commit` is false.
  Ids Prefetch(const Ids& ids, const std::set<int64_t>& pinned, bool commit = true) {
    SetKeys(ids);
    int64_t pinned_slots = 0;
    for (size_t slot = 0; slot < pins_.size(); ++slot) {
      const auto s = static_cast<Slot>(slot);
      pins_[slot] = directory_.occupied(s) && pinned.count(directory_.key(s).id) > 0;
      pinned_slots += pins_[slot];
    }
    CachePlan plan;
    EXPECT_TRUE(PlanBatch(directory_, policy_.get(), {keys_, hashes_, pins_, dirty_, pinned_slots}, &scratch_, &plan));
    Ids evicted;
    for (const Eviction& eviction : plan.evictions) evicted.push_back(eviction.key.id);
    if (commit) CommitPlan(plan, keys_, hashes_, static_cast<int64_t>(keys_.size()), &directory_, policy_.get());
    return evicted;
  }

  void SetFrequencies(const Ids& ids, const Ids& counts) {
    SetKeys(ids);
    EXPECT_TRUE(policy_->SetFrequencies(keys_, counts));
    for (size_t s = 0; s < pins_.size(); ++s) {
      const auto slot = static_cast<Slot>(s);
      if (directory_.occupied(slot)) policy_->Load(slot, directory_.key(slot), SlotDirectory::Hash(directory_.key(slot)));
    }
  }

  EvictionPolicy* policy() { return policy_.get(); }

 private:
  void SetKeys(const Ids& ids) {
    keys_.clear();
    hashes_.clear();
    for (const int64_t id : ids) {
      keys_.push_back({id, 0});
      hashes_.push_back(SlotDirectory::Hash(keys_.back()));
    }
  }

  SlotDirectory directory_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> pins_;
  std::vector<uint8_t> dirty_;
  PlanScratch scratch_;
  std::vector<Key> keys_;
  std::vector<uint64_t> hashes_;
};

// The rules of eviction_policy.h word by word.
class Model {
 public:
  Model(EvictionPolicyKind kind, size_t slots, size_t window) : kind_(kind), slots_(slots), window_(window) {}

  bool Announce(const Ids& ids) {
    if (announced_.size() >= window_) return false;
    size_t before = 0;
    for (const Announced& announced : announced_) before += announced.ids.size();
    announced_.push_back({ids, before > slots_ - last_use_.size()});
    return true;
  }

  Ids Prefetch(const Ids& ids, const std::set<int64_t>& pinned, bool commit = true) {
    std::vector<std::tuple<int64_t, int64_t, int64_t>> order;  // (rank, last use, id), smallest first.
    size_t missing = ids.size();
    for (const auto& [id, last] : last_use_) {
      const bool requested = std::find(ids.begin(), ids.end(), id) != ids.end();
      missing -= requested;
      if (!requested && pinned.count(id) == 0) order.emplace_back(Rank(id), last, id);
    }
    std::sort(order.begin(), order.end());
    Ids evicted;
    for (const auto& entry : order) {
      if (last_use_.size() + missing - evicted.size() <= slots_) break;
      evicted.push_back(std::get<2>(entry));
    }
    if (!commit) return evicted;
    for (const int64_t id : evicted) last_use_.erase(id);
    for (const int64_t id : ids) last_use_[id] = ++clock_;
    Arrive(ids);
    return evicted;
  }

  size_t Missing(const Ids& ids) const {
    return static_cast<size_t>(std::count_if(ids.begin(), ids.end(), [this](int64_t id) { return last_use_.count(id) == 0; }));
  }
  std::vector<int64_t> Cached() const {
    std::vector<int64_t> ids;
    for (const auto& entry : last_use_) ids.push_back(entry.first);
    return ids;
  }
  size_t open() const { return announced_.size(); }
  const Ids& announced(size_t i) const { return announced_[i].ids; }
  std::map<int64_t, int64_t> counts;

 private:
  struct Announced {
    Ids ids;
    bool with_keys;
  };

  int64_t Rank(int64_t id) const {
    if (kind_ == EvictionPolicyKind::kFreq) return counts.count(id) > 0 ? counts.at(id) : 0;
    for (size_t i = 0; i < announced_.size(); ++i) {
      const auto& [ids, with_keys] = announced_[i];
      if (with_keys && std::find(ids.begin(), ids.end(), id) != ids.end()) return 1000 - static_cast<int64_t>(i);
    }
    return 0;
  }

  void Arrive(const Ids& ids) {
    if (announced_.empty()) return;
    const auto found = std::find_if(announced_.begin(), announced_.end(), [&ids](const Announced& announced) {
      return announced.with_keys ? announced.ids == ids : announced.ids.size() == ids.size();
    });
    if (found != announced_.end()) {
      announced_.erase(announced_.begin(), found + 1);
      unannounced_ = 0;
    } else if (++unannounced_ >= window_) {
      announced_.clear();
      unannounced_ = 0;
    }
  }

  EvictionPolicyKind kind_;
  size_t slots_;
  size_t window_;
  std::map<int64_t, int64_t> last_use_;
  std::deque<Announced> announced_;
  size_t unannounced_ = 0;
  int64_t clock_ = 0;
};

Ids RandomIds(std::mt19937* random, size_t most, int64_t range) {
  Ids all(static_cast<size_t>(range));
  for (int64_t id = 0; id < range; ++id) all[static_cast<size_t>(id)] = id;
  std::shuffle(all.begin(), all.end(), *random);
  all.resize(1 + (*random)() % most);
  return all;
}

// At most as many as leave room for the batch.
std::set<int64_t> RandomPins(std::mt19937* random, const Model& model, const Ids& ids, size_t slots) {
  std::set<int64_t> pinned;
  for (const int64_t id : model.Cached()) {
    const bool requested = std::find(ids.begin(), ids.end(), id) != ids.end();
    if (!requested && pinned.size() + ids.size() < slots && (*random)() % 4 == 0) pinned.insert(id);
  }
  return pinned;
}

class LookaheadProgramTest : public testing::TestWithParam<int32_t> {};

TEST_P(LookaheadProgramTest, EqualsTheModel) {
  const int32_t window = GetParam();
  int64_t evictions = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const size_t slots = 4 + random() % 20;
    const auto range = static_cast<int64_t>(slots * 2 + 3);
    Cache cache(EvictionPolicyKind::kLookahead, static_cast<int64_t>(slots), window);
    Model model(EvictionPolicyKind::kLookahead, slots, static_cast<size_t>(window));
    for (int step = 0; step < 400; ++step) {
      if (random() % 2 == 0) {
        const Ids ids = RandomIds(&random, slots / 2, range);
        ASSERT_EQ(cache.Announce(ids), model.Announce(ids));
        continue;
      }
      // Mostly the announced batch; now and then one that was not announced, or a later one.
      Ids ids = RandomIds(&random, slots / 2, range);
      if (model.open() > 0 && random() % 8 != 0) ids = model.announced(random() % 10 == 0 ? random() % model.open() : 0);
      const std::set<int64_t> pinned = RandomPins(&random, model, ids, slots);
      const bool commit = random() % 8 != 0;
      const Ids evicted = cache.Prefetch(ids, pinned, commit);
      ASSERT_EQ(evicted, model.Prefetch(ids, pinned, commit)) << "seed " << seed << " step " << step;
      evictions += static_cast<int64_t>(evicted.size());
    }
  }
  EXPECT_GT(evictions, 1000);
}

INSTANTIATE_TEST_SUITE_P(Windows, LookaheadProgramTest, testing::Values(0, 1, 2, 5, 63, 64));

TEST(LookaheadPolicyTest, KeepsWhatIsAnnouncedAndThenTheNearest) {
  Cache cache(EvictionPolicyKind::kLookahead, 4, 8);
  EXPECT_TRUE(cache.Prefetch({1, 2, 3, 4}, {}).empty());
  EXPECT_TRUE(cache.Announce({9, 8}));  // Without its keys: no victim is picked before it comes.
  EXPECT_TRUE(cache.Announce({1}));
  EXPECT_TRUE(cache.Announce({2, 3}));
  EXPECT_EQ(cache.Prefetch({9, 8}, {}), (Ids{4, 2}));  // 4 by LRU; of 1, 2, 3 the two last are farther, 2 is older.
  EXPECT_EQ(cache.Prefetch({1}, {}), (Ids{}));
  EXPECT_EQ(cache.Prefetch({2, 3}, {}), (Ids{9}));
}

TEST(LookaheadPolicyTest, MemoryIsBoundedByTheWindow) {
  Cache cache(EvictionPolicyKind::kLookahead, 32, 4);
  int64_t bytes = 0;
  for (int64_t step = 0; step < 2000; ++step) {
    cache.Announce({step, step + 1, step + 2});
    if (step >= 3) cache.Prefetch({step - 3, step - 2, step - 1}, {});
    if (step == 200) bytes = cache.policy()->allocated_bytes();
  }
  EXPECT_EQ(cache.policy()->allocated_bytes(), bytes);
}

TEST(FreqPolicyTest, ProgramEqualsTheModel) {
  int64_t evictions = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const size_t slots = 4 + random() % 20;
    const auto range = static_cast<int64_t>(slots * 2 + 3);
    Cache cache(EvictionPolicyKind::kFreq, static_cast<int64_t>(slots), 0);
    Model model(EvictionPolicyKind::kFreq, slots, 0);
    for (int step = 0; step < 300; ++step) {
      const Ids ids = RandomIds(&random, slots / 2, range);
      if (step % 40 == 5) {  // Counts may change while rows are cached, up and down.
        Ids counts;
        for (const int64_t id : ids) counts.push_back(model.counts[id] = random() % 5);
        cache.SetFrequencies(ids, counts);
        continue;
      }
      const std::set<int64_t> pinned = RandomPins(&random, model, ids, slots);
      const bool commit = random() % 8 != 0;
      const Ids evicted = cache.Prefetch(ids, pinned, commit);
      ASSERT_EQ(evicted, model.Prefetch(ids, pinned, commit)) << "seed " << seed << " step " << step;
      evictions += static_cast<int64_t>(evicted.size());
    }
  }
  EXPECT_GT(evictions, 1000);
}

TEST(FreqPolicyTest, MostFrequentComeByCountThenTableThenId) {
  auto policy = MakeEvictionPolicy(EvictionPolicyKind::kFreq, 8);
  const std::vector<Key> keys = {{7, 1}, {5, 0}, {9, 0}, {1, 0}, {3, 1}};
  const std::vector<int64_t> counts = {4, 4, 6, 0, 4};
  ASSERT_TRUE(policy->SetFrequencies(keys, counts));
  EXPECT_EQ(policy->MostFrequent(3), (std::vector<Key>{{9, 0}, {5, 0}, {3, 1}}));
  EXPECT_EQ(policy->MostFrequent(10), (std::vector<Key>{{9, 0}, {5, 0}, {3, 1}, {7, 1}}));  // Not the one with count 0.
}

TEST(OtherPoliciesTest, TakeNoHints) {
  for (const auto kind : {EvictionPolicyKind::kLru, EvictionPolicyKind::kLfu, EvictionPolicyKind::kClock}) {
    Cache cache(kind, 4, 8);
    EXPECT_FALSE(cache.Announce({1}));
    const std::vector<Key> keys = {{1, 0}};
    const std::vector<int64_t> counts = {1};
    EXPECT_FALSE(cache.policy()->SetFrequencies(keys, counts));
    EXPECT_TRUE(cache.policy()->MostFrequent(4).empty());
  }
}

}  // namespace
}  // namespace hvd_ctr
