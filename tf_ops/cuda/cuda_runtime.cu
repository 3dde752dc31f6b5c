#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "tf_ops/cuda/cuda_runtime.h"

namespace hvd_ctr {
namespace {

cudaStream_t Cuda(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Cuda(Event event) { return static_cast<cudaEvent_t>(event.handle); }

/// OK, or INTERNAL (RESOURCE_EXHAUSTED where memory ran out) with the call, its arguments, and CUDA's words.
template <typename... Arguments>
Status Checked(cudaError_t error, const char* call, const Arguments&... arguments) {
  if (error == cudaSuccess) return Status::Ok();
  // The error of this call is reported here, not by the next that asks. One that broke the context stays.
  (void)cudaGetLastError();
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted : StatusCode::kInternal;
  return MakeStatus(code, call, arguments..., ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

}  // namespace

Status CudaRuntime::Bind() {
  if (device_ != kCurrentDevice) return Use();
  return Checked(cudaGetDevice(&device_), "cudaGetDevice");
}

Status CudaRuntime::Use() const {
  if (device_ == kCurrentDevice) return Status::Ok();
  return Checked(cudaSetDevice(device_), "cudaSetDevice of device ", device_);
}

Status CudaRuntime::Allocate(int64_t bytes, void** memory) const {
  *memory = nullptr;
  if (bytes < 0) return MakeStatus(StatusCode::kInvalidArgument, "cudaMalloc of ", bytes, " bytes");
  const cudaError_t error = cudaMalloc(memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (error == cudaSuccess) return Status::Ok();
  *memory = nullptr;
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) free = total = 0;
  return Checked(error, "cudaMalloc of ", bytes, " bytes (", free, " of the device's ", total, " bytes are free)");
}

void CudaRuntime::Free(void* memory) const { (void)cudaFree(memory); }

Status CudaRuntime::AllocatePinned(int64_t bytes, void** memory) const {
  *memory = nullptr;
  if (bytes < 0) return MakeStatus(StatusCode::kInvalidArgument, "cudaMallocHost of ", bytes, " bytes");
  return Checked(cudaMallocHost(memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "cudaMallocHost of ", bytes, " bytes");
}

void CudaRuntime::FreePinned(void* memory) const { (void)cudaFreeHost(memory); }

Status CudaRuntime::CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
  if (bytes == 0) return Status::Ok();
  return Checked(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, Cuda(stream)),
                 "cudaMemcpyAsync to the device of ", bytes, " bytes");
}

Status CudaRuntime::CopyToHost(void* to, const void* from, int64_t bytes, Stream stream) const {
  if (bytes == 0) return Status::Ok();
  return Checked(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, Cuda(stream)),
                 "cudaMemcpyAsync to the host of ", bytes, " bytes");
}

Status CudaRuntime::CopyOnDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
  if (bytes == 0) return Status::Ok();
  return Checked(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, Cuda(stream)),
                 "cudaMemcpyAsync on the device of ", bytes, " bytes");
}

Status CudaRuntime::Zero(void* memory, int64_t bytes, Stream stream) const {
  if (bytes == 0) return Status::Ok();
  return Checked(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), Cuda(stream)), "cudaMemsetAsync of ", bytes, " bytes");
}

Status CudaRuntime::NewStream(Stream* stream) const {
  cudaStream_t made = nullptr;
  const Status status = Checked(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  *stream = made;
  return status;
}

void CudaRuntime::DestroyStream(Stream stream) const {
  if (stream != nullptr) (void)cudaStreamDestroy(Cuda(stream));
}

Status CudaRuntime::NewEvent(Event* event, bool timed) const {
  cudaEvent_t made = nullptr;
  const Status status =
      Checked(cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event->handle = made;
  return status;
}

void CudaRuntime::DestroyEvent(Event event) const {
  if (event.handle != nullptr) (void)cudaEventDestroy(Cuda(event));
}

Status CudaRuntime::Record(Event event, Stream stream) const {
  return Checked(cudaEventRecord(Cuda(event), Cuda(stream)), "cudaEventRecord");
}

Status CudaRuntime::Wait(Stream stream, Event event) const {
  return Checked(cudaStreamWaitEvent(Cuda(stream), Cuda(event), 0), "cudaStreamWaitEvent");
}

Status CudaRuntime::Synchronize(Stream stream) const {
  return Checked(cudaStreamSynchronize(Cuda(stream)), "cudaStreamSynchronize");
}

Status CudaRuntime::Synchronize(Event event) const { return Checked(cudaEventSynchronize(Cuda(event)), "cudaEventSynchronize"); }

Status CudaRuntime::Elapsed(Event from, Event to, double* seconds) const {
  float milliseconds = 0.0f;
  HVD_CTR_RETURN_IF_ERROR(Checked(cudaEventElapsedTime(&milliseconds, Cuda(from), Cuda(to)), "cudaEventElapsedTime"));
  *seconds = static_cast<double>(milliseconds) * 1e-3;
  return Status::Ok();
}

Status CudaRuntime::Describe(std::string* text) const {
  int device = device_;
  if (device == kCurrentDevice) HVD_CTR_RETURN_IF_ERROR(Checked(cudaGetDevice(&device), "cudaGetDevice"));
  cudaDeviceProp properties;
  HVD_CTR_RETURN_IF_ERROR(Checked(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties of device ", device));
  *text = internal::StrCat(properties.name, ", compute capability ", properties.major, ".", properties.minor, ", ",
                           properties.totalGlobalMem >> 30, " GiB");
  return Status::Ok();
}

Status CudaRuntime::LaunchBlocks(const char* name, const void* function, const Geometry& geometry, const void* kernel,
                                 Stream stream) const {
  return ForLaunches(geometry, kMostBlocks, [&](int64_t first, int64_t count) {
    // The API takes the arguments by pointers that are not const; it copies what they point to.
    void* arguments[] = {const_cast<void*>(kernel), &first};
    const dim3 grid(static_cast<unsigned>(count)), block(static_cast<unsigned>(geometry.threads));
    return Checked(cudaLaunchKernel(function, grid, block, arguments, 0, Cuda(stream)), "cudaLaunchKernel of ", name, " with ",
                   geometry.blocks, " blocks of ", geometry.threads, " threads, from block ", first, " on");
  });
}

}  // namespace hvd_ctr
