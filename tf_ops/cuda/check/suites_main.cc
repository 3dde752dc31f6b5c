// The suites' program: conformance of backend and pool on the device, and random programs of all MixCache calls.
#include <gtest/gtest.h>

#include "tests/cpp/backend_conformance.h"
#include "tests/cpp/device_pool_conformance.h"
#include "tf_ops/cuda/check/device_under_test.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(Device, BackendConformance, OfAllRowTypes(&MakeBackendUnderTest), BackendCaseName);
INSTANTIATE_TEST_SUITE_P(Device, DevicePoolConformance, testing::Values(&MakePoolUnderTest));

}  // namespace hvd_ctr

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
