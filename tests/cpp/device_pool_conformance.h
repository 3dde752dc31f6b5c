// The test suite that every DevicePool passes: the same bits and the same refusals as cpu/pool_rows.h and cpu/interactions.h. A
// pool's test file includes this header and registers a factory of pools that take host memory (host_facing_pool.h):
//
//   INSTANTIATE_TEST_SUITE_P(CudaOnCpu, DevicePoolConformance, testing::Values(&MakePool));
#ifndef HVD_CTR_TESTS_CPP_DEVICE_POOL_CONFORMANCE_H_
#define HVD_CTR_TESTS_CPP_DEVICE_POOL_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/core/bags.h"
#include "tf_ops/cpu/interactions.h"
#include "tf_ops/cpu/pool_rows.h"
#include "tf_ops/cuda/device_pool.h"

namespace hvd_ctr {

using PoolFactory = std::unique_ptr<DevicePool> (*)();

/// Bags that own their arrays, and where they stand behind `beside` columns per sample.
struct PoolCase {
  std::vector<int32_t> ids;
  std::vector<int64_t> splits;
  std::vector<float> weights;
  Combiner combiner = Combiner::kSum;
  int64_t unique = 0;
  int32_t dim = 1;
  int64_t first = 0;  ///< Floats before the first bag.
  BagPlaces places = 1;

