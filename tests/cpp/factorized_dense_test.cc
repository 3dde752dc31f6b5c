// The factored part of a dense layer against its definition in double precision; bits do not depend on threads and levels.
#include "tf_ops/cpu/factorized_dense.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/cpp/thread_runner.h"
#include "tf_ops/core/factor_plan.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

constexpr float kUntouched = 12345.0f;
constexpr int64_t kRoom = 64;  // Floats behind each output.

struct Sizes {
  int64_t samples, features, beside, dim, units, unique;
};

constexpr Sizes kSizes[] = {{60, 5, 3, 16, 32, 40},      {41, 4, 0, 7, 19, 30}, {33, 3, 2, 33, 130, 9},
                            {100, 26, 13, 16, 256, 300}, {20, 2, 1, 1, 1, 5},   {0, 3, 1, 4, 8, 6},
                            {7, 1, 0, 8, 15, 1},         {9, 3, 2, 17, 16, 12}, {64, 6, 5, 64, 300, 200}};

/// A layer and a batch whose features have few or many distinct rows, some rows in common, and some dropped ids.
struct Case {
  explicit Case(const Sizes& s, double max_share) : sizes(s) {
    std::mt19937_64 generator(s.samples * 1000 + s.units);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* values, int64_t n) {
      values->resize(n);
      std::generate(values->begin(), values->end(), [&] { return normal(generator); });
    };
    fill(&rows, s.unique * s.dim);
    fill(&kernel, (s.beside + s.features * s.dim) * s.units);
    fill(&bias, s.units);
    fill(&direct, s.samples * s.units);
    fill(&d_out, s.samples * s.units);
    for (int64_t i = 0; i < s.samples * s.features; ++i) {
      const int64_t rows_of_feature = std::max<int64_t>(1, s.unique / (1 + i % s.features));
      ids.push_back(generator() % 9 == 0 ? -1 : static_cast<int32_t>(generator() % rows_of_feature));
    }
    EXPECT_TRUE(plan.Make(ids, s.samples, s.features, s.unique, {max_share, 1 << 20}).ok());
    slots.resize(plan.factored().size() * s.samples);
    plan.WriteSlots(slots);
    factored = {plan.factored(), plan.begins(), plan.distinct(), slots, s.samples};
    shape = {s.beside, s.features, s.dim, s.units, s.unique};
  }
  double row(int64_t r, int64_t d) const { return rows[r * sizes.dim + d]; }
  double weight(int64_t f, int64_t d, int64_t h) const { return kernel[(sizes.beside + f * sizes.dim + d) * sizes.units + h]; }

  Sizes sizes;
  std::vector<float> rows, kernel, bias, direct, d_out;
  std::vector<int32_t> ids, slots;
  FactorPlan plan;
  FactoredIds factored;
  FactorizedShape shape;
};

/// n floats that a call writes; fails where it writes behind them.
template <typename Fn>
std::vector<float> Written(std::vector<float> before, const Fn& call) {
  const size_t n = before.size();
  before.resize(n + kRoom, kUntouched);
  call(before.data());
  for (size_t i = n; i < n + kRoom; ++i) EXPECT_EQ(before[i], kUntouched) << "wrote behind the end";
  before.resize(n);
  return before;
}

/// As memory from anywhere may be.
std::vector<float> Scratch(int64_t floats) { return std::vector<float>(floats, std::numeric_limits<float>::quiet_NaN()); }

std::vector<float> Outputs(const Case& c, bool with_bias, bool relu, TaskRunner* runner) {
  return Written(c.direct, [&](float* out) {
    Written(Scratch(FactorizedSumScratch(c.factored, c.shape)), [&](float* scratch) {
      FactorizedSum(c.factored, c.shape, c.rows.data(), c.kernel.data(), with_bias ? c.bias.data() : nullptr, relu, out, out,
                    scratch, runner);
    });
  });
}

struct Gradients {
  std::vector<float> rows, kernel;
};

Gradients GradientsOf(const Case& c, TaskRunner* runner) {
  Gradients g;
  g.rows = Written(std::vector<float>(c.rows.size(), 1.0f), [&](float* d_rows) {
    g.kernel = Written(std::vector<float>(c.kernel.size(), kUntouched), [&](float* d_kernel) {
      Written(Scratch(FactorizedGradScratch(c.factored, c.shape)), [&](float* scratch) {
        FactorizedGrad(c.factored, c.shape, c.rows.data(), c.kernel.data(), c.d_out.data(), d_rows, d_kernel, scratch, runner);
      });
    });
  });
  return g;
}

