// Inside of MixCache: the class behind MakeMixCache. Not for inclusion outside tf_ops/core/mix_cache*.cc.
//
// Locks, in the order in which they may be taken:
//   prefetch_mutex_  one Prefetch at a time, also while it waits for room.
//   order_mutex_     one at a time of Prefetch (after its wait), Read, Flush, Export, Import, Sweep: whoever reads or changes
//                    the directory, or moves rows between device and host. So a row is read from the host only after its
//                    earlier write-back (freshness).
//   rows_mutex_      device rows, the tickets' content and life_: Apply, Release, Import and Sweep change them (exclusive);
//                    Lookup, Read, Flush and Export read (shared). Prefetch moves rows of unpinned slots only, which nobody
//                    else touches then: order_mutex_ suffices.
//   announce_mutex_  one Announce at a time; it needs neither of the three above, so that it never waits for rows on their way.
//   mutex_           the small metadata: tickets, pins, dirty flags, policy, counters. Never held while rows move.
// The directory is written under order_mutex_ and mutex_, so holding either allows to read it.
#ifndef HVD_CTR_CORE_MIX_CACHE_IMPL_H_
#define HVD_CTR_CORE_MIX_CACHE_IMPL_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tf_ops/core/cache_plan.h"
#include "tf_ops/core/eviction_policy.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/core/request_merge.h"
#include "tf_ops/core/row_life.h"
#include "tf_ops/core/slot_directory.h"

namespace hvd_ctr {

class MixCacheImpl final : public MixCache {
 public:
  MixCacheImpl(const MixCacheOptions& options, std::unique_ptr<DeviceBackend> backend, std::unique_ptr<HostStore> store);
  /// Call once, before anything else.
  Status Allocate();

  Status Prefetch(const ReceivedKeys& received, int64_t* ticket, TaskRunner* runner) override;
  Status TicketSplits(int64_t ticket, std::vector<int32_t>* splits) const override;
  Status Lookup(int64_t ticket, float* rows, TaskRunner* runner) override;
  Status Apply(int64_t ticket, const float* gradients, float learning_rate_scale, TaskRunner* runner) override;
  Status Release(int64_t ticket) override;
  Status Read(const ReceivedKeys& received, float* rows, TaskRunner* runner) override;
  Status Flush(TaskRunner* runner) override;
  Status Export(int32_t table, int64_t* cursor, int64_t max_rows, ExportChunk* chunk, TaskRunner* runner) override;
  Status Import(int32_t table, Span<const int64_t> ids, const float* rows, const float* state, int64_t* foreign,
                TaskRunner* runner) override;
  Status RowAges(std::vector<int64_t>* ages) const override;
  Status Sweep(Span<const int64_t> ages, int64_t* deleted, TaskRunner* runner) override;
  Status ExportWaiting(int32_t table, int64_t* cursor, int64_t max_ids, std::vector<int64_t>* ids,
                       std::vector<RowLife::Id>* life) const override;
  Status ImportLife(int32_t table, Span<const int64_t> ids, Span<const RowLife::Id> life, int64_t* foreign) override;
  Status Announce(const ReceivedKeys& received, bool* noted) override;
  void EndAnnouncements() override;
  Status SetFrequencies(int32_t table, Span<const int64_t> ids, Span<const int64_t> counts, int64_t* foreign) override;
  Status WarmStart(int64_t* rows, TaskRunner* runner) override;
  int32_t state_floats(int32_t table) const override { return state_floats_[static_cast<size_t>(table)]; }
  int64_t step() const override;
  Status SetStep(int64_t step) override;
  MixCacheStats Stats() const override;
  const MixCacheOptions& options() const override { return options_; }

  /// Rows moved at a time: bounds the staging memory and keeps it in the processor's cache.
  static constexpr int64_t kMoveRows = 4096;

 private:
  static constexpr int64_t kRowGrain = 256;
  static constexpr int64_t kDeviceCursor = int64_t{1} << 62;  // Of Export: from here on, rows that only the device has.

