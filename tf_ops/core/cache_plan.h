// CachePlan: what one batch does to the cache, as a value of integers: the slot of each working key, which of them must be
// loaded, and which cached keys give way. Decided first, without device, host store or rows; then the rows are moved; then
// CommitPlan makes it so.
//
// Example, S=3, cached {a:0, b:1, c:2} with b pinned and a used last, LRU; keys {b, d} ->
// slots {1, 2}, loads {1}, evictions {{c, 2, dirty?}}.
//
// Invariants: requested keys and slots are one-to-one; loads = requested minus cached; an evicted slot was neither pinned nor
// requested; evictions happen only when the free slots do not suffice. Until CommitPlan nothing has changed.
#ifndef HVD_CTR_CORE_CACHE_PLAN_H_
#define HVD_CTR_CORE_CACHE_PLAN_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/eviction_policy.h"
#include "tf_ops/core/slot_directory.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

struct Eviction {
  Key key;
  Slot slot = kNoSlot;
  bool dirty = false;  ///< The row must be written back before its slot is overwritten.
};

struct CachePlan {
  std::vector<Slot> slots;          ///< (K) slot of working key k.
  std::vector<int32_t> loads;       ///< (M) working keys that are not cached, ascending; key loads[m] goes to slots[loads[m]].
  std::vector<Eviction> evictions;  ///< (E) in the order of the policy; eviction e makes room for load e.
};

/// One batch to plan. Sizes: K keys, S slots.
struct PlanRequest {
  Span<const Key> keys;         ///< (K) distinct.
  Span<const uint64_t> hashes;  ///< (K) SlotDirectory::Hash of each key.
  Span<const int32_t> pins;     ///< (S) how many tickets hold the slot.
  Span<const uint8_t> dirty;    ///< (S)
  int64_t pinned_slots = 0;     ///< Slots with pins > 0.
};

/// Kept between calls, so that planning allocates nothing in steady state.
struct PlanScratch {
  std::vector<uint32_t> marks;  ///< (S) number of the last plan that requested the slot.
  uint32_t plans = 0;
  std::vector<Slot> victims;
};

/// Fills *plan and returns true; or returns false when the batch does not fit beside the pinned slots now (it needs M free or
/// evictable slots). Changes neither directory nor the policy's answers.
bool PlanBatch(const SlotDirectory& directory, EvictionPolicy* policy, const PlanRequest& request, PlanScratch* scratch,
               CachePlan* plan);

/// Carries the plan out in directory and policy: evicted keys leave, loaded keys enter, all working keys count as used in their
/// order. Precondition: neither has changed since PlanBatch. keys and hashes as in the request.
void CommitPlan(const CachePlan& plan, Span<const Key> keys, Span<const uint64_t> hashes, int64_t requested,
                SlotDirectory* directory, EvictionPolicy* policy);

/// Carries out the evictions only: for a batch that failed after its slots were overwritten. Evicted keys leave, their slots are
/// free.
void CommitEvictions(const CachePlan& plan, SlotDirectory* directory, EvictionPolicy* policy);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_CACHE_PLAN_H_
