// The device's pooling kernels in loops on this machine.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/device_pool_conformance.h"
#include "tests/cpp/host_facing_pool.h"
#include "tests/cpp/test_backends.h"
#include "tf_ops/cuda/bag_segments.h"
#include "tf_ops/cuda/device_pool.h"
#include "tf_ops/cuda/device_pool_impl.h"
#include "tf_ops/cuda/host_runtime.h"

namespace hvd_ctr {
namespace {

std::unique_ptr<DevicePool> MakePool() {
  return std::make_unique<HostFacingPool<HostRuntime>>(MakeCudaPoolOnCpu(), HostRuntime());
}

/// On a device that runs nothing before it is waited for, whose memory the host cannot touch.
std::unique_ptr<DevicePool> MakeQueuedPool() {
  const QueuedRuntime runtime(NewQueuedDevice(false));
  return std::make_unique<HostFacingPool<QueuedRuntime>>(std::make_unique<RuntimePool<QueuedRuntime>>(runtime), runtime);
}

INSTANTIATE_TEST_SUITE_P(CudaOnCpu, DevicePoolConformance, testing::Values(&MakePool));
INSTANTIATE_TEST_SUITE_P(Queued, DevicePoolConformance, testing::Values(&MakeQueuedPool));

TEST(BagSegmentsTest, PositionsOfEachIdAscend) {
  const std::vector<int32_t> ids = {2, 0, -1, 2, 2, 0};
  const std::vector<int64_t> splits = {0, 3, 3, 6};
  Bags bags;
  bags.virtual_ids = ids;
  bags.splits = splits;
  std::vector<int32_t> starts(5, -9), bag_of(5, -9), positions(5, -9);
  SortByVirtualId(bags, 4, {starts.data(), bag_of.data(), positions.data()});
  EXPECT_EQ(starts, (std::vector<int32_t>{0, 2, 2, 5, 5}));
  EXPECT_EQ(positions, (std::vector<int32_t>{1, 5, 0, 3, 4}));
  EXPECT_EQ(bag_of, (std::vector<int32_t>{0, 2, 0, 2, 2}));
  std::vector<int32_t> bag_of_position(6, -9);
  FillBagOfPosition(bags, bag_of_position.data());
  EXPECT_EQ(bag_of_position, (std::vector<int32_t>{0, 0, 0, 2, 2, 2}));
}

TEST(BagSegmentsTest, MoreThanAnInt32CanNumberIsRefused) {
  Bags bags;
  bags.virtual_ids = Span<const int32_t>(nullptr, INT32_MAX);
  EXPECT_TRUE(CheckBagCounts("Call", bags).ok());
  bags.virtual_ids = Span<const int32_t>(nullptr, int64_t{INT32_MAX} + 1);
  const Status status = CheckBagCounts("Call", bags);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("2147483648 ids"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace hvd_ctr
