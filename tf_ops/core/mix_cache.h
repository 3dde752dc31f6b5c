// MixCache: the three-tier embedding cache of one rank (ScaleFreeCTR, SIGIR 2021). Full rows live in the host store, working rows
// in S slots of the device backend. It is "mixed" over the ranks: each rank caches only keys it owns, so no row is cached twice.
//
//   int64_t ticket;
//   cache->Prefetch(received, &ticket, runner);               // Host-Manager: plan, write back, load, pin
//   cache->Lookup(ticket, rows, runner);                      // GPU-Worker: rows (R, D)
//   cache->Apply(ticket, gradients, 1.0f, runner);            // GPU-Worker: sum, update, mark dirty, unpin; the ticket ends
//
// Invariants (DESIGN 6): plan one-to-one; evicted slots were unpinned and not requested; each ticket is applied or released
// exactly once (a second use is FAILED_PRECONDITION naming the ticket); a row is read from the host only after an earlier
// write-back of it finished; foreign keys (owned by another rank) are dropped (zero row, no update); Read changes nothing.
//
// Concurrency: one thread may call Prefetch while another calls Lookup/Apply/Release: their slots are disjoint or pinned.
// Metadata is under one mutex, row movement is outside it. Flush/Export/Import/Read take part in the same order as Prefetch, but
// a Prefetch that waits for room lets them pass, so the thread that holds the pins may call them. The calling thread's order
// decides the numbers: Apply tickets in the order of their batches, and Lookup a ticket after the Apply of the one before; Sweep
// after the Apply of its step and before the next Lookup.
//
// Rows of tables with min_count, max_idle_steps or max_rows (row_life.h) may be refused by Apply and deleted by Sweep. A deleted
// row that is in flight (its slot is pinned by the ticket of a later batch) is set back to its first value where it is, so what
// that batch sees does not depend on how far ahead it was prefetched. Eviction never deletes.
#ifndef HVD_CTR_CORE_MIX_CACHE_H_
#define HVD_CTR_CORE_MIX_CACHE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/host_store.h"
#include "tf_ops/core/key_exchange.h"
#include "tf_ops/core/options.h"
#include "tf_ops/core/row_life.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Counters since creation, per table. Units: rows unless named otherwise.
struct MixCacheTableStats {
  int64_t requested = 0;  ///< Received keys R, summed over steps.
  int64_t unique = 0;     ///< Working keys K, summed over steps. unique == hits + misses.
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t created = 0;  ///< Of the misses: rows that did not exist yet (a row exists from its first update on).
  int64_t evictions = 0;
  int64_t write_backs = 0;       ///< Rows written to the host store (by eviction and flush).
  int64_t invalid_ids = 0;       ///< Over all ranks (from the key headers), so equal on every rank.
  int64_t host_rows = 0;         ///< Rows in the host store now.
  int64_t cached_rows = 0;       ///< Rows on the device now.
  int64_t loads = 0;             ///< Rows moved into device slots: misses, warm start, imports over a cached row.
  int64_t not_admitted = 0;      ///< Working keys, summed over steps, whose gradients were dropped: their ids had not occurred
                                 ///< min_count times.
  int64_t waiting_ids = 0;       ///< Ids now that have occurred, but not min_count times.
  int64_t deleted_idle = 0;      ///< Rows deleted because of max_idle_steps.
  int64_t deleted_max_rows = 0;  ///< Rows deleted because of max_rows.
};

struct MixCacheStats {
  std::vector<MixCacheTableStats> tables;
  int64_t steps = 0;         ///< Applied tickets = the optimizer's global step.
  int64_t foreign_keys = 0;  ///< Keys dropped because another rank owns them (0 in a correct run).
  int64_t pinned_slots = 0;  ///< Now.
  int64_t pinned_peak = 0;   ///< Highest ever.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;         ///< RAM of the host tier: store, directory, scratch.
  int64_t disk_bytes = 0;         ///< Size of the file of rows; 0 without a disk tier, as are the next two.
  int64_t disk_rows_read = 0;     ///< Records read from it, those moved inside it too.
  int64_t disk_rows_written = 0;  ///< Records written to it, those moved inside it too.
  int64_t record_bytes = 0;       ///< Of one row with its state, on its way between the tiers.
};

/// A chunk of exported rows: ids (n), rows (n, D), state (n, state_floats of this table); of a table that is tracked (row_life.h)
/// what is known of the ids (n), of another (0).
struct ExportChunk {
  std::vector<int64_t> ids;
  std::vector<float> rows;
  std::vector<float> state;
  std::vector<RowLife::Id> life;
};

class MixCache {
 public:
  virtual ~MixCache() = default;

