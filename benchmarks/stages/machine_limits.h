// What the machine itself takes to move the bytes of a stage: bare loops without any of the stage's own work, compiled for this
// machine (-march=native).
#ifndef HVD_CTR_BENCHMARKS_STAGES_MACHINE_LIMITS_H_
#define HVD_CTR_BENCHMARKS_STAGES_MACHINE_LIMITS_H_

#include <cstdint>

#include "tf_ops/core/types.h"

namespace hvd_ctr::bench {

/// Reads `floats` floats of each record, prefetched into L2, and stores them one after the other to out (n, floats).
void ReadRandomRecords(const float* arena, int64_t stride, Span<const Slot> slots, int64_t floats, float* out);
/// Adds 1 to every float of each record, prefetched likewise.
void ModifyRandomRecords(float* arena, int64_t stride, Span<const Slot> slots, int64_t floats);
/// Writes every record without reading it.
void WriteRandomRecords(float* arena, int64_t stride, Span<const Slot> slots, int64_t floats);
/// Reads one cache line (64 bytes) per position of a table of lines; returns a sum, so that the reads are made.
uint64_t ReadRandomLines(const uint64_t* lines, Span<const uint32_t> positions);
/// Fills the floats with non-temporal stores from registers.
void StreamStore(float* out, int64_t floats);
/// Sum of all floats: a stream of reads.
float StreamRead(const float* in, int64_t floats);
/// Reads (table << 48 | id) of row-major ids (n, features) and stores it: what packing alone takes.
void PackIds(const int64_t* ids, int64_t count, int32_t features, uint64_t* packed);
/// Removes the memory from all caches.
void Evict(const void* data, int64_t bytes);

}  // namespace hvd_ctr::bench

#endif  // HVD_CTR_BENCHMARKS_STAGES_MACHINE_LIMITS_H_
