// CallAreas: what one call needs of a staging block (staging.h), by type and number of elements.
//
//   CallAreas areas;
//   const auto ids = areas.Staged<int32_t>(n);                    // filled in pinned memory, copied to the device
//   const auto sums = areas.Scratch<float>(n);                    // device only
//   ... pool.Take(runtime, areas.staged_bytes(), areas.bytes(), &block) ...
//   const CallMemory memory(block);
//   std::copy_n(from, n, memory.host(ids));
//   ... launches that use memory.device(ids), memory.device(sums) ...
#ifndef HVD_CTR_CUDA_CALL_AREAS_H_
#define HVD_CTR_CUDA_CALL_AREAS_H_

#include <cstddef>
#include <cstdint>

#include "tf_ops/cuda/runtime_types.h"
#include "tf_ops/cuda/staging.h"

namespace hvd_ctr {

/// n elements at a place of a block.
template <typename T>
struct CallArea {
  int64_t offset = 0;
  int64_t n = 0;
};

class CallAreas {
 public:
  /// All staged areas come before the first scratch area.
  template <typename T>
  CallArea<T> Staged(int64_t n) {
    const CallArea<T> area = Scratch<T>(n);
    staged_bytes_ = bytes_;
    return area;
  }
  template <typename T>
  CallArea<T> Scratch(int64_t n) {
    const CallArea<T> area{bytes_, n};
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    bytes_ += (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    return area;
  }
  int64_t bytes() const { return bytes_; }
  int64_t staged_bytes() const { return staged_bytes_; }

 private:
  int64_t bytes_ = 0;
  int64_t staged_bytes_ = 0;
};

/// An area of no elements is nullptr.
class CallMemory {
 public:
  explicit CallMemory(const StagingBlock* block) : block_(block) {}

  template <typename T>
  T* host(const CallArea<T>& area) const {
    return At(block_->pinned.data, area);
  }
  template <typename T>
  T* device(const CallArea<T>& area) const {
    return At(block_->device.data, area);
  }

 private:
  template <typename T>
  static T* At(void* base, const CallArea<T>& area) {
    return area.n == 0 ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(base) + area.offset);
  }

  const StagingBlock* block_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CALL_AREAS_H_
