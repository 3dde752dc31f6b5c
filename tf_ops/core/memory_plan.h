// PlanMemory: what a MixCache will take, before there is one: the figures of MixCacheStats for a number of rows and a size of
// batch. Each part's growth rule stands beside the part (PlannedBytes, PlanHostStore, PlanPolicyBytes); here they are summed up.
//
//   MemoryPlan plan = PlanMemory(options, demand);
//   plan.host_bytes()                                  // MixCacheStats::host_bytes, with a backend whose memory is the host's
//
// Invariant: nothing is allocated that grows with rows or slots. Device bytes are the backend's (LayOutCpuRecords,
// MakeRecordLayout) and not planned here.
#ifndef HVD_CTR_CORE_MEMORY_PLAN_H_
#define HVD_CTR_CORE_MEMORY_PLAN_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/host_store.h"
#include "tf_ops/core/options.h"

namespace hvd_ctr {

/// What one rank meets. Rows and keys; all for a full batch, the largest of the run where they differ.
struct MemoryDemand {
  std::vector<int64_t> rows;  ///< (T) rows of each table that exist on this rank.
  int64_t received = 0;       ///< R.
  int64_t unique = 0;         ///< K; M of the first batch.
  int64_t evictions = 0;      ///< E.
  int64_t tickets = 1;        ///< Batches in flight.
  int64_t coming = 0;         ///< PolicyDemand::coming.
  int64_t counted = 0;        ///< PolicyDemand::counted.
  int64_t read = 0;           ///< Keys of one call outside training: R of an evaluated batch, ids of a chunk of counts.
  int64_t appended = 0;       ///< PlanHostStore.
};

/// Bytes. The fields are handed out in this order (HvdCtrPlanMemory).
struct MemoryPlan {
  int64_t record_bytes = 0;      ///< Rows and state in the host tier's RAM.
  int64_t index_bytes = 0;       ///< The host tier's index.
  int64_t buffer_bytes = 0;      ///< The host tier's buffers.
  int64_t slot_bytes = 0;        ///< Directory of slots, policy, pins and marks.
  int64_t batch_bytes = 0;       ///< Keys, plans and tickets of the batches in flight.
  int64_t sum_bytes = 0;         ///< Sums of a batch's gradients, in the backend's memory (DeviceBackend::Workspace).
  int64_t cached_rows = 0;       ///< Rows, not bytes: in the host tier's RAM.
  int64_t disk_bytes = 0;        ///< The file of rows.
  int64_t disk_row_bytes = 0;    ///< Of which one record takes.
  int64_t least_ram_bytes = 0;   ///< HostStorePlan::least_ram_bytes.
  int64_t needed_ram_bytes = 0;  ///< HostStorePlan::needed_ram_bytes.
  int64_t record_floats = 0;     ///< Floats, not bytes: row and state of one record.

  int64_t host_bytes() const { return record_bytes + index_bytes + buffer_bytes + slot_bytes + batch_bytes + sum_bytes; }
};

MemoryPlan PlanMemory(const MixCacheOptions& options, const MemoryDemand& demand);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_MEMORY_PLAN_H_
