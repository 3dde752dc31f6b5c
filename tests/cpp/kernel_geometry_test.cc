// How device kernels lay their work out, and what the host prepares for them.
#include "tf_ops/cuda/kernel_geometry.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "tf_ops/cuda/host_runtime.h"
#include "tf_ops/cuda/row_kernels.h"
#include "tf_ops/cuda/segment_order.h"
#include "tf_ops/cuda/update_runs.h"

namespace hvd_ctr {
namespace {

// Address space that costs memory only where it is touched.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  size_t bytes_;
  void* data_;
};

TEST(RowLayoutTest, EveryPieceOfEveryRowBelongsToOneThread) {
  for (const int64_t rows : {0, 1, 7, 64, 65, 1000}) {
    for (const int32_t pieces : {0, 1, 2, 3, 4, 7, 8, 25, 32, 33, 100}) {
      for (const int32_t repeats : {1, 3, 4}) {
        const RowLayout layout = MakeRowLayout(rows, pieces, repeats);
        std::vector<int> times(static_cast<size_t>(rows * pieces), 0);
        for (int64_t block = 0; block < layout.geometry().blocks; ++block) {
          for (int32_t thread = 0; thread < layout.geometry().threads; ++thread) {
            for (int32_t i = 0; i < repeats; ++i) {
              const int64_t row = layout.row(block, thread, i);
              for (int32_t p = layout.lane(thread); row < rows && p < pieces; p += layout.lanes()) {
                ++times[static_cast<size_t>(row * pieces + p)];
              }
            }
          }
        }
        EXPECT_EQ(std::count(times.begin(), times.end(), 1), rows * pieces) << rows << " " << pieces << " " << repeats;
      }
    }
  }
}

TEST(RowLayoutTest, AWarpIsOneRowOf128FloatsOrSeveralNarrowerOnes) {
  const auto lanes = [](int32_t dim) { return MakeRowLayout(1, dim / kPieceFloats).lanes(); };
  EXPECT_EQ(lanes(4), 1);
  EXPECT_EQ(lanes(16), 4);  // 8 rows per warp.
  EXPECT_EQ(lanes(32), 8);
  EXPECT_EQ(lanes(100), 32);
  EXPECT_EQ(lanes(128), 32);
  EXPECT_EQ(lanes(1024), 32);  // 8 pieces per thread.
}

TEST(RowLayoutTest, HasNoBlockTooMany) {
  EXPECT_EQ(MakeRowLayout(0, 4).geometry().blocks, 0);
  EXPECT_EQ(MakeRowLayout(5, 0).geometry().blocks, 0);
  EXPECT_EQ(MakeRowLayout(64, 4).geometry().blocks, 1);
  EXPECT_EQ(MakeRowLayout(65, 4).geometry().blocks, 2);
  EXPECT_EQ(MakeRowLayout(256, 4, 4).geometry().blocks, 1);
  EXPECT_EQ(OverItems(0).blocks, 0);
  EXPECT_EQ(OverItems(kBlockThreads + 1).blocks, 2);
}

TEST(RowLayoutTest, CountsBeyondTwoToThe31AreExact) {
  for (const int64_t rows : {(int64_t{1} << 31) + 1, (int64_t{1} << 40) + 12345}) {
    for (const int32_t pieces : {1, 4, 32, 64}) {
      for (const int32_t repeats : {1, 4}) {
        const RowLayout layout = MakeRowLayout(rows, pieces, repeats);
        const int64_t last = layout.geometry().blocks - 1;
        EXPECT_LT(layout.row(last, 0), rows);
        EXPECT_GE(layout.row(last, kBlockThreads - 1, repeats - 1), rows - 1);
        EXPECT_EQ(layout.row(last + 1, 0) - layout.row(last, 0), repeats * (kBlockThreads / layout.lanes()));
      }
    }
  }
  const int64_t items = (int64_t{1} << 41) + 1;
  EXPECT_EQ(ThreadIndex(OverItems(items).blocks - 1, 0), items - 1);
}

TEST(ForLaunchesTest, SplitsLongLaunchesAndStopsAtAnError) {
  std::vector<std::pair<int64_t, int64_t>> parts;
  const auto note = [&parts](int64_t first, int64_t count) {
    parts.push_back({first, count});
    return Status::Ok();
  };
  EXPECT_TRUE(ForLaunches({10, 1}, 3, note).ok());
  EXPECT_EQ(parts, (std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 3}, {6, 3}, {9, 1}}));
  parts.clear();
  EXPECT_TRUE(ForLaunches({0, 1}, 3, note).ok());
  EXPECT_TRUE(parts.empty());
  EXPECT_TRUE(ForLaunches({2 * kMostBlocks + 5, 1}, kMostBlocks, note).ok());
  EXPECT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts.back(), (std::pair<int64_t, int64_t>{2 * kMostBlocks, 5}));
  int calls = 0;
  const Status failed = ForLaunches({10, 1}, 3, [&calls](int64_t first, int64_t) {
    ++calls;
    return first == 3 ? MakeStatus(StatusCode::kInternal, "no") : Status::Ok();
  });
  EXPECT_EQ(failed.message(), "no");
  EXPECT_EQ(calls, 2);
}

