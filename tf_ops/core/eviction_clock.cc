// clock: second chance.
#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/eviction_policy.h"

namespace hvd_ctr {
namespace {

// A use writes one byte. PickVictims only notes what its sweep does: the sweep counts once one of its victims is removed, and is
// forgotten by the next question or use.
class ClockPolicy final : public EvictionPolicy {
 public:
  explicit ClockPolicy(int64_t slots) { AssignHuge(static_cast<size_t>(slots), uint8_t{0}, &states_); }

  void Use(Span<const Slot> slots) override {
    EndSweep(false);
    for (const Slot slot : slots) states_[slot] |= (states_[slot] & kCached) != 0 ? kUsed : kCached;
  }

  void Remove(Slot slot) override {
    if ((states_[slot] & kPicked) != 0) EndSweep(true);
    states_[slot] = 0;
  }

  void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) override {
    EndSweep(false);
    const auto slots = static_cast<int64_t>(states_.size());
    // In the second round no slot is used any more.
    for (int64_t passed = 0; count > 0 && passed < 2 * slots; ++passed) {
      const auto slot = static_cast<Slot>(At(passed));
      uint8_t& state = states_[slot];
      if ((state & kCached) == 0 || (state & kPicked) != 0 || busy(slot)) continue;
      if ((state & (kUsed | kPassed)) == kUsed) {
        state |= kPassed;
      } else {
        state |= kPicked;
        victims->push_back(slot);
        --count;
        swept_ = passed + 1;
      }
    }
    if (count > 0) swept_ = 2 * slots;
  }

  int64_t allocated_bytes() const override { return static_cast<int64_t>(states_.capacity()); }

 private:
  static constexpr uint8_t kCached = 1;
  static constexpr uint8_t kUsed = 2;    // Since it was filled, or since the hand passed.
  static constexpr uint8_t kPassed = 4;  // By the present sweep: no longer used if the sweep counts.
  static constexpr uint8_t kPicked = 8;  // By the present sweep.

  int64_t At(int64_t passed) const {
    const auto slots = static_cast<int64_t>(states_.size());
    int64_t at = hand_ + passed;
    while (at >= slots) at -= slots;
    return at;
  }

  void EndSweep(bool counts) {
    if (swept_ == 0) return;
    const auto slots = static_cast<int64_t>(states_.size());
    for (int64_t passed = 0; passed < swept_ && passed < slots; ++passed) {
      uint8_t& state = states_[static_cast<size_t>(At(passed))];
      if (counts && (state & kPassed) != 0) state &= static_cast<uint8_t>(~kUsed);
      state &= static_cast<uint8_t>(~(kPassed | kPicked));
    }
    if (counts) hand_ = At(swept_);
    swept_ = 0;
  }

  std::vector<uint8_t> states_;  // (S)
  int64_t hand_ = 0;             // The slot to look at next.
  int64_t swept_ = 0;            // Slots that the last PickVictims passed.
};

}  // namespace

int64_t PlanClockBytes(int64_t slots) { return slots; }

std::unique_ptr<EvictionPolicy> MakeClockPolicy(int64_t slots) { return std::make_unique<ClockPolicy>(slots); }

}  // namespace hvd_ctr
