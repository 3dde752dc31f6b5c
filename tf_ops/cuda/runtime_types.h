// Handles of a runtime. A runtime is what a device backend and the device kernels need of a device: memory, streams, events,
// copies, launches. CudaRuntime and HostRuntime have the same members, and code takes either as a template parameter.
//
// What a runtime promises: work given to one stream runs in order; Wait(stream, event) holds what comes later on the stream back
// until all that was on the event's stream at its Record is done; copies and launches may return before they are done; members
// may be called from several threads. Sizes of 0 bytes and 0 blocks do nothing. Every failure is a Status that names the call and
// the sizes. Memory is aligned to 256 bytes.
#ifndef HVD_CTR_CUDA_RUNTIME_TYPES_H_
#define HVD_CTR_CUDA_RUNTIME_TYPES_H_

namespace hvd_ctr {

/// cudaStream_t, or anything for the host. nullptr is the default stream.
using Stream = void*;

/// cudaEvent_t, or anything for the host.
struct Event {
  void* handle = nullptr;
};

/// Memory alignment of Allocate and AllocatePinned, bytes.
constexpr int kDeviceAlignment = 256;

/// The device that is current to the calling thread.
constexpr int kCurrentDevice = -1;

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_RUNTIME_TYPES_H_