// The last block of a launch over 2^32 floats, and slots whose records begin beyond 2^32 floats.
TEST(BigLaunchTest, OffsetsHave64Bits) {
  constexpr int64_t kRows = int64_t{1} << 28, kSlots = (int64_t{1} << 27) + 3;
  constexpr int32_t kDim = 16;
  const RecordLayout records = MakeRecordLayout(RowType::kFloat32, kDim, kDim);
  const SparseMemory arena(static_cast<size_t>(kSlots * records.stride)), rows(kRows * kDim * 4), slots(kRows * 4);
  if (!arena.ok() || !rows.ok() || !slots.ok()) GTEST_SKIP() << "needs 35 GB of address space";
  const Slot last_slot = static_cast<Slot>(kSlots - 1);
  const DeviceRecords<Float32Rows> device{arena.as<uint8_t>(), records};
  for (int32_t j = 0; j < kDim; ++j) device.row(last_slot)[j] = static_cast<float>(j + 1);
  slots.as<Slot>()[kRows - 1] = last_slot;
  using Gather = GatherRowsKernel<Float32Rows, kPieceFloats>;
  const RowLayout layout = MakeRowLayout(kRows, kDim / kPieceFloats, Gather::kRepeats);
  const Gather gather{layout, device, slots.as<Slot>(), rows.as<float>()};
  for (int32_t thread = 0; thread < kBlockThreads; ++thread) gather(layout.geometry().blocks - 1, thread);
  float* const last_row = rows.as<float>() + (kRows - 1) * kDim;
  for (int32_t j = 0; j < kDim; ++j) EXPECT_EQ(last_row[j], static_cast<float>(j + 1));
  // Back again, changed, as gradients are: SGD with rate 1 leaves 0.
  TableUpdate sgd;
  sgd.update.learning_rate = 1.0f;
  const int32_t zero = 0;
  UpdateBatch<Float32Rows> batch;
  batch.records = device;
  batch.slots = slots.as<Slot>();
  batch.gradients = rows.as<float>();
  batch.run_starts = batch.run_tables = &zero;
  batch.runs = 1;
  batch.updates = &sgd;
  batch.first_row = kRows - 1;
  const UpdateColumnsKernel<Float32Rows, OptimizerKind::kSgd, kPieceFloats> update{MakeRowLayout(1, kDim / kPieceFloats), batch};
  for (int32_t thread = 0; thread < kBlockThreads; ++thread) update(0, thread);
  for (int32_t j = 0; j < kDim; ++j) EXPECT_EQ(device.row(last_slot)[j], 0.0f);
}

