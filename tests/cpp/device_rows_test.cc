// What orders the device backend's work: streams, events, staging memory, and what happens when a call of the runtime fails.
#include "tf_ops/cuda/device_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cpp/queued_runtime.h"
#include "tests/cpp/test_backends.h"
#include "tests/cpp/thread_runner.h"
#include "tf_ops/cuda/host_runtime.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kSlots = 40;
constexpr int32_t kDim = 8;

// A backend with Adagrad records on a device that runs what has to run and no more.
class DeviceRowsTest : public testing::Test {
 protected:
  void SetUp() override {
    device_->StopDice();
    ASSERT_TRUE(backend_->Allocate(kSlots, kDim, kDim, RowType::kFloat32).ok());
    ASSERT_TRUE(runtime_.NewStream(&stream_).ok());
    ASSERT_TRUE(runtime_.Allocate(kSlots * kDim * 4, &rows_).ok());
  }
  void TearDown() override {
    backend_.reset();
    runtime_.Free(rows_);
    runtime_.DestroyStream(stream_);
  }

  static std::vector<Slot> Range(Slot begin, Slot end) {
    std::vector<Slot> slots(static_cast<size_t>(end - begin));
    std::iota(slots.begin(), slots.end(), begin);
    return slots;
  }
  void Store(Slot begin, Slot end) {
    const std::vector<float> records(static_cast<size_t>((end - begin) * 2 * kDim), 1.0f);
    const std::vector<Slot> slots = Range(begin, end);
    ASSERT_TRUE(backend_->StoreRecords(slots, records.data(), &inline_runner_).ok());
  }
  void Fetch(Slot begin, Slot end) {
    std::vector<float> records(static_cast<size_t>((end - begin) * 2 * kDim));
    const std::vector<Slot> slots = Range(begin, end);
    ASSERT_TRUE(backend_->FetchRecords(slots, records.data(), &inline_runner_).ok());
  }
  void Gather(Slot begin, Slot end, Stream stream) {
    StreamRunner runner(&inline_runner_, stream);
    const std::vector<Slot> slots = Range(begin, end);
    ASSERT_TRUE(backend_->GatherRows(slots, static_cast<float*>(rows_), &runner).ok());
  }
  void Update(Slot begin, Slot end, Stream stream) {
    StreamRunner runner(&inline_runner_, stream);
    const std::vector<Slot> slots = Range(begin, end);
    const std::vector<int32_t> tables(slots.size(), 0);
    const std::vector<RowOptimizerOptions> optimizers(1);
    ASSERT_TRUE(backend_->UpdateRows(slots, tables, static_cast<float*>(rows_), optimizers, 1, 1.0f, &runner).ok());
  }
  void Wait(Stream stream) { ASSERT_TRUE(runtime_.Synchronize(stream).ok()); }

  bool Ran(const std::string& kernel) {
    const std::vector<std::string> ran = device_->ran();
    return std::find(ran.begin(), ran.end(), kernel) != ran.end();
  }
  bool RanBefore(const std::string& first, const std::string& second) {
    const std::vector<std::string> ran = device_->ran();
    return std::find(std::find(ran.begin(), ran.end(), first), ran.end(), second) != ran.end();
  }

  std::shared_ptr<QueuedDevice> device_ = NewQueuedDevice(true);
  QueuedRuntime runtime_{device_};
  std::unique_ptr<DeviceBackend> backend_ = std::make_unique<DeviceRows<QueuedRuntime>>("QueuedBackend", runtime_);
  InlineRunner inline_runner_;
  Stream stream_ = nullptr;
  void* rows_ = nullptr;
};

TEST_F(DeviceRowsTest, CallsReturnBeforeTheirWorkIsDone) {
  Store(0, 4);
  Gather(0, 4, stream_);
  Update(0, 4, stream_);
  EXPECT_FALSE(Ran("StoreRecords") || Ran("GatherRows") || Ran("UpdateRows"));
}

TEST_F(DeviceRowsTest, ComputeWaitsForTheLastLoad) {
  Store(0, 4);
  Gather(0, 4, stream_);
  Wait(stream_);
  EXPECT_TRUE(RanBefore("StoreRecords", "GatherRows"));
}

TEST_F(DeviceRowsTest, TransfersWaitForTheLastUpdate) {
  Update(0, 4, stream_);
  Fetch(0, 4);
  EXPECT_TRUE(RanBefore("UpdateRows", "FetchRecords"));
}

// A ticket that is released without an update may leave a gather behind when its slots are filled anew.
TEST_F(DeviceRowsTest, TransfersWaitForTheLastGather) {
  Gather(0, 4, stream_);
  Store(0, 4);
  Fetch(8, 9);
  EXPECT_TRUE(RanBefore("GatherRows", "StoreRecords"));
}

