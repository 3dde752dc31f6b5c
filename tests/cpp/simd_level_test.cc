// Every dispatched kernel gives the same bits on every level that this machine has; and the choice of the level.
#include "tf_ops/core/simd_level.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/cpp/backend_conformance.h"
#include "tests/cpp/thread_runner.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/id_dedupe.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cpu/interactions.h"
#include "tf_ops/cpu/pool_rows.h"

namespace hvd_ctr {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);  // Of which this takes the helpers only.

namespace {

const std::vector<SimdLevel>& Levels() {
  static const std::vector<SimdLevel> levels = [] {
    std::vector<SimdLevel> available;
    for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
      if (level <= BestSimdLevel()) available.push_back(level);
    }
    return available;
  }();
  return levels;
}

/// The level is back to the process's choice at the end of each test.
class SimdLevelTest : public testing::Test {
 protected:
  ~SimdLevelTest() override { ForceSimdLevel(ProcessSimdChoice().level); }

  /// run(): what the kernel gives. The same on all levels as on the baseline.
  static void ExpectSameBits(const std::string& what, const std::function<std::vector<float>()>& run) {
    ForceSimdLevel(SimdLevel::kBaseline);
    const std::vector<float> expected = run();
    for (const SimdLevel level : Levels()) {
      ForceSimdLevel(level);
      ASSERT_EQ(ActiveSimdLevel(), level);
      EXPECT_TRUE(SameBits(run(), expected)) << what << " on level " << SimdLevelName(level);
    }
  }
};

// Widths with every kind of remainder of 4, 8 and 16 floats, and those with a loop of their own.
const std::vector<int32_t> kDims = {1, 3, 4, 7, 8, 12, 15, 16, 17, 29, 32, 63, 64, 65, 100, 128, 200};
const std::vector<RowType> kRowTypes = {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16};
constexpr int64_t kSlots = 300;
constexpr int64_t kRows = 211;

std::vector<float> Positive(std::vector<float> values) {
  for (float& value : values) value = std::abs(value);
  return values;
}

std::unique_ptr<DeviceBackend> Backend(int32_t dim, int32_t state_floats, RowType row_type = RowType::kFloat32) {
  std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
  EXPECT_TRUE(backend->Allocate(kSlots, dim, state_floats, row_type).ok());
  std::vector<Slot> all(kSlots);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<float> records = Positive(RandomFloats(static_cast<size_t>(kSlots * (dim + state_floats)), 3));
  InlineRunner runner;
  EXPECT_TRUE(backend->StoreRecords(all, records.data(), &runner).ok());
  return backend;
}

/// All records (kSlots, record_floats).
std::vector<float> Records(const DeviceBackend& backend, int64_t record_floats) {
  std::vector<Slot> all(kSlots);
  std::iota(all.begin(), all.end(), 0);
  std::vector<float> records(static_cast<size_t>(kSlots * record_floats));
  InlineRunner runner;
  EXPECT_TRUE(backend.FetchRecords(all, records.data(), &runner).ok());
  return records;
}

TEST_F(SimdLevelTest, RowOptimizers) {
  for (const int32_t dim : kDims) {
    for (const RowOptimizerOptions& options : AllOptimizers()) {
      const int32_t state = StateFloats(options, dim);
      std::vector<Slot> slots = RandomSlots(kSlots, kRows, 5);
      slots[7] = kNoSlot;
      const std::vector<int32_t> tables(kRows, 0);
      const std::vector<float> gradients = RandomFloats(static_cast<size_t>(kRows * dim), 6);
      for (const RowType row_type : kRowTypes) {
        const auto what =
            internal::StrCat("optimizer ", static_cast<int>(options.kind), " dim ", dim, " ", RowTypeName(row_type));
        ExpectSameBits(what, [&] {
          const std::unique_ptr<DeviceBackend> backend = Backend(dim, state, row_type);
          InlineRunner runner;
          const std::vector<RowOptimizerOptions> optimizers = {options};
          for (int64_t step = 1; step <= 3; ++step) {
            EXPECT_TRUE(backend->UpdateRows(slots, tables, gradients.data(), optimizers, step, 0.5f, &runner).ok());
          }
          return Records(*backend, dim + state);
        });
      }
    }
  }
}

