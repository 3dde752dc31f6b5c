// lru and lookahead.
#include <algorithm>
#include <array>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/eviction_policy.h"
#include "tf_ops/core/key_map.h"

namespace hvd_ctr {
namespace {

// Exact LRU as a log of uses instead of a linked list: a use appends to the log and stores the position, so it costs one
// sequential and one random write (a list costs four random ones). An entry counts only if its slot still points at it. Stale
// entries are dropped when victims are picked, or by Compact when the log is full; both are paid for by the uses that made them
// stale.
class LruPolicy : public EvictionPolicy {
 public:
  explicit LruPolicy(int64_t slots) {
    AssignHuge(static_cast<size_t>(slots), -1, &position_);
    // After Compact at most S entries are left and one call brings at most S more, so this capacity is never exceeded.
    ReserveHuge(static_cast<size_t>(kLogPerSlot * slots), &log_);
  }

  static int64_t PlannedBytes(int64_t slots) {
    return slots * static_cast<int64_t>(sizeof(int32_t) + kLogPerSlot * sizeof(Slot));
  }

  void Use(Span<const Slot> slots) final {
    if (log_.size() + static_cast<size_t>(slots.size()) > log_.capacity()) Compact();
    auto position = static_cast<int32_t>(log_.size());
    log_.insert(log_.end(), slots.begin(), slots.end());
    for (const Slot slot : slots) position_[slot] = position++;
  }

  void Remove(Slot slot) override { position_[slot] = -1; }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) override {
    PickOldest(count, busy, victims);
  }

  int64_t allocated_bytes() const override {
    return static_cast<int64_t>(position_.capacity() * sizeof(int32_t) + log_.capacity() * sizeof(Slot));
  }

 protected:
  /// Appends the longest unused slots that skip(slot) does not hold back; returns how many of `count` are missing.
  template <typename Skip>
  int64_t PickOldest(int64_t count, const Skip& skip, std::vector<Slot>* victims) {
    const auto size = static_cast<int32_t>(log_.size());
    int32_t end = head_;
    for (; count > 0 && end < size; ++end) {
      if (end + kPrefetchAhead < size) __builtin_prefetch(&position_[log_[end + kPrefetchAhead]]);
      if (!Live(end) || skip(log_[end])) continue;
      victims->push_back(log_[end]);
      --count;
    }
    // Keeps the live entries of the part just read, without the stale ones between them: a later call does not read those again.
    int32_t front = end;
    for (int32_t i = end - 1; i >= head_; --i) {
      if (Live(i)) MoveEntry(i, --front);
    }
    head_ = front;
    return count;
  }

  /// function(slot) for every slot, longest unused first.
  template <typename Function>
  void ForEachByAge(const Function& function) const {
    for (int32_t i = head_; i < static_cast<int32_t>(log_.size()); ++i) {
      if (Live(i)) function(log_[i]);
    }
  }

  int64_t slots() const { return static_cast<int64_t>(position_.size()); }

 private:
  static constexpr int32_t kPrefetchAhead = 16;
  static constexpr int64_t kLogPerSlot = 4;

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

// Announcement n (counted from 0) is bit n % 64 of a mask: at most 64 are open at a time, so the bits do not meet. coming_ has
// the mask of every key that an open announcement names, cached or not; masks_ a copy of it for every cached slot, so that
// picking victims needs no look-up.
class LookaheadPolicy final : public LruPolicy {
 public:
  LookaheadPolicy(int64_t slots, int32_t window) : LruPolicy(slots), window_(static_cast<size_t>(window)) {
    open_.reserve(window_);
  }

  void Load(Slot slot, const Key& key, uint64_t hash) override {
    if (!masks_.empty()) masks_[slot] = coming_.Find(key, hash);
  }

  void Remove(Slot slot) override {
    LruPolicy::Remove(slot);
    if (!masks_.empty()) masks_[slot] = 0;
  }

  Expectation Expect(int64_t requested, int64_t free_slots) override {
    if (open_.size() >= window_ || requested == 0) return Expectation::kRefused;
    int64_t before = 0;
    for (const Announced& announced : open_) before += announced.requested;
    if (before > free_slots) return Expectation::kWantsKeys;
    open_.push_back({requested});
    return Expectation::kNoted;
  }

  void Announce(const BatchKeys& batch) override {
    const int64_t count = batch.keys.size();
    coming_.Reserve(coming_.size() + count);
    if (masks_.empty()) AssignHuge(static_cast<size_t>(slots()), uint64_t{0}, &masks_);
    open_.push_back({batch.requested, true, Sum(batch)});
    const uint64_t bit = Bit(open_.size() - 1);
    for (int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) coming_.Prefetch(batch.hashes[k + kAhead]);
      coming_.FindOrInsert(batch.keys[k], batch.hashes[k]) |= bit;
      if (batch.slots[k] != kNoSlot) masks_[batch.slots[k]] |= bit;
    }
  }

  void EndAnnouncements() override { End(open_.size()); }