  Bags bags() const {
    Bags b;
    b.virtual_ids = Span<const int32_t>(ids);
    b.splits = Span<const int64_t>(splits);
    b.weights = Span<const float>(weights);
    b.combiner = combiner;
    return b;
  }
  /// Floats of the matrix of pooled vectors, some of no bag behind the last one among them.
  size_t floats() const {
    int64_t extent = 0;
    for (int64_t i = 0; i < bags().bags(); ++i) extent = std::max(extent, first + places.at(i) + dim);
    return static_cast<size_t>(extent + 3);
  }
};

inline std::vector<float> UniformFloats(size_t n, uint64_t seed, float low = -1.0f, float high = 1.0f) {
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(generator);
  return values;
}

inline bool EqualBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

enum class Arrangement { kRows, kBySample, kByFeature };

/// Samples of 5 features, bags of 0 to 5 ids (or one), dropped ones among them; id 0 is hot.
inline PoolCase RandomPoolCase(int32_t dim, Combiner combiner, bool ragged, bool weighted, Arrangement arrangement,
                               uint64_t seed) {
  std::mt19937_64 generator(seed);
  const int64_t samples = 12, features = 5, beside = static_cast<int64_t>(generator() % 4) + (dim % 4 == 0 ? 0 : 1);
  PoolCase c;
  c.dim = dim;
  c.combiner = combiner;
  c.unique = 23;
  if (ragged) c.splits.push_back(0);
  for (int64_t i = 0; i < samples * features; ++i) {
    const uint64_t count = !ragged ? 1 : i + 3 > samples * features ? 0 : generator() % 6;
    for (uint64_t k = 0; k < count; ++k) {
      const uint64_t draw = generator() % 40;
      c.ids.push_back(draw == 39 ? kNoVirtualId : draw < 22 ? static_cast<int32_t>(draw) : 0);
    }
    if (ragged) c.splits.push_back(static_cast<int64_t>(c.ids.size()));
  }
  if (weighted) c.weights = UniformFloats(c.ids.size(), seed + 1, 0.1f, 2.0f);
  const int64_t row_floats = beside + features * dim;
  c.places = arrangement == Arrangement::kRows       ? BagPlaces(dim)
             : arrangement == Arrangement::kBySample ? BagPlaces(features, row_floats, dim)
                                                     : BagPlaces(samples, dim, row_floats);
  c.first = arrangement == Arrangement::kRows ? 0 : beside;
  return c;
}

class DevicePoolConformance : public testing::TestWithParam<PoolFactory> {
 protected:
  /// Compares one case's three functions with the CPU's, floats between the bags included.
  static void Compare(DevicePool* pool, const PoolCase& c, uint64_t seed) {
    const Bags bags = c.bags();
    InlineRunner runner;
    const std::vector<float> rows = UniformFloats(static_cast<size_t>(c.unique * c.dim), seed);
    std::vector<float> expected(c.floats(), 99.0f), out(c.floats(), 99.0f);
    ASSERT_TRUE(hvd_ctr::PoolRows(bags, rows.data(), c.unique, c.dim, expected.data() + c.first, c.places, &runner).ok());
    const Status pooled = pool->PoolRows(bags, rows.data(), c.unique, c.dim, out.data() + c.first, c.places, nullptr);
    ASSERT_TRUE(pooled.ok()) << pooled.message();
    EXPECT_TRUE(EqualBits(out, expected));

    const std::vector<float> d_out = UniformFloats(c.floats(), seed + 1);
    std::vector<float> d_expected(rows.size(), 99.0f), d_rows(rows.size(), 99.0f);
    ASSERT_TRUE(hvd_ctr::PoolRowsGrad(bags, d_out.data() + c.first, c.places, c.unique, c.dim, d_expected.data(), &runner).ok());
    const Status summed = pool->PoolRowsGrad(bags, d_out.data() + c.first, c.places, c.unique, c.dim, d_rows.data(), nullptr);
    ASSERT_TRUE(summed.ok()) << summed.message();
    EXPECT_TRUE(EqualBits(d_rows, d_expected));

    std::vector<float> w_expected(c.ids.size(), 99.0f), d_weights(c.ids.size(), 99.0f);
    ASSERT_TRUE(hvd_ctr::PoolRowsWeightGrad(bags, rows.data(), d_out.data() + c.first, c.places, c.unique, c.dim,
                                            w_expected.data(), &runner)
                    .ok());
    const Status weighed =
        pool->PoolRowsWeightGrad(bags, rows.data(), d_out.data() + c.first, c.places, c.unique, c.dim, d_weights.data(), nullptr);
    ASSERT_TRUE(weighed.ok()) << weighed.message();
    EXPECT_TRUE(EqualBits(d_weights, w_expected));
  }
};

inline std::string Describe(const PoolCase& c) {
  return "dim " + std::to_string(c.dim) + (c.splits.empty() ? " one id" : " ragged") + (c.weights.empty() ? "" : " weighted") +
         " combiner " + std::to_string(static_cast<int>(c.combiner)) + " first " + std::to_string(c.first) + " inner stride " +
         std::to_string(c.places.inner_stride);
}

TEST_P(DevicePoolConformance, GivesTheBitsOfTheCpu) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  uint64_t seed = 1;
  for (const int32_t dim : {1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100, 127, 128, 129, 130, 516}) {
    for (const Combiner combiner : {Combiner::kSum, Combiner::kMean, Combiner::kSqrtN}) {
      for (const int kind : {0, 1, 2, 3}) {
        for (const Arrangement arrangement : {Arrangement::kRows, Arrangement::kBySample, Arrangement::kByFeature}) {
          const PoolCase c = RandomPoolCase(dim, combiner, kind % 2 == 1, kind > 1, arrangement, ++seed);
          SCOPED_TRACE(Describe(c));
          Compare(pool.get(), c, seed);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Segments of thousands of terms and rows without one; more bags than a block has threads.
TEST_P(DevicePoolConformance, HotIdsAreSummedInOrder) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  for (const int32_t dim : {1, 4, 16, 70}) {
    for (const bool weighted : {false, true}) {
      PoolCase c;
      c.dim = dim;
      c.combiner = Combiner::kMean;
      c.unique = 9;
      c.places = dim;
      for (int32_t p = 0; p < 7001; ++p) c.ids.push_back(p % 3 != 0 ? 7 : p % 97 == 0 ? kNoVirtualId : p % 7 == 0 ? 2 : 8);
      if (weighted) c.weights = UniformFloats(c.ids.size(), 4, -0.5f, 2.0f);
      Compare(pool.get(), c, 3);
      c.splits = {0, 0, 6000, 6001, 7001};
      Compare(pool.get(), c, 3);
      if (HasFailure()) return;
    }
  }
}

// As PoolRowsTest.ZeroTotalWeightGivesZerosAndZeroGradients.
TEST_P(DevicePoolConformance, BagsThatPoolToZerosPassNoGradient) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  PoolCase c;
  c.ids = {1, 2, 3, 1, 2};
  c.splits = {0, 2, 3, 3, 5};
  c.weights = {0, 0, 2, 1.5f, -1.5f};
  c.combiner = Combiner::kMean;
  const std::vector<float> rows = {0, 0, 1, -2, 2, -4, 3, -6};
  const std::vector<float> d_out = {INFINITY, INFINITY, 1, 1, INFINITY, INFINITY, 1, 1};
  std::vector<float> out(8, 99.0f), d_rows(8, 99.0f), d_weights(5, 99.0f);
  ASSERT_TRUE(pool->PoolRows(c.bags(), rows.data(), 4, 2, out.data(), 2, nullptr).ok());
  EXPECT_EQ(out, (std::vector<float>{0, 0, 3, -6, 0, 0, 0, 0}));
  ASSERT_TRUE(pool->PoolRowsGrad(c.bags(), d_out.data(), 2, 4, 2, d_rows.data(), nullptr).ok());
  EXPECT_EQ(d_rows, (std::vector<float>{0, 0, 0, 0, 0, 0, 1, 1}));
  ASSERT_TRUE(pool->PoolRowsWeightGrad(c.bags(), rows.data(), d_out.data(), 2, 4, 2, d_weights.data(), nullptr).ok());
  EXPECT_EQ(d_weights, (std::vector<float>{0, 0, 0, 0, 0}));
}

// A copy keeps -0, a sum from 0 does not; both as on the CPU.
TEST_P(DevicePoolConformance, SignsOfZeroAreTheCpus) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  InlineRunner runner;
  const std::vector<float> rows = {-0.0f, 1.0f, -0.0f, -1.0f};
  for (const bool ragged : {false, true}) {
    PoolCase c;
    c.ids = {1, -1, 0, 1};
    if (ragged) c.splits = {0, 1, 2, 3, 4};
    std::vector<float> out(8, 99.0f), expected(8, 99.0f);
    ASSERT_TRUE(pool->PoolRows(c.bags(), rows.data(), 2, 2, out.data(), 2, nullptr).ok());
    ASSERT_TRUE(hvd_ctr::PoolRows(c.bags(), rows.data(), 2, 2, expected.data(), 2, &runner).ok());
    EXPECT_TRUE(EqualBits(out, expected)) << ragged;
    EXPECT_EQ(std::signbit(out[0]), !ragged);
  }
}

TEST_P(DevicePoolConformance, NothingAtAll) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  for (const bool ragged : {false, true}) {
    PoolCase c;
    c.dim = 3;
    c.places = 3;
    c.combiner = Combiner::kMean;
    if (ragged) c.splits = {0};
    Compare(pool.get(), c, 1);
    c.unique = 2;  // Rows without a position: their gradient is zeros.
    Compare(pool.get(), c, 1);
    if (ragged) c.splits = {0, 0, 0};
    Compare(pool.get(), c, 1);
  }
  EXPECT_TRUE(pool->CopyBeside({}, nullptr).ok());
  const DeviceVectors none{nullptr, 0, 4, 3};
  EXPECT_TRUE(pool->DotPairs(none, nullptr, nullptr).ok());
  EXPECT_TRUE(pool->DotPairsGrad(none, nullptr, nullptr, nullptr).ok());
  EXPECT_TRUE(pool->PairSum(none, nullptr, nullptr).ok());
  EXPECT_TRUE(pool->PairSumGrad(none, nullptr, nullptr, nullptr).ok());
}

/// The three functions refuse a case with the words of the CPU.
inline void ExpectTheCpusRefusal(DevicePool* pool, const PoolCase& c) {
  InlineRunner runner;
  std::vector<float> a(100, 0.0f), b(100, 1.0f);
  const std::vector<float> before = b;
  const Bags bags = c.bags();
  const Status wanted[] = {hvd_ctr::PoolRows(bags, a.data(), c.unique, c.dim, b.data(), c.places, &runner),
                           hvd_ctr::PoolRowsGrad(bags, a.data(), c.places, c.unique, c.dim, b.data(), &runner),
                           hvd_ctr::PoolRowsWeightGrad(bags, a.data(), a.data(), c.places, c.unique, c.dim, b.data(), &runner)};
  const Status given[] = {pool->PoolRows(bags, a.data(), c.unique, c.dim, b.data(), c.places, nullptr),
                          pool->PoolRowsGrad(bags, a.data(), c.places, c.unique, c.dim, b.data(), nullptr),
                          pool->PoolRowsWeightGrad(bags, a.data(), a.data(), c.places, c.unique, c.dim, b.data(), nullptr)};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(wanted[i].code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(given[i].code(), wanted[i].code());
    EXPECT_EQ(given[i].message(), wanted[i].message());
  }
  EXPECT_EQ(b, before);
}

TEST_P(DevicePoolConformance, BadArgumentsAreRefusedWithTheWordsOfTheCpu) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  PoolCase good;
  good.ids = {0, 1, 2};
  good.splits = {0, 2, 3};
  good.unique = 3;
  good.dim = 2;
  good.places = 2;
  PoolCase bad = good;
  bad.places = 1;
  ExpectTheCpusRefusal(pool.get(), bad);
  for (const int32_t id : {3, -2}) {
    bad = good;
    bad.ids[1] = id;
    ExpectTheCpusRefusal(pool.get(), bad);
  }
  for (const std::vector<int64_t>& splits : {std::vector<int64_t>{0, 2, 2}, {1, 2, 3}, {0, 4, 2, 3}}) {
    bad = good;
    bad.splits = splits;
    ExpectTheCpusRefusal(pool.get(), bad);
  }
  bad = good;
  bad.weights = {1, 1};
  ExpectTheCpusRefusal(pool.get(), bad);
  float values[8] = {};
  EXPECT_EQ(pool->CopyBeside({values, 1, 3, values + 4, 2}, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->DotPairs({values, 1, 0, 2}, values + 4, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->PairSum({values, 1, 2, 0}, values + 4, nullptr).code(), StatusCode::kInvalidArgument);
}

TEST_P(DevicePoolConformance, ColumnsStandBesideTheBags) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  for (const int64_t columns : {1, 13, 40}) {
    const int64_t samples = 29, stride = columns + 6;
    const std::vector<float> from = UniformFloats(static_cast<size_t>(samples * columns), 1);
    std::vector<float> to(static_cast<size_t>(samples * stride), 99.0f), expected = to;
    for (int64_t i = 0; i < samples * columns; ++i) expected[i / columns * stride + i % columns] = from[i];
    ASSERT_TRUE(pool->CopyBeside({from.data(), samples, columns, to.data(), stride}, nullptr).ok());
    EXPECT_TRUE(EqualBits(to, expected)) << columns;
  }
}

TEST_P(DevicePoolConformance, InteractionsGiveTheBitsOfTheCpu) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  InlineRunner runner;
  for (const int64_t features : {1, 2, 5, 17, 40}) {
    for (const int64_t dim : {1, 3, 16, 17, 40}) {
      const int64_t samples = 7, pairs = features * (features - 1) / 2;
      const std::vector<float> data = UniformFloats(static_cast<size_t>(samples * features * dim), 2);
      const SampleVectors host{data.data(), samples, features, dim};
      const DeviceVectors vectors{data.data(), samples, features, dim};
      std::vector<float> wanted(static_cast<size_t>(samples * pairs), 99.0f), given = wanted;
      hvd_ctr::DotPairs(host, wanted.data(), &runner);
      ASSERT_TRUE(pool->DotPairs(vectors, given.data(), nullptr).ok());
      EXPECT_TRUE(EqualBits(given, wanted)) << features << " " << dim;
      std::vector<float> d_wanted(data.size(), 99.0f), d_given(data.size(), 98.0f);
      hvd_ctr::DotPairsGrad(host, wanted.data(), d_wanted.data(), &runner);
      ASSERT_TRUE(pool->DotPairsGrad(vectors, wanted.data(), d_given.data(), nullptr).ok());
      EXPECT_TRUE(EqualBits(d_given, d_wanted)) << features << " " << dim;
      std::vector<float> sums(static_cast<size_t>(samples), 99.0f), given_sums(sums.size(), 98.0f);
      hvd_ctr::PairSum(host, sums.data(), &runner);
      ASSERT_TRUE(pool->PairSum(vectors, given_sums.data(), nullptr).ok());
      EXPECT_TRUE(EqualBits(given_sums, sums)) << features << " " << dim;
      hvd_ctr::PairSumGrad(host, sums.data(), d_wanted.data(), &runner);
      ASSERT_TRUE(pool->PairSumGrad(vectors, sums.data(), d_given.data(), nullptr).ok());
      EXPECT_TRUE(EqualBits(d_given, d_wanted)) << features << " " << dim;
    }
  }
}

TEST_P(DevicePoolConformance, ThreadsShareOnePool) {
  const std::unique_ptr<DevicePool> pool = GetParam()();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&pool, t] {
      for (uint64_t i = 0; i < 12; ++i) {
        const auto arrangement = static_cast<Arrangement>(i % 3);
        const auto dim = static_cast<int32_t>(1 + (i * 7 + t) % 20);
        Compare(pool.get(), RandomPoolCase(dim, Combiner::kSqrtN, i % 2 == 0, i % 4 < 2, arrangement, 100 * t + i), i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_DEVICE_POOL_CONFORMANCE_H_
