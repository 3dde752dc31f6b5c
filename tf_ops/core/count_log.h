// log1p of counts as float: what a model sees of an integer field. Bit for bit float(std::log1p(double(count))), several times as
// fast.
#ifndef HVD_CTR_CORE_COUNT_LOG_H_
#define HVD_CTR_CORE_COUNT_LOG_H_

#include <array>
#include <cstdint>

namespace hvd_ctr {

/// Counts below have their logarithm in a table of 16 KB; most of Criteo's have.
constexpr uint64_t kCountLogTableSize = 4096;
using CountLogTable = std::array<float, kCountLogTableSize>;

const CountLogTable& SmallCountLogs();

/// Of any count, without the table.
float LargeCountLog(uint64_t count);

/// sign * log1p(count); +0 for count 0. `table` is SmallCountLogs(), fetched once by the caller of many.
inline float SignedCountLog(uint64_t count, bool negative, const CountLogTable& table) {
  const float value = count < kCountLogTableSize ? table[count] : LargeCountLog(count);
  return negative && count != 0 ? -value : value;
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_COUNT_LOG_H_