TEST_F(SimdLevelTest, MovingRecords) {
  for (const int32_t dim : kDims) {
    std::vector<Slot> slots = RandomSlots(kSlots, kRows, 8);
    slots[0] = slots[100] = kNoSlot;
    const std::vector<float> stored = RandomFloats(static_cast<size_t>(kRows * (dim + 5)), 9);
    for (const RowType row_type : kRowTypes) {
      ExpectSameBits(internal::StrCat("dim ", dim, " ", RowTypeName(row_type)), [&] {
        const std::unique_ptr<DeviceBackend> backend = Backend(dim, 5, row_type);
        InlineRunner runner;
        EXPECT_TRUE(backend->StoreRecords(slots, stored.data(), &runner).ok());
        std::vector<float> rows(static_cast<size_t>(kRows * dim));
        EXPECT_TRUE(backend->GatherRows(slots, rows.data(), &runner).ok());
        const std::vector<float> records = Records(*backend, dim + 5);
        rows.insert(rows.end(), records.begin(), records.end());
        return rows;
      });
    }
  }
}

TEST_F(SimdLevelTest, FirstRecords) {
  for (const InitializerKind kind : {InitializerKind::kConstant, InitializerKind::kUniform, InitializerKind::kNormal}) {
    for (const int32_t dim : kDims) {
      std::vector<Key> keys;
      for (int64_t i = 0; i < kRows; ++i)
        keys.push_back({static_cast<int64_t>(Mix64(i) >> (i % 63 + 1)), static_cast<int32_t>(i % 2)});
      const std::vector<Slot> slots = RandomSlots(kSlots, kRows, 8);
      RowOptimizerOptions adagrad, sgd;
      sgd.kind = OptimizerKind::kSgd;
      const std::vector<RowInit> tables = {MakeRowInit({kind, 0.05f}, adagrad, 1, 2, dim),
                                           MakeRowInit({kind, 0.3f}, sgd, 1, 3, dim)};
      for (const RowType row_type : kRowTypes) {
        const auto what = internal::StrCat("initializer ", static_cast<int>(kind), " dim ", dim, " ", RowTypeName(row_type));
        ExpectSameBits(what, [&] {
          const std::unique_ptr<DeviceBackend> backend = Backend(dim, dim + 3, row_type);
          InlineRunner runner;
          const RecordInit init{tables, dim, 2 * dim + 3};
          EXPECT_TRUE(backend->StoreFirstRecords(slots, keys, init, &runner).ok());
          return Records(*backend, 2 * dim + 3);
        });
      }
    }
  }
}

TEST_F(SimdLevelTest, SegmentSum) {
  constexpr int64_t kUnique = 40, kIds = 700;
  for (const int32_t dim : kDims) {
    const std::vector<float> gradients = RandomFloats(static_cast<size_t>(kIds * dim), 4);
    std::vector<int32_t> inverse(kIds);
    for (int64_t i = 0; i < kIds; ++i) inverse[i] = static_cast<int32_t>(Mix64(i) % (kUnique + 1)) - 1;
    for (const int threads : {1, 3}) {
      ExpectSameBits(internal::StrCat("dim ", dim, " threads ", threads), [&] {
        ThreadRunner runner(threads);
        std::vector<float> sums(static_cast<size_t>(kUnique * dim));
        EXPECT_TRUE(Backend(dim, 0)->SegmentSum(gradients.data(), inverse, kUnique, sums.data(), &runner).ok());
        return sums;
      });
    }
  }
}

