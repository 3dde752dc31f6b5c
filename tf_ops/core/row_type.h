// RowType: how the device tier stores the D values of a row. Everything else stays float32: optimizer state, rows on their way
// (between the ranks, between the tiers), gradients, host records, checkpoints.
//
//   Bfloat16Rows::Element stored = Bfloat16Rows::Narrow(value);      // rounds to nearest, ties to even
//   float value = Bfloat16Rows::Widen(stored);                       // exact
//   WithRowType(type, [&](auto rows) { using Rows = decltype(rows); ... Rows::Widen(element) ... });
//
// Invariants: Narrow(Widen(x)) is x for every x that Narrow returns, so a row that goes from the device to the host and back is
// the same row. Conversions are integer arithmetic and exact products, so the bits do not depend on host, device, vector width,
// or a thread's treatment of denormals. Beyond float16's range Narrow gives infinity; NaN stays NaN, with its sign and the upper
// bits of its payload, and becomes quiet.
#ifndef HVD_CTR_CORE_ROW_TYPE_H_
#define HVD_CTR_CORE_ROW_TYPE_H_

#include <cstdint>
#include <cstring>

#include "tf_ops/core/hash.h"

/// Inlined everywhere, as the row loops are: see row_math.h.
#define HVD_CTR_ROW_TYPE_INLINE HVD_CTR_HD inline __attribute__((always_inline))

namespace hvd_ctr {

/// Passed from Python (hvd_ctr/ops/mix_cache_ops.py): never renumber.
enum class RowType : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

/// As in embedding.cache.row_dtype.
constexpr const char* RowTypeName(RowType type) {
  return type == RowType::kFloat16 ? "float16" : type == RowType::kBfloat16 ? "bfloat16" : "float32";
}

HVD_CTR_ROW_TYPE_INLINE uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HVD_CTR_ROW_TYPE_INLINE float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// The three types, for use as a template parameter.
struct Float32Rows {
  using Element = float;
  static constexpr RowType kType = RowType::kFloat32;
  HVD_CTR_ROW_TYPE_INLINE static float Widen(Element element) { return element; }
  HVD_CTR_ROW_TYPE_INLINE static Element Narrow(float value) { return value; }
};

/// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
struct Float16Rows {
  using Element = uint16_t;
  static constexpr RowType kType = RowType::kFloat16;

  // No branches, so that loops over it become vector code.
  HVD_CTR_ROW_TYPE_INLINE static float Widen(Element element) {
    const uint32_t sign = (static_cast<uint32_t>(element) & 0x8000u) << 16;
    const uint32_t size = static_cast<uint32_t>(element) & 0x7fffu;
    const uint32_t normal = (size << 13) + (112u << 23);  // The exponent's bias is 15 here and 127 there.
    // Infinity and NaN: both exponents are the largest. Below 2^-14: multiples of 2^-24, an exact product.
    const uint32_t special = normal + (112u << 23);
    const uint32_t subnormal = FloatToBits(static_cast<float>(static_cast<int32_t>(size)) * (1.0f / 16777216.0f));
    const uint32_t finite = size < 0x400u ? subnormal : normal;
    return FloatFromBits(sign | (size >= 0x7c00u ? special : finite));
  }

  HVD_CTR_ROW_TYPE_INLINE static Element Narrow(float value) {
    const uint32_t bits = FloatToBits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    // 13 bits less of mantissa. A carry goes into the exponent, up to infinity.
    const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    // Below 2^-14: the mantissa in units of 2^-24. From 25 bits on nothing is left of it.
    const uint32_t exponent = size >> 23;
    const uint32_t shift = exponent < 101u ? 25u : (126u - exponent) & 31u;
    const uint32_t mantissa = (size & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift;
    const uint32_t subnormal = (mantissa + ((1u << shift) >> 1) - 1u + (kept & 1u)) >> shift;
    const uint32_t special = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u;
    const uint32_t finite = size < (113u << 23) ? subnormal : normal;
    return static_cast<Element>(sign | (size >= (143u << 23) ? special : finite));
  }
};

/// The upper half of a float32: 8 bits of exponent, 7 of mantissa.
struct Bfloat16Rows {
  using Element = uint16_t;
  static constexpr RowType kType = RowType::kBfloat16;

  HVD_CTR_ROW_TYPE_INLINE static float Widen(Element element) { return FloatFromBits(static_cast<uint32_t>(element) << 16); }

  HVD_CTR_ROW_TYPE_INLINE static Element Narrow(float value) {
    const uint32_t bits = FloatToBits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<Element>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
};

/// Calls function with a value of the type's struct, and returns what it returns. Host only.
template <typename Function>
auto WithRowType(RowType type, const Function& function) {
  switch (type) {
    case RowType::kFloat16:
      return function(Float16Rows());
    case RowType::kBfloat16:
      return function(Bfloat16Rows());
    case RowType::kFloat32:
      break;
  }
  return function(Float32Rows());
}

/// Bytes of one column of a row on the device.
HVD_CTR_HD constexpr int32_t RowElementBytes(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

/// What a column is once the device has stored it.
HVD_CTR_ROW_TYPE_INLINE float RoundToRowType(RowType type, float value) {
  return type == RowType::kFloat16    ? Float16Rows::Widen(Float16Rows::Narrow(value))
         : type == RowType::kBfloat16 ? Bfloat16Rows::Widen(Bfloat16Rows::Narrow(value))
                                      : value;
}

/// The same for a row (n) that is seen without having been on the device.
inline void RoundRow(RowType type, int64_t n, float* row) {
  if (type == RowType::kFloat32) return;
  WithRowType(type, [n, row](auto rows) {
    using Rows = decltype(rows);
    for (int64_t j = 0; j < n; ++j) row[j] = Rows::Widen(Rows::Narrow(row[j]));
  });
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ROW_TYPE_H_
