#include "tf_ops/core/row_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace hvd_ctr {
namespace {

/// One row under one optimizer, step by step.
struct Row {
  explicit Row(const RowOptimizerOptions& optimizer, std::vector<float> values) : options(optimizer), row(std::move(values)) {
    state.resize(static_cast<size_t>(StateFloats(options, dim())));
    InitialState(options, dim(), state.data());
  }
  int32_t dim() const { return static_cast<int32_t>(row.size()); }
  void Step(int64_t step, const std::vector<float>& gradient) {
    UpdateRow(options, step, options.learning_rate, gradient.data(), dim(), row.data(), state.data());
  }

  RowOptimizerOptions options;
  std::vector<float> row;
  std::vector<float> state;
};

RowOptimizerOptions Options(OptimizerKind kind, float learning_rate) {
  RowOptimizerOptions options;
  options.kind = kind;
  options.learning_rate = learning_rate;
  return options;
}

TEST(StateFloatsTest, CountsOfEachKind) {
  EXPECT_EQ(StateFloats(Options(OptimizerKind::kSgd, 1), 7), 0);
  EXPECT_EQ(StateFloats(Options(OptimizerKind::kAdagrad, 1), 7), 7);
  EXPECT_EQ(StateFloats(Options(OptimizerKind::kRowWiseAdagrad, 1), 7), 1);
  EXPECT_EQ(StateFloats(Options(OptimizerKind::kFtrl, 1), 7), 14);
  RowOptimizerOptions adam = Options(OptimizerKind::kAdam, 1);
  EXPECT_EQ(StateFloats(adam, 7), 14);
  adam.row_step = true;
  EXPECT_EQ(StateFloats(adam, 7), 15);
}

TEST(InitialStateTest, AccumulatorsStartAtTheOptionAllElseAtZero) {
  for (const OptimizerKind kind : {OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad, OptimizerKind::kFtrl}) {
    RowOptimizerOptions options = Options(kind, 1);
    options.initial_accumulator = 0.25f;
    const Row row(options, {0, 0, 0});
    const size_t accumulators = kind == OptimizerKind::kRowWiseAdagrad ? 1 : 3;
    for (size_t i = 0; i < row.state.size(); ++i) EXPECT_EQ(row.state[i], i < accumulators ? 0.25f : 0.0f) << i;
  }
  RowOptimizerOptions adam = Options(OptimizerKind::kAdam, 1);
  adam.row_step = true;
  EXPECT_EQ(Row(adam, {1, 2}).state, std::vector<float>(5, 0.0f));
}

// Duplicates are summed before the rule: ids [5, 5] with gradient 1 each arrive as gradient 2 (FC 8).
TEST(UpdateRowTest, AdagradOnTheSummedGradient) {
  for (const float epsilon : {0.0f, 1e-7f}) {
    RowOptimizerOptions options = Options(OptimizerKind::kAdagrad, 1.0f);
    options.epsilon = epsilon;
    Row row(options, {0.0f});
    row.Step(1, {2.0f});
    EXPECT_NEAR(row.row[0], -0.98773, 1e-5);
    EXPECT_FLOAT_EQ(row.state[0], 4.1f);
  }
}

TEST(UpdateRowTest, AdamCorrectsALateRowByTheGlobalStepOrByItsOwn) {  // FC 18
  RowOptimizerOptions options = Options(OptimizerKind::kAdam, 0.1f);
  Row global(options, {0.0f});
  global.Step(3, {1.0f});
  EXPECT_NEAR(global.row[0], -0.0639, 5e-5);

  options.row_step = true;
  Row own(options, {0.0f});
  own.Step(3, {1.0f});
  EXPECT_NEAR(own.row[0], -0.1, 1e-5);
  EXPECT_EQ(own.state[2], 1.0f);

  // Touched in every step, the two agree.
  Row always_global(Options(OptimizerKind::kAdam, 0.1f), {0.5f, -1.0f});
  Row always_own(options, {0.5f, -1.0f});
  for (int64_t step = 1; step <= 5; ++step) {
    always_global.Step(step, {0.3f, static_cast<float>(step)});
    always_own.Step(step, {0.3f, static_cast<float>(step)});
  }
  EXPECT_EQ(always_global.row, always_own.row);
  EXPECT_EQ(always_own.state[4], 5.0f);
}

TEST(UpdateRowTest, AdamTwoStepsByHand) {
  Row row(Options(OptimizerKind::kAdam, 0.1f), {1.0f});
  row.Step(1, {2.0f});  // m .2, v .004, alpha = .1 sqrt(.001)/.1
  EXPECT_NEAR(row.row[0], 1.0 - 0.1, 1e-5);
  row.Step(2, {-1.0f});  // m .08, v .004996, alpha = .1 sqrt(.001999)/.19
  const double alpha = 0.1 * std::sqrt(1 - 0.999 * 0.999) / (1 - 0.81);
  EXPECT_NEAR(row.row[0], 0.9 - 0.08 * alpha / std::sqrt(0.004996), 1e-5);
}

TEST(UpdateRowTest, AdamCountStopsAtTwoToThe24) {
  RowOptimizerOptions options = Options(OptimizerKind::kAdam, 0.1f);
  options.row_step = true;
  Row row(options, {0.0f});
  row.state[2] = 16777216.0f;
  row.Step(1, {1.0f});
  EXPECT_EQ(row.state[2], 16777216.0f);
  EXPECT_TRUE(std::isfinite(row.row[0]));
}

TEST(UpdateRowTest, RowWiseAdagradUsesTheMeanSquareOfTheRow) {
  RowOptimizerOptions options = Options(OptimizerKind::kRowWiseAdagrad, 0.5f);
  options.epsilon = 0.0f;
  Row row(options, {1.0f, 2.0f, 3.0f, 4.0f});
  row.Step(1, {1.0f, -2.0f, 3.0f, 0.0f});  // mean square 14/4
  EXPECT_FLOAT_EQ(row.state[0], 3.6f);
  const double root = std::sqrt(3.6);
  EXPECT_NEAR(row.row[0], 1 - 0.5 / root, 1e-6);
  EXPECT_NEAR(row.row[1], 2 + 1.0 / root, 1e-6);
  EXPECT_NEAR(row.row[2], 3 - 1.5 / root, 1e-6);
  EXPECT_EQ(row.row[3], 4.0f);
}

TEST(UpdateRowTest, RowWiseSumCoversEveryColumn) {
  for (const int32_t dim : {1, 3, 7, 15, 16, 17, 31, 64, 100, 2049}) {
    RowOptimizerOptions options = Options(OptimizerKind::kRowWiseAdagrad, 0.0f);
    options.initial_accumulator = 0.0f;
    Row row(options, std::vector<float>(static_cast<size_t>(dim), 0.0f));
    std::vector<float> gradient(static_cast<size_t>(dim));
    double sum = 0.0;
    for (int32_t j = 0; j < dim; ++j) {
      gradient[j] = static_cast<float>(j % 8 + 1);
      sum += gradient[j] * gradient[j];
    }
    row.Step(1, gradient);
    EXPECT_EQ(row.state[0], static_cast<float>(sum) / static_cast<float>(dim)) << dim;
  }
}

TEST(UpdateRowTest, FtrlByHand) {
  RowOptimizerOptions options = Options(OptimizerKind::kFtrl, 0.5f);
  options.l1 = 0.1f;
  options.l2 = 0.2f;
  const std::vector<float> start = {1.0f, -1.0f};  // A negative and a positive linear term.
  Row row(options, start);
  row.Step(1, {2.0f, 2.0f});
  const double old_root = std::sqrt(0.1), new_root = std::sqrt(4.1);
  for (size_t j = 0; j < 2; ++j) {
    const double linear = 2.0 - (new_root - old_root) / 0.5 * start[j];
    const double expected = ((linear < 0 ? -0.1 : 0.1) - linear) / (new_root / 0.5 + 0.4);
    EXPECT_NEAR(row.row[j], expected, 1e-6);
    EXPECT_FLOAT_EQ(row.state[j], 4.1f);
    EXPECT_NEAR(row.state[2 + j], linear, 1e-6);
  }
}

TEST(UpdateRowTest, FtrlL1SetsSmallWeightsToExactlyZero) {
  RowOptimizerOptions options = Options(OptimizerKind::kFtrl, 0.5f);
  options.l1 = 10.0f;
  Row row(options, {0.5f});
  row.Step(1, {0.01f});
  EXPECT_EQ(row.row[0], 0.0f);
}

TEST(UpdateRowTest, FtrlWithAnotherPowerAgreesWithTheRootAtOneHalf) {
  RowOptimizerOptions options = Options(OptimizerKind::kFtrl, 0.5f);
  Row root(options, {1.0f, -2.0f});
  options.learning_rate_power = std::nextafter(-0.5f, 0.0f);
  Row power(options, {1.0f, -2.0f});
  for (int64_t step = 1; step <= 3; ++step) {
    root.Step(step, {2.0f, 0.5f});
    power.Step(step, {2.0f, 0.5f});
  }
  EXPECT_NEAR(root.row[0], power.row[0], 1e-5);
  EXPECT_NEAR(root.row[1], power.row[1], 1e-5);
}

TEST(UpdateRowTest, FtrlWithLearningRateZeroChangesNothing) {
  RowOptimizerOptions options = Options(OptimizerKind::kFtrl, 0.0f);
  Row row(options, {1.0f});
  row.Step(1, {2.0f});
  EXPECT_EQ(row.row[0], 1.0f);
  EXPECT_EQ(row.state, (std::vector<float>{0.1f, 0.0f}));
}

TEST(UpdateRowTest, LazyL2IsAddedToTheGradient) {  // FC 21: one touched step of ten decays once.
  RowOptimizerOptions options = Options(OptimizerKind::kSgd, 0.5f);
  options.l2 = 0.1f;
  Row row(options, {2.0f});
  row.Step(1, {1.0f});
  EXPECT_FLOAT_EQ(row.row[0], 2.0f - 0.5f * (1.0f + 0.2f));

  options = Options(OptimizerKind::kAdagrad, 1.0f);
  options.l2 = 0.1f;
  Row adagrad(options, {2.0f});
  adagrad.Step(1, {0.8f});  // g = 1
  EXPECT_FLOAT_EQ(adagrad.state[0], 1.1f);
}

TEST(UpdateRowTest, ZeroGradientOnZeroStateIsNotNan) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
    RowOptimizerOptions options = Options(kind, 0.1f);
    options.initial_accumulator = 0.0f;
    options.epsilon = 0.0f;
    Row row(options, {1.5f, -2.0f});
    row.Step(1, {0.0f, 0.0f});
    EXPECT_EQ(row.row, (std::vector<float>{1.5f, -2.0f})) << static_cast<int>(kind);
  }
}