  struct Ticket {
    int64_t number = 0;
    std::vector<Slot> slots;                   // (K)
    std::vector<int32_t> tables;               // (K)
    std::vector<int32_t> inverse;              // (R)
    std::vector<Slot> received_slots;          // (R) slots[inverse], kNoSlot for foreign keys.
    std::vector<int32_t> splits;               // (W)
    std::vector<RowLife::Occurrence> tracked;  // Those of the K keys whose tables are tracked, in their order.
  };

  // Prefetch: mix_cache_prefetch.cc.
  Status PrefetchSerially(const ReceivedKeys& received, int64_t* number, TaskRunner* runner);
  Status CheckCapacity() const;
  Status PlanOrWait(std::unique_lock<std::mutex>* order);
  Status NoRoom(double waited_seconds) const;
  std::unique_ptr<Ticket> FillTicket(const ReceivedKeys& received);
  Status MovePlannedRows(TaskRunner* runner);
  Status WriteBackAndLoad(bool* overwritten, TaskRunner* runner);
  Status LoadChunk(int64_t begin, int64_t end, bool* overwritten, TaskRunner* runner);
  void CountEvictions();
  int64_t OpenTicket(std::unique_ptr<Ticket> ticket, const ReceivedKeys& received);
  void CountBatch(const ReceivedKeys& received);
  int64_t ScratchBytes() const;

  // Flush, Read, Export, Import: mix_cache_export.cc.
  Status FlushInOrder(TaskRunner* runner);
  Status ReadInOrder(const ReceivedKeys& received, float* rows, TaskRunner* runner);
  Status ReadHostChunk(const ReceivedKeys& received, Span<const int32_t> sources, float* rows, TaskRunner* runner);
  Status ExportInOrder(int32_t table, int64_t* cursor, int64_t max_rows, ExportChunk* chunk, TaskRunner* runner);
  Status ExportHostRows(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids, std::vector<float>* records,
                        TaskRunner* runner);
  Status ExportDeviceRows(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
                          std::vector<float>* records, TaskRunner* runner);
  int64_t FindDeviceOnlyRows(int32_t table, int64_t slot, int64_t max_rows);
  Status ImportInOrder(int32_t table, Span<const int64_t> ids, const float* rows, const float* state, int64_t* foreign,
                       TaskRunner* runner);
  Status CheckImport(int32_t table, Span<const int64_t> ids);
  Status ImportChunk(int32_t table, int64_t begin, int64_t end, const float* rows, const float* state, TaskRunner* runner);

  // What row_life.h decides: mix_cache_life.cc.
  void TrackKeys(const ReceivedKeys& received, Ticket* ticket);
  Span<const Slot> AdmittedSlots(const Ticket& ticket);
  void NoteAdmitted(const Ticket& ticket);  // Needs mutex_.
  Status SweepInOrder(Span<const int64_t> ages, int64_t* deleted, TaskRunner* runner);
  Status DeleteRows(Span<const Key> keys, int64_t MixCacheTableStats::* counter, TaskRunner* runner);
  Status DeleteChunk(Span<const Key> keys, int64_t MixCacheTableStats::* counter, TaskRunner* runner);
  void NoteLife();  // Needs mutex_ and rows_mutex_.

  // Announce, SetFrequencies, WarmStart: mix_cache_hints.cc.
  Status SetFrequenciesInOrder(int32_t table, Span<const int64_t> ids, Span<const int64_t> counts, int64_t* foreign);
  Status WarmStartInOrder(int64_t* rows, TaskRunner* runner);
  Status WarmChunk(Span<const Key> keys, TaskRunner* runner);

