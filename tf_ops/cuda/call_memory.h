// CallMemory: pinned and device memory for what one call hands to the device. It is kept from call to call: a few sets in turn,
// each used again only when the work of its last call is done, so calls may be on different streams and the host runs ahead of
// the device.
//
//   CallMemory<Runtime> memory(runtime);
//   CallAreas areas;
//   const auto ids = areas.Staged<int32_t>(n);                    // filled here, copied to the device
//   const auto sums = areas.Scratch<float>(n);                    // device only
//   HVD_CTR_RETURN_IF_ERROR(memory.Begin(areas));                 // Begin .. End: one thread at a time
//   std::copy_n(from, n, memory.host(ids));
//   HVD_CTR_RETURN_IF_ERROR(memory.CopyStaged(stream));
//   ... launches that use memory.device(ids), memory.device(sums) on the stream ...
//   HVD_CTR_RETURN_IF_ERROR(memory.End(stream));                  // after a failure too
#ifndef HVD_CTR_CUDA_CALL_MEMORY_H_
#define HVD_CTR_CUDA_CALL_MEMORY_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "tf_ops/core/status.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// n elements at a place of a call's memory. n == 0: nullptr.
template <typename T>
struct CallArea {
  int64_t offset = 0;
  int64_t n = 0;
};

/// Adds up what a call needs.
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

template <typename Runtime>
class CallMemory {
 public:
  explicit CallMemory(const Runtime& runtime) : runtime_(runtime) {}
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;
  ~CallMemory() {
    for (Set& set : sets_) {
      if (set.in_use) static_cast<void>(runtime_.Synchronize(set.done).ok());
      runtime_.FreePinned(set.host);
      runtime_.Free(set.device);
      if (set.has_event) runtime_.DestroyEvent(set.done);
    }
  }

  Status Begin(const CallAreas& areas) {
    turn_ = (turn_ + 1) % sets_.size();
    Set& set = sets_[turn_];
    if (!set.has_event) HVD_CTR_RETURN_IF_ERROR(runtime_.NewEvent(&set.done));
    set.has_event = true;
    if (set.in_use) HVD_CTR_RETURN_IF_ERROR(runtime_.Synchronize(set.done));
    set.in_use = false;
    staged_bytes_ = areas.staged_bytes();
    if (areas.staged_bytes() > set.host_bytes) {
      runtime_.FreePinned(set.host);
      set.host = nullptr;
      set.host_bytes = 0;
      const int64_t bytes = Roomy(areas.staged_bytes());
      HVD_CTR_RETURN_IF_ERROR(runtime_.AllocatePinned(bytes, &set.host));
      set.host_bytes = bytes;
    }
    if (areas.bytes() > set.device_bytes) {
      runtime_.Free(set.device);
      set.device = nullptr;
      set.device_bytes = 0;
      const int64_t bytes = Roomy(areas.bytes());
      HVD_CTR_RETURN_IF_ERROR(runtime_.Allocate(bytes, &set.device));
      set.device_bytes = bytes;
    }
    return Status::Ok();
  }

  Status CopyStaged(Stream stream) const {
    return runtime_.CopyToDevice(sets_[turn_].device, sets_[turn_].host, staged_bytes_, stream);
  }

  Status End(Stream stream) {
    sets_[turn_].in_use = true;
    return runtime_.Record(sets_[turn_].done, stream);
  }

  template <typename T>
  T* host(const CallArea<T>& area) const {
    return At(sets_[turn_].host, area);
  }
  template <typename T>
  T* device(const CallArea<T>& area) const {
    return At(sets_[turn_].device, area);
  }

 private:
  struct Set {
    void* host = nullptr;
    void* device = nullptr;
    int64_t host_bytes = 0;
    int64_t device_bytes = 0;
    Event done;
    bool has_event = false;
    bool in_use = false;
  };

  /// A quarter more than asked for: batches differ in size, and a new allocation waits for the device.
  static int64_t Roomy(int64_t bytes) { return bytes + bytes / 4; }

  template <typename T>
  static T* At(void* base, const CallArea<T>& area) {
    return area.n == 0 ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(base) + area.offset);
  }

  Runtime runtime_;
  std::array<Set, 3> sets_;
  size_t turn_ = 0;
  int64_t staged_bytes_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CALL_MEMORY_H_