TEST(UpdateRowTest, NanGradientStaysVisible) {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad,
                                   OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
    Row row(Options(kind, 0.1f), {1.0f});
    row.Step(1, {std::numeric_limits<float>::quiet_NaN()});
    EXPECT_TRUE(std::isnan(row.row[0])) << static_cast<int>(kind);
  }
}

TEST(AdamAlphaTest, PowersAgreeWithPow) {
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{1000}, int64_t{123457}}) {
    EXPECT_NEAR(IntegerPower(0.999, n), std::pow(0.999, static_cast<double>(n)), 1e-12) << n;
  }
  RowOptimizerOptions options = Options(OptimizerKind::kAdam, 0.25f);
  EXPECT_EQ(MakeRowUpdate(options, int64_t{1} << 40, 0.25f).alpha, 0.25f);
}

constexpr uint64_t kTable = 0x123456789abcdef0ULL;

std::vector<float> First(InitializerKind kind, float scale, uint64_t seed, uint64_t table, int64_t id, int32_t dim) {
  std::vector<float> row(static_cast<size_t>(dim));
  InitialRow(InitializerOptions{kind, scale}, seed, table, id, dim, row.data());
  return row;
}

TEST(InitialRowTest, ConstantIsTheScale) {
  EXPECT_EQ(First(InitializerKind::kConstant, -0.5f, 1, kTable, 7, 3), (std::vector<float>(3, -0.5f)));
}

