// FactorPlan: which features of a batch a dense layer multiplies once per distinct row, and which once per sample.
//
// The first dense layer of a tower computes X K for X (B, F * D), the expanded rows of a batch. Feature f adds to sample b the
// product of its row and of its D rows of the kernel, and the same row gives the same product: with few distinct rows that is
// one product per row, and a sum of products per sample (the rewriting of Chen et al., "Towards Linear Algebra over Normalized
// Data", PVLDB 10(11), 2017, section 3.3). Where most rows of a feature are met once or twice it saves nothing.
//
//   FactorPlan plan;                                      // kept from batch to batch: it holds on to its memory
//   HVD_CTR_RETURN_IF_ERROR(plan.Make(row_of_id, samples, features, unique, limits));
//   slots.resize(plan.factored().size() * samples);
//   plan.WriteSlots(slots);
//
// Invariant: a plan is a function of the ids and limits alone, never of the processor or of the batches before, so the numbers
// that follow from it are.
#ifndef HVD_CTR_CORE_FACTOR_PLAN_H_
#define HVD_CTR_CORE_FACTOR_PLAN_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

struct FactorLimits {
  double max_share = 0.35;       ///< Distinct rows of a factored feature per sample, at most; 0 .. 1.
  int64_t max_distinct = 32768;  ///< Distinct rows of all factored features: their products are to stay in caches.
};

class FactorPlan {
 public:
  /// Factors the features with at most max_share * samples distinct rows, those with the fewest first, until max_distinct.
  /// row_of_id: (samples, features), -1 for a dropped id, else in [0, unique); INVALID_ARGUMENT otherwise.
  Status Make(Span<const int32_t> row_of_id, int64_t samples, int64_t features, int64_t unique, const FactorLimits& limits);

  /// Features, ascending; together all of them.
  const std::vector<int32_t>& direct() const { return direct_; }
  const std::vector<int32_t>& factored() const { return factored_; }
  /// The distinct rows of factored feature i are distinct()[begins()[i]] .. distinct()[begins()[i + 1] - 1], in the order in
  /// which the samples have them first.
  const std::vector<int32_t>& distinct() const { return distinct_; }
  const std::vector<int32_t>& begins() const { return begins_; }

  /// (samples, factored): the position in distinct() of each id; distinct().size() for a dropped one.
  void WriteSlots(Span<int32_t> slots) const;
  /// (samples, direct): row_of_id without the columns of the factored features.
  void WriteDirectIds(Span<const int32_t> row_of_id, Span<int32_t> ids) const;

 private:
  void Transpose(Span<const int32_t> row_of_id);
  bool CountFeature(int64_t feature, int64_t limit);
  void Choose(int64_t max_distinct);

  int64_t samples_ = 0;
  int64_t features_ = 0;
  std::vector<int32_t> direct_, factored_, distinct_, begins_;
  int64_t stride_ = 0;
  // (F, stride): row_of_id by columns; of a candidate the numbers of its rows among the feature's own.
  std::vector<int32_t> places_;
  std::vector<int32_t> found_;   // Distinct rows of all candidates, one after the other.
  std::vector<int32_t> number_;  // By row: its number in the feature that is counted. All -1 between features.
  struct Candidate {
    int32_t feature;
    int64_t begin, end;  // In found_.
    int64_t rows() const { return end - begin; }
  };
  std::vector<Candidate> candidates_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_FACTOR_PLAN_H_