TEST(RecordLayoutTest, PartsAreAlignedAndWasteLittle) {
  for (const RowType type : {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16}) {
    for (int32_t dim = 1; dim < 300; ++dim) {
      for (const int32_t state : {0, 1, dim, 2 * dim + 1}) {
        const RecordLayout layout = MakeRecordLayout(type, dim, state);
        EXPECT_EQ(layout.stride % 16, 0);
        EXPECT_EQ(layout.state_offset % (dim % 4 == 0 ? 16 : 4), 0);
        EXPECT_GE(layout.state_offset, dim * RowElementBytes(type));
        // Wide pieces move the padding too.
        const int64_t moved = layout.wide() ? layout.packed_stride() - dim : state;
        EXPECT_GE(layout.stride, layout.state_offset + moved * 4);
        EXPECT_LE(layout.stride, (layout.state_offset + state * 4) * 5 / 4 + 15);
      }
    }
  }
  EXPECT_EQ(MakeRecordLayout(RowType::kFloat32, 16, 16).stride, 128);
  EXPECT_EQ(MakeRecordLayout(RowType::kFloat32, 16, 1).stride, 80);
  EXPECT_EQ(MakeRecordLayout(RowType::kFloat16, 16, 1).stride, 48);
}

TEST(SegmentOrderTest, PositionsOfASegmentAreAscending) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int64_t unique = random() % 20;
    std::vector<int32_t> inverse(random() % 60);
    for (int32_t& k : inverse) k = static_cast<int32_t>(random() % static_cast<uint32_t>(unique + 1)) - 1;
    std::vector<int32_t> positions(inverse.size(), -7), starts(static_cast<size_t>(unique) + 1, -7);
    const SegmentOrder order = MakeSegmentOrder(inverse, unique, positions.data(), starts.data());
    if (order != SegmentOrder::kSegments) continue;
    std::vector<int32_t> expected;
    for (int32_t k = 0; k < unique; ++k) {
      EXPECT_EQ(starts[static_cast<size_t>(k)], static_cast<int32_t>(expected.size()));
      for (size_t i = 0; i < inverse.size(); ++i) {
        if (inverse[i] == k) expected.push_back(static_cast<int32_t>(i));
      }
    }
    EXPECT_EQ(starts[static_cast<size_t>(unique)], static_cast<int32_t>(expected.size()));
    positions.resize(expected.size());
    EXPECT_EQ(positions, expected);
  }
}