TEST(InitialRowTest, DependsOnSeedTableIdAndColumnOnly) {
  const std::vector<float> row = First(InitializerKind::kUniform, 0.05f, 1, kTable, 7, 8);
  EXPECT_EQ(row, First(InitializerKind::kUniform, 0.05f, 1, kTable, 7, 8));
  EXPECT_NE(row, First(InitializerKind::kUniform, 0.05f, 2, kTable, 7, 8));
  EXPECT_NE(row, First(InitializerKind::kUniform, 0.05f, 1, kTable + 1, 7, 8));
  EXPECT_NE(row, First(InitializerKind::kUniform, 0.05f, 1, kTable, 8, 8));
  EXPECT_EQ(std::set<float>(row.begin(), row.end()).size(), 8u);
  // A wider row starts with the same columns.
  const std::vector<float> wide = First(InitializerKind::kUniform, 0.05f, 1, kTable, 7, 16);
  EXPECT_EQ(row, std::vector<float>(wide.begin(), wide.begin() + 8));
}

TEST(InitialRowTest, LargestIdsAreDistinct) {  // No narrowing of ids.
  const int64_t top = std::numeric_limits<int64_t>::max();
  std::set<std::vector<float>> rows;
  for (const int64_t id : {top, top - 1, int64_t{1} << 32, int64_t{0}, (int64_t{1} << 32) + 1, int64_t{1}}) {
    rows.insert(First(InitializerKind::kUniform, 1.0f, 0, kTable, id, 4));
  }
  EXPECT_EQ(rows.size(), 6u);
}

