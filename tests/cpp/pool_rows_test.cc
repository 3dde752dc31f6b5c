#include "tf_ops/cpu/pool_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/thread_runner.h"

namespace hvd_ctr {
namespace {

constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtN};

/// Bags that own their arrays.
struct Case {
  std::vector<int32_t> ids;
  std::vector<int64_t> splits;  ///< Empty: one id per bag.
  std::vector<float> weights;   ///< Empty: all 1.
  int64_t unique = 0;
  int32_t dim = 1;

  Bags bags(Combiner combiner) const {
    Bags b;
    b.virtual_ids = Span<const int32_t>(ids);
    b.splits = Span<const int64_t>(splits);
    b.weights = Span<const float>(weights);
    b.combiner = combiner;
    return b;
  }
  int64_t begin(int64_t bag) const { return splits.empty() ? bag : splits[bag]; }
  int64_t end(int64_t bag) const { return splits.empty() ? bag + 1 : splits[bag + 1]; }
  float weight(int64_t p) const { return weights.empty() ? 1.0f : weights[p]; }
};

std::vector<float> Random(size_t n, uint64_t seed, float low = -1.0f, float high = 1.0f) {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(generator);
  return values;
}

/// Bags of 0 to 5 ids, among them empty ones, trailing empty ones and dropped ids; or one id per bag.
Case RandomCase(int32_t dim, bool ragged, bool weighted, uint64_t seed) {
  Case c;
  c.dim = dim;
  c.unique = 37;
  std::mt19937_64 generator(seed);
  const int64_t bags = dim < 100 ? 900 : 60;
  if (ragged) c.splits.push_back(0);
  for (int64_t i = 0; i < bags; ++i) {
    const uint64_t count = !ragged ? 1 : i + 3 > bags ? 0 : generator() % 6;
    for (uint64_t k = 0; k < count; ++k) c.ids.push_back(generator() % 9 == 0 ? -1 : static_cast<int32_t>(generator() % 37));
    if (ragged) c.splits.push_back(static_cast<int64_t>(c.ids.size()));
  }
  if (weighted) c.weights = Random(c.ids.size(), seed + 1, 0.1f, 2.0f);
  return c;
}

/// The definition in double: normaliser of one bag, 0 where the bag pools to zeros.
double DivisorOf(const Case& c, Combiner combiner, int64_t bag) {
  double total = 0.0;
  for (int64_t p = c.begin(bag); p < c.end(bag); ++p) {
    if (c.ids[p] >= 0) total += combiner == Combiner::kMean ? c.weight(p) : c.weight(p) * c.weight(p);
  }
  return combiner == Combiner::kSum ? 1.0 : combiner == Combiner::kMean ? total : std::sqrt(total);
}

std::vector<double> PoolInDouble(const Case& c, Combiner combiner, const std::vector<float>& rows) {
  const int64_t bags = c.bags(combiner).bags();
  std::vector<double> out(static_cast<size_t>(bags * c.dim), 0.0);
  for (int64_t i = 0; i < bags; ++i) {
    const double divisor = DivisorOf(c, combiner, i);
    for (int64_t p = c.begin(i); p < c.end(i) && divisor != 0.0; ++p) {
      for (int32_t j = 0; j < c.dim && c.ids[p] >= 0; ++j) {
        out[i * c.dim + j] += static_cast<double>(c.weight(p)) * rows[c.ids[p] * c.dim + j] / divisor;
      }
    }
  }
  return out;
}

std::vector<float> Pool(const Case& c, Combiner combiner, const std::vector<float>& rows, TaskRunner* runner) {
  const Bags bags = c.bags(combiner);
  std::vector<float> out(static_cast<size_t>(bags.bags() * c.dim), 99.0f);
  const Status status = PoolRows(bags, rows.data(), c.unique, c.dim, out.data(), c.dim, runner);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

std::vector<float> RowGrad(const Case& c, Combiner combiner, const std::vector<float>& d_out, TaskRunner* runner) {
  std::vector<float> d_rows(static_cast<size_t>(c.unique * c.dim), 99.0f);
  const Status status = PoolRowsGrad(c.bags(combiner), d_out.data(), c.dim, c.unique, c.dim, d_rows.data(), runner);
  EXPECT_TRUE(status.ok()) << status.message();
  return d_rows;
}

std::vector<float> WeightGrad(const Case& c, Combiner combiner, const std::vector<float>& rows, const std::vector<float>& d_out,
                              TaskRunner* runner) {
  std::vector<float> d_weights(c.ids.size(), 99.0f);
  const Status status =
      PoolRowsWeightGrad(c.bags(combiner), rows.data(), d_out.data(), c.dim, c.unique, c.dim, d_weights.data(), runner);
  EXPECT_TRUE(status.ok()) << status.message();
  return d_weights;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// sum over bags of out . d_out: the scalar whose derivatives the gradients are.
double Loss(const Case& c, Combiner combiner, const std::vector<float>& rows, const std::vector<float>& d_out) {
  const std::vector<double> out = PoolInDouble(c, combiner, rows);
  double loss = 0.0;
  for (size_t i = 0; i < out.size(); ++i) loss += out[i] * d_out[i];
  return loss;
}

template <typename Fn>
void ForEachCase(const Fn& fn) {
  for (const int32_t dim : {1, 3, 7, 16, 17, 64, 100, 1024, 1280, 2049}) {
    for (const bool ragged : {false, true}) {
      for (const bool weighted : {false, true}) {
        const Case c = RandomCase(dim, ragged, weighted, static_cast<uint64_t>(dim) + 1);
        for (const Combiner combiner : kCombiners) {
          SCOPED_TRACE("dim " + std::to_string(dim) + (ragged ? " ragged" : " one id") + (weighted ? " weighted" : "") +
                       " combiner " + std::to_string(static_cast<int>(combiner)));
          fn(c, combiner);
        }
      }
    }
  }
}

TEST(PoolRowsTest, EqualsTheDefinitionForAnyThreadCount) {
  ForEachCase([](const Case& c, Combiner combiner) {
    const std::vector<float> rows = Random(static_cast<size_t>(c.unique * c.dim), 5);
    const std::vector<double> expected = PoolInDouble(c, combiner, rows);
    InlineRunner inline_runner;
    const std::vector<float> out = Pool(c, combiner, rows, &inline_runner);
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 2e-6) << i;
    for (const int threads : {2, 3, 8}) {
      ThreadRunner runner(threads);
      EXPECT_TRUE(SameBits(Pool(c, combiner, rows, &runner), out)) << threads;
    }
  });
}

TEST(PoolRowsGradTest, EqualsTheDefinitionForAnyThreadCount) {
  ForEachCase([](const Case& c, Combiner combiner) {
    const int64_t bags = c.bags(combiner).bags();
    const std::vector<float> d_out = Random(static_cast<size_t>(bags * c.dim), 6);
    std::vector<double> expected(static_cast<size_t>(c.unique * c.dim), 0.0);
    for (int64_t i = 0; i < bags; ++i) {
      for (int64_t p = c.begin(i); p < c.end(i); ++p) {
        for (int32_t j = 0; j < c.dim && c.ids[p] >= 0; ++j) {
          expected[c.ids[p] * c.dim + j] += c.weight(p) / DivisorOf(c, combiner, i) * d_out[i * c.dim + j];
        }
      }
    }
    InlineRunner inline_runner;
    const std::vector<float> d_rows = RowGrad(c, combiner, d_out, &inline_runner);
    for (size_t i = 0; i < d_rows.size(); ++i) ASSERT_NEAR(d_rows[i], expected[i], 2e-5) << i;
    for (const int threads : {2, 3, 8}) {
      ThreadRunner runner(threads);
      EXPECT_TRUE(SameBits(RowGrad(c, combiner, d_out, &runner), d_rows)) << threads;
    }
  });
}

// The pooled value is linear in the rows, so a difference of any size is exact up to rounding.
TEST(PoolRowsGradTest, AgreesWithFiniteDifferences) {
  for (const bool weighted : {false, true}) {
    Case c = RandomCase(3, true, weighted, 77);
    std::vector<float> rows = Random(static_cast<size_t>(c.unique * c.dim), 8);
    for (const Combiner combiner : kCombiners) {
      const std::vector<float> d_out = Random(static_cast<size_t>(c.bags(combiner).bags() * c.dim), 9);
      InlineRunner runner;
      const std::vector<float> d_rows = RowGrad(c, combiner, d_out, &runner);
      for (size_t i = 0; i < rows.size(); i += 5) {
        const float before = rows[i];
        rows[i] = before + 0.5f;
        const double up = Loss(c, combiner, rows, d_out);
        rows[i] = before - 0.5f;
        const double down = Loss(c, combiner, rows, d_out);
        rows[i] = before;
        EXPECT_NEAR(d_rows[i], up - down, 1e-4) << i;
      }
    }
  }
}

TEST(PoolRowsWeightGradTest, AgreesWithFiniteDifferencesForAnyThreadCount) {  // FC 45
  for (const int32_t dim : {1, 3, 16, 17, 100}) {
    for (const bool ragged : {false, true}) {
      Case c = RandomCase(dim, ragged, true, 40 + static_cast<uint64_t>(dim));
      const std::vector<float> rows = Random(static_cast<size_t>(c.unique * c.dim), 8);
      for (const Combiner combiner : kCombiners) {
        const std::vector<float> d_out = Random(static_cast<size_t>(c.bags(combiner).bags() * c.dim), 9);
        InlineRunner inline_runner;
        const std::vector<float> d_weights = WeightGrad(c, combiner, rows, d_out, &inline_runner);
        for (size_t p = 0; p < c.ids.size(); p += 41) {
          const float before = c.weights[p];
          const float high = before * 1.002f, low = before * 0.998f;
          c.weights[p] = high;
          const double up = Loss(c, combiner, rows, d_out);
          c.weights[p] = low;
          const double down = Loss(c, combiner, rows, d_out);
          c.weights[p] = before;
          ASSERT_NEAR(d_weights[p], (up - down) / (static_cast<double>(high) - low), 2e-3) << "dim " << dim << " position " << p;
          if (c.ids[p] < 0) {
            EXPECT_EQ(d_weights[p], 0.0f);
          }
        }
        ThreadRunner runner(3);
        EXPECT_TRUE(SameBits(WeightGrad(c, combiner, rows, d_out, &runner), d_weights));
      }
    }
  }
}

TEST(PoolRowsWeightGradTest, NoWeightsMeansTheDerivativeAtOne) {
  const Case plain = RandomCase(5, true, false, 3);
  Case ones = plain;
  ones.weights.assign(plain.ids.size(), 1.0f);
  const std::vector<float> rows = Random(static_cast<size_t>(plain.unique * plain.dim), 8);
  InlineRunner runner;
  for (const Combiner combiner : kCombiners) {
    const std::vector<float> d_out = Random(static_cast<size_t>(plain.bags(combiner).bags() * plain.dim), 9);
    EXPECT_TRUE(SameBits(WeightGrad(plain, combiner, rows, d_out, &runner), WeightGrad(ones, combiner, rows, d_out, &runner)));
  }
}

// Rows of the field cases: row i is {i, -2 i}.
const std::vector<float> kRows = {0, 0, 1, -2, 2, -4, 3, -6};

TEST(PoolRowsTest, ZeroTotalWeightGivesZerosAndZeroGradients) {  // FC 27
  Case c;
  c.ids = {1, 2, 3, 1, 2};
  c.splits = {0, 2, 3, 3, 5};  // Weights that are all 0; one id; no ids; weights that cancel in the mean.
  c.weights = {0, 0, 2, 1.5f, -1.5f};
  c.unique = 4;
  c.dim = 2;
  // Even an infinite gradient of a bag that pools to zeros reaches nothing.
  const std::vector<float> d_out = {INFINITY, INFINITY, 1, 1, INFINITY, INFINITY, 1, 1};
  InlineRunner runner;
  EXPECT_EQ(Pool(c, Combiner::kMean, kRows, &runner), (std::vector<float>{0, 0, 3, -6, 0, 0, 0, 0}));
  EXPECT_EQ(RowGrad(c, Combiner::kMean, d_out, &runner), (std::vector<float>{0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(WeightGrad(c, Combiner::kMean, kRows, d_out, &runner), (std::vector<float>{0, 0, 0, 0, 0}));

  const std::vector<float> out = Pool(c, Combiner::kSqrtN, kRows, &runner);
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 6), (std::vector<float>{0, 0, 3, -6, 0, 0}));
  for (const float value : RowGrad(c, Combiner::kSqrtN, d_out, &runner)) EXPECT_TRUE(std::isfinite(value));
  const std::vector<float> d_weights = WeightGrad(c, Combiner::kSqrtN, kRows, d_out, &runner);
  EXPECT_EQ(d_weights[0], 0.0f);
  EXPECT_EQ(d_weights[1], 0.0f);
  for (const float value : d_weights) EXPECT_TRUE(std::isfinite(value));
}

TEST(PoolRowsTest, WeightedMeanDividesByTheWeightSum) {  // FC 42
  Case c;
  c.ids = {0, 1};
  c.splits = {0, 2};
  c.weights = {1, 3};
  c.unique = 2;
  InlineRunner runner;
  EXPECT_EQ(Pool(c, Combiner::kMean, {0.0f, 4.0f}, &runner), std::vector<float>{3.0f});
  EXPECT_EQ(RowGrad(c, Combiner::kMean, {1.0f}, &runner), (std::vector<float>{0.25f, 0.75f}));
}

TEST(PoolRowsTest, TrailingEmptyBagsKeepTheirPlace) {  // FC 28
  Case c;
  c.ids = {3};
  c.splits = {0, 0, 1, 1, 1};
  c.unique = 4;
  c.dim = 2;
  InlineRunner runner;
  for (const Combiner combiner : kCombiners) {
    EXPECT_EQ(Pool(c, combiner, kRows, &runner), (std::vector<float>{0, 0, 3, -6, 0, 0, 0, 0}));
    Case empty = c;
    empty.ids.clear();
    empty.splits = {0, 0, 0, 0, 0};
    EXPECT_EQ(Pool(empty, combiner, kRows, &runner), std::vector<float>(8, 0.0f));
    EXPECT_EQ(RowGrad(empty, combiner, std::vector<float>(8, 1.0f), &runner), std::vector<float>(8, 0.0f));
  }
}

TEST(PoolRowsTest, DroppedIdsDoNotCountInAMean) {
  Case c;
  c.ids = {-1, 2, -1, -1};
  c.splits = {0, 3, 4};
  c.unique = 4;
  c.dim = 2;
  InlineRunner runner;
  for (const Combiner combiner : kCombiners) {
    EXPECT_EQ(Pool(c, combiner, kRows, &runner), (std::vector<float>{2, -4, 0, 0}));
    EXPECT_EQ(RowGrad(c, combiner, {5, 6, 7, 8}, &runner), (std::vector<float>{0, 0, 0, 0, 5, 6, 0, 0}));
  }
}

TEST(PoolRowsTest, NothingAtAll) {
  Case c;
  c.dim = 3;
  InlineRunner runner;
  for (const Combiner combiner : kCombiners) {
    EXPECT_TRUE(Pool(c, combiner, {}, &runner).empty());
    EXPECT_TRUE(RowGrad(c, combiner, {}, &runner).empty());
    EXPECT_TRUE(WeightGrad(c, combiner, {}, {}, &runner).empty());
  }
  Case no_bags = c;
  no_bags.splits = {0};
  EXPECT_EQ(no_bags.bags(Combiner::kSum).bags(), 0);
  EXPECT_TRUE(Pool(no_bags, Combiner::kSum, {}, &runner).empty());
  // A rank without ids still gets zero gradients for its rows.
  Case rows_only = c;
  rows_only.unique = 2;
  EXPECT_EQ(RowGrad(rows_only, Combiner::kSum, {}, &runner), std::vector<float>(6, 0.0f));
}

TEST(PoolRowsTest, StrideLeavesTheOtherColumnsAlone) {
  InlineRunner runner;
  for (const bool ragged : {false, true}) {
    Case c;
    c.ids = {3, -1, 1};
    if (ragged) c.splits = {0, 1, 2, 3};
    c.unique = 4;
    c.dim = 2;
    std::vector<float> out(15, 99.0f);
    ASSERT_TRUE(PoolRows(c.bags(Combiner::kSum), kRows.data(), 4, 2, out.data() + 1, 5, &runner).ok());
    EXPECT_EQ(out, (std::vector<float>{99, 3, -6, 99, 99, 99, 0, 0, 99, 99, 99, 1, -2, 99, 99}));
    std::vector<float> d_rows(8, 99.0f);
    ASSERT_TRUE(PoolRowsGrad(c.bags(Combiner::kSum), out.data() + 1, 5, 4, 2, d_rows.data(), &runner).ok());
    EXPECT_EQ(d_rows, (std::vector<float>{0, 0, 1, -2, 0, 0, 3, -6}));
    std::vector<float> d_weights(3, 99.0f);
    ASSERT_TRUE(
        PoolRowsWeightGrad(c.bags(Combiner::kSum), kRows.data(), out.data() + 1, 5, 4, 2, d_weights.data(), &runner).ok());
    EXPECT_EQ(d_weights, (std::vector<float>{45, 0, 5}));
  }
}

// Two samples of three features in rows of 1 + 3 * 2 floats, for any split over threads.
TEST(PoolRowsTest, BagsOfASampleStandInOneRow) {
  const std::vector<float> d_out = {9, 1, 2, 3, 4, 5, 6, 9, 7, 8, 10, 20, 30, 40};
  for (const int32_t threads : {1, 3}) {
    ThreadRunner runner(threads);
    for (const bool ragged : {false, true}) {
      for (const bool feature_major : {false, true}) {
        Case c;
        c.ids = feature_major ? std::vector<int32_t>{3, 2, -1, 1, 1, 3} : std::vector<int32_t>{3, -1, 1, 2, 1, 3};
        if (ragged) c.splits = {0, 1, 2, 3, 4, 5, 6};
        c.unique = 4;
        c.dim = 2;
        const BagPlaces places = feature_major ? BagPlaces(2, 2, 7) : BagPlaces(3, 7, 2);
        std::vector<float> out(14, 99.0f);
        ASSERT_TRUE(PoolRows(c.bags(Combiner::kSum), kRows.data(), 4, 2, out.data() + 1, places, &runner).ok());
        EXPECT_EQ(out, (std::vector<float>{99, 3, -6, 0, 0, 1, -2, 99, 2, -4, 1, -2, 3, -6}));
        std::vector<float> d_rows(8, 99.0f);
        ASSERT_TRUE(PoolRowsGrad(c.bags(Combiner::kSum), d_out.data() + 1, places, 4, 2, d_rows.data(), &runner).ok());
        EXPECT_EQ(d_rows, (std::vector<float>{0, 0, 15, 26, 7, 8, 31, 42}));
      }
    }
  }
}

void ExpectRefused(const Case& c, int64_t stride, const std::string& part) {
  InlineRunner runner;
  std::vector<float> buffer(100, 0.0f);
  const Bags bags = c.bags(Combiner::kMean);
  for (const Status& status :
       {PoolRows(bags, buffer.data(), c.unique, c.dim, buffer.data() + 50, stride, &runner),
        PoolRowsGrad(bags, buffer.data(), stride, c.unique, c.dim, buffer.data() + 50, &runner),
        PoolRowsWeightGrad(bags, buffer.data(), buffer.data(), stride, c.unique, c.dim, buffer.data() + 50, &runner)}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
}

TEST(PoolRowsTest, BadArgumentsAreNamed) {
  Case c;
  c.ids = {0, 1, 2};
  c.splits = {0, 2, 3};
  c.unique = 3;
  c.dim = 2;
  ExpectRefused(c, 1, "stride of the bags 1");
  Case bad = c;
  bad.ids[1] = 3;
  ExpectRefused(bad, 2, "virtual id 3 at position 1");
  bad.ids[1] = -2;
  ExpectRefused(bad, 2, "virtual id -2 at position 1");
  bad = c;
  bad.splits = {0, 2, 2};
  ExpectRefused(bad, 2, "from 0 to 2");
  bad.splits = {1, 2, 3};
  ExpectRefused(bad, 2, "from 1 to 3");
  bad.splits = {0, 4, 2, 3};
  ExpectRefused(bad, 2, "decrease from 4 to 2 at position 2");
  bad = c;
  bad.weights = {1, 1};
  ExpectRefused(bad, 2, "2 weights for 3 ids");
  bad = c;
  bad.dim = 0;
  ExpectRefused(bad, 2, "dim 0");
}

}  // namespace
}  // namespace hvd_ctr
