#include "tf_ops/core/criteo_parser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace hvd_ctr {
namespace {

// Lines per task: about 60 KB of text.
constexpr int64_t kGrainLines = 256;
// Most counts of the data set are below; a call of log1p costs as much as the rest of a field.
constexpr int64_t kLogTableSize = 4096;
// Any decimal of so many digits fits into int64.
constexpr int64_t kSafeDigits = 18;

using LogTable = std::array<float, kLogTableSize>;

const LogTable& LogOfCounts() {
  static const LogTable table = [] {
    LogTable values;
    for (int64_t i = 0; i < kLogTableSize; ++i) values[i] = static_cast<float>(std::log1p(static_cast<double>(i)));
    return values;
  }();
  return table;
}

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

float SignedLog1p(uint64_t magnitude, bool negative, const LogTable& table) {
  const float value =
      magnitude < kLogTableSize ? table[magnitude] : static_cast<float>(std::log1p(static_cast<double>(magnitude)));
  return negative && magnitude != 0 ? -value : value;
}

// An integer field that is not empty.
bool ReadInteger(Cursor* line, const LogTable& table, float* out) {
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
  *out = SignedLog1p(value, negative, table);
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

struct LineOutput {
  float label = 0.0f;
  float dense[kCriteoDense];
  int64_t ids[kCriteoSparse];
  bool stripped = false;
};

// The fields after the label, the cursor at the first one; `more` is false when the line ended before it.
LineFault ReadFeatures(Cursor* line, bool more, const LogTable& table, LineOutput* out) {
  for (int32_t i = 0; i < kCriteoDense; ++i) {
    out->dense[i] = 0.0f;
    if (!more) continue;
    if (!line->AtFieldEnd() && !ReadInteger(line, table, &out->dense[i])) return LineFault::kBadInteger;
    more = NextField(line);
  }
  for (int32_t i = 0; i < kCriteoSparse; ++i) {
    out->ids[i] = kCriteoMissingId;
    if (!more) {
      out->stripped = true;
      continue;
    }
    if (!line->AtFieldEnd() && !ReadHex(line, &out->ids[i])) return LineFault::kBadHex;
    more = NextField(line);
  }
  return more ? LineFault::kTooManyFields : LineFault::kNone;
}

LineFault ReadLine(Cursor line, bool has_label, const LogTable& table, LineOutput* out) {
  if (line.at != line.end && line.end[-1] == '\n') --line.end;
  if (line.at != line.end && line.end[-1] == '\r') --line.end;
  if (line.at == line.end) return LineFault::kBlank;
  out->label = 0.0f;
  out->stripped = false;
  if (has_label) {
    if (!ReadLabel(&line, &out->label)) return LineFault::kBadLabel;
    if (!NextField(&line)) return LineFault::kTooFewFields;
  }
  return ReadFeatures(&line, true, table, out);
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
  const LogTable& table = LogOfCounts();
  runner->ParallelFor(std::min(begins.size(), ends.size()), kGrainLines, [&](int64_t first, int64_t last) {
    LineOutput line;
    for (int64_t i = first; i < last; ++i) {
      const Cursor cursor{text.data() + begins[i], text.data() + ends[i]};
      const LineFault fault = ReadLine(cursor, options.has_label, table, &line);
      if (fault != LineFault::kNone) {
        line.label = 0.0f;
        line.stripped = false;
        std::fill_n(line.dense, kCriteoDense, 0.0f);
        std::fill_n(line.ids, kCriteoSparse, int64_t{0});
      }
      out.faults[i] = static_cast<int32_t>(fault);
      out.labels[i] = line.label;
      out.stripped[i] = line.stripped;
      std::copy_n(line.dense, kCriteoDense, out.dense + i * kCriteoDense);
      std::copy_n(line.ids, kCriteoSparse, out.ids + i * kCriteoSparse);
    }
  });
}

}  // namespace hvd_ctr