TEST_F(DeviceRowsTest, ComputeOnAnotherStreamWaitsForTheLast) {
  Stream other = nullptr;
  ASSERT_TRUE(runtime_.NewStream(&other).ok());
  Update(0, 4, stream_);
  Gather(0, 4, other);
  Wait(other);
  EXPECT_TRUE(RanBefore("UpdateRows", "GatherRows"));
  runtime_.DestroyStream(other);
}

TEST_F(DeviceRowsTest, MovesDoNotWaitForTheStepThatRunsBesideThem) {
  Update(0, 4, stream_);
  ASSERT_TRUE(backend_->BeginMoves().ok());
  Gather(4, 8, stream_);
  Store(8, 12);
  Fetch(0, 4);
  EXPECT_TRUE(RanBefore("UpdateRows", "FetchRecords"));
  EXPECT_TRUE(Ran("StoreRecords"));
  EXPECT_FALSE(Ran("GatherRows"));
  ASSERT_TRUE(backend_->EndMoves().ok());
  Fetch(0, 4);  // Outside of moves: waits for all.
  EXPECT_TRUE(Ran("GatherRows"));
}

TEST_F(DeviceRowsTest, ComputeWaitsForMovesOnceTheyHaveEnded) {
  ASSERT_TRUE(backend_->BeginMoves().ok());
  Store(8, 12);
  Gather(4, 8, stream_);
  Wait(stream_);
  EXPECT_TRUE(Ran("GatherRows"));
  EXPECT_FALSE(Ran("StoreRecords"));
  ASSERT_TRUE(backend_->EndMoves().ok());
  Gather(8, 12, stream_);
  Wait(stream_);
  EXPECT_TRUE(Ran("StoreRecords"));
}

// A device to which nothing can be copied for a while.
class UploadsFail : public QueuedRuntime {
 public:
  UploadsFail(const std::shared_ptr<QueuedDevice>& device, const bool* fail) : QueuedRuntime(device), fail_(fail) {}
  Status CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
    if (*fail_) return MakeStatus(StatusCode::kInternal, "injected fault");
    return QueuedRuntime::CopyToDevice(to, from, bytes, stream);
  }

 private:
  const bool* fail_;
};

// The call that fails has given nothing to its stream, so what transfers wait for is still the call before it.
TEST_F(DeviceRowsTest, TransfersWaitForTheLastUpdateAlsoWhenALaterCallFails) {
  bool fail = false;
  Stream other = nullptr;
  ASSERT_TRUE(runtime_.NewStream(&other).ok());
  backend_ = std::make_unique<DeviceRows<UploadsFail>>("QueuedBackend", UploadsFail(device_, &fail));
  ASSERT_TRUE(backend_->Allocate(kSlots, kDim, kDim, RowType::kFloat32).ok());
  Update(0, 4, stream_);
  fail = true;
  StreamRunner runner(&inline_runner_, other);
  const std::vector<Slot> slots = Range(0, 4);
  EXPECT_FALSE(backend_->GatherRows(slots, static_cast<float*>(rows_), &runner).ok());
  fail = false;
  Fetch(0, 4);
  EXPECT_TRUE(RanBefore("UpdateRows", "FetchRecords"));
  backend_.reset();
  runtime_.DestroyStream(other);
}

// More calls on their way than there are blocks of staging memory: a block is filled again only when its work is done.
TEST_F(DeviceRowsTest, StagingMemoryIsNotFilledAgainTooEarly) {
  const std::vector<int32_t> tables = {0};
  std::vector<float> expected;
  ASSERT_TRUE(runtime_.Zero(rows_, kDim * 4, stream_).ok());
  StreamRunner runner(&inline_runner_, stream_);
  for (Slot slot = 0; slot < kSlots; ++slot) {
    const std::vector<Slot> slots = {slot};
    std::vector<float> record(2 * kDim, static_cast<float>(slot + 1));
    ASSERT_TRUE(backend_->StoreRecords(slots, record.data(), &inline_runner_).ok());
    expected.insert(expected.end(), record.begin(), record.end());
  }
  const auto fetch = [&] {
    const std::vector<Slot> all = Range(0, kSlots);
    std::vector<float> records(expected.size());
    EXPECT_TRUE(backend_->FetchRecords(all, records.data(), &inline_runner_).ok());
    return records;
  };
  EXPECT_EQ(fetch(), expected);
  // Gradients of 0: Adagrad with l2 moves each row by what it is itself.
  std::vector<RowOptimizerOptions> decay(1);
  decay[0].l2 = 0.5f;
  for (Slot slot = 0; slot < kSlots; ++slot) {
    const std::vector<Slot> slots = {slot};
    ASSERT_TRUE(backend_->UpdateRows(slots, tables, static_cast<float*>(rows_), decay, 1, 1.0f, &runner).ok());
    float* const record = &expected[static_cast<size_t>(slot) * 2 * kDim];
    const std::vector<float> zeros(kDim, 0.0f);
    UpdateRow(decay[0], 1, decay[0].learning_rate, zeros.data(), kDim, record, record + kDim);
  }
  EXPECT_EQ(fetch(), expected);
}