  void Arrive(const BatchKeys& batch) override {
    if (open_.empty() || batch.requested == 0) return;
    const uint64_t sum = Sum(batch);
    const auto found = std::find_if(open_.begin(), open_.end(), [&batch, sum](const Announced& announced) {
      return announced.requested == batch.requested && (!announced.with_keys || announced.sum == sum);
    });
    if (found == open_.end()) {
      if (++unannounced_ >= window_) End(open_.size());
      return;
    }
    unannounced_ = 0;
    End(static_cast<size_t>(found - open_.begin()));
    if (open_.front().with_keys) ForgetFirst(batch);
    open_.erase(open_.begin());
    ++first_;
  }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) override {
    if (coming_.size() == 0) {
      PickOldest(count, busy, victims);
      return;
    }
    const auto needed_or_busy = [this, &busy](Slot slot) { return masks_[slot] != 0 || busy(slot); };
    const int64_t missing = PickOldest(count, needed_or_busy, victims);
    if (missing > 0) PickFarthest(missing, busy, victims);
  }

  /// What the first announcement brings.
  static int64_t PlannedExtra(int64_t slots, int64_t coming) {
    return KeyMap::PlannedBytes(coming) + slots * static_cast<int64_t>(sizeof(uint64_t));
  }

  int64_t allocated_bytes() const override {
    return LruPolicy::allocated_bytes() + coming_.allocated_bytes() + static_cast<int64_t>(masks_.capacity() * sizeof(uint64_t));
  }

 private:
  static constexpr int64_t kAhead = 8;

  // Number and sum of the hashes tell batches apart: taking one for another would only make a choice worse.
  struct Announced {
    int64_t requested = 0;
    bool with_keys = false;
    uint64_t sum = 0;
  };

  static uint64_t Sum(const BatchKeys& batch) {
    uint64_t sum = 0;
    for (const uint64_t hash : batch.hashes) sum += hash;
    return sum;
  }

  /// Bit of the i-th open announcement.
  uint64_t Bit(size_t i) const { return uint64_t{1} << ((first_ + i) % 64); }

  /// Which open announcement needs the slot first; its mask is not 0.
  size_t NextUse(Slot slot) const {
    const uint64_t shift = first_ % 64;
    const uint64_t mask = masks_[slot];
    return static_cast<size_t>(__builtin_ctzll(shift == 0 ? mask : mask >> shift | mask << (64 - shift)));
  }

  /// The batch of the first announcement has come.
  void ForgetFirst(const BatchKeys& batch) {
    const uint64_t others = ~Bit(0);
    const int64_t count = batch.keys.size();
    for (int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) coming_.Prefetch(batch.hashes[k + kAhead]);
      masks_[batch.slots[k]] = coming_.KeepBits(batch.keys[k], batch.hashes[k], others);
    }
  }

  /// Ends the first `count` announcements; their batches do not come.
  void End(size_t count) {
    if (count == 0) return;
    uint64_t ended = 0;
    for (size_t i = 0; i < count; ++i) ended |= Bit(i);
    coming_.ForEach([ended](const Key&, uint64_t& mask) { mask &= ~ended; });
    coming_.EraseZeros();
    for (uint64_t& mask : masks_) mask &= ~ended;
    open_.erase(open_.begin(), open_.begin() + static_cast<int64_t>(count));
    first_ += count;
    unannounced_ = 0;
  }

  void PickFarthest(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) const {
    const auto candidate = [this, &busy](Slot slot) { return masks_[slot] != 0 && !busy(slot); };
    std::array<int64_t, kMaxWindow> place{};  // Of the next slot by next use, at first its number of slots.
    ForEachByAge([&](Slot slot) {
      if (candidate(slot)) ++place[NextUse(slot)];
    });
    int64_t total = 0;
    for (size_t use = place.size(); use-- > 0;) {
      const int64_t slots = place[use];
      place[use] = total;
      total += slots;
    }
    count = std::min(count, total);
    const auto first = static_cast<int64_t>(victims->size());
    victims->resize(static_cast<size_t>(first + count));
    ForEachByAge([&](Slot slot) {
      if (!candidate(slot)) return;
      const int64_t at = place[NextUse(slot)]++;
      if (at < count) (*victims)[static_cast<size_t>(first + at)] = slot;
    });
  }

  const size_t window_;
  KeyMap coming_;
  std::vector<uint64_t> masks_;  // (S), or empty before the first announcement.
  std::vector<Announced> open_;  // At most window_, oldest first.
  size_t first_ = 0;             // Number of open_.front().
  size_t unannounced_ = 0;       // Batches in a row that came without an announcement.
};

}  // namespace

int64_t PlanRecencyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand) {
  const bool announced = kind == EvictionPolicyKind::kLookahead && demand.coming > 0;
  return LruPolicy::PlannedBytes(slots) + (announced ? LookaheadPolicy::PlannedExtra(slots, demand.coming) : 0);
}

std::unique_ptr<EvictionPolicy> MakeLruPolicy(int64_t slots) { return std::make_unique<LruPolicy>(slots); }

std::unique_ptr<EvictionPolicy> MakeLookaheadPolicy(int64_t slots, int32_t window) {
  return std::make_unique<LookaheadPolicy>(slots, window);
}

}  // namespace hvd_ctr
