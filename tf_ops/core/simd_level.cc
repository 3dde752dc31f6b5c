#include "tf_ops/core/simd_level.h"

#include <atomic>
#include <cstdlib>

namespace hvd_ctr {
namespace {

constexpr SimdLevel kLevels[] = {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512};
constexpr int32_t kNotChosen = -1;

// A process-wide fact of the processor, looked up by every kernel.
std::atomic<int32_t> active_level{kNotChosen};

std::string Names(SimdLevel best) {
  std::string names;
  for (const SimdLevel level : kLevels) {
    if (level > best) break;
    names += (names.empty() ? "" : ", ") + std::string(SimdLevelName(level));
  }
  return names;
}

}  // namespace

const char* SimdLevelName(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kAvx512:
      return "avx512";
    case SimdLevel::kBaseline:
      break;
  }
  return "baseline";
}

SimdLevel BestSimdLevel() {
#if defined(__x86_64__) && defined(__GNUC__)
  // Each asks for the system's support as well.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("popcnt");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return SimdLevel::kAvx512;
  if (avx2) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kBaseline;
}

SimdChoice ChooseSimdLevel(const char* wanted, SimdLevel best) {
  const std::string wish = wanted == nullptr ? "" : wanted;
  if (wish.empty()) return {best, ""};
  for (const SimdLevel level : kLevels) {
    if (wish != SimdLevelName(level)) continue;
    if (level <= best) return {level, ""};
    return {best, "HVD_CTR_SIMD is '" + wish + "', which this processor does not have; it has: " + Names(best) + "; '" +
                      SimdLevelName(best) + "' is used"};
  }
  return {best, "HVD_CTR_SIMD is '" + wish + "'; allowed are baseline, avx2, avx512; '" + SimdLevelName(best) + "' is used"};
}

const SimdChoice& ProcessSimdChoice() {
  static const SimdChoice choice = ChooseSimdLevel(std::getenv("HVD_CTR_SIMD"), BestSimdLevel());
  return choice;
}

SimdLevel ActiveSimdLevel() {
  const int32_t level = active_level.load(std::memory_order_relaxed);
  if (level != kNotChosen) return static_cast<SimdLevel>(level);
  const SimdLevel chosen = ProcessSimdChoice().level;
  active_level.store(static_cast<int32_t>(chosen), std::memory_order_relaxed);
  return chosen;
}

void ForceSimdLevel(SimdLevel level) {
  const SimdLevel best = BestSimdLevel();
  active_level.store(static_cast<int32_t>(level < best ? level : best), std::memory_order_relaxed);
}

}  // namespace hvd_ctr
