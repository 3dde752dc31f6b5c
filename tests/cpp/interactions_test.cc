#include "tf_ops/cpu/interactions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/cpp/thread_runner.h"

namespace hvd_ctr {
namespace {

struct Shape {
  int64_t samples, features, dim;
};

constexpr Shape kShapes[] = {{9, 26, 16}, {5, 2, 1}, {3, 17, 15}, {4, 16, 33}, {2, 40, 64}, {6, 1, 7}, {0, 3, 4}};
constexpr float kUntouched = 12345.0f;

/// A batch with the results of the definition, in double precision.
struct Batch {
  explicit Batch(const Shape& s) : shape(s) {
    std::mt19937_64 generator(s.samples * 100 + s.features);
    std::normal_distribution<float> normal;
    values.resize(s.samples * s.features * s.dim);
    d_pairs.resize(s.samples * pairs());
    d_sums.resize(s.samples);
    for (std::vector<float>* v : {&values, &d_pairs, &d_sums})
      std::generate(v->begin(), v->end(), [&] { return normal(generator); });
  }
  int64_t pairs() const { return shape.features * (shape.features - 1) / 2; }
  SampleVectors vectors() const { return {values.data(), shape.samples, shape.features, shape.dim}; }
  double at(int64_t b, int64_t f, int64_t d) const { return values[(b * shape.features + f) * shape.dim + d]; }
  double dot(int64_t b, int64_t f, int64_t g) const {
    double sum = 0;
    for (int64_t d = 0; d < shape.dim; ++d) sum += at(b, f, d) * at(b, g, d);
    return sum;
  }

  Shape shape;
  std::vector<float> values, d_pairs, d_sums;
};

/// What a call writes into n floats; fails where it writes behind them.
template <typename Fn>
std::vector<float> Written(int64_t n, const Fn& call) {
  std::vector<float> out(n + 32, kUntouched);
  call(out.data());
  for (int64_t i = n; i < n + 32; ++i) EXPECT_EQ(out[i], kUntouched) << "wrote behind the end";
  out.resize(n);
  return out;
}

class InteractionsTest : public testing::TestWithParam<Shape> {};

TEST_P(InteractionsTest, PairsAndTheirSumFollowTheDefinition) {
  const Batch batch(GetParam());
  InlineRunner runner;
  const auto pairs = Written(batch.d_pairs.size(), [&](float* out) { DotPairs(batch.vectors(), out, &runner); });
  const auto sums = Written(batch.shape.samples, [&](float* out) { PairSum(batch.vectors(), out, &runner); });
  const double tolerance = 1e-5 * batch.shape.features * batch.shape.dim;
  size_t i = 0;
  for (int64_t b = 0; b < batch.shape.samples; ++b) {
    double sum = 0;
    for (int64_t f = 0; f < batch.shape.features; ++f) {
      for (int64_t g = 0; g < f; ++g) {
        EXPECT_NEAR(pairs[i++], batch.dot(b, f, g), 1e-5 * batch.shape.dim) << b << " " << f << " " << g;
        sum += batch.dot(b, f, g);
      }
    }
    EXPECT_NEAR(sums[b], sum, tolerance) << b;
  }
}

TEST_P(InteractionsTest, GradientsFollowTheDefinition) {
  const Batch batch(GetParam());
  InlineRunner runner;
  const int64_t n = batch.values.size();
  const auto by_pairs = Written(n, [&](float* out) { DotPairsGrad(batch.vectors(), batch.d_pairs.data(), out, &runner); });
  const auto by_sums = Written(n, [&](float* out) { PairSumGrad(batch.vectors(), batch.d_sums.data(), out, &runner); });
  size_t i = 0;
  for (int64_t b = 0; b < batch.shape.samples; ++b) {
    for (int64_t f = 0; f < batch.shape.features; ++f) {
      for (int64_t d = 0; d < batch.shape.dim; ++d, ++i) {
        double of_pairs = 0, others = 0;
        for (int64_t g = 0; g < batch.shape.features; ++g) {
          if (g == f) continue;
          const int64_t pair = std::max(f, g) * (std::max(f, g) - 1) / 2 + std::min(f, g);
          of_pairs += batch.d_pairs[b * batch.pairs() + pair] * batch.at(b, g, d);
          others += batch.at(b, g, d);
        }
        ASSERT_NEAR(by_pairs[i], of_pairs, 1e-5 * batch.shape.features) << b << " " << f << " " << d;
        ASSERT_NEAR(by_sums[i], batch.d_sums[b] * others, 1e-5 * batch.shape.features) << b << " " << f << " " << d;
      }
    }
  }
}

TEST_P(InteractionsTest, ThreadsChangeNoBit) {
  const Shape small = GetParam();
  const Batch batch(Shape{small.samples * 50, small.features, small.dim});
  InlineRunner inline_runner;
  ThreadRunner threads(3);
  const auto all = [&](TaskRunner* runner) {
    std::vector<float> found = Written(batch.d_pairs.size(), [&](float* out) { DotPairs(batch.vectors(), out, runner); });
    const int64_t n = batch.values.size();
    for (const auto& part : {Written(batch.shape.samples, [&](float* out) { PairSum(batch.vectors(), out, runner); }),
                             Written(n, [&](float* out) { DotPairsGrad(batch.vectors(), batch.d_pairs.data(), out, runner); }),
                             Written(n, [&](float* out) { PairSumGrad(batch.vectors(), batch.d_sums.data(), out, runner); })}) {
      found.insert(found.end(), part.begin(), part.end());
    }
    return found;
  };
  EXPECT_EQ(all(&inline_runner), all(&threads));
}

INSTANTIATE_TEST_SUITE_P(Shapes, InteractionsTest, testing::ValuesIn(kShapes));

}  // namespace
}  // namespace hvd_ctr
