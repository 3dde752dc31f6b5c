// Against a reference that knows no bit tricks: the value of every pattern from its definition, rounding as a search for the
// nearest of them.
#include "tf_ops/core/row_type.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tf_ops/core/row_math.h"

namespace hvd_ctr {
namespace {

/// A format of 16 bits: sign, exponent, mantissa.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int top() const { return (1 << exponent_bits) - 1; }
  int exponent(uint32_t pattern) const { return static_cast<int>(pattern >> mantissa_bits) & top(); }
  uint32_t mantissa(uint32_t pattern) const { return pattern & ((1u << mantissa_bits) - 1); }
  bool nan(uint32_t pattern) const { return exponent(pattern) == top() && mantissa(pattern) != 0; }

  /// As if the exponent had no end: infinity stands for the next power of two, which is where rounding to it begins.
  double ValueWithoutEnd(uint32_t pattern) const {
    const int e = exponent(pattern);
    const double units = mantissa(pattern) + (e > 0 ? std::ldexp(1.0, mantissa_bits) : 0.0);
    const double size = std::ldexp(units, std::max(e, 1) - bias() - mantissa_bits);
    return (pattern & 0x8000u) != 0 ? -size : size;
  }
  double Value(uint32_t pattern) const {
    if (exponent(pattern) != top()) return ValueWithoutEnd(pattern);
    return (pattern & 0x8000u) != 0 ? -INFINITY : INFINITY;
  }

  /// The pattern nearest to value, which is not NaN; of two, the even one.
  uint16_t Nearest(float value) const {
    const double size = std::fabs(static_cast<double>(value));
    const auto infinity = static_cast<uint32_t>(top()) << mantissa_bits;
    uint32_t below = 0, above = infinity;  // Sizes ascend with the patterns.
    while (above - below > 1) {
      const uint32_t middle = (below + above) / 2;
      (ValueWithoutEnd(middle) <= size ? below : above) = middle;
    }
    const double down = size - ValueWithoutEnd(below), up = ValueWithoutEnd(above) - size;
    const uint32_t nearest = down < up ? below : up < down ? above : below % 2 == 0 ? below : above;
    return static_cast<uint16_t>(nearest | (std::signbit(value) ? 0x8000u : 0u));
  }
};

constexpr Format kFloat16{5, 10};
constexpr Format kBfloat16{8, 7};

template <typename Rows>
void CompareNarrow(const Format& format, uint32_t bits) {
  const float value = FloatFromBits(bits);
  const uint32_t narrow = Rows::Narrow(value);
  if (std::isnan(value)) {
    const uint32_t quiet = 1u << (format.mantissa_bits - 1);
    const uint32_t payload = ((bits & 0x7fffffu) >> (23 - format.mantissa_bits)) | quiet;
    const uint32_t expected = ((bits >> 31) << 15) | (static_cast<uint32_t>(format.top()) << format.mantissa_bits) | payload;
    ASSERT_EQ(narrow, expected) << std::hex << bits;
  } else {
    ASSERT_EQ(narrow, format.Nearest(value)) << std::hex << bits;
  }
  ASSERT_EQ(FloatToBits(RoundToRowType(Rows::kType, value)), FloatToBits(Rows::Widen(static_cast<uint16_t>(narrow))));
}

template <typename Rows>
void ComparePatterns(const Format& format) {
  for (uint32_t pattern = 0; pattern <= 0xffffu; ++pattern) {
    const float value = Rows::Widen(static_cast<uint16_t>(pattern));
    if (format.nan(pattern)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << pattern;
      ASSERT_EQ(std::signbit(value), (pattern & 0x8000u) != 0) << std::hex << pattern;
      ASSERT_EQ(Rows::Narrow(value), pattern | (1u << (format.mantissa_bits - 1))) << std::hex << pattern;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), format.Value(pattern)) << std::hex << pattern;
    ASSERT_EQ(std::signbit(value), (pattern & 0x8000u) != 0) << std::hex << pattern;
    ASSERT_EQ(Rows::Narrow(value), pattern);
    // The pattern's own neighbours among the floats, and those of the middle to the next pattern, where ties are.
    const uint32_t bits = FloatToBits(value), half = 1u << (22 - format.mantissa_bits);
    for (const uint32_t centre : {bits, bits + half, bits - half}) {
      for (uint32_t offset = 0; offset < 5; ++offset) CompareNarrow<Rows>(format, centre + offset - 2);
    }
  }
}

