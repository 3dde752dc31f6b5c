// The backends that the suites run on: the CPU's, cuda-on-cpu, and cuda-on-cpu on a device that does as little as it may
// (queued_runtime.h).
//
//   class MixCacheTest : public testing::TestWithParam<NamedBackend> {};
//   INSTANTIATE_TEST_SUITE_P(Backends, MixCacheTest, testing::ValuesIn(TestBackends()), BackendName);
#ifndef HVD_CTR_TESTS_CPP_TEST_BACKENDS_H_
#define HVD_CTR_TESTS_CPP_TEST_BACKENDS_H_

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/host_facing_backend.h"
#include "tests/cpp/queued_runtime.h"
#include "tf_ops/core/device_backend.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/device_rows.h"

namespace hvd_ctr {

using BackendFactory = std::unique_ptr<DeviceBackend> (*)();

/// Seeds of devices differ, and are the same in every run.
inline std::shared_ptr<QueuedDevice> NewQueuedDevice(bool one_thread) {
  static std::atomic<uint32_t> seed{0};
  return std::make_shared<QueuedDevice>(++seed, one_thread);
}

inline std::unique_ptr<DeviceBackend> MakeHostFacing(const std::shared_ptr<QueuedDevice>& device) {
  const QueuedRuntime runtime(device);
  return std::make_unique<HostFacingBackend<QueuedRuntime>>(
      runtime, std::make_unique<DeviceRows<QueuedRuntime>>("QueuedBackend", runtime));
}

inline std::unique_ptr<DeviceBackend> MakeQueuedBackend() { return MakeHostFacing(NewQueuedDevice(false)); }
/// For tests of one thread: finds kernels that read host memory too.
inline std::unique_ptr<DeviceBackend> MakeStrictBackend() { return MakeHostFacing(NewQueuedDevice(true)); }

struct NamedBackend {
  const char* name;
  BackendFactory make;
};

inline std::vector<NamedBackend> TestBackends() {
  return {{"Cpu", &MakeCpuBackend}, {"CudaOnCpu", &MakeCudaOnCpuBackend}, {"Queued", &MakeQueuedBackend}};
}

inline std::string BackendName(const testing::TestParamInfo<NamedBackend>& info) { return info.param.name; }

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_TEST_BACKENDS_H_
