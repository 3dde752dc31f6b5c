// The CUDA backend's kernels and logic on the CPU: the suite of every backend, and the same bits as CpuBackend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/backend_conformance.h"
#include "tests/cpp/test_backends.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cuda/cuda_backend.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(CudaOnCpu, BackendConformance, OfAllRowTypes(&MakeCudaOnCpuBackend), BackendCaseName);
INSTANTIATE_TEST_SUITE_P(Queued, BackendConformance, OfAllRowTypes(&MakeQueuedBackend), BackendCaseName);
#if defined(HVD_CTR_DEVICE_UNDER_TEST)
INSTANTIATE_TEST_SUITE_P(Device, BackendConformance, OfAllRowTypes(&MakeBackendUnderTest), BackendCaseName);
#endif

namespace {

// Optimizers with every option that changes the rule, and values at its edges.
std::vector<RowOptimizerOptions> ManyOptimizers() {
  std::vector<RowOptimizerOptions> all = AllOptimizers();
  const size_t plain = all.size();
  for (size_t i = 0; i < plain; ++i) {
    RowOptimizerOptions options = all[i];
    options.epsilon = 0.0f;
    options.initial_accumulator = 0.0f;
    options.beta1 = 0.0f;
    options.learning_rate_power = i % 2 == 0 ? -0.3f : 0.0f;
    if (options.kind == OptimizerKind::kFtrl && i % 2 == 0) options.learning_rate = 0.0f;
    all.push_back(options);
  }
  return all;
}

struct Pair {
  BackendFactory device;
  const char* name;
  RowType row_type;
  bool other_nans = false;  // The device's arithmetic has NaNs of its own.
};

class SameBitsTest : public testing::TestWithParam<Pair> {
 protected:
  /// Two backends with the same first records.
  void Make(int32_t dim) {
    all_ = RandomSlots(kSlots, kSlots, 1);
    cpu_ = MakeCpuBackend();
    device_ = GetParam().device();
    dim_ = dim;
    state_ = 2 * dim + 1;
    floats_ = dim_ + state_;
    optimizers_ = ManyOptimizers();
    for (const std::unique_ptr<DeviceBackend>* backend : {&cpu_, &device_}) {
      ASSERT_TRUE((*backend)->Allocate(kSlots, dim, state_, GetParam().row_type).ok());
    }
    inits_.clear();
    for (size_t t = 0; t < optimizers_.size(); ++t) {
      const auto kind = static_cast<InitializerKind>(t % 3);
      inits_.push_back(MakeRowInit({kind, 0.1f}, optimizers_[t], 3, t, dim));
    }
    const std::vector<Key> keys = Keys(kSlots);
    Both([&](DeviceBackend* backend) { return backend->StoreFirstRecords(all_, keys, Init(), &runner_); });
  }

  template <typename Call>
  void Both(const Call& call) {
    for (DeviceBackend* backend : {cpu_.get(), device_.get()}) {
      const Status status = call(backend);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }

  /// One random call on both; what they return must be equal.
  void RunOne() {
    const std::vector<Slot> slots = Some();
    const auto n = static_cast<int64_t>(slots.size());
    const uint32_t dice = Dice(10);
    if (dice < 5) {
      Update(slots);
    } else if (dice < 6) {
      std::vector<float> records = Values(n * floats_);
      for (int64_t i = 0; i < n; ++i) {  // State of these rules is not negative, and counts are whole.
        for (int32_t j = dim_; j < floats_; ++j) records[i * floats_ + j] = std::abs(records[i * floats_ + j]);
        records[i * floats_ + floats_ - 1] = static_cast<float>(Dice(5));
      }
      Both([&](DeviceBackend* backend) { return backend->StoreRecords(slots, records.data(), &runner_); });
    } else if (dice < 7) {
      const std::vector<Key> keys = Keys(n);
      Both([&](DeviceBackend* backend) { return backend->StoreFirstRecords(slots, keys, Init(), &runner_); });
    } else if (dice < 8) {
      Compare(n * dim_, [&](DeviceBackend* backend, float* out) { return backend->GatherRows(slots, out, &runner_); });
    } else {
      Compare(n * floats_, [&](DeviceBackend* backend, float* out) { return backend->FetchRecords(slots, out, &runner_); });
    }
  }

  void CompareAll() {
    Compare(kSlots * floats_, [&](DeviceBackend* backend, float* out) { return backend->FetchRecords(all_, out, &runner_); });
  }

 private:
  static constexpr int64_t kSlots = 60;

  uint32_t Dice(uint32_t sides) { return static_cast<uint32_t>(random_() % sides); }
  RecordInit Init() const { return {inits_, dim_, floats_}; }

  std::vector<Slot> Some() {
    std::vector<Slot> slots = RandomSlots(kSlots, 1 + Dice(kSlots), random_());
    for (Slot& slot : slots) {
      if (Dice(9) == 0) slot = kNoSlot;
    }
    return slots;
  }
  std::vector<Key> Keys(int64_t n) {
    std::vector<Key> keys(static_cast<size_t>(n));
    for (Key& key : keys)
      key = {static_cast<int64_t>(random_() >> 1), static_cast<int32_t>(Dice(static_cast<uint32_t>(inits_.size())))};
    return keys;
  }
  /// Of very different sizes, some 0 and -0.
  std::vector<float> Values(int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) {
      value = Dice(12) == 0 ? -0.0f : std::ldexp(static_cast<float>(Dice(2001)) - 1000.0f, -static_cast<int>(Dice(40)));
    }
    return values;
  }

