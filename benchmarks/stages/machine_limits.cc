#include "benchmarks/stages/machine_limits.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvd_ctr::bench {
namespace {

constexpr int64_t kAhead = 32;
constexpr int64_t kLine = 16;  // Floats of a cache line.
typedef float Line __attribute__((vector_size(64)));

void Prefetch(const float* record, int64_t floats) {
  for (int64_t j = 0; j < floats; j += kLine) __builtin_prefetch(record + j, 0, 2);
}

Line Load(const float* from) {
  Line line;
  std::memcpy(&line, from, sizeof(line));
  return line;
}

void Store(const Line& line, float* to) { std::memcpy(to, &line, sizeof(line)); }

void StoreAround(const Line& line, float* to) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, reinterpret_cast<const __m512&>(line));
#else
  Store(line, to);
#endif
}

}  // namespace

void ReadRandomRecords(const float* arena, int64_t stride, Span<const Slot> slots, int64_t floats, float* out) {
  for (int64_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) Prefetch(arena + slots[i + kAhead] * stride, floats);
    const float* record = arena + slots[i] * stride;
    for (int64_t j = 0; j < floats; j += kLine) Store(Load(record + j), out + i * floats + j);
  }
}

void ModifyRandomRecords(float* arena, int64_t stride, Span<const Slot> slots, int64_t floats) {
  for (int64_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) Prefetch(arena + slots[i + kAhead] * stride, floats);
    float* record = arena + slots[i] * stride;
    for (int64_t j = 0; j < floats; j += kLine) Store(Load(record + j) + 1.0f, record + j);
  }
}

void WriteRandomRecords(float* arena, int64_t stride, Span<const Slot> slots, int64_t floats) {
  const Line line = {};
  for (const Slot slot : slots) {
    for (int64_t j = 0; j < floats; j += kLine) Store(line, arena + slot * stride + j);
  }
}

uint64_t ReadRandomLines(const uint64_t* lines, Span<const uint32_t> positions) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < positions.size(); ++i) {
    if (i + kAhead < positions.size()) __builtin_prefetch(lines + int64_t{positions[i + kAhead]} * 8, 0, 2);
    sum += lines[int64_t{positions[i]} * 8];
  }
  return sum;
}

void StreamStore(float* out, int64_t floats) {
  Line line = {};
  for (int64_t j = 0; j + kLine <= floats; j += kLine) {
    line += 1.0f;
    StoreAround(line, out + j);
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

float StreamRead(const float* in, int64_t floats) {
  Line sums[4] = {};
  for (int64_t j = 0; j + 4 * kLine <= floats; j += 4 * kLine) {
    for (int64_t i = 0; i < 4; ++i) sums[i] += Load(in + j + i * kLine);
  }
  const Line sum = sums[0] + sums[1] + sums[2] + sums[3];
  float total = 0.0f;
  for (int64_t i = 0; i < kLine; ++i) total += sum[i];
  return total;
}

void PackIds(const int64_t* ids, int64_t count, int32_t features, uint64_t* packed) {
  for (int64_t begin = 0; begin < count; begin += features) {
    for (int64_t f = 0; f < features; ++f) {
      packed[begin + f] = static_cast<uint64_t>(f) << 48 | static_cast<uint64_t>(ids[begin + f]);
    }
  }
}

void Evict(const void* data, int64_t bytes) {
#if defined(__x86_64__)
  const char* line = static_cast<const char*>(data);
  for (int64_t i = 0; i < bytes; i += 64) _mm_clflush(line + i);
  _mm_mfence();
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace hvd_ctr::bench