TEST_F(SimdLevelTest, Interactions) {
  constexpr int64_t kSamples = 9;
  for (const int64_t features : {2, 5, 17, 26}) {
    for (const int32_t dim : kDims) {
      const std::vector<float> vectors = RandomFloats(static_cast<size_t>(kSamples * features * dim), 21);
      const std::vector<float> upstream = RandomFloats(static_cast<size_t>(kSamples * features * features), 22);
      const SampleVectors v{vectors.data(), kSamples, features, dim};
      ExpectSameBits(internal::StrCat("features ", features, " dim ", dim), [&] {
        InlineRunner runner;
        const auto pairs = static_cast<size_t>(kSamples * v.pairs());
        std::vector<float> dots(pairs), sums(kSamples), d_dots(vectors.size()), d_sums(vectors.size());
        DotPairs(v, dots.data(), &runner);
        DotPairsGrad(v, upstream.data(), d_dots.data(), &runner);
        PairSum(v, sums.data(), &runner);
        PairSumGrad(v, upstream.data(), d_sums.data(), &runner);
        for (const std::vector<float>* part : {&sums, &d_dots, &d_sums}) dots.insert(dots.end(), part->begin(), part->end());
        return dots;
      });
    }
  }
}

/// One id per bag, or bags of 0 .. 4 ids; with and without weights; every combiner.
class PoolLevels : public SimdLevelTest {
 protected:
  static constexpr int64_t kUnique = 50, kBags = 300;

  PoolLevels() {
    splits_.push_back(0);
    for (int64_t i = 0; i < kBags; ++i) splits_.push_back(splits_.back() + static_cast<int64_t>(Mix64(i) % 5));
    for (int64_t i = 0; i < splits_.back(); ++i) ids_.push_back(static_cast<int32_t>(Mix64(i + 999) % (kUnique + 1)) - 1);
    weights_ = RandomFloats(ids_.size(), 12);
  }

  /// function(bags, what) for every kind of bags.
  void ForEachBags(const std::function<void(const Bags&, const std::string&)>& function) const {
    for (const bool split : {false, true}) {
      for (const bool weighted : {false, true}) {
        for (const Combiner combiner : {Combiner::kSum, Combiner::kMean, Combiner::kSqrtN}) {
          Bags bags;
          bags.virtual_ids = ids_;
          if (split) bags.splits = splits_;
          if (weighted) bags.weights = weights_;
          bags.combiner = combiner;
          function(bags, internal::StrCat("split ", split, " weighted ", weighted, " combiner ", static_cast<int>(combiner)));
        }
      }
    }
  }

