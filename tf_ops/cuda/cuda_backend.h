// The device backend of a CUDA device, and its twin that runs the same kernels in loops on this machine.
//
//   std::unique_ptr<DeviceBackend> backend = MakeCudaBackend();
//   HVD_CTR_RETURN_IF_ERROR(backend->Allocate(slots, dim, state_floats));
//
// Of the arguments, `rows`, `gradients` and `sums` are in device memory, all others in host memory (the twin's device memory is
// host memory). Work on device memory is ordered on the caller's stream, TaskRunner::stream(): GatherRows, SegmentSum and
// UpdateRows may return before it is done. Records move on a stream of the backend's own: what computes later waits for the loads
// before it, and records move after the updates before them. Host memory may be reused when a call returns, and FetchRecords'
// records are there then.
//
// Concurrent calls are safe while their slots are disjoint. StoreRecords and UpdateRows skip kNoSlot; FetchRecords and GatherRows
// answer it with zeros. Fresh records are zeros.
#ifndef HVD_CTR_CUDA_CUDA_BACKEND_H_
#define HVD_CTR_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// device: CUDA's number of it; kCurrentDevice: the one that is current to the thread that calls Allocate. Exists where the
/// library was built with CUDA.
std::unique_ptr<DeviceBackend> MakeCudaBackend(int device = kCurrentDevice);

/// "cuda-on-cpu". Exists in every build.
std::unique_ptr<DeviceBackend> MakeCudaOnCpuBackend();

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CUDA_BACKEND_H_
