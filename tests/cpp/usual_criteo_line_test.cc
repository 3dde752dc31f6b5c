// Which lines the fast way takes, and that it never reads beyond them. That it gives what the careful parser gives is seen in
// criteo_parser_test.cc, whose random lines go through both.
#include "tf_ops/core/usual_criteo_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace hvd_ctr {
namespace {

struct Values {
  bool usual = false;
  float label = -1.0f;
  std::vector<float> dense = std::vector<float>(kCriteoDense, -1.0f);
  std::vector<int64_t> ids = std::vector<int64_t>(kCriteoSparse, -1);
};

// The line in a buffer of exactly its size: a read beyond it, before or after, is seen by the sanitizers.
Values Parse(const std::string& line, bool has_label = true) {
  const std::unique_ptr<char[]> exact(new char[line.size()]);
  std::copy(line.begin(), line.end(), exact.get());
  Values values;
  values.usual = ParseUsualLine(std::string_view(exact.get(), line.size()), has_label, SmallCountLogs(),
                                {&values.label, values.dense.data(), values.ids.data()});
  return values;
}

std::string Join(const std::vector<std::string>& fields) {
  std::string line = fields[0];
  for (size_t i = 1; i < fields.size(); ++i) line += "\t" + fields[i];
  return line;
}

std::vector<std::string> Fields(const std::string& count = "12", const std::string& category = "68fd1e64") {
  std::vector<std::string> fields = {"1"};
  fields.insert(fields.end(), kCriteoDense, count);
  fields.insert(fields.end(), kCriteoSparse, category);
  return fields;
}

std::string With(size_t field, const std::string& text) {
  std::vector<std::string> fields = Fields();
  fields[field] = text;
  return Join(fields);
}

float Log1p(double value) { return static_cast<float>(std::log1p(value)); }

TEST(UsualCriteoLineTest, LengthsOfFields) {
  for (size_t field = 1; field <= 13; ++field) {
    for (const char* const text : {"", "0", "-0", "7", "-1", "99", "-12345", "1234567", "-1234567", "12345678", "00000000"}) {
      const Values values = Parse(With(field, text));
      ASSERT_TRUE(values.usual) << text;
      const int64_t value = *text == '\0' ? 0 : std::stoll(text);
      EXPECT_EQ(values.dense[field - 1], value < 0 ? -Log1p(-value) : Log1p(value)) << text;
      EXPECT_FALSE(value == 0 && std::signbit(values.dense[field - 1]));
    }
  }
  for (size_t field = 14; field <= 39; ++field) {
    for (const char* const text : {"", "0", "f", "1A", "aBc", "0001", "fffff", "ABCDEF", "1234567", "ffffffff", "00000000"}) {
      const Values values = Parse(With(field, text));
      ASSERT_TRUE(values.usual) << text;
      EXPECT_EQ(values.ids[field - 14], *text == '\0' ? kCriteoMissingId : std::stoll(text, nullptr, 16)) << text;
    }
  }
}

TEST(UsualCriteoLineTest, Labels) {
  EXPECT_EQ(Parse(Join(Fields())).label, 1.0f);
  EXPECT_EQ(Parse(With(0, "0")).label, 0.0f);
  const Values without = Parse(Join(Fields()).substr(2), false);
  EXPECT_TRUE(without.usual);
  EXPECT_EQ(without.label, 0.0f);
  EXPECT_EQ(without.ids, Parse(Join(Fields())).ids);
  for (const char* const label : {"", "2", "01", "10", "-1", " 1", "\t1"}) EXPECT_FALSE(Parse(With(0, label)).usual) << label;
}

TEST(UsualCriteoLineTest, EveryOtherByteInEveryPlaceOfAFieldIsLeftToTheCarefulParser) {
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const bool decimal = c >= '0' && c <= '9';
    const bool hex = decimal || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    for (size_t place = 0; place < 8; ++place) {
      for (const size_t size : {place + 1, size_t{8}}) {
        std::string text(size, '4');
        text[place] = c;
        EXPECT_EQ(Parse(With(13, text)).usual, decimal || (c == '-' && place == 0 && size > 1)) << byte << " " << text;
        for (const size_t field : {14, 39}) EXPECT_EQ(Parse(With(field, text)).usual, hex) << byte << " " << text;
      }
    }
  }
}

TEST(UsualCriteoLineTest, OtherNumbersAndSizesOfFieldsAreLeftToTheCarefulParser) {
  const std::vector<std::string> fields = Fields();
  for (size_t kept = 1; kept < fields.size(); ++kept) {
    EXPECT_FALSE(Parse(Join(std::vector<std::string>(fields.begin(), fields.begin() + kept))).usual) << kept;
  }
  EXPECT_FALSE(Parse(Join(fields) + "\t").usual);
  EXPECT_FALSE(Parse(Join(fields), false).usual);
  EXPECT_FALSE(Parse(With(1, "-")).usual);
  EXPECT_FALSE(Parse(With(13, "123456789")).usual);
  EXPECT_FALSE(Parse(With(14, "123456789")).usual);
  EXPECT_FALSE(Parse(With(39, "000000000")).usual);
  EXPECT_FALSE(Parse(With(39, std::string(100000, '0'))).usual);
  EXPECT_FALSE(Parse("").usual);
  EXPECT_FALSE(Parse("1" + std::string(39, '\t')).usual);  // All missing: too short for the search, and rare.
  EXPECT_FALSE(Parse(std::string(200, '\t')).usual);
  EXPECT_TRUE(Parse(Join(Fields("12345678", "12345678"))).usual);  // The longest there is.
}

// Tabs at every distance from the borders of the blocks that are searched.
TEST(UsualCriteoLineTest, LinesOfEveryLength) {
  std::mt19937_64 random(5);
  for (size_t i = 0; i < 3000; ++i) {
    std::vector<std::string> fields = Fields("", "");
    std::vector<int64_t> ids(kCriteoSparse, kCriteoMissingId);
    for (size_t f = 1; f <= 13; ++f) fields[f] = std::string(random() % 9, '3');
    for (size_t f = 0; f < 26; ++f) {
      const size_t digits = random() % 9;
      if (digits == 0) continue;
      const uint32_t value = static_cast<uint32_t>(random()) >> (4 * (8 - digits));
      char text[9];
      std::snprintf(text, sizeof(text), "%0*x", static_cast<int>(digits), value);
      fields[14 + f] = text;
      ids[f] = value;
    }
    const std::string line = Join(fields);
    const Values values = Parse(line);
    if (line.size() < 64) continue;
    ASSERT_TRUE(values.usual) << line;
    ASSERT_EQ(values.ids, ids) << line;
    for (size_t f = 0; f < 13; ++f) ASSERT_EQ(values.dense[f], Log1p(fields[1 + f].empty() ? 0 : std::stod(fields[1 + f])));
  }
}

}  // namespace
}  // namespace hvd_ctr
