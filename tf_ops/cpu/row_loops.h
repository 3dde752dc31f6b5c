// Small pieces shared by the CPU kernels: copying rows, prefetching records, splitting rows over threads.
#ifndef HVD_CTR_CPU_ROW_LOOPS_H_
#define HVD_CTR_CPU_ROW_LOOPS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tf_ops/core/backend_checks.h"
#include "tf_ops/core/simd_level.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

constexpr int64_t kLineFloats = 16;  ///< 64-byte cache line.
/// Rounded up to whole lines.
constexpr int64_t WholeLines(int64_t floats) { return (floats + kLineFloats - 1) / kLineFloats * kLineFloats; }
/// Rows (records) to prefetch ahead. 32 with the L2 hint was the best of 8 .. 64 on random 64- to 512-byte records.
constexpr int64_t kPrefetchRows = 32;
/// Lines of one record to prefetch; the hardware's stream prefetcher follows up on longer ones.
constexpr int64_t kPrefetchLines = 16;

/// kColumns floats that the compiler keeps in registers, whatever their width; element-wise operators only. For locals: it is not
/// passed or returned, its calling convention depends on the instruction set. Load and store with memcpy.
template <int32_t kColumns>
struct FloatVector {
  typedef float Type __attribute__((vector_size(kColumns * sizeof(float))));
};
template <>
struct FloatVector<1> {
  using Type = float;
};

HVD_CTR_SIMD_BODY void PrefetchRecord(const float* record, int64_t floats) {
  const int64_t end = std::min(floats, kPrefetchLines * kLineFloats);
  for (int64_t j = 0; j < end; j += kLineFloats) __builtin_prefetch(record + j, 0, 2);
}

/// memcpy of floats in blocks of a line, which beats the call into libc on short rows.
HVD_CTR_SIMD_BODY void CopyRow(const float* __restrict__ from, int64_t floats, float* __restrict__ to) {
  int64_t j = 0;
  for (; j + kLineFloats <= floats; j += kLineFloats) std::memcpy(to + j, from + j, kLineFloats * sizeof(float));
  for (; j < floats; ++j) to[j] = from[j];
}

HVD_CTR_SIMD_BODY void ZeroRow(int64_t floats, float* row) { std::memset(row, 0, static_cast<size_t>(floats) * sizeof(float)); }

/// Calls fn(begin, end) over ranges of n rows of `row_floats` floats each; ranges are at least about 32 KB of work.
template <typename Function>
void ForRows(TaskRunner* runner, int64_t n, int64_t row_floats, const Function& fn) {
  if (n > 0) runner->Run(n, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, row_floats)), fn);
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_ROW_LOOPS_H_
