// EvictionPolicy: which cached slots to give up first. Knows slots only, neither keys nor rows.
//
//   policy->Use(slots);                         // the batch's slots in the order of its keys; new slots begin their life
//   policy->PickVictims(n, busy, &victims);     // best victims first; decides, changes nothing
//   policy->Remove(victim);                     // the slot was evicted
//
// Invariant: the answer is a function of the calls so far and of `busy` alone, never of addresses or hash order. Both policies
// are exact. LRU: longest unused first. LFU: fewest uses since the slot was filled first, ties by longest unused. Not
// thread-safe: MixCache calls it under its mutex.
#ifndef HVD_CTR_CORE_EVICTION_POLICY_H_
#define HVD_CTR_CORE_EVICTION_POLICY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/core/options.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Slots that must not be evicted: pinned ones, and those marked with `mark` (requested by the batch being planned).
struct BusySlots {
  Span<const int32_t> pins;    ///< (S)
  Span<const uint32_t> marks;  ///< (S)
  uint32_t mark = 0;

  bool operator()(Slot slot) const { return pins[slot] > 0 || marks[slot] == mark; }
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  /// One use of each slot, in the order given. slots (K) distinct, within [0, S).
  virtual void Use(Span<const Slot> slots) = 0;
  /// Ends the life of a used slot. A later Use starts it anew.
  virtual void Remove(Slot slot) = 0;
  /// Appends the `count` best victims that are not busy, best first; fewer when there are no more. The choice has no effect on
  /// later answers until Remove.
  virtual void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) = 0;
  virtual int64_t allocated_bytes() const = 0;
};

/// slots: S, 1 .. 2^28.
std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyKind kind, int64_t slots);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_EVICTION_POLICY_H_
