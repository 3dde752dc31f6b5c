#include "tf_ops/core/eviction_policy.h"

#include <algorithm>

namespace hvd_ctr {
namespace {

// Exact LRU as a log of uses instead of a linked list: a use appends to the log and stores the position, so it costs one
// sequential and one random write (a list costs four random ones). An entry counts only if its slot still points at it. Stale
// entries are dropped when victims are picked, or by Compact when the log is full; both are paid for by the uses that made them
// stale.
class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(int64_t slots) : position_(static_cast<size_t>(slots), -1) {
    // After Compact at most S entries are left and one call brings at most S more, so this capacity is never exceeded.
    log_.reserve(static_cast<size_t>(4 * slots));
  }

  void Use(Span<const Slot> slots) override {
    if (log_.size() + static_cast<size_t>(slots.size()) > log_.capacity()) Compact();
    auto position = static_cast<int32_t>(log_.size());
    log_.insert(log_.end(), slots.begin(), slots.end());
    for (const Slot slot : slots) position_[slot] = position++;
  }

  void Remove(Slot slot) override { position_[slot] = -1; }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) override {
    const auto size = static_cast<int32_t>(log_.size());
    int32_t end = head_;
    for (; count > 0 && end < size; ++end) {
      if (end + kPrefetchAhead < size) __builtin_prefetch(&position_[log_[end + kPrefetchAhead]]);
      if (!Live(end) || busy(log_[end])) continue;
      victims->push_back(log_[end]);
      --count;
    }
    // Keeps the live entries of the part just read, without the stale ones between them: a later call does not read those again.
    int32_t front = end;
    for (int32_t i = end - 1; i >= head_; --i) {
      if (Live(i)) MoveEntry(i, --front);
    }
    head_ = front;
  }

  int64_t allocated_bytes() const override {
    return static_cast<int64_t>(position_.capacity() * sizeof(int32_t) + log_.capacity() * sizeof(Slot));
  }

 private:
  static constexpr int32_t kPrefetchAhead = 16;

  bool Live(int32_t entry) const { return position_[log_[entry]] == entry; }

  void MoveEntry(int32_t from, int32_t to) {
    log_[to] = log_[from];
    position_[log_[to]] = to;
  }

  void Compact() {
    const auto size = static_cast<int32_t>(log_.size());
    int32_t count = 0;
    for (int32_t i = head_; i < size; ++i) {
      if (i + kPrefetchAhead < size) __builtin_prefetch(&position_[log_[i + kPrefetchAhead]]);
      if (Live(i)) MoveEntry(i, count++);
    }
    log_.resize(static_cast<size_t>(count));
    head_ = 0;
  }

  std::vector<int32_t> position_;  // (S) index in log_ of the slot's last use, -1: not cached.
  std::vector<Slot> log_;          // Uses, oldest first.
  int32_t head_ = 0;               // First entry of log_ that may be live.
};

// Exact LFU as a lazy heap: a use only counts. Heap keys are what the slot's key was when it was pushed; as keys only grow, the
// top entry is a lower bound, and it is the true minimum once it is up to date. Each refresh is paid for by a use.
class LfuPolicy final : public EvictionPolicy {
 public:
  explicit LfuPolicy(int64_t slots) : lives_(static_cast<size_t>(slots)) { heap_.reserve(static_cast<size_t>(slots)); }

  void Use(Span<const Slot> slots) override {
    if (heap_.size() + held_.size() + static_cast<size_t>(slots.size()) > 3 * lives_.size()) DropDead();
    for (const Slot slot : slots) {
      Life& life = lives_[slot];
      life.last_use = ++clock_;
      if (++life.uses > 1) continue;
      life.born = clock_;
      Push({1, clock_, slot});
    }
  }

  void Remove(Slot slot) override { lives_[slot].uses = 0; }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) override {
    ReturnHeld();
    while (count > 0 && !heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), After);
      const Entry entry = heap_.back();
      heap_.pop_back();
      if (Dead(entry)) continue;
      const Life& life = lives_[entry.slot];
      if (entry.uses != life.uses) {
        Push({life.uses, life.last_use, entry.slot});
        continue;
      }
      held_.push_back(entry);
      if (busy(entry.slot)) continue;
      victims->push_back(entry.slot);
      --count;
    }
  }

  int64_t allocated_bytes() const override {
    return static_cast<int64_t>(lives_.capacity() * sizeof(Life) + (heap_.capacity() + held_.capacity()) * sizeof(Entry));
  }

 private:
  struct Life {
    int64_t uses = 0;  // 0: not cached.
    int64_t last_use = 0;
    int64_t born = 0;
  };
  struct Entry {
    int64_t uses;
    int64_t last_use;
    Slot slot;
  };

  static bool After(const Entry& a, const Entry& b) { return a.uses != b.uses ? a.uses > b.uses : a.last_use > b.last_use; }

  bool Dead(const Entry& entry) const {
    const Life& life = lives_[entry.slot];
    return life.uses == 0 || entry.last_use < life.born;
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

  std::vector<Life> lives_;  // (S)
  std::vector<Entry> heap_;  // One entry per cached slot (in heap_ or held_), and dead ones.
  std::vector<Entry> held_;
  int64_t clock_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyKind kind, int64_t slots) {
  if (kind == EvictionPolicyKind::kLfu) return std::make_unique<LfuPolicy>(slots);
  return std::make_unique<LruPolicy>(slots);
}

}  // namespace hvd_ctr
