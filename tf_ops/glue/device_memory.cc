#include "tf_ops/glue/device_memory.h"

#include <cstdlib>
#include <cstring>

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/util/device_name_utils.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cuda/cuda_backend.h"
#include "xla/stream_executor/stream.h"

namespace hvd_ctr {
namespace {

using tensorflow::DeviceContext;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr char kCudaOnCpuName[] = "cuda_on_cpu";

const char* BackendVariable() {
  const char* value = std::getenv(kBackendVariable);
  return value == nullptr ? "" : value;
}

/// Kernels ask at every call, and the environment is not to be read while Python changes it: read once.
bool CudaOnCpuIsAskedFor() {
  static const bool asked = std::strcmp(BackendVariable(), kCudaOnCpuName) == 0;
  return asked;
}

bool IsOnGpu(const OpKernelContext* ctx) { return ctx->device()->attributes().device_type() == tensorflow::DEVICE_GPU; }

/// Without a copy: kernels ask at every call.
int GpuOf(const OpKernelContext* ctx) {
  return IsOnGpu(ctx) ? static_cast<const tensorflow::Device*>(ctx->device())->parsed_name().id : -1;
}

tensorflow::Device* DeviceOf(OpKernelContext* ctx) { return static_cast<tensorflow::Device*>(ctx->device()); }

}  // namespace

bool BuiltWithCuda() {
#ifdef HVD_CTR_CUDA
  return true;
#else
  return false;
#endif
}

bool HasGpuKernels() { return BuiltWithCuda() || CudaOnCpuIsAskedFor(); }

RowCode RowCodeOf(const OpKernelContext* ctx) {
  if (CudaOnCpuIsAskedFor()) return RowCode::kCudaOnCpu;
  return IsOnGpu(ctx) ? RowCode::kCuda : RowCode::kCpu;
}

Result<std::unique_ptr<DeviceBackend>> MakeDeviceBackend(OpKernelContext* ctx) {
  const char* wanted = BackendVariable();
  if (*wanted != '\0' && std::strcmp(wanted, kCudaOnCpuName) != 0) {
    return MakeStatus(StatusCode::kInvalidArgument, kBackendVariable, " is '", wanted, "', allowed: ", kCudaOnCpuName,
                      " (for tests), or unset");
  }
  switch (RowCodeOf(ctx)) {
    case RowCode::kCudaOnCpu:
      if (StreamOf(ctx) == nullptr) return MakeCudaOnCpuBackend();
      return MakeStatus(StatusCode::kInvalidArgument, kBackendVariable, " is '", wanted,
                        "', whose loops do not reach the memory of this GPU; unset it, or hide the GPU by CUDA_VISIBLE_DEVICES=");
    case RowCode::kCuda:
#ifdef HVD_CTR_CUDA
      return MakeCudaBackend(CudaDeviceOf(ctx));
#else
      break;  // There are no kernels for GPUs then.
#endif
    case RowCode::kCpu:
      break;
  }
  return MakeCpuBackend();
}

RowsPlace RowsPlaceOf(const OpKernelContext* ctx) { return RowsPlace{ctx->device()->name(), GpuOf(ctx)}; }

Status CheckRowsPlace(const OpKernelContext* ctx, const RowsPlace& place, const std::string& owner) {
  if (GpuOf(ctx) == place.gpu) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, ctx->op_kernel().type_string(), " was placed on ", ctx->device()->name(),
                    ", but the rows of ", owner, " are on ", place.device,
                    ", whose memory it cannot use; leave the device of this op to hvd_ctr (no tf.device around it), or make the "
                    "cache on the other device");
}

std::string HostNameOf(const OpKernelContext* ctx) {
  tensorflow::DeviceNameUtils::ParsedName name;
  if (!tensorflow::DeviceNameUtils::ParseFullName(ctx->device()->name(), &name)) return ctx->device()->name();
  name.type = tensorflow::DEVICE_CPU;
  name.id = 0;
  return tensorflow::DeviceNameUtils::ParsedNameToString(name);
}

int CudaDeviceOf(const OpKernelContext* ctx) {
  const auto* info = ctx->device()->tensorflow_accelerator_device_info();
  return IsOnGpu(ctx) && info != nullptr ? info->gpu_id : -1;
}

void* StreamOf(OpKernelContext* ctx) {
  const DeviceContext* context = ctx->op_device_context();
  stream_executor::Stream* stream = context == nullptr ? nullptr : context->stream();
  return stream == nullptr ? nullptr : stream->platform_specific_handle().stream;
}

absl::Status CopyToHost(OpKernelContext* ctx, const Tensor& tensor, Tensor* host) {
  DeviceContext* context = ctx->op_device_context();
  if (context == nullptr) {
    *host = tensor;
    return absl::OkStatus();
  }
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  on_host.set_gpu_compatible(true);
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor.dtype(), tensor.shape(), host, on_host));
  if (tensor.NumElements() == 0) return absl::OkStatus();
  return context->CopyDeviceTensorToCPUSync(&tensor, "", DeviceOf(ctx), host);
}

absl::Status CopyToDevice(OpKernelContext* ctx, const Tensor& host, Tensor* tensor) {
  const DeviceContext* context = ctx->op_device_context();
  if (context == nullptr) {
    *tensor = host;
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(ctx->allocate_temp(host.dtype(), host.shape(), tensor));
  if (host.NumElements() == 0) return absl::OkStatus();
  return context->CopyCPUTensorToDeviceSync(&host, DeviceOf(ctx), tensor);
}

}  // namespace hvd_ctr
