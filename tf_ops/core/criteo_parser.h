// Parser of Criteo display-advertising TSV: label, 13 integer fields, 26 hexadecimal fields, separated by tabs, any of them empty;
// trailing empty fields may be missing from the line; CRLF is accepted. The hot path of reading.
#ifndef HVD_CTR_CORE_CRITEO_PARSER_H_
#define HVD_CTR_CORE_CRITEO_PARSER_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

constexpr int32_t kCriteoDense = 13;
constexpr int32_t kCriteoSparse = 26;
/// Id of an empty categorical field: outside the range of 8-digit hex values, so apart from every real one (FC 102, 104, 109).
constexpr int64_t kCriteoMissingId = int64_t{1} << 32;

/// Why a line was refused. Values index counters in Python (hvd_ctr/data/criteo.py): never renumber.
enum class LineFault : int32_t { kNone = 0, kTooManyFields = 1, kBadLabel = 2, kBadInteger = 3, kBadHex = 4, kTooFewFields = 5, kBlank = 6 };
constexpr int32_t kLineFaults = 7;

/// Offsets of line starts in text: (lines+1), the last one is where the unfinished rest begins (== size when text ends in a newline
/// or `final` is set and the rest is taken as a line).
void SplitLines(Span<const char> text, bool final, std::vector<int64_t>* offsets);

struct CriteoOptions {
  bool has_label = true;  ///< false: test files, 39 fields; label is set to 0.
};

struct CriteoOutput {
  float* labels = nullptr;    ///< (n)
  float* dense = nullptr;     ///< (n, 13): missing 0; else sign(v)*log1p(|v|), finite for negative counts (FC 103).
  int64_t* ids = nullptr;     ///< (n, 26): hex value 0 .. 2^32-1, or kCriteoMissingId.
  int32_t* faults = nullptr;  ///< (n) LineFault per line; a refused line's other outputs are zeros.
  uint8_t* stripped = nullptr;///< (n) 1: the line was good but had fewer fields than the full 40 (39).
};

/// Parses line i = text[begins[i] .. ends[i]) for i < n, without the newline.
void ParseCriteoLines(Span<const char> text, Span<const int64_t> begins, Span<const int64_t> ends, const CriteoOptions& options,
                      const CriteoOutput& out, TaskRunner* runner);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_CRITEO_PARSER_H_
