// HostRuntime: the runtime whose device is this machine's memory and whose launches are loops over the same geometry. Streams and
// events order nothing, because everything is done when a call returns. See runtime_types.h for what its members promise.
//
//   HostRuntime runtime;
//   void* memory = nullptr;
//   HVD_CTR_RETURN_IF_ERROR(runtime.Allocate(bytes, &memory));
//   HVD_CTR_RETURN_IF_ERROR(runtime.Launch("Double", layout.geometry(), Double{...}, nullptr));
#ifndef HVD_CTR_CUDA_HOST_RUNTIME_H_
#define HVD_CTR_CUDA_HOST_RUNTIME_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "tf_ops/core/status.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

class HostRuntime {
 public:
  explicit HostRuntime(int /*device*/ = kCurrentDevice) {}

  /// From now on the device is the one that is current to the calling thread, unless one was named.
  Status Bind() { return Status::Ok(); }
  /// Makes the device current to the calling thread; first of all members, once in every call from outside.
  Status Use() const { return Status::Ok(); }
  /// Not zeroed. RESOURCE_EXHAUSTED with the bytes asked for, also where the machine has less memory than that in all.
  Status Allocate(int64_t bytes, void** memory) const;
  /// nullptr is allowed, here and below. Waits for work that uses the memory.
  void Free(void* memory) const;
  Status AllocatePinned(int64_t bytes, void** memory) const { return Allocate(bytes, memory); }
  void FreePinned(void* memory) const { Free(memory); }

  /// `from` of CopyToDevice and `to` of CopyToHost are pinned where the copy shall not hold up the caller.
  Status CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status CopyToHost(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status CopyOnDevice(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status Zero(void* memory, int64_t bytes, Stream stream) const;

  Status NewStream(Stream* stream) const;
  void DestroyStream(Stream stream) const;
  /// timed: for Elapsed.
  Status NewEvent(Event* event, bool timed = false) const;
  void DestroyEvent(Event event) const;
  Status Record(Event event, Stream stream) const;
  Status Wait(Stream stream, Event event) const;
  Status Synchronize(Stream stream) const;
  Status Synchronize(Event event) const;
  /// Time between the work before the two records; both timed and done.
  Status Elapsed(Event from, Event to, double* seconds) const;

  /// E.g. "NVIDIA H100 80GB HBM3, compute capability 9.0, 79 GiB".
  Status Describe(std::string* text) const;

  template <typename Kernel>
  Status Launch(const char* name, const Geometry& geometry, const Kernel& kernel, Stream /*stream*/) const {
    static_assert(std::is_trivially_copyable<Kernel>::value, "a kernel is copied to the device as bytes");
    HVD_CTR_RETURN_IF_ERROR(CheckGeometry(name, geometry));
    return ForLaunches(geometry, kMostBlocks, [&](int64_t first, int64_t count) {
      for (int64_t block = first; block < first + count; ++block) {
        for (int32_t thread = 0; thread < geometry.threads; ++thread) kernel(block, thread);
      }
      return Status::Ok();
    });
  }

 private:
  static Status CheckGeometry(const char* name, const Geometry& geometry);
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_HOST_RUNTIME_H_
