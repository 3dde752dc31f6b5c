#include "tf_ops/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/backend_conformance.h"
#include "tests/cpp/thread_runner.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, OfAllRowTypes(&MakeCpuBackend), BackendCaseName);

namespace {

int64_t Float32Stride(int64_t record_floats) {
  return LayOutCpuRecords(RowType::kFloat32, 1, record_floats - 1).stride_bytes / static_cast<int64_t>(sizeof(float));
}

TEST(CpuRecordLayoutTest, WholeLinesWhereTheyWasteLittle) {
  EXPECT_EQ(Float32Stride(32), 32);  // D=16 with Adagrad: two lines.
  EXPECT_EQ(Float32Stride(48), 48);
  EXPECT_EQ(Float32Stride(14), 16);
  EXPECT_EQ(Float32Stride(200), 208);
  EXPECT_EQ(Float32Stride(17), 20);  // D=16, row-wise Adagrad: 80 bytes, not 128.
  EXPECT_EQ(Float32Stride(9), 12);
  EXPECT_EQ(Float32Stride(1), 1);
  EXPECT_EQ(Float32Stride(2), 2);
  EXPECT_EQ(Float32Stride(3), 4);
  for (int64_t floats = 1; floats < 3000; ++floats) {
    EXPECT_GE(Float32Stride(floats), floats);
    EXPECT_LE(Float32Stride(floats), floats + floats / 4 + 3);
  }
}

TEST(CpuRecordLayoutTest, NarrowRowsTakeHalfAndStateStaysAligned) {
  for (const RowType type : {RowType::kFloat16, RowType::kBfloat16}) {
    EXPECT_EQ(LayOutCpuRecords(type, 16, 16).stride_bytes, 96);  // 32 bytes of row, 64 of state.
    EXPECT_EQ(LayOutCpuRecords(type, 16, 1).stride_bytes, 48);
    EXPECT_EQ(LayOutCpuRecords(type, 64, 1).stride_bytes, 144);
    EXPECT_EQ(LayOutCpuRecords(type, 32, 0).stride_bytes, 64);
    EXPECT_EQ(LayOutCpuRecords(type, 1, 0).stride_bytes, 4);
    for (int32_t dim = 1; dim < 300; ++dim) {
      for (const int64_t state : {int64_t{0}, int64_t{1}, int64_t{dim}, 2 * int64_t{dim} + 1}) {
        const CpuRecordLayout layout = LayOutCpuRecords(type, dim, state);
        EXPECT_EQ(layout.state_offset_bytes, (dim + 1) / 2 * 4);
        EXPECT_EQ(layout.stride_bytes % 4, 0);
        EXPECT_GE(layout.stride_bytes, layout.state_offset_bytes + 4 * state);
        EXPECT_LE(layout.stride_bytes, LayOutCpuRecords(RowType::kFloat32, dim, state).stride_bytes);
      }
    }
  }
}

TEST(CpuBackendTest, BytesCountTheWholeArena) {
  std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
  ASSERT_TRUE(backend->Allocate(1000, 16, 16).ok());
  EXPECT_EQ(backend->allocated_bytes(), 1000 * 128);
  backend = MakeCpuBackend();
  ASSERT_TRUE(backend->Allocate(1000, 16, 16, RowType::kBfloat16).ok());
  EXPECT_EQ(backend->allocated_bytes(), 1000 * 96);
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