  /// Sums of gradients, then the rule, as a step does.
  void Update(const std::vector<Slot>& slots) {
    const auto unique = static_cast<int64_t>(slots.size());
    std::vector<int32_t> inverse(static_cast<size_t>(unique));
    std::iota(inverse.begin(), inverse.end(), 0);
    const uint32_t form = Dice(4);
    if (form == 1) std::shuffle(inverse.begin(), inverse.end(), random_);
    if (form >= 2) {
      inverse.resize(1 + Dice(200));
      for (int32_t& k : inverse) k = static_cast<int32_t>(Dice(static_cast<uint32_t>(unique) + 1)) - 1;
      if (form == 3) std::fill(inverse.begin(), inverse.end() - inverse.size() / 2, 0);
    }
    const std::vector<float> gradients = Values(static_cast<int64_t>(inverse.size()) * dim_);
    std::vector<float> sums(static_cast<size_t>(unique * dim_));
    Compare(
        unique * dim_,
        [&](DeviceBackend* backend, float* out) { return backend->SegmentSum(gradients.data(), inverse, unique, out, &runner_); },
        &sums);
    std::vector<int32_t> tables(static_cast<size_t>(unique));
    for (int32_t& table : tables) table = static_cast<int32_t>(Dice(static_cast<uint32_t>(optimizers_.size())));
    if (Dice(2) == 0) std::sort(tables.begin(), tables.end());
    if (Dice(3) == 0) std::fill(tables.begin(), tables.end(), tables[0]);
    const float scale = static_cast<float>(Dice(3)) * 0.5f;
    ++step_;
    Both([&](DeviceBackend* backend) {
      return backend->UpdateRows(slots, tables, sums.data(), optimizers_, step_, scale, &runner_);
    });
  }

  template <typename Call>
  void Compare(int64_t floats, const Call& call, std::vector<float>* result = nullptr) {
    std::vector<float> first(static_cast<size_t>(floats), 99.0f), second(static_cast<size_t>(floats), -99.0f);
    ASSERT_TRUE(call(cpu_.get(), first.data()).ok());
    ASSERT_TRUE(call(device_.get(), second.data()).ok());
    if (result != nullptr) *result = first;
    if (GetParam().other_nans) {
      for (std::vector<float>* values : {&first, &second}) MakeNansAlike(values);
    }
    ASSERT_TRUE(SameBits(first, second)) << "dim " << dim_ << ", after " << step_ << " updates";
  }

  /// Rows that rules of several kinds update in turn come to roots of negative numbers. Of those x86 makes 0xffc00000, and CUDA
  /// 0x7fffffff.
  static void MakeNansAlike(std::vector<float>* values) {
    for (float& value : *values) {
      if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    }
  }

  std::mt19937_64 random_{17};
  ThreadRunner runner_{2};
  std::unique_ptr<DeviceBackend> cpu_, device_;
  int32_t dim_ = 0, state_ = 0, floats_ = 0;
  int64_t step_ = 0;
  std::vector<Slot> all_;
  std::vector<RowOptimizerOptions> optimizers_;
  std::vector<RowInit> inits_;
};

TEST_P(SameBitsTest, RandomProgramsOfCalls) {
  for (const int32_t dim : {1, 2, 3, 4, 5, 8, 12, 16, 20, 31, 32, 36, 64, 100, 128, 132, 260}) {
    Make(dim);
    for (int i = 0; i < 60 && !HasFatalFailure(); ++i) RunOne();
    CompareAll();
    if (HasFatalFailure()) return;
  }
}

std::vector<Pair> Pairs() {
  std::vector<Pair> pairs;
  for (const RowType row_type : {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16}) {
    pairs.push_back({&MakeCudaOnCpuBackend, "CudaOnCpu", row_type});
    pairs.push_back({&MakeStrictBackend, "Strict", row_type});
#if defined(HVD_CTR_DEVICE_UNDER_TEST)
    pairs.push_back({&MakeBackendUnderTest, "Device", row_type, true});
#endif
  }
  return pairs;
}

INSTANTIATE_TEST_SUITE_P(Backends, SameBitsTest, testing::ValuesIn(Pairs()),
                         [](const auto& info) { return std::string(info.param.name) + RowTypeName(info.param.row_type); });

}  // namespace
}  // namespace hvd_ctr
