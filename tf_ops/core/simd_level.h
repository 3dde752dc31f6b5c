// SimdLevel: which instruction set the hot loops use. One binary holds each of them once per level and picks at run time, so it
// runs on every processor of the family. The environment variable HVD_CTR_SIMD=baseline|avx2|avx512 forces a level.
//
//   template <SimdLevel kLevel>
//   HVD_CTR_SIMD_BODY void ScaleBody(float* x, int64_t n) { for (int64_t i = 0; i < n; ++i) x[i] *= 2.0f; }
//   HVD_CTR_SIMD_KERNEL(void, Scale, (float* x, int64_t n), (x, n))      // defines void Scale(float* x, int64_t n)
//
// Invariant: results have the same bits on every level. Loops on floats are element-wise IEEE operations or keep a fixed order,
// and -ffp-contract=off keeps a level with FMA from fusing them.
//
// A body must inline everything that it calls; what is left outside is compiled for the baseline. It may use SimdFloats(kLevel),
// but no intrinsics of a level: those stand in functions with HVD_CTR_TARGET_AVX512 and a choice by ActiveSimdLevel().
#ifndef HVD_CTR_CORE_SIMD_LEVEL_H_
#define HVD_CTR_CORE_SIMD_LEVEL_H_

#include <cstdint>
#include <string>

namespace hvd_ctr {

/// In ascending order. Other processors than x86-64 have the baseline only.
enum class SimdLevel : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

/// Floats of a vector register.
constexpr int32_t SimdFloats(SimdLevel level) { return level == SimdLevel::kAvx512 ? 16 : level == SimdLevel::kAvx2 ? 8 : 4; }

/// As in HVD_CTR_SIMD.
const char* SimdLevelName(SimdLevel level);

/// The highest level that this processor and system have.
SimdLevel BestSimdLevel();

struct SimdChoice {
  SimdLevel level = SimdLevel::kBaseline;
  std::string warning;  ///< Empty, or why the wish was not followed.
};

/// wanted: value of HVD_CTR_SIMD; null or empty: no wish. What is unknown or beyond `best` gives `best` and a warning.
SimdChoice ChooseSimdLevel(const char* wanted, SimdLevel best);

/// The process's choice, made at the first call.
const SimdChoice& ProcessSimdChoice();

/// The level in use.
SimdLevel ActiveSimdLevel();

/// For tests: the level in use from now on, at most BestSimdLevel(). No kernel may be running.
void ForceSimdLevel(SimdLevel level);

}  // namespace hvd_ctr

#define HVD_CTR_SIMD_BODY inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define HVD_CTR_TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define HVD_CTR_TARGET_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,bmi,bmi2,popcnt")))
/// Defines `type name parameters`, which runs `type nameBody<kLevel> arguments` compiled for the level in use.
#define HVD_CTR_SIMD_KERNEL(type, name, parameters, arguments)                                                       \
  HVD_CTR_TARGET_AVX512 type name##Avx512 parameters { return name##Body<::hvd_ctr::SimdLevel::kAvx512> arguments; } \
  HVD_CTR_TARGET_AVX2 type name##Avx2 parameters { return name##Body<::hvd_ctr::SimdLevel::kAvx2> arguments; }       \
  type name parameters {                                                                                             \
    switch (::hvd_ctr::ActiveSimdLevel()) {                                                                          \
      case ::hvd_ctr::SimdLevel::kAvx512:                                                                            \
        return name##Avx512 arguments;                                                                               \
      case ::hvd_ctr::SimdLevel::kAvx2:                                                                              \
        return name##Avx2 arguments;                                                                                 \
      case ::hvd_ctr::SimdLevel::kBaseline:                                                                          \
        break;                                                                                                       \
    }                                                                                                                \
    return name##Body<::hvd_ctr::SimdLevel::kBaseline> arguments;                                                    \
  }
#else
#define HVD_CTR_SIMD_KERNEL(type, name, parameters, arguments) \
  type name parameters { return name##Body<::hvd_ctr::SimdLevel::kBaseline> arguments; }
#endif

#endif  // HVD_CTR_CORE_SIMD_LEVEL_H_
