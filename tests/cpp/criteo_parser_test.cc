// Each rule of criteo_parser.h, and random lines against a parser written for obviousness.
#include "tf_ops/core/criteo_parser.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/cpp/thread_runner.h"

namespace hvd_ctr {
namespace {

// The header's rule: the logarithm in double, rounded once.
float Log1p(double value) { return static_cast<float>(std::log1p(value)); }

struct Parsed {
  std::vector<float> labels, dense;
  std::vector<int64_t> ids;
  std::vector<int32_t> faults;
  std::vector<uint8_t> stripped;

  LineFault fault(size_t i = 0) const { return static_cast<LineFault>(faults[i]); }
};

Parsed ParseRanges(Span<const char> text, const std::vector<int64_t>& begins, const std::vector<int64_t>& ends, bool has_label,
                   TaskRunner* runner) {
  const size_t n = begins.size();
  Parsed out;
  out.labels.assign(n, -1.0f);
  out.dense.assign(n * kCriteoDense, -1.0f);
  out.ids.assign(n * kCriteoSparse, -1);
  out.faults.assign(n, -1);
  out.stripped.assign(n, 7);
  CriteoOutput output;
  output.labels = out.labels.data();
  output.dense = out.dense.data();
  output.ids = out.ids.data();
  output.faults = out.faults.data();
  output.stripped = out.stripped.data();
  CriteoOptions options;
  options.has_label = has_label;
  ParseCriteoLines(text, begins, ends, options, output, runner);
  return out;
}

// One line in a buffer of exactly its size: a read beyond it is seen by the sanitizers.
Parsed ParseLine(const std::string& line, bool has_label = true) {
  const std::unique_ptr<char[]> exact(new char[line.size()]);
  std::copy(line.begin(), line.end(), exact.get());
  InlineRunner runner;
  const int64_t size = static_cast<int64_t>(line.size());
  return ParseRanges(Span<const char>(exact.get(), size), {0}, {size}, has_label, &runner);
}

std::string Join(const std::vector<std::string>& fields) {
  std::string line;
  for (size_t i = 0; i < fields.size(); ++i) line += (i == 0 ? "" : "\t") + fields[i];
  return line;
}

// label, dense 1 .. 13, hex values.
std::vector<std::string> FullFields() {
  std::vector<std::string> fields = {"1"};
  for (int i = 1; i <= kCriteoDense; ++i) fields.push_back(std::to_string(i));
  for (int i = 0; i < kCriteoSparse; ++i) {
    std::ostringstream hex;
    hex << std::hex << 0x68fd1e64u + static_cast<unsigned>(i);
    fields.push_back(hex.str());
  }
  return fields;
}

// FullFields with field i (0: label) replaced.
std::string With(size_t i, const std::string& value) {
  std::vector<std::string> fields = FullFields();
  fields[i] = value;
  return Join(fields);
}

void ExpectRefused(const std::string& line, LineFault fault, bool has_label = true) {
  const Parsed out = ParseLine(line, has_label);
  EXPECT_EQ(out.fault(), fault) << line;
  EXPECT_EQ(out.labels[0], 0.0f);
  EXPECT_EQ(out.dense, std::vector<float>(kCriteoDense, 0.0f));
  EXPECT_EQ(out.ids, std::vector<int64_t>(kCriteoSparse, 0));
  EXPECT_EQ(out.stripped[0], 0);
}

TEST(CriteoParserTest, FullLine) {
  for (const std::string line_end : {"", "\n", "\r", "\r\n"}) {
    const Parsed out = ParseLine(Join(FullFields()) + line_end);
    ASSERT_EQ(out.fault(), LineFault::kNone);
    EXPECT_EQ(out.labels[0], 1.0f);
    EXPECT_EQ(out.stripped[0], 0);
    for (int i = 0; i < kCriteoDense; ++i) EXPECT_EQ(out.dense[i], Log1p(i + 1));
    for (int i = 0; i < kCriteoSparse; ++i) EXPECT_EQ(out.ids[i], 0x68fd1e64 + i);
  }
}

TEST(CriteoParserTest, LineWithoutLabel) {
  std::vector<std::string> fields = FullFields();
  fields.erase(fields.begin());
  const Parsed out = ParseLine(Join(fields), false);
  ASSERT_EQ(out.fault(), LineFault::kNone);
  EXPECT_EQ(out.labels[0], 0.0f);
  EXPECT_EQ(out.stripped[0], 0);
  EXPECT_EQ(out.dense[0], Log1p(1.0));
  EXPECT_EQ(out.ids[25], 0x68fd1e64 + 25);
  // A line with its label is one field too long for this kind of file.
  ExpectRefused(Join(FullFields()), LineFault::kTooManyFields, false);
}

TEST(CriteoParserTest, EmptyFieldsAreMissingAndApartFromAllValues) {
  const Parsed out = ParseLine("0" + std::string(39, '\t'));
  ASSERT_EQ(out.fault(), LineFault::kNone);
  EXPECT_EQ(out.stripped[0], 0);
  EXPECT_EQ(out.dense, std::vector<float>(kCriteoDense, 0.0f));
  EXPECT_EQ(out.ids, std::vector<int64_t>(kCriteoSparse, kCriteoMissingId));
  EXPECT_EQ(ParseLine(With(14, "0")).ids[0], 0);
  EXPECT_EQ(ParseLine(With(14, "ffffffff")).ids[0], kCriteoMissingId - 1);
}

TEST(CriteoParserTest, StrippedTrailingFields) {
  const std::vector<std::string> fields = FullFields();
  for (size_t kept = 2; kept <= 40; ++kept) {
    const Parsed out = ParseLine(Join(std::vector<std::string>(fields.begin(), fields.begin() + kept)) + "\r");
    ASSERT_EQ(out.fault(), LineFault::kNone) << kept;
    EXPECT_EQ(out.stripped[0], kept < 40) << kept;
    for (size_t i = 0; i < kCriteoDense; ++i) {
      EXPECT_EQ(out.dense[i], i + 1 < kept ? Log1p(i + 1) : 0.0f) << kept;
    }
    for (size_t i = 0; i < kCriteoSparse; ++i) {
      EXPECT_EQ(out.ids[i], i + 14 < kept ? 0x68fd1e64 + static_cast<int64_t>(i) : kCriteoMissingId) << kept;
    }
  }
  EXPECT_EQ(ParseLine("0\t").fault(), LineFault::kNone);
  EXPECT_EQ(ParseLine("5", false).fault(), LineFault::kNone);
  EXPECT_EQ(ParseLine("5", false).stripped[0], 1);
}

TEST(CriteoParserTest, LineFaults) {
  ExpectRefused("", LineFault::kBlank);
  ExpectRefused("\r", LineFault::kBlank);
  ExpectRefused("\n", LineFault::kBlank);
  ExpectRefused("\r\n", LineFault::kBlank);
  ExpectRefused("", LineFault::kBlank, false);
  ExpectRefused("1", LineFault::kTooFewFields);
  ExpectRefused("0\r", LineFault::kTooFewFields);
  ExpectRefused(Join(FullFields()) + "\t", LineFault::kTooManyFields);
  ExpectRefused(Join(FullFields()) + "\tdeadbeef", LineFault::kTooManyFields);
  ExpectRefused(std::string(39, '\t'), LineFault::kTooManyFields, false);
}

TEST(CriteoParserTest, BadLabels) {
  for (const char* const label : {"", "2", "-1", "01", "10", "1.0", " 1", "1 ", "x", "\r"}) {
    ExpectRefused(With(0, label), LineFault::kBadLabel);
  }
  ExpectRefused("click", LineFault::kBadLabel);
  ExpectRefused(" ", LineFault::kBadLabel);
  ExpectRefused(std::string("1\0\t", 3), LineFault::kBadLabel);
}

TEST(CriteoParserTest, Integers) {
  const struct {
    const char* field;
    float value;
  } good[] = {
      {"0", 0.0f},
      {"-0", 0.0f},
      {"-1", -Log1p(1.0)},
      {"-3", -Log1p(3.0)},
      {"007", Log1p(7.0)},
      {"4095", Log1p(4095.0)},
      {"4096", Log1p(4096.0)},
      {"16777217", Log1p(16777217.0)},
      {"999999999999999999", Log1p(1e18)},
      {"9223372036854775807", Log1p(9223372036854775808.0)},
      {"-9223372036854775807", -Log1p(9223372036854775808.0)},
      {"-9223372036854775808", -Log1p(9223372036854775808.0)},
      {"00000000000000000000000000000005", Log1p(5.0)},
  };
  for (const auto& c : good) {
    for (const size_t field : {1, 7, 13}) {
      const Parsed out = ParseLine(With(field, c.field));
      ASSERT_EQ(out.fault(), LineFault::kNone) << c.field;
      EXPECT_EQ(out.dense[field - 1], c.value) << c.field;
      EXPECT_FALSE(std::signbit(out.dense[field - 1]) && c.value == 0.0f);
    }
    EXPECT_EQ(ParseLine(c.field, false).dense[0], c.value) << c.field;  // At the line's end.
  }
  for (const char* const field : {"-", "--1", "+1", "1-", "1.5", "1e3", " 1", "1 ", "x", "0x10", "9223372036854775808",
                                  "-9223372036854775809", "18446744073709551616", "99999999999999999999999999", "1\r"}) {
    ExpectRefused(With(1, field), LineFault::kBadInteger);
    ExpectRefused(With(13, field), LineFault::kBadInteger);
  }
}

TEST(CriteoParserTest, LogTableEqualsTheFunction) {
  for (int i = 0; i < 10000; ++i) {
    ASSERT_EQ(ParseLine(std::to_string(i), false).dense[0], Log1p(i)) << i;
    ASSERT_EQ(ParseLine(std::to_string(-i), false).dense[0], i == 0 ? 0.0f : -Log1p(i)) << i;
  }
}

TEST(CriteoParserTest, HexValues) {
  const struct {
    const char* field;
    int64_t value;
  } good[] = {{"0", 0},
              {"f", 15},
              {"1A", 26},
              {"00000000", 0},
              {"7fffffff", 0x7fffffff},
              {"0001", 1},
              {"ABCDEF", 0xabcdef},
              {"80000000", 0x80000000},
              {"FFFFffff", 0xffffffff},
              {"deadbee", 0xdeadbee}};
  for (const auto& c : good) {
    for (const size_t field : {14, 20, 39}) {
      const Parsed out = ParseLine(With(field, c.field));
      ASSERT_EQ(out.fault(), LineFault::kNone) << c.field;
      EXPECT_EQ(out.ids[field - 14], c.value) << c.field;
    }
  }
  for (const char* const field : {"g", "-1", " 1", "1 ", "0x1", "123456789", "000000001", "1234567g", "g2345678", "1\r2"}) {
    ExpectRefused(With(14, field), LineFault::kBadHex);
    ExpectRefused(With(39, field), LineFault::kBadHex);
  }
  ExpectRefused(With(14, "1234567\r"), LineFault::kBadHex);
  EXPECT_EQ(ParseLine(With(39, "1234567\r")).ids[25], 0x1234567);  // The CR of a line end.
  ExpectRefused(With(39, "1234567\r\r"), LineFault::kBadHex);
}

// An obvious parser: split at tabs, then judge each field.
LineFault ModelFault(std::string line, bool has_label, std::vector<std::string>* fields) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  fields->clear();
  if (line.empty()) return LineFault::kBlank;
  std::string field;
  for (const char c : line + "\t") {
    if (c == '\t') {
      fields->push_back(field);
      field.clear();
    } else {
      field += c;
    }
  }
  if (has_label) {
    if (fields->front() != "0" && fields->front() != "1") return LineFault::kBadLabel;
    if (fields->size() == 1) return LineFault::kTooFewFields;
    fields->erase(fields->begin());
  }
  for (size_t i = 0; i < fields->size() && i < 39; ++i) {
    const std::string& text = (*fields)[i];
    if (text.empty()) continue;
    if (i < 13) {
      const std::string digits = text.substr(text[0] == '-' ? 1 : 0);
      if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return LineFault::kBadInteger;
    } else if (text.size() > 8 || text.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      return LineFault::kBadHex;
    }
  }
  return fields->size() > 39 ? LineFault::kTooManyFields : LineFault::kNone;
}

// A line that is mostly good: some fields empty, some of any length, sometimes a byte changed or fields lost or added.
std::string RandomLine(std::mt19937_64* random, bool has_label) {
  const auto draw = [&](uint64_t n) { return (*random)() % n; };
  std::vector<std::string> fields;
  if (has_label) fields.push_back(draw(2) ? "1" : "0");
  for (int i = 0; i < kCriteoDense; ++i) {
    std::string field = draw(4) == 0 ? "" : std::to_string(draw(uint64_t{1} << draw(50)));
    if (!field.empty() && draw(5) == 0) field = "-" + field;
    fields.push_back(field);
  }
  for (int i = 0; i < kCriteoSparse; ++i) {
    std::string field;
    for (uint64_t n = draw(6) == 0 ? draw(8) : 8; n > 0; --n) field += "0123456789abcdefABCDEF"[draw(22)];
    fields.push_back(field);
  }
  if (draw(3) == 0) fields.resize(1 + draw(41));
  std::string line = Join(fields) + (draw(4) == 0 ? "\r" : "");
  if (!line.empty() && draw(3) == 0) line[draw(line.size())] = "\t-0g\r\xff 9"[draw(8)];
  return line;
}

void ExpectModel(const std::string& line, bool has_label, const Parsed& out, size_t i) {
  std::vector<std::string> fields;
  const LineFault fault = ModelFault(line, has_label, &fields);
  ASSERT_EQ(out.fault(i), fault) << line;
  const bool good = fault == LineFault::kNone;
  EXPECT_EQ(out.labels[i], good && has_label && line[0] == '1' ? 1.0f : 0.0f);
  EXPECT_EQ(out.stripped[i], good && fields.size() < 39);
  fields.resize(39);
  for (int d = 0; d < kCriteoDense; ++d) {
    float want = 0.0f;
    if (good && !fields[d].empty()) {
      const int64_t value = std::stoll(fields[d]);
      want = Log1p(std::abs(value)) * (value < 0 ? -1.0f : 1.0f);
    }
    ASSERT_EQ(out.dense[i * kCriteoDense + d], want) << line;
  }
  for (int s = 0; s < kCriteoSparse; ++s) {
    const std::string& field = fields[kCriteoDense + s];
    const int64_t want = !good ? 0 : field.empty() ? kCriteoMissingId : std::stoll(field, nullptr, 16);
    ASSERT_EQ(out.ids[i * kCriteoSparse + s], want) << line;
  }
}

TEST(CriteoParserTest, RandomLinesEqualTheModelOnOneThreadAndOnMany) {
  std::mt19937_64 random(17);
  for (const bool has_label : {true, false}) {
    std::vector<std::string> lines;
    std::string text;
    std::vector<int64_t> begins, ends;
    for (int i = 0; i < 3000; ++i) {
      lines.push_back(RandomLine(&random, has_label));
      begins.push_back(static_cast<int64_t>(text.size()));
      text += lines.back();
      ends.push_back(static_cast<int64_t>(text.size()));
      text += "\n";
    }
    const Span<const char> view(text.data(), static_cast<int64_t>(text.size()));
    InlineRunner one;
    ThreadRunner many(4);
    const Parsed out = ParseRanges(view, begins, ends, has_label, &one);
    const Parsed out_many = ParseRanges(view, begins, ends, has_label, &many);
    size_t good = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      ExpectModel(lines[i], has_label, out, i);
      ExpectModel(lines[i], has_label, out_many, i);
      ExpectModel(lines[i], has_label, ParseLine(lines[i], has_label), 0);
      good += out.fault(i) == LineFault::kNone;
    }
    EXPECT_GT(good, 1000u);
    EXPECT_LT(good, 2900u);
  }
}