  std::vector<int64_t> splits_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

TEST_F(PoolLevels, PoolAndGradients) {
  InlineRunner runner;
  for (const int32_t dim : kDims) {
    const std::vector<float> rows = RandomFloats(static_cast<size_t>(kUnique * dim), 10);
    ForEachBags([&](const Bags& bags, const std::string& what) {
      for (const int64_t stride : {int64_t{dim}, int64_t{dim} + 5}) {
        const auto size = static_cast<size_t>(bags.bags() * stride);
        const std::vector<float> d_out = RandomFloats(size, 11);
        ExpectSameBits(internal::StrCat(what, " dim ", dim, " stride ", stride), [&] {
          std::vector<float> out(size, -3.0f), d_rows(static_cast<size_t>(kUnique * dim)), d_weights(ids_.size());
          EXPECT_TRUE(PoolRows(bags, rows.data(), kUnique, dim, out.data(), stride, &runner).ok());
          EXPECT_TRUE(PoolRowsGrad(bags, d_out.data(), stride, kUnique, dim, d_rows.data(), &runner).ok());
          EXPECT_TRUE(PoolRowsWeightGrad(bags, rows.data(), d_out.data(), stride, kUnique, dim, d_weights.data(), &runner).ok());
          out.insert(out.end(), d_rows.begin(), d_rows.end());
          out.insert(out.end(), d_weights.begin(), d_weights.end());
          return out;
        });
      }
    });
  }
}

// More than 4 MB, in whole cache lines: AVX-512 stores past the caches.
TEST_F(SimdLevelTest, LargeExpandWithAlignedAndOtherOutput) {
  constexpr int64_t kUnique = 100, kIds = 40000, kLine = 16;
  for (const int32_t dim : {16, 48}) {
    const std::vector<float> rows = RandomFloats(static_cast<size_t>(kUnique * dim), 10);
    std::vector<int32_t> ids(kIds);
    for (int64_t i = 0; i < kIds; ++i) ids[i] = static_cast<int32_t>(Mix64(i) % (kUnique + 1)) - 1;
    Bags bags;
    bags.virtual_ids = ids;
    for (const int64_t stride : {int64_t{dim}, dim + kLine, int64_t{dim} + 5}) {
      for (const int64_t offset : {0, 3}) {
        std::vector<float> memory(static_cast<size_t>(kIds * stride + 2 * kLine));
        const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
        float* const out = memory.data() + (kLine - address % kLine) % kLine + offset;
        ExpectSameBits(internal::StrCat("dim ", dim, " stride ", stride, " offset ", offset), [&] {
          std::fill(memory.begin(), memory.end(), -3.0f);
          ThreadRunner runner(2);
          EXPECT_TRUE(PoolRows(bags, rows.data(), kUnique, dim, out, stride, &runner).ok());
          for (int64_t i = 0; i < kIds; ++i) {
            for (int32_t j = 0; j < dim; ++j) {
              if (out[i * stride + j] != (ids[i] < 0 ? 0.0f : rows[static_cast<size_t>(ids[i] * dim + j)])) {
                ADD_FAILURE() << "bag " << i << " column " << j;
                return memory;
              }
            }
          }
          return memory;
        });
      }
    }
  }
}

TEST(SimdChoiceTest, NoWishGivesTheBest) {
  for (const char* wanted : {static_cast<const char*>(nullptr), ""}) {
    const SimdChoice choice = ChooseSimdLevel(wanted, SimdLevel::kAvx2);
    EXPECT_EQ(choice.level, SimdLevel::kAvx2);
    EXPECT_EQ(choice.warning, "");
  }
}

TEST(SimdChoiceTest, AWishUpToTheBestIsFollowed) {
  for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    const SimdChoice choice = ChooseSimdLevel(SimdLevelName(level), SimdLevel::kAvx512);
    EXPECT_EQ(choice.level, level);
    EXPECT_EQ(choice.warning, "");
  }
}

TEST(SimdChoiceTest, MoreThanTheProcessorHasIsAWarning) {
  const SimdChoice choice = ChooseSimdLevel("avx512", SimdLevel::kAvx2);
  EXPECT_EQ(choice.level, SimdLevel::kAvx2);
  EXPECT_EQ(choice.warning,
            "HVD_CTR_SIMD is 'avx512', which this processor does not have; it has: baseline, avx2; 'avx2' is used");
}

TEST(SimdChoiceTest, AnUnknownNameIsAWarning) {
  for (const char* wanted : {"AVX512", "sse", "avx512 "}) {
    const SimdChoice choice = ChooseSimdLevel(wanted, SimdLevel::kAvx512);
    EXPECT_EQ(choice.level, SimdLevel::kAvx512);
    EXPECT_EQ(choice.warning,
              internal::StrCat("HVD_CTR_SIMD is '", wanted, "'; allowed are baseline, avx2, avx512; 'avx512' is used"));
  }
}

TEST(SimdChoiceTest, ForcingGoesNoHigherThanTheProcessor) {
  ForceSimdLevel(SimdLevel::kAvx512);
  EXPECT_EQ(ActiveSimdLevel(), BestSimdLevel());
  ForceSimdLevel(ProcessSimdChoice().level);
  EXPECT_EQ(ActiveSimdLevel(), ProcessSimdChoice().level);
}

}  // namespace
}  // namespace hvd_ctr
