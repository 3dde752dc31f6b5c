// The factored part of a tower's first dense layer (core/factor_plan.h): one product per distinct row, a sum of products per
// sample, and the gradients of both. The direct part is a matrix product of the framework.
//
//   out[b] = direct[b] + sum over factored features f of rows[row_of_id[b, f]] K_f + bias,      K_f (D, H): f's rows of the
//   kernel
//
// Sums run over the features, or over the samples, in ascending order, whatever the number of threads and the SIMD level.
#ifndef HVD_CTR_CPU_FACTORIZED_DENSE_H_
#define HVD_CTR_CPU_FACTORIZED_DENSE_H_

#include <cstdint>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// What a FactorPlan says of a batch. Trusted once CheckFactoredIds says so.
struct FactoredIds {
  Span<const int32_t> features;  ///< Factored ones, ascending.
  Span<const int32_t> begins;    ///< (features + 1), in `distinct`.
  Span<const int32_t> distinct;  ///< Row numbers.
  Span<const int32_t> slots;     ///< (samples, features), positions in `distinct`; its size for a dropped id.
  int64_t samples = 0;
};

/// The layer. Its kernel is (beside + F * dim, units): first the rows of the columns beside the features, then D per feature.
struct FactorizedShape {
  int64_t beside = 0;
  int64_t features = 0;
  int64_t dim = 1;
  int64_t units = 1;
  int64_t unique = 0;  ///< Rows of the batch.
};

/// INVALID_ARGUMENT that begins with `call`, or OK.
Status CheckFactoredIds(const char* call, const FactoredIds& ids, const FactorizedShape& shape);
/// The same unless both ascend and each of [0, features) is in one of them: else part of d_kernel would not be written, or twice.
Status CheckFeatures(const char* call, Span<const int32_t> direct, Span<const int32_t> factored, int64_t features);

/// out = direct + products + bias (units, or null); with `relu` zero where that is below zero. out may be direct.
/// scratch: FactorizedSumScratch floats.
void FactorizedSum(const FactoredIds& ids, const FactorizedShape& shape, const float* rows, const float* kernel,
                   const float* bias, bool relu, const float* direct, float* out, float* scratch, TaskRunner* runner);
int64_t FactorizedSumScratch(const FactoredIds& ids, const FactorizedShape& shape);

/// Adds to d_rows (unique, dim), and overwrites the rows of d_kernel that belong to factored features. d_out (samples, units).
/// scratch: FactorizedGradScratch floats.
void FactorizedGrad(const FactoredIds& ids, const FactorizedShape& shape, const float* rows, const float* kernel,
                    const float* d_out, float* d_rows, float* d_kernel, float* scratch, TaskRunner* runner);
int64_t FactorizedGradScratch(const FactoredIds& ids, const FactorizedShape& shape);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_FACTORIZED_DENSE_H_