TEST(CriteoParserTest, NoLines) {
  InlineRunner runner;
  EXPECT_TRUE(ParseRanges(Span<const char>(), {}, {}, true, &runner).faults.empty());
}

std::vector<int64_t> Split(const std::string& text, bool final) {
  std::vector<int64_t> offsets = {9, 9};
  SplitLines(Span<const char>(text.data(), static_cast<int64_t>(text.size())), final, &offsets);
  return offsets;
}

TEST(SplitLinesTest, StartsAndRest) {
  using Offsets = std::vector<int64_t>;
  for (const bool final : {false, true}) {
    EXPECT_EQ(Split("", final), (Offsets{0}));
    EXPECT_EQ(Split("\n", final), (Offsets{0, 1}));
    EXPECT_EQ(Split("\n\n", final), (Offsets{0, 1, 2}));
    EXPECT_EQ(Split("ab\r\nc\n", final), (Offsets{0, 4, 6}));
  }
  EXPECT_EQ(Split("ab", false), (Offsets{0}));
  EXPECT_EQ(Split("ab", true), (Offsets{0, 2}));
  EXPECT_EQ(Split("ab\ncd", false), (Offsets{0, 3}));
  EXPECT_EQ(Split("ab\ncd", true), (Offsets{0, 3, 5}));
}

