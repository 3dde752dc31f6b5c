// The test suite that every DeviceBackend passes. A backend's test file includes this header and registers a factory:
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, OfAllRowTypes(&MakeCpuBackend), BackendCaseName);
//
// Expected values come from row_math.h applied row by row, rounded to the row type, and from plain loops; comparisons are bit for
// bit.
#ifndef HVD_CTR_TESTS_CPP_BACKEND_CONFORMANCE_H_
#define HVD_CTR_TESTS_CPP_BACKEND_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/test_backends.h"
#include "tests/cpp/thread_runner.h"
#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/row_math.h"

namespace hvd_ctr {

struct BackendCase {
  BackendFactory make;
  RowType row_type;
};

/// The suite's parameters for one backend: every type of rows.
inline auto OfAllRowTypes(BackendFactory make) {
  return testing::Values(BackendCase{make, RowType::kFloat32}, BackendCase{make, RowType::kFloat16},
                         BackendCase{make, RowType::kBfloat16});
}

inline std::string BackendCaseName(const testing::TestParamInfo<BackendCase>& info) { return RowTypeName(info.param.row_type); }

/// Widths with every kind of remainder, and wide ones (FC 47).
inline const std::vector<int32_t>& TestDims() {
  static const std::vector<int32_t> dims = {1, 3, 7, 16, 17, 64, 100, 1024, 1280, 2049};
  return dims;
}

inline std::vector<float> RandomFloats(size_t n, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(generator);
  return values;
}

/// n distinct slots of [0, slots) in random order.
inline std::vector<Slot> RandomSlots(int64_t slots, size_t n, uint64_t seed) {
  std::vector<Slot> all(static_cast<size_t>(slots));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::mt19937_64(seed));
  all.resize(n);
  return all;
}

/// Equal bits: unlike ==, tells 0 from -0 and takes NaN as equal to itself.
inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// One option set of each kind, with the options that change the rule switched on in the second half.
inline std::vector<RowOptimizerOptions> AllOptimizers() {
  std::vector<RowOptimizerOptions> all;
  for (const bool extras : {false, true}) {
    for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad,
                                     OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
      RowOptimizerOptions options;
      options.kind = kind;
      options.learning_rate = 0.1f;
      options.row_step = extras;
      options.l1 = extras ? 0.05f : 0.0f;
      options.l2 = extras ? 0.02f : 0.0f;
      all.push_back(options);
    }
  }
  return all;
}

class BackendConformance : public testing::TestWithParam<BackendCase> {
 protected:
  std::unique_ptr<DeviceBackend> Make() const { return GetParam().make(); }
  RowType row_type() const { return GetParam().row_type; }

  /// What the device makes of a row (n).
  void Round(float* row, int64_t n) const {
    for (int64_t j = 0; j < n; ++j) row[j] = RoundToRowType(row_type(), row[j]);
  }
  /// The same for the rows of records (n, record_floats).
  std::vector<float> Rounded(std::vector<float> records) const {
    for (size_t begin = 0; begin < records.size(); begin += static_cast<size_t>(floats_)) Round(&records[begin], dim_);
    return records;
  }

  /// A backend whose records are random, and the same records beside it, rounded: records_ (slots, record_floats). State is
  /// positive, as the squared sums in it are; the last float of a record (Adam's own count) is a small whole number.
  void Fill(int64_t slots, int32_t dim, int32_t state_floats, uint64_t seed) {
    backend_ = Make();
    dim_ = dim;
    floats_ = dim + state_floats;
    ASSERT_TRUE(backend_->Allocate(slots, dim, state_floats, row_type()).ok());
    records_ = RandomFloats(static_cast<size_t>(slots * floats_), seed);
    for (int64_t s = 0; s < slots; ++s) {
      for (int32_t j = dim; j < floats_; ++j) records_[s * floats_ + j] = std::abs(records_[s * floats_ + j]);
      if (state_floats > 0) records_[s * floats_ + floats_ - 1] = static_cast<float>(s % 5);
    }
    std::vector<Slot> all(static_cast<size_t>(slots));
    std::iota(all.begin(), all.end(), 0);
    ASSERT_TRUE(backend_->StoreRecords(all, records_.data(), &inline_runner_).ok());
    records_ = Rounded(std::move(records_));
  }

  std::vector<float> FetchAll() {
    std::vector<Slot> all(records_.size() / static_cast<size_t>(floats_));
    std::iota(all.begin(), all.end(), 0);
    std::vector<float> records(records_.size());
    EXPECT_TRUE(backend_->FetchRecords(all, records.data(), &inline_runner_).ok());
    return records;
  }

