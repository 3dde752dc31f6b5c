// Per-row arithmetic shared by all backends (host and device inline): first value of a row, first optimizer state, update rules.
//
// Invariant: plain IEEE operations in one fixed order, compiled without contraction (-ffp-contract=off, nvcc -fmad=false), so the
// bits depend neither on the backend, nor on vector width, thread count or host. One exception: FTRL with a learning_rate_power
// other than -0.5 (and 0, -1) calls the C library's powf.
//
//   float row[16], state[16];
//   InitialRow(initializer, seed, HashBytes(name.data(), name.size()), id, 16, row);
//   InitialState(options, 16, state);
//   UpdateRow(options, /*step=*/1, options.learning_rate * scale, gradient, 16, row, state);
//
// Many rows of one table in one step: MakeRowUpdate once, then UpdateRowOf<kind> per row.
//
// Lazy semantics (DESIGN 7): a rule runs when a row is touched and only then. Rows absent from a batch do not move, their state
// does not decay, and l2 acts on touched rows only.
#ifndef HVD_CTR_CORE_ROW_MATH_H_
#define HVD_CTR_CORE_ROW_MATH_H_

#include <cmath>
#include <cstdint>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/options.h"

/// Inlined everywhere: a caller compiled for a wider instruction set must take the row loops with it.
#define HVD_CTR_ROW_INLINE HVD_CTR_HD inline __attribute__((always_inline))

