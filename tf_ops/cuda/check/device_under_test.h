// The device that the suites of the check run on: a GPU, or with HVD_CTR_CHECK_HOST the host runtime, to see that they run at
// all.
#ifndef HVD_CTR_CUDA_CHECK_DEVICE_UNDER_TEST_H_
#define HVD_CTR_CUDA_CHECK_DEVICE_UNDER_TEST_H_

#include <memory>

#include "tests/cpp/host_facing_backend.h"
#include "tests/cpp/host_facing_pool.h"
#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/device_pool.h"
#if defined(HVD_CTR_CHECK_HOST)
#include "tf_ops/cuda/host_runtime.h"
#else
#include "tf_ops/cuda/cuda_runtime.h"
#endif

namespace hvd_ctr {

#if defined(HVD_CTR_CHECK_HOST)
using RuntimeUnderTest = HostRuntime;
inline std::unique_ptr<DeviceBackend> MakeBareBackendUnderTest() { return MakeCudaOnCpuBackend(); }
inline std::unique_ptr<DevicePool> MakeBarePoolUnderTest() { return MakeCudaPoolOnCpu(); }
#else
using RuntimeUnderTest = CudaRuntime;
inline std::unique_ptr<DeviceBackend> MakeBareBackendUnderTest() { return MakeCudaBackend(); }
inline std::unique_ptr<DevicePool> MakeBarePoolUnderTest() { return MakeCudaPool(); }
#endif

/// With host memory for what the device has in its own.
inline std::unique_ptr<DeviceBackend> MakeBackendUnderTest() {
  return std::make_unique<HostFacingBackend<RuntimeUnderTest>>(RuntimeUnderTest(), MakeBareBackendUnderTest());
}
inline std::unique_ptr<DevicePool> MakePoolUnderTest() {
  return std::make_unique<HostFacingPool<RuntimeUnderTest>>(MakeBarePoolUnderTest(), RuntimeUnderTest());
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_DEVICE_UNDER_TEST_H_