class FactorizedDenseTest : public testing::TestWithParam<Sizes> {
 protected:
  ~FactorizedDenseTest() override { ForceSimdLevel(ProcessSimdChoice().level); }
};

TEST_P(FactorizedDenseTest, SumsFollowTheDefinition) {
  for (const double share : {0.3, 1.0}) {
    const Case c(GetParam(), share);
    InlineRunner runner;
    for (const bool relu : {false, true}) {
      const auto outputs = Outputs(c, true, relu, &runner);
      const auto without_bias = Outputs(c, false, relu, &runner);
      for (int64_t b = 0; b < c.sizes.samples; ++b) {
        for (int64_t h = 0; h < c.sizes.units; ++h) {
          double sum = c.direct[b * c.sizes.units + h];
          for (const int32_t f : c.plan.factored()) {
            const int32_t r = c.ids[b * c.sizes.features + f];
            for (int64_t d = 0; r >= 0 && d < c.sizes.dim; ++d) sum += c.row(r, d) * c.weight(f, d, h);
          }
          const double tolerance = 1e-5 * c.sizes.features * c.sizes.dim;
          const double with_bias = sum + c.bias[h];
          EXPECT_NEAR(outputs[b * c.sizes.units + h], relu ? std::max(0.0, with_bias) : with_bias, tolerance);
          EXPECT_NEAR(without_bias[b * c.sizes.units + h], relu ? std::max(0.0, sum) : sum, tolerance);
        }
      }
    }
  }
}

TEST_P(FactorizedDenseTest, GradientsFollowTheDefinition) {
  for (const double share : {0.3, 1.0}) {
    const Case c(GetParam(), share);
    InlineRunner runner;
    const Gradients found = GradientsOf(c, &runner);
    std::vector<double> d_rows(c.rows.size(), 1.0), d_kernel(c.kernel.size(), kUntouched);
    for (const int32_t f : c.plan.factored()) {
      const auto first = d_kernel.begin() + (c.sizes.beside + f * c.sizes.dim) * c.sizes.units;
      std::fill(first, first + c.sizes.dim * c.sizes.units, 0.0);
      for (int64_t b = 0; b < c.sizes.samples; ++b) {
        const int32_t r = c.ids[b * c.sizes.features + f];
        for (int64_t d = 0; r >= 0 && d < c.sizes.dim; ++d) {
          for (int64_t h = 0; h < c.sizes.units; ++h) {
            const double upstream = c.d_out[b * c.sizes.units + h];
            d_rows[r * c.sizes.dim + d] += upstream * c.weight(f, d, h);
            *(first + d * c.sizes.units + h) += upstream * c.row(r, d);
          }
        }
      }
    }
    const double tolerance = 2e-6 * (1 + c.sizes.samples) * (1 + c.sizes.units);
    for (size_t i = 0; i < d_rows.size(); ++i) ASSERT_NEAR(found.rows[i], d_rows[i], tolerance) << i;
    // The rows of the direct features are left alone.
    for (size_t i = 0; i < d_kernel.size(); ++i) ASSERT_NEAR(found.kernel[i], d_kernel[i], tolerance) << i;
  }
}

