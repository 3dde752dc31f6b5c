// Staging memory between host and device: blocks of pinned host memory and device memory, used again and again, so that a steady
// state allocates nothing.
//
//   StagingPool<Runtime> pool(4);
//   StagingBlock* block = nullptr;
//   HVD_CTR_RETURN_IF_ERROR(pool.Take(runtime, pinned_bytes, device_bytes, &block));
//   ... fill block->pinned, copy it to block->device on a stream, launch kernels that read it there: status ...
//   return pool.GiveBack(runtime, block, stream, status);
//
// Invariant: a block is handed out again only when the work that was on the stream at its GiveBack is done. The stream must not
// hold work on the block that other streams do, unless it waits for them.
#ifndef HVD_CTR_CUDA_STAGING_H_
#define HVD_CTR_CUDA_STAGING_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// Memory that grows, by half at least, and never shrinks. What it held is lost.
struct GrowingMemory {
  void* data = nullptr;
  int64_t bytes = 0;

  /// allocate(bytes, void**) -> Status, free(void*).
  template <typename Allocate, typename Free>
  Status Grow(int64_t needed, const Allocate& allocate, const Free& free) {
    if (needed <= bytes) return Status::Ok();
    const int64_t grown = std::max(needed, bytes + bytes / 2);
    free(data);
    data = nullptr;
    bytes = 0;
    HVD_CTR_RETURN_IF_ERROR(allocate(grown, &data));
    bytes = grown;
    return Status::Ok();
  }
};

template <typename Runtime>
Status GrowOnDevice(const Runtime& runtime, int64_t needed, GrowingMemory* memory) {
  return memory->Grow(
      needed, [&](int64_t bytes, void** data) { return runtime.Allocate(bytes, data); }, [&](void* data) { runtime.Free(data); });
}

struct StagingBlock {
  GrowingMemory pinned;
  GrowingMemory device;
  Event uploaded;  ///< For whoever fills the device part on another stream than the one that uses it.
  Event done;
};

template <typename Runtime>
class StagingPool {
 public:
  /// So many blocks are made before one is used again.
  explicit StagingPool(int blocks) : wanted_(blocks) {}

  Status Take(const Runtime& runtime, int64_t pinned_bytes, int64_t device_bytes, StagingBlock** block) {
    StagingBlock* taken = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty() && static_cast<int>(all_.size()) >= wanted_) {
        // The one that was given back longest ago.
        taken = free_.front();
        free_.erase(free_.begin());
      } else {
        HVD_CTR_RETURN_IF_ERROR(Make(runtime, &taken));
      }
    }
    Status status = runtime.Synchronize(taken->done);
    if (status.ok()) {
      status = taken->pinned.Grow(
          pinned_bytes, [&](int64_t bytes, void** data) { return runtime.AllocatePinned(bytes, data); },
          [&](void* data) { runtime.FreePinned(data); });
    }
    if (status.ok()) status = GrowOnDevice(runtime, device_bytes, &taken->device);
    if (!status.ok()) {
      PutFree(taken);
      return status;
    }
    *block = taken;
    return Status::Ok();
  }

  /// status: of the work on the block. Returns it, or what went wrong here. After an error the stream is waited for.
  Status GiveBack(const Runtime& runtime, StagingBlock* block, Stream stream, Status status) {
    const Status recorded = runtime.Record(block->done, stream);
    if (status.ok()) status = recorded;
    if (!status.ok()) (void)runtime.Synchronize(stream).ok();
    PutFree(block);
    return status;
  }

  /// Only while nobody uses the pool. Waits for the work on its blocks.
  void Destroy(const Runtime& runtime) {
    for (const std::unique_ptr<StagingBlock>& block : all_) {
      (void)runtime.Synchronize(block->done).ok();
      runtime.FreePinned(block->pinned.data);
      runtime.Free(block->device.data);
      runtime.DestroyEvent(block->uploaded);
      runtime.DestroyEvent(block->done);
    }
    all_.clear();
    free_.clear();
  }

 private:
  // Needs mutex_.
  Status Make(const Runtime& runtime, StagingBlock** made) {
    auto block = std::make_unique<StagingBlock>();
    HVD_CTR_RETURN_IF_ERROR(runtime.NewEvent(&block->uploaded));
    const Status status = runtime.NewEvent(&block->done);
    if (!status.ok()) {
      runtime.DestroyEvent(block->uploaded);
      return status;
    }
    free_.reserve(all_.size() + 1);
    *made = block.get();
    all_.push_back(std::move(block));
    return Status::Ok();
  }

  void PutFree(StagingBlock* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(block);
  }

  const int wanted_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<StagingBlock>> all_;
  std::vector<StagingBlock*> free_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_STAGING_H_
