#include "tf_ops/core/cache_plan.h"

#include <algorithm>

namespace hvd_ctr {
namespace {

constexpr size_t kAhead = 24;  // Keys whose directory entries are asked for ahead of use.

// Marks the cached slots among plan.slots as requested; returns the number of those that are not pinned.
int64_t MarkRequested(const PlanRequest& request, const CachePlan& plan, PlanScratch* scratch) {
  if (scratch->marks.size() != static_cast<size_t>(request.pins.size()) || scratch->plans + 1 == 0) {
    AssignHuge(static_cast<size_t>(request.pins.size()), uint32_t{0}, &scratch->marks);
    scratch->plans = 0;
  }
  ++scratch->plans;
  int64_t unpinned = 0;
  for (const Slot slot : plan.slots) {
    if (slot == kNoSlot) continue;
    scratch->marks[static_cast<size_t>(slot)] = scratch->plans;
    unpinned += request.pins[slot] == 0;
  }
  return unpinned;
}

}  // namespace

bool PlanBatch(const SlotDirectory& directory, EvictionPolicy* policy, const PlanRequest& request, PlanScratch* scratch,
               CachePlan* plan) {
  const int64_t count = request.keys.size();
  plan->slots.resize(static_cast<size_t>(count));
  plan->loads.clear();
  plan->evictions.clear();
  directory.Find(request.keys, request.hashes, plan->slots.data());
  for (int64_t k = 0; k < count; ++k) {
    if (plan->slots[static_cast<size_t>(k)] == kNoSlot) plan->loads.push_back(static_cast<int32_t>(k));
  }
  const auto misses = static_cast<int64_t>(plan->loads.size());
  const int64_t evictions = std::max<int64_t>(0, misses - directory.free_slots());
  if (evictions > 0) {
    const int64_t requested_unpinned = MarkRequested(request, *plan, scratch);
    if (evictions > directory.size() - request.pinned_slots - requested_unpinned) return false;
    scratch->victims.clear();
    policy->PickVictims(evictions, BusySlots{request.pins, scratch->marks, scratch->plans}, &scratch->victims);
    for (const Slot slot : scratch->victims) plan->evictions.push_back({directory.key(slot), slot, request.dirty[slot] != 0});
  }
  // The same order in which CommitPlan frees and takes slots: evicted ones first, then those that were free.
  for (int64_t m = 0; m < misses; ++m) {
    plan->slots[static_cast<size_t>(plan->loads[static_cast<size_t>(m)])] =
        m < evictions ? plan->evictions[static_cast<size_t>(m)].slot : directory.free_slot(m - evictions);
  }
  return true;
}

void CommitPlan(const CachePlan& plan, Span<const Key> keys, Span<const uint64_t> hashes, int64_t requested,
                SlotDirectory* directory, EvictionPolicy* policy) {
  CommitEvictions(plan, directory, policy);
  const size_t loads = plan.loads.size();
  for (size_t m = 0; m < loads; ++m) {
    if (m + kAhead < loads) directory->Prefetch(hashes[plan.loads[m + kAhead]]);
    const int32_t k = plan.loads[m];
    policy->Load(directory->Insert(keys[k], hashes[k]), keys[k], hashes[k]);
  }
  policy->Arrive({keys, hashes, plan.slots, requested});
  policy->Use(plan.slots);
}

void CommitEvictions(const CachePlan& plan, SlotDirectory* directory, EvictionPolicy* policy) {
  // Backwards, because the slot freed last is taken first.
  for (size_t e = plan.evictions.size(); e-- > 0;) {
    if (e >= kAhead) directory->Prefetch(SlotDirectory::Hash(plan.evictions[e - kAhead].key));
    directory->Erase(plan.evictions[e].slot);
    policy->Remove(plan.evictions[e].slot);
  }
}

}  // namespace hvd_ctr