  /// Plans and loads the working rows of `received`; pins them. *ticket names the batch. Waits (bounded by prefetch_wait_seconds)
  /// while pinned slots of other tickets leave too little room. RESOURCE_EXHAUSTED if this batch alone needs more than S slots:
  /// the message names cache, the table with most keys, keys needed, slots there are, and 'cache.slots' as the field to raise.
  virtual Status Prefetch(const ReceivedKeys& received, int64_t* ticket, TaskRunner* runner) = 0;
  /// Rows the ticket answers to each peer (W) = keys each peer asked for, in the order received.
  virtual Status TicketSplits(int64_t ticket, std::vector<int32_t>* splits) const = 0;
  /// rows (R, D) in the order received.
  virtual Status Lookup(int64_t ticket, float* rows, TaskRunner* runner) = 0;
  /// gradients (R, D) in the order received. Ends the ticket. Counts one optimizer step, also for R = 0. Counts the occurrences
  /// of ids in tables that are tracked; rows of ids below min_count are not updated and do not come into being.
  virtual Status Apply(int64_t ticket, const float* gradients, float learning_rate_scale, TaskRunner* runner) = 0;
  /// Ends the ticket without an update.
  virtual Status Release(int64_t ticket) = 0;
  /// Evaluation: rows (R, D) as they are now (dirty cached ones too); keys without a row get their initial value. Changes
  /// nothing.
  virtual Status Read(const ReceivedKeys& received, float* rows, TaskRunner* runner) = 0;
  /// Writes all dirty rows back to the host store; they stay cached.
  virtual Status Flush(TaskRunner* runner) = 0;
  /// Flushes when *cursor is 0, then returns up to max_rows rows of the table from *cursor on; *cursor becomes -1 at the end.
  /// Where the host store has no room for the flush (RESOURCE_EXHAUSTED, DATA_LOSS), it goes on without: the rows then come from
  /// the device, so that they can be saved elsewhere. After an error *cursor is as before.
  virtual Status Export(int32_t table, int64_t* cursor, int64_t max_rows, ExportChunk* chunk, TaskRunner* runner) = 0;
  /// Creates or overwrites rows this rank owns; others are ignored and counted in *foreign. ids (n) distinct; rows (n, D);
  /// state (n, state_floats) or empty for the initial state.
  virtual Status Import(int32_t table, Span<const int64_t> ids, const float* rows, const float* state, int64_t* foreign,
                        TaskRunner* runner) = 0;
  /// ages (A * kAgeBins): rows of the A tables with max_rows by age (RowLife::Ages), those of tables for which no sweep is due
  /// now are zeros. To be summed over all ranks, for Sweep.
  virtual Status RowAges(std::vector<int64_t>* ages) const = 0;
  /// Deletes the rows that max_idle_steps and max_rows end at this step (RowLife), from device and host; nothing where no sweep
  /// is due. ages: RowAges summed over all ranks. *deleted: how many. The dropped rows' slots are free then.
  virtual Status Sweep(Span<const int64_t> ages, int64_t* deleted, TaskRunner* runner) = 0;
  /// Ids of the table that wait to occur min_count times, in no particular order, in chunks of at most max_ids (perhaps none):
  /// from *cursor, 0 at the start, on; it is -1 at the end. The table must not be trained in between.
  virtual Status ExportWaiting(int32_t table, int64_t* cursor, int64_t max_ids, std::vector<int64_t>* ids,
                               std::vector<RowLife::Id>* life) const = 0;
  /// Restores what is known of the ids (n) that this rank owns, others are counted in *foreign; after Import, which takes rows
  /// for just trained and as often seen as needed. Ids without a row wait. Nothing for tables that are not tracked.
  virtual Status ImportLife(int32_t table, Span<const int64_t> ids, Span<const RowLife::Id> life, int64_t* foreign) = 0;
  /// A hint for the policy `lookahead`, which changes speed and never a number: the keys of a batch that will be prefetched after
  /// those announced before. Its Prefetch ends the announcement; so does the Prefetch of a batch announced later, as this one was
  /// skipped then. *noted is false where the policy is another or options().window batches are announced already. Keys are looked
  /// at, and checked, only where slots may run out before the batch comes. Moves no rows and does not wait for Prefetch; may be
  /// called from a thread of its own.
  virtual Status Announce(const ReceivedKeys& received, bool* noted) = 0;
  /// The announced batches will not be prefetched: what they need is no longer kept for them.
  virtual void EndAnnouncements() = 0;
  /// How often ids (n, distinct) occur, counts (n) >= 0: the order in which the policy `freq` keeps rows. Ids of other ranks are
  /// ignored and counted in *foreign; ids without a count have 0. FAILED_PRECONDITION with another policy.
  virtual Status SetFrequencies(int32_t table, Span<const int64_t> ids, Span<const int64_t> counts, int64_t* foreign) = 0;
  /// Loads the rows with the largest counts (SetFrequencies) into the free slots; nothing is evicted and no row
  /// is created. *rows: how many were loaded.
  virtual Status WarmStart(int64_t* rows, TaskRunner* runner) = 0;
  /// Optimizer state floats of one row of the table.
  virtual int32_t state_floats(int32_t table) const = 0;
  /// Optimizer's global step; SetStep is for restore. FAILED_PRECONDITION while tickets are open.
  virtual int64_t step() const = 0;
  virtual Status SetStep(int64_t step) = 0;
  virtual MixCacheStats Stats() const = 0;
  virtual const MixCacheOptions& options() const = 0;
};

/// Checks the options (INVALID_ARGUMENT naming field, value and what is allowed), allocates the device tier.
Result<std::unique_ptr<MixCache>> MakeMixCache(const MixCacheOptions& options, std::unique_ptr<DeviceBackend> backend,
                                               std::unique_ptr<HostStore> store);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_MIX_CACHE_H_
