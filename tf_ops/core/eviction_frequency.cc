// lfu and freq.
#include <algorithm>
#include <utility>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/eviction_policy.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/key_map.h"

namespace hvd_ctr {
namespace {

// Exact order by (rank, longest unused) as a lazy heap: a use only notes itself. An entry of the heap is what the slot was when
// the entry was pushed; as (rank, last use) only grows, the top entry is a lower bound, and it is the true minimum once it is up
// to date. Each refresh is paid for by a use. Where ranks fall, all of them do so together (LFU's ageing) or the heap is built
// anew.
class RankedPolicy : public EvictionPolicy {
 public:
  explicit RankedPolicy(int64_t slots) {
    AssignHuge(static_cast<size_t>(slots), Life(), &lives_);
    ReserveHuge(static_cast<size_t>(slots), &heap_);
  }

  void Remove(Slot slot) final { lives_[slot].last_use = 0; }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) final {
    if (reranked_) Rebuild();
    ReturnHeld();
    while (count > 0 && !heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), After);
      const Entry entry = heap_.back();
      heap_.pop_back();
      if (Dead(entry)) continue;
      const Life& life = lives_[entry.slot];
      if (entry.last_use != life.last_use) {
        Push({life.rank, life.last_use, entry.slot});
        continue;
      }
      held_.push_back(entry);
      if (busy(entry.slot)) continue;
      victims->push_back(entry.slot);
      --count;
    }
  }

  /// The heap has one entry per cached slot; entries of what the last PickVictims passed are held beside it.
  static int64_t PlannedBytes(int64_t slots, int64_t passed) {
    int64_t held = 1;  // std::vector doubles.
    while (held < passed) held *= 2;
    return slots * static_cast<int64_t>(sizeof(Life) + sizeof(Entry)) + held * static_cast<int64_t>(sizeof(Entry));
  }

  int64_t allocated_bytes() const override {
    return static_cast<int64_t>(lives_.capacity() * sizeof(Life) + (heap_.capacity() + held_.capacity()) * sizeof(Entry));
  }

 protected:
  struct Life {
    int64_t rank = 0;
    int64_t last_use = 0;  // 0: not cached.
    int64_t born = 0;
  };
  struct Entry {
    int64_t rank;
    int64_t last_use;
    Slot slot;
  };

  static bool After(const Entry& a, const Entry& b) { return a.rank != b.rank ? a.rank > b.rank : a.last_use > b.last_use; }

  bool Cached(Slot slot) const { return lives_[slot].last_use != 0; }

  /// Makes room for the entries of `count` new lives.
  void BeforeUse(int64_t count) {
    if (heap_.size() + held_.size() + static_cast<size_t>(count) > 3 * lives_.size()) DropDead();
  }

  void NoteUse(Slot slot) {
    Life& life = lives_[slot];
    const bool cached = life.last_use != 0;
    life.last_use = ++clock_;
    if (cached) return;
    life.born = clock_;
    Push({life.rank, clock_, slot});
  }

  /// Ranks of cached slots have changed in any way.
  void Reranked() { reranked_ = true; }

  std::vector<Life> lives_;  // (S)

 private:
  void Rebuild() {
    reranked_ = false;
    heap_.clear();
    held_.clear();
    for (size_t slot = 0; slot < lives_.size(); ++slot) {
      if (lives_[slot].last_use != 0) heap_.push_back({lives_[slot].rank, lives_[slot].last_use, static_cast<Slot>(slot)});
    }
    std::make_heap(heap_.begin(), heap_.end(), After);
  }

  bool Dead(const Entry& entry) const {
    const Life& life = lives_[entry.slot];
    return life.last_use == 0 || entry.last_use < life.born;
  }

  void Push(const Entry& entry) {
    heap_.push_back(entry);
    std::push_heap(heap_.begin(), heap_.end(), After);
  }

  // Entries taken off the heap by the last PickVictims: victims that were not removed after all, and busy slots.
  void ReturnHeld() {
    for (const Entry& entry : held_) {
      if (!Dead(entry)) Push(entry);
    }
    held_.clear();
  }

  void DropDead() {
    ReturnHeld();
    heap_.erase(std::remove_if(heap_.begin(), heap_.end(), [this](const Entry& entry) { return Dead(entry); }), heap_.end());
    std::make_heap(heap_.begin(), heap_.end(), After);
  }

  std::vector<Entry> heap_;  // One entry per cached slot (in heap_ or held_), and dead ones.
  std::vector<Entry> held_;
  int64_t clock_ = 0;
  bool reranked_ = false;  // The heap is out of date.
};

