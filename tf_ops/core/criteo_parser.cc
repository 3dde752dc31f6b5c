#include "tf_ops/core/criteo_parser.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace hvd_ctr {
namespace {

// Lines per task: about 60 KB of text.
constexpr int64_t kGrainLines = 256;
// In shuffled order each line is somewhere else in memory: it is asked for while others are parsed. Of a long one the beginning;
// the processor sees for itself how it goes on.
constexpr int64_t kLinesAhead = 8;
constexpr size_t kPrefetchBytes = 512;
constexpr size_t kCacheLine = 64;
// Any decimal of so many digits fits into int64.
constexpr int64_t kSafeDigits = 18;

// Value of each hex digit, 0xFF for any other byte: two of them or-ed together show a bad one in the high bits.
constexpr std::array<uint8_t, 256> MakeHexValues() {
  std::array<uint8_t, 256> values{};
  for (int c = 0; c < 256; ++c) {
    if (c >= '0' && c <= '9') {
      values[c] = static_cast<uint8_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      values[c] = static_cast<uint8_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      values[c] = static_cast<uint8_t>(c - 'A' + 10);
    } else {
      values[c] = 0xFF;
    }
  }
  return values;
}
constexpr std::array<uint8_t, 256> kHexValues = MakeHexValues();

// One line being read. A field ends at `end` or before a tab.
struct Cursor {
  const char* at;
  const char* end;

  bool AtFieldEnd() const { return at == end || *at == '\t'; }
};

// Leaves the cursor at the field's end when it returns true.
bool ReadLabel(Cursor* line, float* label) {
  if (line->at == line->end || (*line->at != '0' && *line->at != '1')) return false;
  *label = *line->at++ == '1' ? 1.0f : 0.0f;
  return line->AtFieldEnd();
}

// An integer field that is not empty.
bool ReadInteger(Cursor* line, const CountLogTable& table, float* out) {
  const bool negative = *line->at == '-';
  const char* at = line->at + negative;
  const char* const digits = at;
  const uint64_t limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) + negative;
  uint64_t value = 0;
  for (; at != line->end; ++at) {
    const unsigned digit = static_cast<unsigned char>(*at) - static_cast<unsigned>('0');
    if (digit > 9) break;
    if (at - digits >= kSafeDigits && value > (limit - digit) / 10) return false;
    value = value * 10 + digit;
  }
  line->at = at;
  if (at == digits || !line->AtFieldEnd()) return false;
  *out = SignedCountLog(value, negative, table);
  return true;
}

// A categorical field that is not empty.
bool ReadHex(Cursor* line, int64_t* out) {
  const auto value_of = [](const char* c) { return kHexValues[static_cast<unsigned char>(*c)]; };
  const char* const at = line->at;
  // The usual case, without a branch per digit.
  if (line->end - at >= 8) {
    uint32_t value = 0;
    uint8_t seen = 0;
    for (int i = 0; i < 8; ++i) {
      const uint8_t digit = value_of(at + i);
      seen |= digit;
      value = value << 4 | (digit & 0xF);
    }
    if (seen <= 0xF) {
      *out = value;
      line->at = at + 8;
      return line->AtFieldEnd();
    }
  }
  // Fewer than 8 digits up to the line's end or the first byte that is none, which must end the field.
  uint32_t value = 0;
  const char* digit = at;
  for (; digit != line->end && value_of(digit) <= 0xF; ++digit) value = value << 4 | value_of(digit);
  *out = value;
  line->at = digit;
  return digit != at && line->AtFieldEnd();
}

// Steps to the next field; false at the line's end.
bool NextField(Cursor* line) {
  if (line->at == line->end) return false;
  ++line->at;
  return true;
}

// The fields after the label, the cursor at the first one; `more` is false when the line ended before it.
LineFault ReadFeatures(Cursor* line, bool more, const CountLogTable& table, const CriteoLineOutput& out, bool* stripped) {
  for (int32_t i = 0; i < kCriteoDense; ++i) {
    out.dense[i] = 0.0f;
    if (!more) continue;
    if (!line->AtFieldEnd() && !ReadInteger(line, table, &out.dense[i])) return LineFault::kBadInteger;
    more = NextField(line);
  }
  for (int32_t i = 0; i < kCriteoSparse; ++i) {
    out.ids[i] = kCriteoMissingId;
    if (!more) {
      *stripped = true;
      continue;
    }
    if (!line->AtFieldEnd() && !ReadHex(line, &out.ids[i])) return LineFault::kBadHex;
    more = NextField(line);
  }
  return more ? LineFault::kTooManyFields : LineFault::kNone;
}

