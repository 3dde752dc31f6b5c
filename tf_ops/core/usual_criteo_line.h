// The fast way through a Criteo line that is as most are: all fields present, counts of up to 8 characters, categories of up to 8
// hexadecimal digits. Fields are found by a vectorised search for tabs and converted eight characters at a time, without a branch
// that depends on the data: lengths and empty fields are random, so each such branch would often be mispredicted.
//
//   if (!ParseUsualLine(line, has_label, logs, out)) ...the careful parser reads the line, right or wrong...
//
// Invariant: where it returns true, the outputs are those of the careful parser (criteo_parser.cc).
#ifndef HVD_CTR_CORE_USUAL_CRITEO_LINE_H_
#define HVD_CTR_CORE_USUAL_CRITEO_LINE_H_

#include <cstdint>
#include <string_view>

#include "tf_ops/core/count_log.h"

namespace hvd_ctr {

constexpr int32_t kCriteoDense = 13;
constexpr int32_t kCriteoSparse = 26;
/// Id of an empty categorical field: outside the range of 8-digit hex values, so apart from every real one (FC 102, 104, 109).
constexpr int64_t kCriteoMissingId = int64_t{1} << 32;

/// Where a line's values go.
struct CriteoLineOutput {
  float* label = nullptr;  ///< One; 0 without a label.
  float* dense = nullptr;  ///< (13)
  int64_t* ids = nullptr;  ///< (26)
};

/// line: without its newline or CRLF. false: the line is unusual or bad, and the outputs hold anything.
bool ParseUsualLine(std::string_view line, bool has_label, const CountLogTable& logs, const CriteoLineOutput& out);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_USUAL_CRITEO_LINE_H_