TEST(SegmentOrderTest, SingleRowsAreFound) {
  std::vector<int32_t> positions(6), starts(4);
  const auto order = [&](const std::vector<int32_t>& inverse, int64_t unique) {
    return MakeSegmentOrder(inverse, unique, positions.data(), starts.data());
  };
  EXPECT_EQ(order({0, 1, 2}, 3), SegmentOrder::kIdentity);
  EXPECT_EQ(order({}, 0), SegmentOrder::kIdentity);
  EXPECT_EQ(order({2, 0, 1}, 3), SegmentOrder::kSingles);
  EXPECT_EQ(std::vector<int32_t>(positions.begin(), positions.begin() + 3), (std::vector<int32_t>{1, 2, 0}));
  EXPECT_EQ(order({1, -1, 0}, 2), SegmentOrder::kSingles);
  EXPECT_EQ(std::vector<int32_t>(positions.begin(), positions.begin() + 2), (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(order({0, 1}, 3), SegmentOrder::kSegments);
  EXPECT_EQ(order({0, 0, 1}, 3), SegmentOrder::kSegments);
  EXPECT_EQ(order({}, 2), SegmentOrder::kSegments);
}

TEST(UpdateRunsTest, RunsOfEqualTableAndTheRowsOfEachRule) {
  std::vector<RowOptimizerOptions> optimizers(3);  // Adagrad.
  optimizers[1].kind = OptimizerKind::kAdam;
  optimizers[2].kind = OptimizerKind::kSgd;
  const std::vector<int32_t> tables = {0, 0, 1, 1, 1, 0, 2};
  ASSERT_EQ(CountRuns(tables), 4);
  EXPECT_EQ(CountRuns(Span<const int32_t>()), 0);
  std::vector<int32_t> starts(4), run_tables(4);
  UpdateRequest request;
  FillRuns(tables, optimizers, starts.data(), run_tables.data(), &request);
  EXPECT_EQ(starts, (std::vector<int32_t>{0, 2, 5, 6}));
  EXPECT_EQ(run_tables, (std::vector<int32_t>{0, 1, 0, 2}));
  const auto range = [&request](OptimizerKind kind) {
    const RowRange& rows = request.ranges[static_cast<int32_t>(kind)];
    return std::make_pair(rows.begin, rows.end);
  };
  EXPECT_EQ(range(OptimizerKind::kAdagrad), std::make_pair(int64_t{0}, int64_t{6}));
  EXPECT_EQ(range(OptimizerKind::kAdam), std::make_pair(int64_t{2}, int64_t{5}));
  EXPECT_EQ(range(OptimizerKind::kSgd), std::make_pair(int64_t{6}, int64_t{7}));
  EXPECT_TRUE(request.ranges[static_cast<int32_t>(OptimizerKind::kFtrl)].empty());
  EXPECT_FALSE(request.needs_row_values);
  optimizers[1].row_step = true;
  FillRuns(tables, optimizers, starts.data(), run_tables.data(), &request);
  EXPECT_TRUE(request.needs_row_values);
}

struct CountKernel {
  int64_t* calls;
  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const { *calls += 1 + 1000 * block + thread; }
};

TEST(HostRuntimeTest, RunsEveryThreadOfEveryBlock) {
  HostRuntime runtime;
  int64_t calls = 0;
  ASSERT_TRUE(runtime.Launch("Count", {3, 2}, CountKernel{&calls}, nullptr).ok());
  EXPECT_EQ(calls, 6 + 2 * 3000 + 3);
  calls = 0;
  ASSERT_TRUE(runtime.Launch("Count", {0, 256}, CountKernel{&calls}, nullptr).ok());
  EXPECT_EQ(calls, 0);
  const Status refused = runtime.Launch("Count", {1, 257}, CountKernel{&calls}, nullptr);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("Count with 1 blocks of 257 threads"), std::string::npos) << refused.message();
}

TEST(HostRuntimeTest, MemoryCopiesAndEvents) {
  HostRuntime runtime;
  void* memory = nullptr;
  const Status refused = runtime.Allocate(int64_t{1} << 50, &memory);
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("1125899906842624"), std::string::npos) << refused.message();
  ASSERT_TRUE(runtime.Allocate(12, &memory).ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % kDeviceAlignment, 0u);
  const int32_t values[3] = {1, 2, 3};
  int32_t back[3] = {};
  EXPECT_TRUE(runtime.CopyToDevice(memory, values, 12, nullptr).ok());
  EXPECT_TRUE(runtime.Zero(memory, 4, nullptr).ok());
  EXPECT_TRUE(runtime.CopyToHost(back, memory, 12, nullptr).ok());
  EXPECT_EQ(std::vector<int32_t>(back, back + 3), (std::vector<int32_t>{0, 2, 3}));
  EXPECT_TRUE(runtime.CopyToDevice(nullptr, nullptr, 0, nullptr).ok());
  EXPECT_TRUE(runtime.CopyOnDevice(nullptr, nullptr, 0, nullptr).ok());
  EXPECT_TRUE(runtime.Zero(nullptr, 0, nullptr).ok());
  runtime.Free(memory);
  Event from, to, untimed;
  ASSERT_TRUE(runtime.NewEvent(&from, true).ok() && runtime.NewEvent(&to, true).ok() && runtime.NewEvent(&untimed).ok());
  ASSERT_TRUE(runtime.Record(from, nullptr).ok() && runtime.Record(to, nullptr).ok());
  double seconds = -1.0;
  ASSERT_TRUE(runtime.Elapsed(from, to, &seconds).ok());
  EXPECT_GE(seconds, 0.0);
  EXPECT_EQ(runtime.Elapsed(from, untimed, &seconds).code(), StatusCode::kInvalidArgument);
  for (const Event event : {from, to, untimed}) runtime.DestroyEvent(event);
}

}  // namespace
}  // namespace hvd_ctr
