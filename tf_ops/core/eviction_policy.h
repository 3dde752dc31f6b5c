// EvictionPolicy: which cached slots to give up first. Decides on slots; only the policies that know more than the past look at
// keys: freq (counts of ids) and lookahead (batches to come).
//
//   policy->Load(slot, key, hash);              // the key has come into the slot
//   policy->Use(slots);                         // the batch's slots in the order of its keys; new slots begin their life
//   policy->PickVictims(n, busy, &victims);     // best victims first; decides, changes nothing
//   policy->Remove(victim);                     // the slot was evicted
//
// The policies, all exact and deterministic:
//   lru        Longest unused first.
//   lfu        Fewest uses since the slot was filled first, ties by longest unused. Ageing: after every 16 S uses (S slots) the
//   uses
//              of all slots are halved, rounded up, so that what was popular once does not stay for ever.
//   clock      Second chance: a hand goes round the slots; it takes the slots that were not used since they were filled or since
//              it last passed, and passes by the others once.
//   freq       Smallest count of the id first (SetFrequencies; an id without a count has 0), ties by longest unused.
//   lookahead  Slots whose keys no announced batch needs first, longest unused first; then those that are needed farthest in the
//              future, ties by longest unused: Belady's rule within the window. Without announcements it is lru.
//
// Invariant: the answer is a function of the calls so far and of `busy` alone, never of addresses or hash order. Not
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

/// A batch's distinct keys. hashes[k] is SlotDirectory::Hash of keys[k]; slots[k] its slot, kNoSlot where it is not cached.
struct BatchKeys {
  Span<const Key> keys;         ///< (K)
  Span<const uint64_t> hashes;  ///< (K)
  Span<const Slot> slots;       ///< (K)
  int64_t requested = 0;        ///< R: keys as they were requested, repetitions included.
};

/// What a policy makes of the announcement of a batch.
enum class Expectation { kRefused, kNoted, kWantsKeys };

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  /// The key has come into the slot (whose first Use follows), or what the policy knows of the key has changed.
  virtual void Load(Slot /*slot*/, const Key& /*key*/, uint64_t /*hash*/) {}
  /// One use of each slot, in the order given. slots (K) distinct, within [0, S).
  virtual void Use(Span<const Slot> slots) = 0;
  /// Ends the life of a used slot. A later Use starts it anew.
  virtual void Remove(Slot slot) = 0;
  /// Appends the `count` best victims that are not busy, best first; fewer when there are no more. The choice has no effect on
  /// later answers until Remove.
  virtual void PickVictims(int64_t count, const BusySlots& busy, std::vector<Slot>* victims) = 0;
  virtual int64_t allocated_bytes() const = 0;

  /// lookahead: a batch of that many requested keys will come after those announced before. kNoted without its keys where no
  /// victim can be picked before it comes, as the batches before it fit into the free slots. kRefused: the window is full, or the
  /// policy looks at the past only, or the batch has no keys.
  virtual Expectation Expect(int64_t /*requested*/, int64_t /*free_slots*/) { return Expectation::kRefused; }
  /// lookahead, where Expect answered kWantsKeys: the batch's keys. May throw std::bad_alloc and then has noted nothing.
  virtual void Announce(const BatchKeys& /*batch*/) {}
  /// lookahead: the announced batches will not come.
  virtual void EndAnnouncements() {}
  /// The batch has come; all its keys are cached by now. Comes before its Use. Ends the oldest announcement of the same keys and
  /// those before it (their batches were skipped); an unannounced batch ends none, but when as many of them have come in a row as
  /// the window is long, the announcements are out of date and all of them end.
  virtual void Arrive(const BatchKeys& /*batch*/) {}

  /// freq: counts (n), >= 0, of keys; replaces the counts they had. False: the policy uses no counts. The caller then calls Load
  /// again for every cached slot. May throw std::bad_alloc.
  virtual bool SetFrequencies(Span<const Key> /*keys*/, Span<const int64_t> /*counts*/) { return false; }
  /// freq: the `count` keys with the largest counts above 0 (fewer when there are no more), by falling count, ties by table and
  /// id. May throw std::bad_alloc.
  virtual std::vector<Key> MostFrequent(int64_t /*count*/) { return {}; }
};

/// slots: S, 1 .. 2^28. window: lookahead's longest, 0 .. kMaxWindow batches.
std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyKind kind, int64_t slots, int32_t window = 0);

/// What a policy keeps besides its slots, at most.
struct PolicyDemand {
  int64_t coming = 0;   ///< lookahead: keys of the announced batches, distinct but for those of the last one.
  int64_t counted = 0;  ///< freq: keys with counts.
  int64_t passed = 0;   ///< lfu, freq: slots that one PickVictims looks at, busy ones included.
};

/// allocated_bytes() of a policy in use.
int64_t PlanPolicyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand);

// Parts of MakeEvictionPolicy and PlanPolicyBytes: eviction_recency.cc, eviction_frequency.cc, eviction_clock.cc.
std::unique_ptr<EvictionPolicy> MakeLruPolicy(int64_t slots);
std::unique_ptr<EvictionPolicy> MakeLookaheadPolicy(int64_t slots, int32_t window);
std::unique_ptr<EvictionPolicy> MakeLfuPolicy(int64_t slots);
std::unique_ptr<EvictionPolicy> MakeFreqPolicy(int64_t slots);
std::unique_ptr<EvictionPolicy> MakeClockPolicy(int64_t slots);
int64_t PlanRecencyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand);
int64_t PlanFrequencyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand);
int64_t PlanClockBytes(int64_t slots);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_EVICTION_POLICY_H_