Status Locate(const std::vector<std::string_view>& texts, const std::vector<int64_t>& begins, const std::vector<int64_t>& ends,
              std::vector<std::string_view>* lines) {
  return LocateLines(texts, begins, ends, lines);
}

TEST(LocateLinesTest, LinesOfSeveralTexts) {
  const std::vector<std::string_view> texts = {"ab\nc\n", "", "d\n\nef"};
  std::vector<std::string_view> lines = {"old"};
  ASSERT_TRUE(Locate(texts, {0, 3, 5, 7, 8, 8, 10}, {2, 4, 6, 7, 10, 9, 10}, &lines).ok());
  EXPECT_EQ(lines, (std::vector<std::string_view>{"ab", "c", "d", "", "ef", "e", ""}));
  EXPECT_EQ(lines[2].data(), texts[2].data());
  ASSERT_TRUE(Locate({}, {}, {}, &lines).ok());
  EXPECT_TRUE(lines.empty());
  ASSERT_TRUE(Locate({}, {0}, {0}, &lines).ok());
  EXPECT_EQ(lines, std::vector<std::string_view>{""});
}

TEST(LocateLinesTest, LinesElsewhereAreRefused) {
  const std::vector<std::string_view> texts = {"ab", "cd"};
  std::vector<std::string_view> lines;
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{-1, 1}, {2, 1}, {0, 5}, {5, 5}}) {
    const Status status = Locate(texts, {0, begin}, {1, end}, &lines);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("line 1 is ["), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("outside the text of 4 bytes"), std::string::npos) << status.message();
  }
  EXPECT_NE(Locate(texts, {1}, {3}, &lines).message().find("line 0 is [1, 3), but one text ends at 2"), std::string::npos);
  EXPECT_NE(Locate(texts, {1, 2}, {3}, &lines).message().find("2 begins of lines but 1 ends"), std::string::npos);
}

