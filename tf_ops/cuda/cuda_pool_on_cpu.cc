#include "tf_ops/cuda/device_pool_impl.h"
#include "tf_ops/cuda/host_runtime.h"

namespace hvd_ctr {

std::unique_ptr<DevicePool> MakeCudaPoolOnCpu() { return std::make_unique<RuntimePool<HostRuntime>>(HostRuntime()); }

}  // namespace hvd_ctr
