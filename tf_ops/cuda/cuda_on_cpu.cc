#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/device_rows.h"
#include "tf_ops/cuda/host_runtime.h"

namespace hvd_ctr {

std::unique_ptr<DeviceBackend> MakeCudaOnCpuBackend() {
  return std::make_unique<DeviceRows<HostRuntime>>("CudaOnCpuBackend", HostRuntime());
}

}  // namespace hvd_ctr