class LfuPolicy final : public RankedPolicy {
 public:
  using RankedPolicy::RankedPolicy;

  void Use(Span<const Slot> slots) override {
    BeforeUse(slots.size());
    for (const Slot slot : slots) {
      lives_[slot].rank = Cached(slot) ? lives_[slot].rank + 1 : 1;
      NoteUse(slot);
    }
    uses_ += slots.size();
    if (uses_ >= kAgeingUses * static_cast<int64_t>(lives_.size())) Age();
  }

 private:
  static constexpr int64_t kAgeingUses = 16;  // Per slot, between two halvings.

  void Age() {
    uses_ = 0;
    for (Life& life : lives_) life.rank = (life.rank + 1) / 2;
    Reranked();
  }

  int64_t uses_ = 0;
};

class FreqPolicy final : public RankedPolicy {
 public:
  using RankedPolicy::RankedPolicy;

  void Load(Slot slot, const Key& key, uint64_t hash) override {
    lives_[slot].rank = static_cast<int64_t>(counts_.Find(key, hash));
    if (Cached(slot)) Reranked();
  }

  void Use(Span<const Slot> slots) override {
    BeforeUse(slots.size());
    for (const Slot slot : slots) NoteUse(slot);
  }

  bool SetFrequencies(Span<const Key> keys, Span<const int64_t> counts) override {
    counts_.Reserve(counts_.size() + keys.size());
    for (int64_t i = 0; i < keys.size(); ++i) {
      counts_.FindOrInsert(keys[i], HashKey(keys[i].table, keys[i].id, kDirectorySalt)) = static_cast<uint64_t>(counts[i]);
    }
    return true;
  }

  std::vector<Key> MostFrequent(int64_t count) override {
    std::vector<std::pair<uint64_t, Key>> ranked;
    counts_.ForEach([&ranked](const Key& key, uint64_t& uses) {
      if (uses > 0) ranked.emplace_back(uses, key);
    });
    count = std::min(count, static_cast<int64_t>(ranked.size()));
    std::partial_sort(ranked.begin(), ranked.begin() + count, ranked.end(), [](const auto& a, const auto& b) {
      if (a.first != b.first) return a.first > b.first;
      return a.second.table != b.second.table ? a.second.table < b.second.table : a.second.id < b.second.id;
    });
    std::vector<Key> keys(static_cast<size_t>(count));
    std::transform(ranked.begin(), ranked.begin() + count, keys.begin(), [](const auto& entry) { return entry.second; });
    return keys;
  }

  int64_t allocated_bytes() const override { return RankedPolicy::allocated_bytes() + counts_.allocated_bytes(); }

 private:
  KeyMap counts_;
};

}  // namespace

int64_t PlanFrequencyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand) {
  const bool counts = kind == EvictionPolicyKind::kFreq && demand.counted > 0;
  return RankedPolicy::PlannedBytes(slots, demand.passed) + (counts ? KeyMap::PlannedBytes(demand.counted) : 0);
}

std::unique_ptr<EvictionPolicy> MakeLfuPolicy(int64_t slots) { return std::make_unique<LfuPolicy>(slots); }

std::unique_ptr<EvictionPolicy> MakeFreqPolicy(int64_t slots) { return std::make_unique<FreqPolicy>(slots); }

}  // namespace hvd_ctr
