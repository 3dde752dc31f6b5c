#include "tf_ops/core/count_log.h"

#include <cmath>

namespace hvd_ctr {

const CountLogTable& SmallCountLogs() {
  static const CountLogTable table = [] {
    CountLogTable values;
    for (uint64_t i = 0; i < kCountLogTableSize; ++i) values[i] = static_cast<float>(std::log1p(static_cast<double>(i)));
    return values;
  }();
  return table;
}

float LargeCountLog(uint64_t count) {
  // log is a third of log1p's work, and both are within a few units in the last place of a double. Where everything so near
  // rounds to the same float, they agree; else (one count in a million) log1p decides.
  constexpr double kNear = 1e-13;
  constexpr uint64_t kExactInDouble = uint64_t{1} << 53;
  if (count < kExactInDouble) {
    const double value = std::log(static_cast<double>(count + 1));
    const float low = static_cast<float>(value * (1 - kNear));
    if (low == static_cast<float>(value * (1 + kNear))) return low;
  }
  return static_cast<float>(std::log1p(static_cast<double>(count)));
}

}  // namespace hvd_ctr
