#include "tf_ops/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/backend_conformance.h"
#include "tests/cpp/thread_runner.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, testing::Values(&MakeCpuBackend));

namespace {

TEST(CpuRecordStrideTest, WholeLinesWhereTheyWasteLittle) {
  EXPECT_EQ(CpuRecordStride(32), 32);  // D=16 with Adagrad: two lines.
  EXPECT_EQ(CpuRecordStride(48), 48);
  EXPECT_EQ(CpuRecordStride(14), 16);
  EXPECT_EQ(CpuRecordStride(200), 208);
  EXPECT_EQ(CpuRecordStride(17), 20);  // D=16, row-wise Adagrad: 80 bytes, not 128.
  EXPECT_EQ(CpuRecordStride(9), 12);
  EXPECT_EQ(CpuRecordStride(1), 1);
  EXPECT_EQ(CpuRecordStride(2), 2);
  EXPECT_EQ(CpuRecordStride(3), 4);
  for (int64_t floats = 1; floats < 3000; ++floats) {
    EXPECT_GE(CpuRecordStride(floats), floats);
    EXPECT_LE(CpuRecordStride(floats), floats + floats / 4 + 3);
  }
}

TEST(CpuBackendTest, BytesCountTheWholeArena) {
  std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
  ASSERT_TRUE(backend->Allocate(1000, 16, 16).ok());
  EXPECT_EQ(backend->allocated_bytes(), 1000 * 128);
}

TEST(CpuBackendTest, FreshRecordsAreZeros) {
  std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
  ASSERT_TRUE(backend->Allocate(200000, 16, 16).ok());  // Over the huge-page threshold.
  InlineRunner runner;
  const std::vector<Slot> slots = {0, 199999};
  std::vector<float> records(64, 99.0f);
  ASSERT_TRUE(backend->FetchRecords(slots, records.data(), &runner).ok());
  EXPECT_EQ(records, std::vector<float>(64, 0.0f));
}

// FC 40: slot x stride exceeds 2^31 floats. Only the touched pages are committed.
TEST(CpuBackendTest, SlotsFarBeyondTwoToThe31Floats) {
  std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
  const int64_t slots_total = 33554433 + 5;
  const Status status = backend->Allocate(slots_total, 64, 64);
  if (status.code() == StatusCode::kResourceExhausted) GTEST_SKIP() << "needs 17 GB of address space: " << status.message();
  ASSERT_TRUE(status.ok()) << status.message();
  InlineRunner runner;
  const Slot last = static_cast<Slot>(slots_total - 1);
  // What 32-bit arithmetic would hit instead: float offsets modulo 2^32 of the last slots are those of slots 0 .. 5.
  const std::vector<Slot> slots = {last, 0, 1, 2, 3, 4, 5};
  std::vector<float> records(7 * 128, 0.5f);
  for (int i = 0; i < 128; ++i) records[static_cast<size_t>(i)] = static_cast<float>(i + 1);
  ASSERT_TRUE(backend->StoreRecords(slots, records.data(), &runner).ok());
  const std::vector<Slot> last_only = {last};
  const std::vector<int32_t> tables = {0};
  const std::vector<RowOptimizerOptions> optimizers(1);
  const std::vector<float> gradient(64, 1.0f);
  ASSERT_TRUE(backend->UpdateRows(last_only, tables, gradient.data(), optimizers, 1, 1.0f, &runner).ok());
  UpdateRow(optimizers[0], 1, optimizers[0].learning_rate, gradient.data(), 64, records.data(), records.data() + 64);
  std::vector<float> back(7 * 128);
  ASSERT_TRUE(backend->FetchRecords(slots, back.data(), &runner).ok());
  EXPECT_EQ(back, records);
}

}  // namespace
}  // namespace hvd_ctr