  std::vector<float> SumOf(const std::vector<float>& gradients, const std::vector<int32_t>& inverse, int64_t unique,
                           TaskRunner* runner) {
    std::vector<float> sums(static_cast<size_t>(unique * dim_), 99.0f);
    EXPECT_TRUE(backend_->SegmentSum(gradients.data(), inverse, unique, sums.data(), runner).ok());
    return sums;
  }

  InlineRunner inline_runner_;
  std::unique_ptr<DeviceBackend> backend_;
  int32_t dim_ = 0;
  int32_t floats_ = 0;
  std::vector<float> records_;
};

TEST_P(BackendConformance, CallsBeforeAllocateAndASecondAllocateAreRefused) {
  std::unique_ptr<DeviceBackend> backend = Make();
  float row[4] = {};
  const std::vector<Slot> slots = {0};
  const std::vector<int32_t> tables = {0};
  const std::vector<RowOptimizerOptions> optimizers(1);
  EXPECT_EQ(backend->GatherRows(slots, row, &inline_runner_).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->StoreRecords(slots, row, &inline_runner_).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->SegmentSum(row, tables, 1, row, &inline_runner_).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->UpdateRows(slots, tables, row, optimizers, 1, 1.0f, &inline_runner_).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(backend->allocated_bytes(), 0);
  ASSERT_TRUE(backend->Allocate(10, 2, 2, row_type()).ok());
  EXPECT_GE(backend->allocated_bytes(), 10 * (2 * RowElementBytes(row_type()) + 2 * static_cast<int64_t>(sizeof(float))));
  EXPECT_EQ(backend->Allocate(10, 2, 2, row_type()).code(), StatusCode::kFailedPrecondition);
}

TEST_P(BackendConformance, NarrowRowsTakeLessMemory) {
  const auto bytes = [this](RowType type) {
    std::unique_ptr<DeviceBackend> backend = Make();
    EXPECT_TRUE(backend->Allocate(1000, 64, 64, type).ok());
    return backend->allocated_bytes();
  };
  EXPECT_EQ(bytes(RowType::kFloat32) - bytes(row_type()), 1000 * 64 * (4 - RowElementBytes(row_type())));
}

TEST_P(BackendConformance, AllocateNamesTheBytesItCannotGet) {
  std::unique_ptr<DeviceBackend> backend = Make();
  const Status status = backend->Allocate(2147483647, 1 << 16, 1 << 16, row_type());  // 1 PiB
  const int64_t bytes = 2147483647 * int64_t{1 << 16} * (RowElementBytes(row_type()) + 4);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find(std::to_string(bytes)), std::string::npos) << status.message();
  for (const int32_t dim : {0, -1}) EXPECT_EQ(Make()->Allocate(1, dim, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Make()->Allocate(-1, 4, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Make()->Allocate(1, 4, -1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Make()->Allocate(int64_t{1} << 31, 4, 0).code(), StatusCode::kInvalidArgument);
}

TEST_P(BackendConformance, RecordsComeBackAsStored) {
  for (const int32_t dim : TestDims()) {
    for (const int32_t state : {0, 1, dim, 2 * dim + 1}) {
      Fill(50, dim, state, 7);
      EXPECT_TRUE(SameBits(FetchAll(), records_)) << "dim " << dim << " state " << state;
    }
  }
}

TEST_P(BackendConformance, EdgesOfTheRowTypeAreRoundedAsDefinedAndStateIsNot) {
  std::vector<float> values = {0.0f, -0.0f, 1.00390625f, 65504.0f, 65519.0f, 65520.0f, -1e30f, 3e38f, INFINITY, -INFINITY, NAN};
  for (const float power : {0x1p-14f, 0x1p-24f, 0x1p-25f, 0x1p-126f, 0x1p-133f, 0x1p-134f, 0x1p-149f}) {
    for (const float factor : {1.0f, -1.5f, 0.75f, 1.00390625f}) values.push_back(power * factor);
  }
  const auto dim = static_cast<int32_t>(values.size());
  Fill(3, dim, dim, 5);
  std::vector<float> record = values;
  record.insert(record.end(), values.begin(), values.end());
  const std::vector<Slot> slot = {1};
  ASSERT_TRUE(backend_->StoreRecords(slot, record.data(), &inline_runner_).ok());
  std::vector<float> row(values.size());
  ASSERT_TRUE(backend_->GatherRows(slot, row.data(), &inline_runner_).ok());
  Round(record.data(), dim);
  EXPECT_TRUE(SameBits(row, {record.begin(), record.begin() + dim}));
  std::vector<float> fetched(record.size());
  ASSERT_TRUE(backend_->FetchRecords(slot, fetched.data(), &inline_runner_).ok());
  EXPECT_TRUE(SameBits(fetched, record));
  // What came from the device goes back to it unchanged.
  ASSERT_TRUE(backend_->StoreRecords(slot, fetched.data(), &inline_runner_).ok());
  ASSERT_TRUE(backend_->FetchRecords(slot, record.data(), &inline_runner_).ok());
  EXPECT_TRUE(SameBits(fetched, record));
}

TEST_P(BackendConformance, GatherReadsRowsAndAnswersNoSlotWithZeros) {
  for (const int32_t dim : TestDims()) {
    Fill(90, dim, dim, 11);
    std::vector<Slot> slots = RandomSlots(90, 70, 3);
    slots.push_back(slots[0]);  // A slot may be read twice.
    slots[5] = slots[69] = kNoSlot;
    std::vector<float> expected;
    for (const Slot slot : slots) {
      for (int32_t j = 0; j < dim; ++j) expected.push_back(slot == kNoSlot ? 0.0f : records_[slot * floats_ + j]);
    }
    for (const int threads : {1, 2, 5}) {
      ThreadRunner runner(threads);
      std::vector<float> rows(expected.size(), 99.0f);
      ASSERT_TRUE(backend_->GatherRows(slots, rows.data(), &runner).ok());
      EXPECT_TRUE(SameBits(rows, expected)) << "dim " << dim << " threads " << threads;
    }
  }
}

TEST_P(BackendConformance, StoreSkipsNoSlotAndFetchAnswersItWithZeros) {
  Fill(4, 3, 1, 5);
  const std::vector<Slot> slots = {2, kNoSlot, 0};
  const std::vector<float> fresh = RandomFloats(12, 6);
  ASSERT_TRUE(backend_->StoreRecords(slots, fresh.data(), &inline_runner_).ok());
  std::vector<float> back(12, 99.0f), expected = Rounded(fresh);
  std::copy(expected.begin(), expected.begin() + 4, records_.begin() + 8);
  std::copy(expected.begin() + 8, expected.end(), records_.begin());
  EXPECT_TRUE(SameBits(FetchAll(), records_));
  std::fill(expected.begin() + 4, expected.begin() + 8, 0.0f);
  ASSERT_TRUE(backend_->FetchRecords(slots, back.data(), &inline_runner_).ok());
  EXPECT_TRUE(SameBits(back, expected));
}

TEST_P(BackendConformance, FirstRecordsAreInitialRowAndState) {
  const InitializerOptions normal{InitializerKind::kNormal, 0.2f}, uniform{InitializerKind::kUniform, 0.1f};
  RowOptimizerOptions row_wise;
  row_wise.kind = OptimizerKind::kRowWiseAdagrad;
  for (const int32_t dim : TestDims()) {
    Fill(90, dim, dim + 2, 13);
    const std::vector<RowInit> tables = {MakeRowInit(normal, row_wise, 5, 100, dim),
                                         MakeRowInit(uniform, RowOptimizerOptions(), 5, 101, dim)};
    std::vector<Slot> slots = RandomSlots(90, 70, 4);
    slots[3] = slots[69] = kNoSlot;
    std::vector<Key> keys;
    for (int64_t i = 0; i < 70; ++i) keys.push_back({i % 3 == 0 ? INT64_MAX - i : i, static_cast<int32_t>(i % 2)});
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == kNoSlot) continue;
      float* record = records_.data() + slots[i] * floats_;
      std::fill(record, record + floats_, 0.0f);
      const bool first = keys[i].table == 0;
      InitialRow(first ? normal : uniform, 5, first ? 100 : 101, keys[i].id, dim, record);
      Round(record, dim);
      InitialState(first ? row_wise : RowOptimizerOptions(), dim, record + dim);
    }
    for (const int threads : {1, 3}) {
      ThreadRunner runner(threads);
      ASSERT_TRUE(backend_->StoreFirstRecords(slots, keys, {tables, dim, floats_}, &runner).ok());
      EXPECT_TRUE(SameBits(FetchAll(), records_)) << "dim " << dim << " threads " << threads;
    }
  }
}

TEST_P(BackendConformance, EmptyCallsDoNothing) {
  Fill(4, 3, 1, 5);
  const std::vector<RowOptimizerOptions> optimizers(1, RowOptimizerOptions());
  std::vector<float> none;
  const std::vector<Slot> no_slots;
  EXPECT_TRUE(backend_->StoreRecords(no_slots, none.data(), &inline_runner_).ok());
  EXPECT_TRUE(backend_->FetchRecords(no_slots, none.data(), &inline_runner_).ok());
  EXPECT_TRUE(backend_->GatherRows(no_slots, none.data(), &inline_runner_).ok());
  EXPECT_TRUE(backend_->SegmentSum(none.data(), no_slots, 0, none.data(), &inline_runner_).ok());
  EXPECT_TRUE(SumOf(none, {}, 2, &inline_runner_) == std::vector<float>(6, 0.0f));
  std::unique_ptr<DeviceBackend> empty = Make();
  EXPECT_TRUE(empty->Allocate(0, 3, 0).ok());
  EXPECT_TRUE(empty->GatherRows(no_slots, none.data(), &inline_runner_).ok());
}

TEST_P(BackendConformance, SegmentSumAddsInPositionOrderForAnyThreadCount) {
  for (const int32_t dim : TestDims()) {
    Fill(1, dim, 0, 1);
    const int64_t n = std::max<int64_t>(300, 110000 / dim), unique = n / 7;  // Enough work for three threads.
    std::mt19937_64 generator(static_cast<uint64_t>(dim));
    std::vector<int32_t> inverse(static_cast<size_t>(n));
    for (int32_t& target : inverse) {  // Some hot, some never, some left out.
      const int64_t draw = static_cast<int64_t>(generator() % static_cast<uint64_t>(unique + 10));
      target = static_cast<int32_t>(draw < unique ? draw * draw / unique : draw == unique ? -1 : 0);
    }
    const std::vector<float> gradients = RandomFloats(static_cast<size_t>(n * dim), 21);
    std::vector<float> expected(static_cast<size_t>(unique * dim), 0.0f);
    for (int64_t i = 0; i < n; ++i) {
      for (int32_t j = 0; j < dim && inverse[i] >= 0; ++j) expected[inverse[i] * dim + j] += gradients[i * dim + j];
    }
    for (const int threads : {1, 2, 3, 8}) {
      ThreadRunner runner(threads);
      EXPECT_TRUE(SameBits(SumOf(gradients, inverse, unique, &runner), expected)) << "dim " << dim << " threads " << threads;
    }
  }
}

TEST_P(BackendConformance, UpdateRowsEqualsRowMathAndLeavesOtherRowsAlone) {
  const std::vector<RowOptimizerOptions> optimizers = AllOptimizers();
  for (const int32_t dim : TestDims()) {
    const int64_t slots_total = dim < 1000 ? 400 : 40;
    const std::vector<Slot> slots = RandomSlots(slots_total, static_cast<size_t>(slots_total - 9), 17);
    std::vector<int32_t> tables(slots.size());
    for (size_t k = 0; k < tables.size(); ++k) tables[k] = static_cast<int32_t>(k * optimizers.size() / tables.size());
    std::swap(tables.front(), tables.back());  // Grouping by table is usual, not required.
    std::vector<float> gradients = RandomFloats(slots.size() * static_cast<size_t>(dim), 31);
    std::fill(gradients.begin(), gradients.begin() + dim, 0.0f);
    for (const int threads : {1, 2, 3, 7}) {
      Fill(slots_total, dim, 2 * dim + 1, 13);
      std::vector<float> expected = records_;
      std::vector<Slot> used = slots;
      used[3] = kNoSlot;
      for (const int64_t step : {1, 2}) {
        for (size_t k = 0; k < used.size(); ++k) {
          if (used[k] == kNoSlot) continue;
          float* record = &expected[static_cast<size_t>(used[k]) * floats_];
          const RowOptimizerOptions& options = optimizers[tables[k]];
          UpdateRow(options, step, options.learning_rate * 0.5f, &gradients[k * dim], dim, record, record + dim);
          Round(record, dim);
        }
        ThreadRunner runner(threads);
        ASSERT_TRUE(backend_->UpdateRows(used, tables, gradients.data(), optimizers, step, 0.5f, &runner).ok());
      }
      EXPECT_TRUE(SameBits(FetchAll(), expected)) << "dim " << dim << " threads " << threads;
    }
  }
}

TEST_P(BackendConformance, DuplicatesAreSummedBeforeTheRule) {
  RowOptimizerOptions adagrad;  // FC 8: ids [5, 5], gradient 1 each; one by one would give -1.64353.
  adagrad.learning_rate = 1.0f;
  Fill(6, 1, 1, 1);
  const std::vector<Slot> slots = {5};
  const std::vector<int32_t> tables = {0};
  const std::vector<float> start = {0.0f, 0.1f};
  ASSERT_TRUE(backend_->StoreRecords(slots, start.data(), &inline_runner_).ok());
  const std::vector<float> sum = SumOf({1.0f, 1.0f}, {0, 0}, 1, &inline_runner_);
  const std::vector<RowOptimizerOptions> optimizers = {adagrad};
  ASSERT_TRUE(backend_->UpdateRows(slots, tables, sum.data(), optimizers, 1, 1.0f, &inline_runner_).ok());
  float row = 0.0f;
  ASSERT_TRUE(backend_->GatherRows(slots, &row, &inline_runner_).ok());
  EXPECT_NEAR(row, RoundToRowType(row_type(), -0.98773f), 1e-5);
}

TEST_P(BackendConformance, BadArgumentsNameTheValueAndChangeNothing) {
  Fill(4, 3, 3, 5);
  std::vector<float> buffer(64, 1.0f);
  const std::vector<int32_t> tables = {0, 0};
  std::vector<RowOptimizerOptions> optimizers(1);
  for (const Slot bad : {4, -2, 2147483647}) {
    const std::vector<Slot> slots = {1, bad};
    for (const Status& status : {backend_->GatherRows(slots, buffer.data(), &inline_runner_),
                                 backend_->StoreRecords(slots, buffer.data(), &inline_runner_),
                                 backend_->FetchRecords(slots, buffer.data(), &inline_runner_),
                                 backend_->UpdateRows(slots, tables, buffer.data(), optimizers, 1, 1.0f, &inline_runner_)}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find(std::to_string(bad)), std::string::npos) << status.message();
    }
  }
  for (const int32_t bad : {2, -2}) {
    const std::vector<int32_t> inverse = {0, bad};
    const Status status = backend_->SegmentSum(buffer.data(), inverse, 2, buffer.data() + 6, &inline_runner_);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("inverse[1] = " + std::to_string(bad)), std::string::npos) << status.message();
  }
  const std::vector<Slot> slots = {1, 2};
  for (const int32_t bad : {1, -1}) {
    const std::vector<int32_t> bad_tables = {0, bad};
    EXPECT_EQ(backend_->UpdateRows(slots, bad_tables, buffer.data(), optimizers, 1, 1.0f, &inline_runner_).code(),
              StatusCode::kInvalidArgument);
  }
  const std::vector<int32_t> one_table = {0};
  EXPECT_EQ(backend_->UpdateRows(slots, one_table, buffer.data(), optimizers, 1, 1.0f, &inline_runner_).code(),
            StatusCode::kInvalidArgument);
  optimizers[0].kind = OptimizerKind::kAdam;  // 6 state floats, 3 allocated.
  const Status status = backend_->UpdateRows(slots, tables, buffer.data(), optimizers, 1, 1.0f, &inline_runner_);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("needs 6"), std::string::npos) << status.message();
  EXPECT_TRUE(SameBits(FetchAll(), records_));
}