TEST_P(FactorizedDenseTest, ThreadsAndLevelsGiveTheSameBits) {
  const Case c(GetParam(), 1.0);
  InlineRunner inline_runner;
  ForceSimdLevel(SimdLevel::kBaseline);
  const auto outputs = Outputs(c, true, true, &inline_runner);
  const Gradients gradients = GradientsOf(c, &inline_runner);
  for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (level > BestSimdLevel()) continue;
    ForceSimdLevel(level);
    for (const int threads : {1, 3}) {
      ThreadRunner runner(threads);
      EXPECT_EQ(Outputs(c, true, true, &runner), outputs) << SimdLevelName(level) << ", threads: " << threads;
      const Gradients found = GradientsOf(c, &runner);
      EXPECT_EQ(found.rows, gradients.rows) << SimdLevelName(level) << ", threads: " << threads;
      EXPECT_EQ(found.kernel, gradients.kernel) << SimdLevelName(level) << ", threads: " << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, FactorizedDenseTest, testing::ValuesIn(kSizes));

TEST(FactorizedDenseValuesTest, ReluKeepsNanAndMakesMinusZeroZero) {
  Case c({2, 1, 0, 1, 40, 1}, 0.0);
  ASSERT_TRUE(c.plan.factored().empty());
  c.direct.assign(80, -0.0f);
  c.direct[3] = std::numeric_limits<float>::quiet_NaN();
  c.direct[38] = std::numeric_limits<float>::quiet_NaN();
  c.direct[5] = -std::numeric_limits<float>::infinity();
  InlineRunner runner;
  const auto outputs = Outputs(c, false, true, &runner);
  EXPECT_TRUE(std::isnan(outputs[3]));
  EXPECT_TRUE(std::isnan(outputs[38]));
  EXPECT_EQ(outputs[5], 0.0f);
  EXPECT_FALSE(std::signbit(outputs[0]));
}

TEST(CheckFactoredIdsTest, RefusesWhatDoesNotBelongToTheBatch) {
  const Case c({10, 3, 1, 4, 8, 5}, 1.0);
  ASSERT_GT(c.plan.distinct().size(), 2u);
  EXPECT_TRUE(CheckFactoredIds("Call", c.factored, c.shape).ok());
  const auto refused = [&](FactoredIds ids, FactorizedShape shape) {
    const Status status = CheckFactoredIds("Call", ids, shape);
    return status.code() == StatusCode::kInvalidArgument && status.message().find("Call: ") == 0;
  };
  auto changed = [&](std::vector<int32_t> values, size_t i, int32_t value) {
    values.at(i) = value;
    return values;
  };
  const auto unique = static_cast<int32_t>(c.shape.unique), distinct = static_cast<int32_t>(c.plan.distinct().size());
  for (const int32_t bad : {-1, -7, distinct + 1}) {
    const auto slots = changed(c.slots, 3, bad);
    FactoredIds ids = c.factored;
    ids.slots = slots;
    EXPECT_TRUE(refused(ids, c.shape)) << bad;
  }
  for (const int32_t bad : {-1, unique}) {
    const auto rows = changed(c.plan.distinct(), 1, bad);
    FactoredIds ids = c.factored;
    ids.distinct = rows;
    EXPECT_TRUE(refused(ids, c.shape)) << bad;
  }
  for (const int32_t bad : {-1, 3, 1}) {  // 1: twice.
    const auto features = changed(c.plan.factored(), 0, bad);
    FactoredIds ids = c.factored;
    ids.features = features;
    EXPECT_TRUE(refused(ids, c.shape)) << bad;
  }
  for (const auto& [place, bad] :
       std::vector<std::pair<size_t, int32_t>>{{0, 1}, {1, distinct + 1}, {1, -1}, {3, distinct - 1}}) {
    const auto begins = changed(c.plan.begins(), place, bad);
    FactoredIds ids = c.factored;
    ids.begins = begins;
    EXPECT_TRUE(refused(ids, c.shape)) << place << " " << bad;
  }
  FactoredIds ids = c.factored;
  ids.samples = 9;
  EXPECT_TRUE(refused(ids, c.shape));
  FactorizedShape shape = c.shape;
  shape.unique = *std::max_element(c.plan.distinct().begin(), c.plan.distinct().end());
  EXPECT_TRUE(refused(c.factored, shape));
}

TEST(CheckFeaturesTest, EachFeatureIsInOneOfBoth) {
  const auto check = [](std::vector<int32_t> direct, std::vector<int32_t> factored) {
    return CheckFeatures("Call", direct, factored, 3).ok();
  };
  EXPECT_TRUE(check({0, 2}, {1}));
  EXPECT_TRUE(check({}, {0, 1, 2}));
  EXPECT_TRUE(check({0, 1, 2}, {}));
  EXPECT_FALSE(check({0, 1}, {1}));
  EXPECT_FALSE(check({0}, {1}));
  EXPECT_FALSE(check({2, 0}, {1}));
  EXPECT_FALSE(check({}, {1, 0, 2}));
  EXPECT_FALSE(check({0, 1, 1}, {2}));
  EXPECT_FALSE(check({0, 1, 2, 3}, {}));
  EXPECT_FALSE(check({0, 1, 2}, {-1}));
}

}  // namespace
}  // namespace hvd_ctr
