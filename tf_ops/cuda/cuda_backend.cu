#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/cuda_runtime.h"
#include "tf_ops/cuda/device_rows.h"

namespace hvd_ctr {

std::unique_ptr<DeviceBackend> MakeCudaBackend(int device) {
  return std::make_unique<DeviceRows<CudaRuntime>>("CudaBackend", CudaRuntime(device));
}

}  // namespace hvd_ctr
