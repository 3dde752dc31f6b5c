// CudaRuntime: the runtime of a CUDA device. The members' definitions (cuda_runtime.cu) are all calls of the CUDA API that there
// are. See runtime_types.h for what the members promise, and HostRuntime for the meaning of each. Launch needs nvcc.
#ifndef HVD_CTR_CUDA_CUDA_RUNTIME_H_
#define HVD_CTR_CUDA_CUDA_RUNTIME_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "tf_ops/core/status.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

#if defined(__CUDACC__)
/// Runs the kernel's blocks from first_block on.
template <typename Kernel>
__global__ void __launch_bounds__(kBlockThreads) RunKernel(const Kernel kernel, const int64_t first_block) {
  kernel(first_block + blockIdx.x, static_cast<int32_t>(threadIdx.x));
}
#endif

class CudaRuntime {
 public:
  /// device: CUDA's number, or kCurrentDevice, which leaves the choice to the caller of every call until Bind.
  explicit CudaRuntime(int device = kCurrentDevice) : device_(device) {}

  Status Bind();
  Status Use() const;
  Status Allocate(int64_t bytes, void** memory) const;
  void Free(void* memory) const;
  Status AllocatePinned(int64_t bytes, void** memory) const;
  void FreePinned(void* memory) const;

  Status CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status CopyToHost(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status CopyOnDevice(void* to, const void* from, int64_t bytes, Stream stream) const;
  Status Zero(void* memory, int64_t bytes, Stream stream) const;

  /// The stream does not wait for the default stream, nor that for it.
  Status NewStream(Stream* stream) const;
  void DestroyStream(Stream stream) const;
  Status NewEvent(Event* event, bool timed = false) const;
  void DestroyEvent(Event event) const;
  Status Record(Event event, Stream stream) const;
  Status Wait(Stream stream, Event event) const;
  Status Synchronize(Stream stream) const;
  Status Synchronize(Event event) const;
  Status Elapsed(Event from, Event to, double* seconds) const;

  Status Describe(std::string* text) const;

#if defined(__CUDACC__)
  template <typename Kernel>
  Status Launch(const char* name, const Geometry& geometry, const Kernel& kernel, Stream stream) const {
    static_assert(std::is_trivially_copyable<Kernel>::value, "a kernel is copied to the device as bytes");
    return LaunchBlocks(name, reinterpret_cast<const void*>(&RunKernel<Kernel>), geometry, &kernel, stream);
  }
#endif

 private:
  /// function: a RunKernel; kernel: the value of its first parameter.
  Status LaunchBlocks(const char* name, const void* function, const Geometry& geometry, const void* kernel, Stream stream) const;

  int device_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CUDA_RUNTIME_H_
