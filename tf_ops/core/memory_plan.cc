#include "tf_ops/core/memory_plan.h"

#include <algorithm>

#include "tf_ops/core/mix_cache_impl.h"

namespace hvd_ctr {
namespace {

// Capacity of a std::vector that is filled element by element.
int64_t Doubled(int64_t size) {
  int64_t capacity = size > 0 ? 1 : 0;
  while (capacity < size) capacity *= 2;
  return capacity;
}

// Of one that is resized to about this size again and again: the first batch that is larger than the first doubles it.
int64_t Resized(int64_t size) { return 2 * size; }

// MergedKeys of R keys, K of them different: `keys` and `hashes` are cut to K after each batch.
int64_t MergedBytes(int64_t received, int64_t unique) {
  return std::max(2 * unique, received) * static_cast<int64_t>(sizeof(Key) + sizeof(uint64_t)) +
         Resized(received) * static_cast<int64_t>(sizeof(int32_t));
}

// MixCacheImpl::Ticket.
int64_t TicketBytes(int64_t received, int64_t unique) {
  const int64_t slots = unique * static_cast<int64_t>(sizeof(Slot));
  const int64_t tables = Resized(unique) * static_cast<int64_t>(sizeof(int32_t));
  return slots + tables + Resized(received) * static_cast<int64_t>(sizeof(int32_t) + sizeof(Slot));
}

// MixCacheImpl::ScratchBytes and announce_bytes_. kMoveRows records are staged at a time.
int64_t ScratchBytes(const MemoryDemand& demand, int64_t record_floats, int64_t move_rows) {
  int64_t bytes = MergedBytes(demand.received, demand.unique) + RequestMerge::PlannedBytes(demand.received, demand.read);
  bytes += Resized(demand.unique) * static_cast<int64_t>(sizeof(Slot));         // CachePlan::slots
  bytes += Doubled(demand.unique) * static_cast<int64_t>(sizeof(int32_t));      // CachePlan::loads: all keys of the first batch
  bytes += Doubled(demand.evictions) * static_cast<int64_t>(sizeof(Eviction));  // CachePlan::evictions
  bytes += Doubled(demand.evictions) * static_cast<int64_t>(sizeof(Slot));      // PlanScratch::victims
  const int64_t moved = std::max(demand.evictions, std::min(demand.unique, move_rows));
  bytes += Doubled(moved) * static_cast<int64_t>(sizeof(Key) + sizeof(Slot));
  bytes += demand.unique;                                                                             // found_
  bytes += std::min(demand.unique, move_rows) * static_cast<int64_t>(sizeof(Slot));                   // part_slots_
  bytes += std::min(demand.unique, move_rows) * record_floats * static_cast<int64_t>(sizeof(float));  // staging_
  if (demand.read > 0) {
    bytes += demand.read * static_cast<int64_t>(sizeof(Key) + sizeof(uint64_t) + sizeof(int32_t));
  }
  if (demand.coming > 0) {
    bytes += MergedBytes(demand.received, demand.unique) + RequestMerge::PlannedBytes(demand.received, 0) +
             Resized(demand.unique) * static_cast<int64_t>(sizeof(Slot));
  }
  return bytes;
}

}  // namespace

MemoryPlan PlanMemory(const MixCacheOptions& options, const MemoryDemand& demand) {
  const HostStoreSpec spec = MakeHostStoreSpec(options);
  const HostStorePlan store = PlanHostStore(spec, options.host, demand.rows, demand.appended);
  MemoryPlan plan;
  plan.record_bytes = store.record_bytes;
  plan.index_bytes = store.index_bytes;
  plan.buffer_bytes = store.buffer_bytes;
  plan.cached_rows = store.cached_rows;
  plan.disk_bytes = store.disk_bytes;
  plan.disk_row_bytes = store.disk_row_bytes;
  plan.least_ram_bytes = store.least_ram_bytes;
  plan.needed_ram_bytes = store.needed_ram_bytes;
  plan.record_floats = spec.record_floats;

  PolicyDemand policy;
  policy.coming = demand.coming;
  policy.counted = demand.counted;
  policy.passed = demand.evictions * demand.tickets;  // The cold rows of the batches in flight are looked at and left.
  const auto marks = static_cast<int64_t>(demand.evictions > 0 ? sizeof(uint32_t) : 0);
  plan.slot_bytes = SlotDirectory::PlannedBytes(options.slots) + PlanPolicyBytes(options.policy, options.slots, policy) +
                    options.slots * (static_cast<int64_t>(sizeof(int32_t) + sizeof(uint8_t)) + marks);
  plan.batch_bytes = ScratchBytes(demand, spec.record_floats, MixCacheImpl::kMoveRows) +
                     demand.tickets * TicketBytes(demand.received, demand.unique);
  plan.sum_bytes = Resized(demand.unique) * options.dim * static_cast<int64_t>(sizeof(float));
  return plan;
}

}  // namespace hvd_ctr