struct Moments {
  double mean = 0, deviation = 0, low = 1e9, high = -1e9, lag = 0;
};

Moments Measure(InitializerKind kind, float scale) {
  Moments m;
  double square = 0, before = 0;
  const int64_t ids = 20000;
  for (int64_t id = 0; id < ids; ++id) {
    for (const float value : First(kind, scale, 3, kTable, id, 4)) {
      m.mean += value / (4.0 * ids);
      square += value * value / (4.0 * ids);
      m.lag += value * before / (4.0 * ids);
      m.low = std::min<double>(m.low, value);
      m.high = std::max<double>(m.high, value);
      before = value;
    }
  }
  m.deviation = std::sqrt(square - m.mean * m.mean);
  return m;
}

TEST(InitialRowTest, UniformFillsTheRange) {
  const Moments m = Measure(InitializerKind::kUniform, 0.5f);
  EXPECT_NEAR(m.mean, 0.0, 0.005);
  EXPECT_NEAR(m.deviation, 0.5 / std::sqrt(3.0), 0.003);
  EXPECT_NEAR(m.lag, 0.0, 0.002);
  EXPECT_GE(m.low, -0.5);
  EXPECT_LT(m.low, -0.499);
  EXPECT_LT(m.high, 0.5);
  EXPECT_GT(m.high, 0.499);
}

TEST(InitialRowTest, NormalHasTheScaleAsDeviation) {
  const Moments m = Measure(InitializerKind::kNormal, 2.0f);
  EXPECT_NEAR(m.mean, 0.0, 0.03);
  EXPECT_NEAR(m.deviation, 2.0, 0.03);
  EXPECT_NEAR(m.lag, 0.0, 0.06);
  EXPECT_GT(m.high, 6.0);
  EXPECT_LT(m.high, 12.0);
}

TEST(InitialRowTest, LogarithmAndCosineAgreeWithLibm) {
  for (uint32_t k = 1; k <= (1u << 24); k += k < 1000 ? 1 : 997) {
    const double x = static_cast<double>(k) / 16777216.0;
    ASSERT_NEAR(LogOf24Bits(k), std::log(x), 1e-13) << k;
    ASSERT_NEAR(CosOf24Bits(k - 1), std::cos(2.0 * 3.14159265358979323846 * (k - 1) / 16777216.0), 1e-13) << k;
  }
  EXPECT_EQ(LogOf24Bits(1u << 24), 0.0);
}

// Values of old checkpoints and of other hosts: a change of these breaks both.
TEST(InitialRowTest, ValuesArePinned) {
  const std::string name = "item";
  const uint64_t table = HashBytes(name.data(), static_cast<int64_t>(name.size()));
  EXPECT_EQ(First(InitializerKind::kUniform, 0.05f, 42, table, 123456789012345, 3),
            (std::vector<float>{-0.0109813036f, -0.0127626238f, 0.0239671301f}));
  EXPECT_EQ(First(InitializerKind::kNormal, 0.05f, 42, table, 123456789012345, 3),
            (std::vector<float>{-0.0204342958f, -0.0702416822f, -0.0385366082f}));
}

}  // namespace
}  // namespace hvd_ctr