TEST(CriteoParserTest, LinesOfSeveralTextsEqualThoseOfOne) {
  std::mt19937_64 random(23);
  std::string text;
  std::vector<int64_t> begins, ends;
  std::vector<std::string_view> lines;
  for (int i = 0; i < 500; ++i) {
    begins.push_back(static_cast<int64_t>(text.size()));
    text += RandomLine(&random, true);
    ends.push_back(static_cast<int64_t>(text.size()));
  }
  const std::string_view view = text;
  const int64_t cut = begins[200];
  ASSERT_TRUE(Locate({view.substr(0, cut), view.substr(cut)}, begins, ends, &lines).ok());
  InlineRunner one;
  const Parsed expected = ParseRanges(Span<const char>(text.data(), static_cast<int64_t>(text.size())), begins, ends, true, &one);
  Parsed out = expected;
  std::fill(out.ids.begin(), out.ids.end(), -1);
  std::fill(out.faults.begin(), out.faults.end(), -1);
  const CriteoOutput output = {out.labels.data(), out.dense.data(), out.ids.data(), out.faults.data(), out.stripped.data()};
  ParseCriteoLines(lines, CriteoOptions(), output, &one);
  EXPECT_EQ(out.ids, expected.ids);
  EXPECT_EQ(out.faults, expected.faults);
  EXPECT_EQ(out.dense, expected.dense);
}

}  // namespace
}  // namespace hvd_ctr