TEST_F(DeviceRowsTest, ASteadyStateAllocatesNothing) {
  int64_t grown = 0;
  for (int step = 0; step < 60; ++step) {
    ASSERT_TRUE(backend_->BeginMoves().ok());
    Fetch(0, 10);
    Store(0, 10);
    ASSERT_TRUE(backend_->EndMoves().ok());
    Gather(0, 30, stream_);
    Update(0, 30, stream_);
    float* sums = nullptr;
    ASSERT_TRUE(backend_->Workspace(30 * kDim, &sums).ok());
    if (step == 19) grown = device_->allocations();
  }
  EXPECT_EQ(device_->allocations(), grown);
  EXPECT_GT(grown, 0);
}

TEST_F(DeviceRowsTest, PlaceRowsPutsHostRowsBesideOthers) {
  const std::vector<int32_t> positions = {3, 0};
  const std::vector<float> records = {1, 2, 3, 4, 5, 6, 7, 8, -1, 11, 12, 13, 14, 15, 16, 17, 18, -1};
  StreamRunner runner(&inline_runner_, stream_);
  ASSERT_TRUE(runtime_.Zero(rows_, 4 * kDim * 4, stream_).ok());
  ASSERT_TRUE(backend_->PlaceRows(positions, records.data(), {kDim, kDim + 1}, static_cast<float*>(rows_), &runner).ok());
  std::vector<float> rows(4 * kDim, 99.0f);
  ASSERT_TRUE(runtime_.CopyToHost(rows.data(), rows_, 4 * kDim * 4, stream_).ok());
  Wait(stream_);
  std::vector<float> expected(4 * kDim, 0.0f);
  std::copy_n(records.begin(), kDim, expected.begin() + 3 * kDim);
  std::copy_n(records.begin() + kDim + 1, kDim, expected.begin());
  EXPECT_EQ(rows, expected);
}

// Several parts of a call are on their way at once.
TEST(DeviceRowsPartsTest, RecordsMoveInParts) {
  const std::unique_ptr<DeviceBackend> backend = MakeStrictBackend();
  const int32_t dim = 300;
  const int64_t floats = 901, slots = 9000;  // 32 MB.
  ASSERT_TRUE(backend->Allocate(slots, dim, static_cast<int32_t>(floats) - dim, RowType::kFloat32).ok());
  ThreadRunner runner(3);
  std::vector<Slot> order(static_cast<size_t>(slots));
  for (int64_t i = 0; i < slots; ++i) order[static_cast<size_t>(i)] = static_cast<Slot>(i * 7 % slots);
  std::vector<float> records(static_cast<size_t>(slots * floats));
  std::iota(records.begin(), records.end(), 1.0f);
  std::vector<float> back(records.size());
  ASSERT_TRUE(backend->StoreRecords(order, records.data(), &runner).ok());
  ASSERT_TRUE(backend->FetchRecords(order, back.data(), &runner).ok());
  EXPECT_EQ(records, back);
}

// The host's runtime with a call that fails, as CUDA's may, counted down.
class FailingRuntime {
 public:
  explicit FailingRuntime(int* countdown) : countdown_(countdown) {}