  // Shared by the parts: mix_cache.cc.
  std::string Where() const;
  Status CheckReceived(const ReceivedKeys& received) const;
  Status CheckTable(int32_t table, const char* what) const;
  Status FindTicket(int64_t number, const char* what, Ticket** ticket) const;  // Needs mutex_.
  /// updated: the slots whose rows have changed; kNoSlot among them. Needs mutex_.
  void EndTicket(Ticket* ticket, Span<const Slot> updated);
  /// Device -> host, in chunks; counts the rows as write-backs. Needs order_mutex_, and nobody may change these rows meanwhile.
  Status WriteBack(Span<const Key> keys, Span<const Slot> slots, TaskRunner* runner);
  /// Host -> device: loads the keys' rows into the slots; those that do not exist get their first value. found (n): which did.
  /// *overwritten is set before the first slot is. At most kMoveRows keys. Needs order_mutex_.
  Status FillSlots(Span<const Key> keys, Span<const Slot> slots, uint8_t* found, bool* overwritten, TaskRunner* runner);
  Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, TaskRunner* runner) {
    return backend_->StoreFirstRecords(slots, keys, {row_inits_, static_cast<int32_t>(dim_), record_floats_}, runner);
  }
  /// First value (D) of the key's row, as the device would give it.
  void FirstRow(const Key& key, float* row) const;
  float* Staging(int64_t rows);
  /// No exception leaves the cache: running out of memory becomes RESOURCE_EXHAUSTED.
  template <typename Function>
  Status Guard(const char* what, const Function& function) const {
    try {
      return function();
    } catch (const std::bad_alloc&) {
      return MakeStatus(StatusCode::kResourceExhausted, Where(), ": no host memory for ", what,
                        "; use more ranks or a machine with more memory, or lower train.global_batch");
    }
  }

  // Constant after Allocate.
  const MixCacheOptions options_;
  const int64_t dim_;
  std::vector<RowOptimizerOptions> optimizers_;  // (T)
  std::vector<int32_t> state_floats_;            // (T)
  std::vector<RowInit> row_inits_;               // (T)
  int64_t record_floats_ = 0;                    // dim + the largest state of all tables; shorter states are padded with zeros.
  std::unique_ptr<DeviceBackend> backend_;
  std::unique_ptr<HostStore> store_;

  std::mutex prefetch_mutex_;
  // Of the Prefetch that runs; under prefetch_mutex_.
  MergedKeys merged_;
  CachePlan plan_;
  PlanScratch plan_scratch_;

  std::mutex order_mutex_;
  // Scratch under order_mutex_.
  RequestMerge merge_;
  MergedKeys other_keys_;  // Of Read and Import.
  std::vector<Slot> other_slots_;
  std::vector<int32_t> sources_;  // Of Read and Import: positions of the caller's rows to move.
  std::vector<Key> move_keys_;
  std::vector<Slot> move_slots_;
  std::vector<Slot> part_slots_;  // Of FillSlots: the slots to fill now, kNoSlot for the others.
  std::vector<uint8_t> found_;    // (M) whether the host had the row of load m.
  std::vector<float> staging_;    // Records on their way.

  std::mutex announce_mutex_;
  // Scratch under announce_mutex_.
  RequestMerge announce_merge_;
  MergedKeys announced_;
  std::vector<Slot> announced_slots_;

  mutable std::shared_mutex rows_mutex_;
  RowLife life_;
  // Of the Apply that runs; under rows_mutex_ held exclusively.
  std::vector<uint8_t> admitted_;     // Of each of the ticket's tracked keys.
  std::vector<Slot> admitted_slots_;  // (K) kNoSlot where the row is not trained.

  mutable std::mutex mutex_;
  std::condition_variable released_;
  SlotDirectory directory_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> pins_;   // (S) open tickets that hold the slot.
  std::vector<uint8_t> dirty_;  // (S) the device has a newer row than the host.
  std::vector<std::unique_ptr<Ticket>> open_;
  std::vector<std::unique_ptr<Ticket>> spare_;  // Ended tickets, kept for their memory.
  int64_t next_ticket_ = 1;
  int64_t releases_ = 0;  // Tickets ended; tells a waiting Prefetch that there may be more room.
  MixCacheStats stats_;   // Counters only; the gauges are filled in by Stats().
  int64_t pinned_slots_ = 0;
  int64_t scratch_bytes_ = 0;  // Scratch memory that Stats may not look at, as of the last Prefetch.
  int64_t sums_bytes_ = 0;
  int64_t announce_bytes_ = 0;
  int64_t life_bytes_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_MIX_CACHE_IMPL_H_
