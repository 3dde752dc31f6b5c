// DeviceRows: the DeviceBackend over a runtime. MakeCudaBackend and MakeCudaOnCpuBackend are this class with two runtimes; what
// it promises stands in cuda_backend.h.
//
// Streams. Compute calls (GatherRows, SegmentSum, UpdateRows, PlaceRows) launch on the caller's stream. Their integer arguments
// go to the device on a stream of their own, ahead of what the caller's stream is busy with. Transfers (StoreRecords,
// StoreFirstRecords, FetchRecords) run on a third. Events join them:
//   loaded_    after the last load. Compute calls wait for it.
//   computed_  after the last compute call. Transfers wait for it: an evicted row may still be read or updated.
// Between BeginMoves and EndMoves a transfer waits for the compute calls before BeginMoves only, and compute calls wait for none
// of these loads before EndMoves, so the moves of the next batch overlap the step of this one.
//
// Locks: compute_mutex_ and transfer_mutex_ make the sequences of calls that enqueue one operation whole. Neither is held while
// memory is filled or a device is waited for, and never both.
#ifndef HVD_CTR_CUDA_DEVICE_ROWS_H_
#define HVD_CTR_CUDA_DEVICE_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>

#include "tf_ops/core/backend_checks.h"
#include "tf_ops/core/device_backend.h"
#include "tf_ops/cuda/row_launches.h"
#include "tf_ops/cuda/runtime_types.h"
#include "tf_ops/cuda/segment_order.h"
#include "tf_ops/cuda/staging.h"

namespace hvd_ctr {

/// Offsets of the parts of a staging block.
class StagingParts {
 public:
  /// Offset of a part of so many bytes.
  int64_t Add(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ += (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

template <typename T>
T* PartAt(const void* memory, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(const_cast<void*>(memory)) + offset);
}

/// What stands in a staging block: records to load, and how many of its bytes the device needs.
struct StagedLoad {
  int64_t records = 0;
  int64_t bytes = 0;
};

/// Leaves kNoSlot out: used and sources (n), the other slots and where they stand. Returns how many there are.
inline int64_t UsedSlots(Span<const Slot> slots, Slot* used, int32_t* sources) {
  int64_t n = 0;
  for (int64_t i = 0; i < slots.size(); ++i) {
    used[n] = slots[i];
    sources[n] = static_cast<int32_t>(i);
    n += slots[i] != kNoSlot;
  }
  return n;
}

template <typename Runtime>
class DeviceRows final : public DeviceBackend {
 public:
  /// name: a literal, for messages.
  DeviceRows(const char* name, Runtime runtime) : name_(name), runtime_(runtime), checks_(name) {}
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;
  ~DeviceRows() override;

  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) override;
  /// Of the arena; staging memory and workspaces come on top of it.
  int64_t allocated_bytes() const override { return bytes_; }

  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override;
  Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init, TaskRunner* runner) override;
  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override;

  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override;
  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override;
  Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                    Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                    TaskRunner* runner) override;

  Status Workspace(int64_t floats, float** memory) override;
  Status PlaceRows(Span<const int32_t> positions, const float* records, const RecordWidth& width, float* rows,
                   TaskRunner* runner) const override;
  Status BeginMoves() override;
  Status EndMoves() override;

 private:
  /// Records are moved in parts of about so many bytes.
  static constexpr int64_t kPartBytes = int64_t{4} << 20;
  /// Least rows for a thread that fills or empties staging memory.
  static constexpr int64_t kRowGrain = 256;
  /// So many compute calls, and transfers, may be on their way before the caller waits for the first.
  static constexpr int kComputeBlocks = 8;
  static constexpr int kTransferBlocks = 4;

  int64_t packed_floats() const { return arena_.layout.packed_stride(); }
  int64_t part_rows() const { return std::max<int64_t>(1, kPartBytes / (packed_floats() * static_cast<int64_t>(sizeof(float)))); }

  /// Calls move(slots, offset) -> Status for parts of the slots.
  template <typename Move>
  Status ForParts(Span<const Slot> slots, const Move& move) const {
    for (int64_t begin = 0; begin < slots.size(); begin += part_rows()) {
      HVD_CTR_RETURN_IF_ERROR(move(slots.subspan(begin, std::min(part_rows(), slots.size() - begin)), begin));
    }
    return Status::Ok();
  }

  /// A compute call: fill(pinned) writes `bytes`, which come to the device, enqueue(device, stream) launches.
  template <typename Fill, typename Enqueue>
  Status Compute(int64_t bytes, TaskRunner* runner, const Fill& fill, const Enqueue& enqueue) const;
  Status Upload(StagingBlock* block, int64_t bytes, Stream stream) const;
  Status JoinCompute(Stream stream) const;

  /// A load: fill(pinned) -> StagedLoad; enqueue(device, records) launches on transfer_.
  template <typename Fill, typename Enqueue>
  Status Load(int64_t pinned_bytes, int64_t device_bytes, const Fill& fill, const Enqueue& enqueue);
  Status JoinTransfer() const { return moving_ ? Status::Ok() : runtime_.Wait(transfer_, computed_); }

  Status StorePart(Span<const Slot> slots, const float* records, TaskRunner* runner);
  Status StoreFirstPart(Span<const Slot> slots, const Key* keys, Span<const RowInit> tables);
  Status FetchPart(Span<const Slot> slots, float* records, TaskRunner* runner) const;
  Status TakeUpdateScratch(UpdateRequest* request);

  const char* const name_;
  Runtime runtime_;
  BackendChecks checks_;
  RecordArena arena_;
  int64_t bytes_ = 0;
  Stream uploads_ = nullptr;
  Stream transfer_ = nullptr;
  Event loaded_;
  Event computed_;
  mutable StagingPool<Runtime> compute_staging_{kComputeBlocks};
  mutable StagingPool<Runtime> transfer_staging_{kTransferBlocks};

  mutable std::mutex compute_mutex_;
  // Under compute_mutex_.
  mutable Stream last_stream_ = nullptr;  // Of the last compute call.
  GrowingMemory workspace_;
  GrowingMemory update_scratch_;

  mutable std::mutex transfer_mutex_;
  // Under transfer_mutex_.
  bool moving_ = false;
  bool moved_ = false;
};

}  // namespace hvd_ctr

#include "tf_ops/cuda/device_rows_compute.h"
#include "tf_ops/cuda/device_rows_transfer.h"

#endif  // HVD_CTR_CUDA_DEVICE_ROWS_H_