  Status Bind() { return Next("Bind"); }
  Status Use() const { return Next("Use"); }
  Status Allocate(int64_t bytes, void** memory) const {
    return Or("Allocate", [&] { return host_.Allocate(bytes, memory); });
  }
  void Free(void* memory) const { host_.Free(memory); }
  Status AllocatePinned(int64_t bytes, void** memory) const {
    return Or("AllocatePinned", [&] { return host_.AllocatePinned(bytes, memory); });
  }
  void FreePinned(void* memory) const { host_.FreePinned(memory); }
  Status CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
    return Or("CopyToDevice", [&] { return host_.CopyToDevice(to, from, bytes, stream); });
  }
  Status CopyToHost(void* to, const void* from, int64_t bytes, Stream stream) const {
    return Or("CopyToHost", [&] { return host_.CopyToHost(to, from, bytes, stream); });
  }
  Status Zero(void* memory, int64_t bytes, Stream stream) const {
    return Or("Zero", [&] { return host_.Zero(memory, bytes, stream); });
  }
  Status NewStream(Stream* /*stream*/) const { return Next("NewStream"); }
  void DestroyStream(Stream /*stream*/) const {}
  Status NewEvent(Event* event, bool timed = false) const {
    return Or("NewEvent", [&] { return host_.NewEvent(event, timed); });
  }
  void DestroyEvent(Event event) const { host_.DestroyEvent(event); }
  Status Record(Event /*event*/, Stream /*stream*/) const { return Next("Record"); }
  Status Wait(Stream /*stream*/, Event /*event*/) const { return Next("Wait"); }
  Status Synchronize(Stream /*stream*/) const { return Next("Synchronize"); }
  Status Synchronize(Event /*event*/) const { return Next("Synchronize"); }
  template <typename Kernel>
  Status Launch(const char* name, const Geometry& geometry, const Kernel& kernel, Stream stream) const {
    return Or(name, [&] { return host_.Launch(name, geometry, kernel, stream); });
  }

 private:
  Status Next(const char* call) const {
    if ((*countdown_)-- != 0) return Status::Ok();
    return MakeStatus(StatusCode::kInternal, "injected fault in ", call);
  }
  template <typename Function>
  Status Or(const char* call, const Function& function) const {
    HVD_CTR_RETURN_IF_ERROR(Next(call));
    return function();
  }

  HostRuntime host_;
  int* countdown_;
};

// One of every call; the first status that is not OK.
Status RunAllCalls(DeviceBackend* backend) {
  constexpr int32_t dim = 4;
  InlineRunner runner;
  HVD_CTR_RETURN_IF_ERROR(backend->Allocate(8, dim, 2 * dim + 1, RowType::kFloat32));
  const std::vector<Slot> slots = {1, kNoSlot, 5};
  const std::vector<Key> keys = {{1, 0}, {2, 0}, {3, 0}};
  std::vector<RowOptimizerOptions> optimizers(2);
  optimizers[0].kind = OptimizerKind::kRowWiseAdagrad;
  optimizers[1].kind = OptimizerKind::kAdam;
  optimizers[1].row_step = true;
  const std::vector<RowInit> inits = {MakeRowInit({}, optimizers[0], 1, 2, dim)};
  const std::vector<int32_t> tables = {0, 0, 1}, inverse = {1, 0, 1, -1}, positions = {2};
  std::vector<float> buffer(64, 1.0f), out(64);
  float* sums = nullptr;
  HVD_CTR_RETURN_IF_ERROR(backend->BeginMoves());
  HVD_CTR_RETURN_IF_ERROR(backend->FetchRecords(slots, out.data(), &runner));
  HVD_CTR_RETURN_IF_ERROR(backend->StoreRecords(slots, buffer.data(), &runner));
  HVD_CTR_RETURN_IF_ERROR(backend->EndMoves());
  HVD_CTR_RETURN_IF_ERROR(backend->StoreFirstRecords(slots, keys, {inits, dim, 3 * dim + 1}, &runner));
  HVD_CTR_RETURN_IF_ERROR(backend->GatherRows(slots, out.data(), &runner));
  HVD_CTR_RETURN_IF_ERROR(backend->PlaceRows(positions, buffer.data(), {dim, dim}, out.data(), &runner));
  HVD_CTR_RETURN_IF_ERROR(backend->Workspace(64, &sums));
  HVD_CTR_RETURN_IF_ERROR(backend->SegmentSum(buffer.data(), inverse, 3, sums, &runner));
  return backend->UpdateRows(slots, tables, sums, optimizers, 1, 1.0f, &runner);
}

TEST(DeviceRowsFaultsTest, EveryFailureOfTheRuntimeIsReportedAndNothingLeaks) {
  int failures = 0;
  for (int fault = 0;; ++fault) {
    int countdown = fault;
    DeviceRows<FailingRuntime> backend("FailingBackend", FailingRuntime(&countdown));
    const Status status = RunAllCalls(&backend);
    if (countdown >= 0) {  // There are no more calls than that.
      EXPECT_TRUE(status.ok()) << status.message();
      break;
    }
    ++failures;
    ASSERT_FALSE(status.ok()) << "fault " << fault;
    EXPECT_NE(status.message().find("injected fault"), std::string::npos) << status.message();
    // Staging memory that was in use came back: the next calls work, unless it was Allocate that failed.
    InlineRunner runner;
    const std::vector<Slot> slots = {1, 5};
    std::vector<float> out(64);
    const Status next = backend.GatherRows(slots, out.data(), &runner);
    EXPECT_TRUE(next.ok() || next.code() == StatusCode::kFailedPrecondition) << next.message();
  }
  EXPECT_GT(failures, 60);
}

}  // namespace
}  // namespace hvd_ctr
