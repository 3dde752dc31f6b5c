// Where the tensors of a kernel are. The same kernel class serves the CPU and a GPU: ids, splits, plans, handles and figures are
// in host memory on both (kernel_registration.h), rows and what is computed from them are in the memory of the kernel's device.
//
//   Tensor payload;                                          // device memory -> host memory, only where it must be looked at
//   TF_RETURN_IF_ERROR(CopyToHost(ctx, rows, &payload));
#ifndef HVD_CTR_GLUE_DEVICE_MEMORY_H_
#define HVD_CTR_GLUE_DEVICE_MEMORY_H_

#include <memory>
#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// Which code computes with rows. It follows from the device that TensorFlow has placed the kernel on.
enum class RowCode {
  kCpu,
  kCuda,
  kCudaOnCpu,  ///< For tests: the kernels of kCuda as loops, on a device whose memory is host memory.
};

/// For tests: "cuda_on_cpu" takes kCudaOnCpu on every device. Unset or empty: what belongs to the device.
constexpr char kBackendVariable[] = "HVD_CTR_BACKEND";

/// Whether the library was built with CUDA.
bool BuiltWithCuda();
/// Whether kernels are registered for GPUs too: it was, or kCudaOnCpu is asked for.
bool HasGpuKernels();

RowCode RowCodeOf(const tensorflow::OpKernelContext* ctx);

/// The device tier on the device of the kernel. INVALID_ARGUMENT for another value of HVD_CTR_BACKEND, or kCudaOnCpu on a GPU.
Result<std::unique_ptr<DeviceBackend>> MakeDeviceBackend(tensorflow::OpKernelContext* ctx);

/// Whose memory a kernel's rows are in.
struct RowsPlace {
  std::string device;  ///< Full name of the kernel's device.
  int gpu = -1;        ///< Its number as TensorFlow counts GPUs; -1: host memory, which all CPUs share.
};
RowsPlace RowsPlaceOf(const tensorflow::OpKernelContext* ctx);

/// INVALID_ARGUMENT where the kernel's rows are not in the memory of `place`; `owner` names what is there.
Status CheckRowsPlace(const tensorflow::OpKernelContext* ctx, const RowsPlace& place, const std::string& owner);

/// Full name of the CPU of the kernel's task: what belongs to the host is there, whatever device the kernel is on.
std::string HostNameOf(const tensorflow::OpKernelContext* ctx);

/// Number of the kernel's GPU as CUDA counts them in this process; -1 on another device.
int CudaDeviceOf(const tensorflow::OpKernelContext* ctx);

/// cudaStream_t that the work of TensorFlow's kernels on this device is ordered on; nullptr on the CPU.
void* StreamOf(tensorflow::OpKernelContext* ctx);

/// *host: the tensor in host memory; the tensor itself where the device's memory is that. On a GPU it waits for all work that was
/// given to the stream so far.
absl::Status CopyToHost(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& tensor, tensorflow::Tensor* host);

/// *tensor: a tensor of host memory in the device's memory, the reverse of CopyToHost. It waits for the copy.
absl::Status CopyToDevice(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& host, tensorflow::Tensor* tensor);

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_DEVICE_MEMORY_H_