TEST_P(BackendConformance, CallsOnDisjointSlotsMayRunTogether) {
  Fill(200, 16, 16, 5);
  const std::vector<Slot> all = RandomSlots(200, 200, 9);
  const std::vector<Slot> loaded(all.begin(), all.begin() + 100), updated(all.begin() + 100, all.end());
  const std::vector<int32_t> tables(100, 0);
  const std::vector<RowOptimizerOptions> optimizers(1);
  const std::vector<float> fresh = RandomFloats(3200, 1), gradients = RandomFloats(1600, 2);
  std::vector<float> expected = records_;
  for (int64_t step = 1; step <= 20; ++step) {
    for (int64_t k = 0; k < 100; ++k) {
      float* record = &expected[static_cast<size_t>(updated[k]) * 32];
      UpdateRow(optimizers[0], step, optimizers[0].learning_rate, &gradients[k * 16], 16, record, record + 16);
      Round(record, 16);
    }
  }
  for (int64_t k = 0; k < 100; ++k) std::copy_n(&fresh[k * 32], 32, &expected[static_cast<size_t>(loaded[k]) * 32]);
  expected = Rounded(expected);
  std::thread host_manager([&] {
    InlineRunner runner;
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(backend_->StoreRecords(loaded, fresh.data(), &runner).ok());
  });
  for (int64_t step = 1; step <= 20; ++step) {
    EXPECT_TRUE(backend_->UpdateRows(updated, tables, gradients.data(), optimizers, step, 1.0f, &inline_runner_).ok());
  }
  host_manager.join();
  EXPECT_TRUE(SameBits(FetchAll(), expected));
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_BACKEND_CONFORMANCE_H_
