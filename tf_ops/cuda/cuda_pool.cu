#include "tf_ops/cuda/cuda_runtime.h"
#include "tf_ops/cuda/device_pool_impl.h"

namespace hvd_ctr {

std::unique_ptr<DevicePool> MakeCudaPool(int device) { return std::make_unique<RuntimePool<CudaRuntime>>(CudaRuntime(device)); }

}  // namespace hvd_ctr
