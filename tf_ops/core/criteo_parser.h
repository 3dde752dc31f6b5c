// Parser of Criteo display-advertising TSV: label, 13 integer fields, 26 hexadecimal fields, separated by tabs, any of them
// empty; trailing empty fields may be missing from the line; CRLF is accepted. The hot path of reading.
//
//   std::vector<int64_t> starts;
//   SplitLines(text, final, &starts);                      // lines i = text[starts[i] .. starts[i+1])
//   ParseCriteoLines(text, begins, ends, options, out, runner);
// or, of lines that lie in several texts,
//   HVD_CTR_RETURN_IF_ERROR(LocateLines(texts, begins, ends, &lines));
//   ParseCriteoLines(lines, options, out, runner);
//
// Rules: label exactly 0 or 1. Integer field: optional '-' and decimal digits, within int64. Categorical field: 1 to 8 hex digits
// of either case. Nothing else is tolerated in a field (no blanks, no '+', no 0x). Fields are checked from left to right and the
// first fault is the line's. A line with a good label and not a single tab holds no features: kTooFewFields; every other short
// line is taken as one whose trailing empty fields were stripped, and is marked so.
//
// Invariant: a line's outputs are a function of its bytes alone, for any TaskRunner.
#ifndef HVD_CTR_CORE_CRITEO_PARSER_H_
#define HVD_CTR_CORE_CRITEO_PARSER_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"
#include "tf_ops/core/usual_criteo_line.h"

namespace hvd_ctr {

/// Why a line was refused. Values index counters in Python (hvd_ctr/data/criteo.py): never renumber.
enum class LineFault : int32_t {
  kNone = 0,
  kTooManyFields = 1,
  kBadLabel = 2,
  kBadInteger = 3,
  kBadHex = 4,
  kTooFewFields = 5,
  kBlank = 6
};
constexpr int32_t kLineFaults = 7;

/// Offsets of line starts in text: (lines+1), the last one is where the unfinished rest begins (== size when text ends in a
/// newline or `final` is set and the rest is taken as a line).
void SplitLines(Span<const char> text, bool final, std::vector<int64_t>* offsets);

struct CriteoOptions {
  bool has_label = true;  ///< false: test files, 39 fields; label is set to 0.
};

struct CriteoOutput {
  float* labels = nullptr;  ///< (n)
  float* dense =
      nullptr;  ///< (n, 13): missing 0; else sign(v)*log1p(|v|) in double, rounded; finite for negative counts (FC 103).
  int64_t* ids = nullptr;       ///< (n, 26): hex value 0 .. 2^32-1, or kCriteoMissingId.
  int32_t* faults = nullptr;    ///< (n) LineFault per line; a refused line's other outputs are zeros.
  uint8_t* stripped = nullptr;  ///< (n) 1: the line was good but had fewer fields than the full 40 (39).
};

/// Parses line i = text[begins[i] .. ends[i]) for i < n; one trailing newline or CRLF is ignored. begins and ends (n) must
/// satisfy 0 <= begins[i] <= ends[i] <= text.size() (the caller's duty: there is no status to tell), the outputs must not be
/// null.
void ParseCriteoLines(Span<const char> text, Span<const int64_t> begins, Span<const int64_t> ends, const CriteoOptions& options,
                      const CriteoOutput& out, TaskRunner* runner);

/// The same for line i = lines[i] < n.
void ParseCriteoLines(Span<const std::string_view> lines, const CriteoOptions& options, const CriteoOutput& out,
                      TaskRunner* runner);

/// Lines of several texts, by offsets as if the texts stood one after another: lines[i] = [begins[i], ends[i]). INVALID_ARGUMENT
/// when begins and ends differ in number, or a line does not lie within one of the texts.
Status LocateLines(Span<const std::string_view> texts, Span<const int64_t> begins, Span<const int64_t> ends,
                   std::vector<std::string_view>* lines);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_CRITEO_PARSER_H_
