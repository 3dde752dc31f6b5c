// The fast logarithm of counts against the rule: log1p in double, rounded once.
#include "tf_ops/core/count_log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace hvd_ctr {
namespace {

float Rule(uint64_t count) { return static_cast<float>(std::log1p(static_cast<double>(count))); }

TEST(CountLogTest, TableAndFunctionAgree) {
  const CountLogTable& table = SmallCountLogs();
  for (uint64_t count = 0; count < kCountLogTableSize; ++count) {
    ASSERT_EQ(table[count], Rule(count)) << count;
    ASSERT_EQ(LargeCountLog(count), Rule(count)) << count;
  }
}

TEST(CountLogTest, EqualsLog1pOfCountsOfAnySize) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const uint64_t count = random() >> (random() % 60);
    ASSERT_EQ(LargeCountLog(count), Rule(count)) << count;
  }
  for (const uint64_t count : {uint64_t{1} << 53, (uint64_t{1} << 53) - 1, (uint64_t{1} << 63) - 1, uint64_t{1} << 63}) {
    EXPECT_EQ(LargeCountLog(count), Rule(count)) << count;
  }
}

// Counts whose logarithm lies next to the middle of two floats: there the quick way is most likely to round to the wrong side.
TEST(CountLogTest, EqualsLog1pBetweenTwoFloats) {
  float value = 9.0f;
  int64_t tried = 0;
  while (value < 36.0f) {
    const float next = std::nextafter(value, std::numeric_limits<float>::infinity());
    const double middle = (static_cast<double>(value) + static_cast<double>(next)) / 2;
    const uint64_t count = static_cast<uint64_t>(std::llround(std::expm1(middle)));
    for (uint64_t near = count - 1; near <= count + 1; ++near, ++tried) ASSERT_EQ(LargeCountLog(near), Rule(near)) << near;
    value += 0.00021f;
  }
  EXPECT_GT(tried, 100000);
}

TEST(CountLogTest, Signs) {
  const CountLogTable& table = SmallCountLogs();
  EXPECT_EQ(SignedCountLog(3, true, table), -Rule(3));
  EXPECT_EQ(SignedCountLog(5000, true, table), -Rule(5000));
  EXPECT_EQ(SignedCountLog(5000, false, table), Rule(5000));
  EXPECT_FALSE(std::signbit(SignedCountLog(0, true, table)));
}

}  // namespace
}  // namespace hvd_ctr
