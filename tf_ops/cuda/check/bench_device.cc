#include "tf_ops/cuda/check/bench_device.h"

#include <cmath>
#include <random>

namespace hvd_ctr {

DrawnIds DrawIds(int64_t n, int64_t population, bool power_law, uint64_t seed) {
  constexpr double kExponent = 1.1;
  std::mt19937_64 generator(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const double tail = std::pow(static_cast<double>(population), 1.0 - kExponent);
  DrawnIds drawn;
  drawn.inverse.resize(static_cast<size_t>(n));
  std::vector<int32_t> position(static_cast<size_t>(population), -1);
  for (int32_t& inverse : drawn.inverse) {
    const double u = uniform(generator);
    const double rank = power_law ? std::pow(1.0 + u * (tail - 1.0), 1.0 / (1.0 - kExponent)) - 1.0 : u * population;
    const auto at = static_cast<uint64_t>(std::clamp<double>(rank, 0.0, static_cast<double>(population - 1)));
    // The multiplier is a prime: where it does not divide the population, this is a bijection.
    const auto id = static_cast<size_t>(at * 2654435761u % static_cast<uint64_t>(population));
    if (position[id] < 0) {
      position[id] = static_cast<int32_t>(drawn.unique.size());
      drawn.unique.push_back(static_cast<int32_t>(id));
    }
    inverse = position[id];
  }
  return drawn;
}

}  // namespace hvd_ctr