namespace hvd_ctr {

/// Lanes of the row sum of row-wise Adagrad (part of its definition: changing it changes bits).
constexpr int32_t kRowSumLanes = 16;

/// Optimizer state floats of one row. Order of the state:
///   Sgd: none.  Adagrad: accumulator (D).  RowWiseAdagrad: accumulator (1).  Adam: m (D), v (D), with row_step the row's own
///   update count (1).  Ftrl: accumulator (D), linear (D).
HVD_CTR_HD inline int32_t StateFloats(const RowOptimizerOptions& options, int32_t dim) {
  switch (options.kind) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kAdagrad:
      return dim;
    case OptimizerKind::kRowWiseAdagrad:
      return 1;
    case OptimizerKind::kAdam:
      return 2 * dim + (options.row_step ? 1 : 0);
    case OptimizerKind::kFtrl:
      return 2 * dim;
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------- first values

/// Natural logarithm of k / 2^24, k = 1 .. 2^24: atanh series on [sqrt(1/2), sqrt(2)), in double. Written out because libm's
/// logarithm and cosine differ between hosts and devices in the last place.
HVD_CTR_HD inline double LogOf24Bits(uint32_t k) {
  double m = static_cast<double>(k) * (1.0 / 16777216.0);
  int32_t exponent = 0;
  while (m < 0.70710678118654752) {
    m *= 2.0;
    --exponent;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double series = 1.0 / 19.0;
  for (int32_t odd = 17; odd >= 1; odd -= 2) series = series * s2 + 1.0 / odd;
  return exponent * 0.69314718055994531 + 2.0 * s * series;
}

/// cos(2 pi k / 2^24), k = 0 .. 2^24-1: Taylor series on one quadrant, in double.
HVD_CTR_HD inline double CosOf24Bits(uint32_t k) {
  const uint32_t quadrant = k >> 22;
  const double x = static_cast<double>(k & 0x3fffffu) * (6.283185307179586 / 16777216.0);
  const double x2 = x * x;
  const bool sine = (quadrant & 1u) != 0;
  double series = 1.0;
  for (int32_t n = sine ? 19 : 18; n >= 2; n -= 2) series = 1.0 - series * x2 / (static_cast<double>(n) * (n - 1));
  if (sine) series *= x;
  return quadrant == 1 || quadrant == 2 ? -series : series;
}

/// What is the same for the first records of all rows of one table. Order of the state: StateFloats.
struct RowInit {
  InitializerOptions initializer;
  uint64_t table_seed = 0;
  int32_t accumulators = 0;  ///< State floats that start at `accumulator`; all others start at 0.
  float accumulator = 0.0f;
};

/// table_hash: HashBytes of the table's name, so that first values do not depend on its position in the config.
HVD_CTR_HD inline RowInit MakeRowInit(const InitializerOptions& initializer, const RowOptimizerOptions& optimizer, uint64_t seed,
                                      uint64_t table_hash, int32_t dim) {
  RowInit init;
  init.initializer = initializer;
  init.table_seed = Mix64(table_hash ^ Mix64(seed ^ kInitialValueSalt));
  init.accumulator = optimizer.initial_accumulator;
  if (optimizer.kind == OptimizerKind::kAdagrad || optimizer.kind == OptimizerKind::kFtrl) init.accumulators = dim;
  if (optimizer.kind == OptimizerKind::kRowWiseAdagrad) init.accumulators = 1;
  return init;
}

/// What the first values of one row have in common.
HVD_CTR_ROW_INLINE uint64_t InitialBase(const RowInit& init, int64_t id) {
  return Mix64(static_cast<uint64_t>(id) ^ init.table_seed);
}

/// Uniform: (2u - 1) * scale, u = top 24 bits / 2^24, which lies in [-scale, scale).
HVD_CTR_ROW_INLINE float UniformColumn(uint64_t base, int32_t j, float scale) {
  // Signed, which every instruction set converts to float; the value has 24 bits.
  const auto top = static_cast<int32_t>(Mix64(base + static_cast<uint64_t>(j)) >> 40);
  return (static_cast<float>(top) * (1.0f / 8388608.0f) - 1.0f) * scale;
}

/// Normal: Box-Muller, sqrt(-2 ln u1) cos(2 pi u2) * scale with u1 in (0, 1] from the top 24 bits and u2 in [0, 1) from the next
/// 24.
HVD_CTR_ROW_INLINE float NormalColumn(uint64_t base, int32_t j, float scale) {
  const uint64_t h = Mix64(base + static_cast<uint64_t>(j));
  const auto first = static_cast<uint32_t>(h >> 40);
  const uint32_t second = static_cast<uint32_t>(h >> 16) & 0xffffffu;
  return static_cast<float>(std::sqrt(-2.0 * LogOf24Bits(first + 1)) * CosOf24Bits(second)) * scale;
}

/// First value of one row (D): a function of seed, table name, id and column only (DESIGN invariant 5). Column j draws h =
/// Mix64(base + j).
HVD_CTR_ROW_INLINE void InitialRowOf(const RowInit& init, int64_t id, int32_t dim, float* row) {
  const uint64_t base = InitialBase(init, id);
  const float scale = init.initializer.scale;
  switch (init.initializer.kind) {
    case InitializerKind::kConstant:
      for (int32_t j = 0; j < dim; ++j) row[j] = scale;
      break;
    case InitializerKind::kUniform:
      for (int32_t j = 0; j < dim; ++j) row[j] = UniformColumn(base, j, scale);
      break;
    case InitializerKind::kNormal:
      for (int32_t j = 0; j < dim; ++j) row[j] = NormalColumn(base, j, scale);
      break;
  }
}

/// Float j of the first record: the same bits as InitialRecordOf, one at a time.
HVD_CTR_ROW_INLINE float InitialColumnOf(const RowInit& init, int64_t id, int32_t dim, int32_t j) {
  if (j >= dim) return j - dim < init.accumulators ? init.accumulator : 0.0f;
  const float scale = init.initializer.scale;
  switch (init.initializer.kind) {
    case InitializerKind::kConstant:
      return scale;
    case InitializerKind::kUniform:
      return UniformColumn(InitialBase(init, id), j, scale);
    case InitializerKind::kNormal:
      return NormalColumn(InitialBase(init, id), j, scale);
  }
  return 0.0f;
}

/// First optimizer state (state_floats >= accumulators): padding is 0.
HVD_CTR_ROW_INLINE void InitialStateOf(const RowInit& init, int64_t state_floats, float* state) {
  for (int64_t j = 0; j < init.accumulators; ++j) state[j] = init.accumulator;
  for (int64_t j = init.accumulators; j < state_floats; ++j) state[j] = 0.0f;
}

/// First record (record_floats >= dim): row, then state.
HVD_CTR_ROW_INLINE void InitialRecordOf(const RowInit& init, int64_t id, int32_t dim, int64_t record_floats, float* record) {
  InitialRowOf(init, id, dim, record);
  InitialStateOf(init, record_floats - dim, record + dim);
}

/// One row; see InitialRowOf.
HVD_CTR_HD inline void InitialRow(const InitializerOptions& options, uint64_t seed, uint64_t table_hash, int64_t id, int32_t dim,
                                  float* row) {
  InitialRowOf(MakeRowInit(options, RowOptimizerOptions(), seed, table_hash, dim), id, dim, row);
}

/// First optimizer state of one row: StateFloats(options, dim) floats.
HVD_CTR_HD inline void InitialState(const RowOptimizerOptions& options, int32_t dim, float* state) {
  InitialStateOf(MakeRowInit(InitializerOptions(), options, 0, 0, dim), StateFloats(options, dim), state);
}

// ---------------------------------------------------------------------------------------------------------- update rules

/// What is the same for all rows of one table in one step.
struct RowUpdate {
  float learning_rate = 0.0f;  ///< Scale included.
  float epsilon = 0.0f;
  float one_minus_beta1 = 0.0f;
  float one_minus_beta2 = 0.0f;
  float alpha = 0.0f;  ///< Adam by the global step: learning rate with the bias corrections in it.
  double beta1 = 0.0;
  double beta2 = 0.0;
  bool row_step = false;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float accumulator_power = 0.5f;  ///< FTRL: -learning_rate_power.
};

/// base^n, n >= 0, by squaring: the same bits on every host, unlike pow.
HVD_CTR_HD inline double IntegerPower(double base, int64_t n) {
  double power = 1.0;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

/// Adam's step size lr * sqrt(1 - beta2^t) / (1 - beta1^t) for update number t >= 1, in double.
HVD_CTR_HD inline float AdamAlpha(const RowUpdate& update, int64_t t) {
  const double correction1 = 1.0 - IntegerPower(update.beta1, t);
  const double correction2 = 1.0 - IntegerPower(update.beta2, t);
  return static_cast<float>(static_cast<double>(update.learning_rate) * std::sqrt(correction2) / correction1);
}

/// step: the global update count including this one, 1 at the first. learning_rate: options.learning_rate times the schedule's
/// scale.
HVD_CTR_HD inline RowUpdate MakeRowUpdate(const RowOptimizerOptions& options, int64_t step, float learning_rate) {
  RowUpdate update;
  update.learning_rate = learning_rate;
  update.epsilon = options.epsilon;
  update.beta1 = static_cast<double>(options.beta1);
  update.beta2 = static_cast<double>(options.beta2);
  update.one_minus_beta1 = 1.0f - options.beta1;
  update.one_minus_beta2 = 1.0f - options.beta2;
  update.row_step = options.row_step;
  update.l1 = options.l1;
  update.l2 = options.l2;
  update.accumulator_power = -options.learning_rate_power;
  if (options.kind == OptimizerKind::kAdam && !options.row_step) update.alpha = AdamAlpha(update, step < 1 ? 1 : step);
  return update;
}

/// A denominator of exactly 0 means that nothing but zero gradients (or ones whose square underflows) came so far and epsilon is
/// 0: divide by 1, so the column does not become NaN. NaN stays NaN.
HVD_CTR_ROW_INLINE float NonZero(float denominator) { return denominator == 0.0f ? 1.0f : denominator; }

/// grad += l2 * row (lazy L2; all rules but FTRL).
HVD_CTR_ROW_INLINE float Regularised(const RowUpdate& update, float gradient, float row) { return gradient + update.l2 * row; }

/// SGD: w -= lr g.
HVD_CTR_ROW_INLINE void SgdColumn(const RowUpdate& update, float gradient, float* row) {
  const float w = *row;
  *row = w - update.learning_rate * Regularised(update, gradient, w);
}

/// Adagrad (Duchi, Hazan, Singer, JMLR 2011) in Keras 3's form: acc += g^2; w -= lr g / sqrt(acc + epsilon).
HVD_CTR_ROW_INLINE void AdagradColumn(const RowUpdate& update, float gradient, float* row, float* accumulator) {
  const float w = *row;
  const float g = Regularised(update, gradient, w);
  const float sum = *accumulator + g * g;
  *accumulator = sum;
  *row = w - update.learning_rate * g / NonZero(std::sqrt(sum + update.epsilon));
}

/// What RowWiseAdagradRoot does once it has the lanes' sums, which it changes.
HVD_CTR_ROW_INLINE float RowWiseAdagradRootOf(const RowUpdate& update, float* lanes, int32_t dim, float* accumulator) {
  for (int32_t half = kRowSumLanes / 2; half > 0; half /= 2) {
    for (int32_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  const float sum = *accumulator + lanes[0] / static_cast<float>(dim);
  *accumulator = sum;
  return NonZero(std::sqrt(sum + update.epsilon));
}

/// Row-wise Adagrad (Mudigere et al., ISCA 2022, section on memory): acc += mean_j g_j^2, one accumulator per row; afterwards
/// w -= lr g / sqrt(acc + epsilon). Updates *accumulator and returns the root. The sum runs in 16 lanes (column j in lane j mod
/// 16, ascending), which are then halved: lane i += lane i+8, i+4, i+2, i+1.
HVD_CTR_ROW_INLINE float RowWiseAdagradRoot(const RowUpdate& update, const float* gradient, const float* row, int32_t dim,
                                            float* accumulator) {
  float lanes[kRowSumLanes] = {};
  int32_t j = 0;
  for (; j + kRowSumLanes <= dim; j += kRowSumLanes) {
    for (int32_t i = 0; i < kRowSumLanes; ++i) {
      const float g = Regularised(update, gradient[j + i], row[j + i]);
      lanes[i] += g * g;
    }
  }
  for (int32_t i = 0; j + i < dim; ++i) {
    const float g = Regularised(update, gradient[j + i], row[j + i]);
    lanes[i] += g * g;
  }
  return RowWiseAdagradRootOf(update, lanes, dim, accumulator);
}

/// Second half of row-wise Adagrad.
HVD_CTR_ROW_INLINE void RowWiseAdagradColumn(const RowUpdate& update, float root, float gradient, float* row) {
  const float w = *row;
  *row = w - update.learning_rate * Regularised(update, gradient, w) / root;
}

/// Adam (Kingma, Ba, ICLR 2015, the paper's efficient form; Keras 3): m += (g - m)(1 - beta1); v += (g^2 - v)(1 - beta2);
/// w -= m alpha / (sqrt(v) + epsilon). alpha: AdamAlpha of the global step or of the row's own count.
HVD_CTR_ROW_INLINE void AdamColumn(const RowUpdate& update, float alpha, float gradient, float* row, float* m, float* v) {
  const float w = *row;
  const float g = Regularised(update, gradient, w);
  const float first = *m + (g - *m) * update.one_minus_beta1;
  const float second = *v + (g * g - *v) * update.one_minus_beta2;
  *m = first;
  *v = second;
  *row = w - first * alpha / NonZero(std::sqrt(second) + update.epsilon);
}

/// accumulator^power of FTRL; the usual 0.5 needs no libm.
HVD_CTR_ROW_INLINE float FtrlPower(float accumulator, float power) { return std::pow(accumulator, power); }

/// FTRL-proximal (McMahan et al., KDD 2013) in Keras 3's form without shrinkage and beta; p = -learning_rate_power:
/// new = acc + g^2; linear += g - (new^p - acc^p) / lr * w; w = (clip(linear, -l1, l1) - linear) / (new^p / lr + 2 l2).
/// old_power and new_power are acc^p and new^p. A column whose quadratic term is 0 (no gradient yet, accumulator 0, l2 0) stays.
HVD_CTR_ROW_INLINE void FtrlColumn(const RowUpdate& update, float gradient, float old_power, float new_power, float* row,
                                   float* linear) {
  const float w = *row;
  const float sum = *linear + (gradient - (new_power - old_power) / update.learning_rate * w);
  const float quadratic = new_power / update.learning_rate + 2.0f * update.l2;
  const float low = sum < -update.l1 ? -update.l1 : sum;
  const float clipped = low > update.l1 ? update.l1 : low;
  *linear = sum;
  const float proximal = (clipped - sum) / NonZero(quadratic);
  *row = quadratic == 0.0f ? w : proximal;
}

/// FTRL of one column, from its accumulator on. kRoot: the power is 0.5.
template <bool kRoot>
HVD_CTR_ROW_INLINE void FtrlAccumulate(const RowUpdate& update, float gradient, float* row, float* accumulator, float* linear) {
  const float old_sum = *accumulator;
  const float new_sum = old_sum + gradient * gradient;
  *accumulator = new_sum;
  if (kRoot) {
    FtrlColumn(update, gradient, std::sqrt(old_sum), std::sqrt(new_sum), row, linear);
  } else {
    FtrlColumn(update, gradient, FtrlPower(old_sum, update.accumulator_power), FtrlPower(new_sum, update.accumulator_power), row,
               linear);
  }
}

/// FTRL over one row. A learning rate of 0 leaves row and state alone: the rule divides by it.
HVD_CTR_ROW_INLINE void FtrlRow(const RowUpdate& update, const float* __restrict__ gradient, int32_t dim, float* __restrict__ row,
                                float* __restrict__ accumulator, float* __restrict__ linear) {
  if (update.learning_rate == 0.0f) return;
  const bool root = update.accumulator_power == 0.5f;
  for (int32_t j = 0; j < dim && root; ++j) FtrlAccumulate<true>(update, gradient[j], row + j, accumulator + j, linear + j);
  for (int32_t j = 0; j < dim && !root; ++j) FtrlAccumulate<false>(update, gradient[j], row + j, accumulator + j, linear + j);
}

/// Adam's alpha by the row's own update count, which it advances.
HVD_CTR_ROW_INLINE float AdamRowAlpha(const RowUpdate& update, float* count) {
  // Counted in a float of the record: exact up to 2^24 updates, where it stops; both corrections are 1 long before.
  const float advanced = *count < 16777216.0f ? *count + 1.0f : *count;
  *count = advanced;
  return AdamAlpha(update, static_cast<int64_t>(advanced));
}

/// Applies the rule kKind to one row: gradient (D), row (D), state (StateFloats). The three do not overlap.
template <OptimizerKind kKind>
HVD_CTR_ROW_INLINE void UpdateRowOf(const RowUpdate& update, const float* __restrict__ gradient, int32_t dim,
                                    float* __restrict__ row, float* __restrict__ state) {
  if constexpr (kKind == OptimizerKind::kSgd) {
    for (int32_t j = 0; j < dim; ++j) SgdColumn(update, gradient[j], row + j);
  } else if constexpr (kKind == OptimizerKind::kAdagrad) {
    for (int32_t j = 0; j < dim; ++j) AdagradColumn(update, gradient[j], row + j, state + j);
  } else if constexpr (kKind == OptimizerKind::kRowWiseAdagrad) {
    const float root = RowWiseAdagradRoot(update, gradient, row, dim, state);
    for (int32_t j = 0; j < dim; ++j) RowWiseAdagradColumn(update, root, gradient[j], row + j);
  } else if constexpr (kKind == OptimizerKind::kAdam) {
    const float alpha = update.row_step ? AdamRowAlpha(update, state + 2 * dim) : update.alpha;
    float* __restrict__ v = state + dim;
    for (int32_t j = 0; j < dim; ++j) AdamColumn(update, alpha, gradient[j], row + j, state + j, v + j);
  } else {
    FtrlRow(update, gradient, dim, row, state, state + dim);
  }
}

/// One row, rule chosen at run time; see MakeRowUpdate for step and learning_rate.
HVD_CTR_HD inline void UpdateRow(const RowOptimizerOptions& options, int64_t step, float learning_rate, const float* gradient,
                                 int32_t dim, float* row, float* state) {
  const RowUpdate update = MakeRowUpdate(options, step, learning_rate);
  switch (options.kind) {
    case OptimizerKind::kSgd:
      return UpdateRowOf<OptimizerKind::kSgd>(update, gradient, dim, row, state);
    case OptimizerKind::kAdagrad:
      return UpdateRowOf<OptimizerKind::kAdagrad>(update, gradient, dim, row, state);
    case OptimizerKind::kRowWiseAdagrad:
      return UpdateRowOf<OptimizerKind::kRowWiseAdagrad>(update, gradient, dim, row, state);
    case OptimizerKind::kAdam:
      return UpdateRowOf<OptimizerKind::kAdam>(update, gradient, dim, row, state);
    case OptimizerKind::kFtrl:
      return UpdateRowOf<OptimizerKind::kFtrl>(update, gradient, dim, row, state);
  }
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ROW_MATH_H_