// Any line, field by field. `text` is without its newline or CRLF.
LineFault ReadLine(std::string_view text, bool has_label, const CountLogTable& table, const CriteoLineOutput& out,
                   bool* stripped) {
  Cursor line{text.data(), text.data() + text.size()};
  if (line.at == line.end) return LineFault::kBlank;
  *out.label = 0.0f;
  if (has_label) {
    if (!ReadLabel(&line, out.label)) return LineFault::kBadLabel;
    if (!NextField(&line)) return LineFault::kTooFewFields;
  }
  return ReadFeatures(&line, true, table, out, stripped);
}

std::string_view WithoutLineEnd(std::string_view line) {
  if (!line.empty() && line.back() == '\n') line.remove_suffix(1);
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  return line;
}

void ParseLine(std::string_view text, bool has_label, const CountLogTable& table, const CriteoOutput& out, int64_t i) {
  const std::string_view line = WithoutLineEnd(text);
  const CriteoLineOutput values = {out.labels + i, out.dense + i * kCriteoDense, out.ids + i * kCriteoSparse};
  LineFault fault = LineFault::kNone;
  bool stripped = false;
  if (!ParseUsualLine(line, has_label, table, values)) fault = ReadLine(line, has_label, table, values, &stripped);
  if (fault != LineFault::kNone) {
    stripped = false;
    *values.label = 0.0f;
    std::fill_n(values.dense, kCriteoDense, 0.0f);
    std::fill_n(values.ids, kCriteoSparse, int64_t{0});
  }
  out.faults[i] = static_cast<int32_t>(fault);
  out.stripped[i] = stripped;
}

void Prefetch(std::string_view line) {
  for (size_t at = 0; at < std::min(line.size(), kPrefetchBytes); at += kCacheLine) __builtin_prefetch(line.data() + at);
}

// line_at(i): line i of n.
template <typename LineAt>
void ParseAll(int64_t n, const LineAt& line_at, const CriteoOptions& options, const CriteoOutput& out, TaskRunner* runner) {
  const CountLogTable& table = SmallCountLogs();
  runner->ParallelFor(n, kGrainLines, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (i + kLinesAhead < last) Prefetch(line_at(i + kLinesAhead));
      ParseLine(line_at(i), options.has_label, table, out, i);
    }
  });
}

}  // namespace

void SplitLines(Span<const char> text, bool final, std::vector<int64_t>* offsets) {
  offsets->assign(1, 0);
  if (text.empty()) return;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const char* at = begin;
  while (at != end) {
    const void* const newline = std::memchr(at, '\n', static_cast<size_t>(end - at));
    if (newline == nullptr) break;
    at = static_cast<const char*>(newline) + 1;
    offsets->push_back(at - begin);
  }
  if (final && at != end) offsets->push_back(text.size());
}

void ParseCriteoLines(Span<const char> text, Span<const int64_t> begins, Span<const int64_t> ends, const CriteoOptions& options,
                      const CriteoOutput& out, TaskRunner* runner) {
  const auto line_at = [&](int64_t i) {
    return std::string_view(text.data() + begins[i], static_cast<size_t>(ends[i] - begins[i]));
  };
  ParseAll(std::min(begins.size(), ends.size()), line_at, options, out, runner);
}

void ParseCriteoLines(Span<const std::string_view> lines, const CriteoOptions& options, const CriteoOutput& out,
                      TaskRunner* runner) {
  ParseAll(lines.size(), [&](int64_t i) { return lines[i]; }, options, out, runner);
}

Status LocateLines(Span<const std::string_view> texts, Span<const int64_t> begins, Span<const int64_t> ends,
                   std::vector<std::string_view>* lines) {
  if (begins.size() != ends.size()) {
    return MakeStatus(StatusCode::kInvalidArgument, begins.size(), " begins of lines but ", ends.size(), " ends");
  }
  // starts[t]: where text t begins; starts[texts] is the size of all.
  std::vector<int64_t> starts(1, 0);
  for (const std::string_view text : texts) starts.push_back(starts.back() + static_cast<int64_t>(text.size()));
  lines->assign(static_cast<size_t>(begins.size()), std::string_view());
  for (int64_t i = 0; i < begins.size(); ++i) {
    const int64_t begin = begins[i], end = ends[i];
    if (begin < 0 || begin > end || end > starts.back()) {
      return MakeStatus(StatusCode::kInvalidArgument, "line ", i, " is [", begin, ", ", end, "), outside the text of ",
                        starts.back(), " bytes");
    }
    if (begin == end) continue;
    const auto after = std::upper_bound(starts.begin(), starts.end(), begin);
    if (end > *after) {
      return MakeStatus(StatusCode::kInvalidArgument, "line ", i, " is [", begin, ", ", end, "), but one text ends at ", *after,
                        "; a line lies in one of the texts");
    }
    const std::string_view text = texts[after - starts.begin() - 1];
    (*lines)[i] = text.substr(static_cast<size_t>(begin - *(after - 1)), static_cast<size_t>(end - begin));
  }
  return Status::Ok();
}

}  // namespace hvd_ctr
