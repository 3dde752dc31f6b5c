// The suites' program. It has the pool's suite; linked to it are tests/cpp's of backend and MixCache, which take the device under
// test beside their other backends.
#include <gtest/gtest.h>

#include "tests/cpp/device_pool_conformance.h"
#include "tf_ops/cuda/check/device_under_test.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(Device, DevicePoolConformance, testing::Values(&MakePoolUnderTest));

}  // namespace hvd_ctr

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