template <typename Rows>
void CompareFloats(const Format& format) {
  const std::vector<float> edges = {0.0f,
                                    -0.0f,
                                    1.0f,
                                    65503.0f,
                                    65504.0f,
                                    65519.996f,
                                    65520.0f,
                                    -65520.0f,
                                    65536.0f,
                                    1e30f,
                                    std::numeric_limits<float>::max(),
                                    std::numeric_limits<float>::lowest(),
                                    std::numeric_limits<float>::min(),
                                    std::numeric_limits<float>::denorm_min(),
                                    -std::numeric_limits<float>::denorm_min(),
                                    std::numeric_limits<float>::infinity(),
                                    -std::numeric_limits<float>::infinity(),
                                    std::numeric_limits<float>::quiet_NaN(),
                                    std::numeric_limits<float>::signaling_NaN()};
  for (const float edge : edges) CompareNarrow<Rows>(format, FloatToBits(edge));
  for (const float power : {0x1p-14f, 0x1p-24f, 0x1p-25f, 0x1p-26f, 0x1p-126f, 0x1p-133f, 0x1p-134f, 0x1p-135f}) {
    for (uint32_t offset = 0; offset < 7; ++offset) CompareNarrow<Rows>(format, FloatToBits(power) + offset - 3);
  }
  std::mt19937 generator(7);
  for (int i = 0; i < 300000; ++i) CompareNarrow<Rows>(format, static_cast<uint32_t>(generator()));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (int i = 0; i < 100000; ++i) CompareNarrow<Rows>(format, FloatToBits(uniform(generator)));
}

TEST(RowTypeTest, EveryPatternOfFloat16) { ComparePatterns<Float16Rows>(kFloat16); }
TEST(RowTypeTest, EveryPatternOfBfloat16) { ComparePatterns<Bfloat16Rows>(kBfloat16); }
TEST(RowTypeTest, Float16OfEdgesAndRandomFloats) { CompareFloats<Float16Rows>(kFloat16); }
TEST(RowTypeTest, Bfloat16OfEdgesAndRandomFloats) { CompareFloats<Bfloat16Rows>(kBfloat16); }

TEST(RowTypeTest, KnownValues) {
  EXPECT_EQ(Float16Rows::Narrow(1.0f), 0x3c00);
  EXPECT_EQ(Float16Rows::Narrow(65504.0f), 0x7bff);
  EXPECT_EQ(Float16Rows::Narrow(65520.0f), 0x7c00);
  EXPECT_EQ(Float16Rows::Narrow(0x1p-25f), 0);  // A tie, to even.
  EXPECT_EQ(Float16Rows::Narrow(-0x1.8p-24f), 0x8002);
  EXPECT_EQ(Bfloat16Rows::Narrow(1.0f), 0x3f80);
  EXPECT_EQ(Bfloat16Rows::Narrow(1.00390625f), 0x3f80);  // 1 + 2^-8, a tie, to even.
  EXPECT_EQ(Bfloat16Rows::Narrow(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8.
  EXPECT_EQ(Bfloat16Rows::Narrow(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(RowTypeTest, TheThreeTypes) {
  EXPECT_EQ(RowElementBytes(RowType::kFloat32), 4);
  EXPECT_EQ(RowElementBytes(RowType::kFloat16), 2);
  EXPECT_EQ(RowElementBytes(RowType::kBfloat16), 2);
  EXPECT_STREQ(RowTypeName(RowType::kFloat32), "float32");
  EXPECT_STREQ(RowTypeName(RowType::kFloat16), "float16");
  EXPECT_STREQ(RowTypeName(RowType::kBfloat16), "bfloat16");
  const float third = 1.0f / 3.0f;
  for (const RowType type : {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16}) {
    EXPECT_EQ(WithRowType(type, [](auto rows) { return decltype(rows)::kType; }), type);
    std::vector<float> row = {third, -third, 1e6f};
    RoundRow(type, 2, row.data());
    EXPECT_EQ(row[0], RoundToRowType(type, third));
    EXPECT_EQ(row[1], -RoundToRowType(type, third));
    EXPECT_EQ(row[2], 1e6f);
  }
  EXPECT_EQ(RoundToRowType(RowType::kFloat32, third), third);
  EXPECT_NE(RoundToRowType(RowType::kFloat16, third), third);
  EXPECT_NE(RoundToRowType(RowType::kBfloat16, third), RoundToRowType(RowType::kFloat16, third));
}

}  // namespace
}  // namespace hvd_ctr
