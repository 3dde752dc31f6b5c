#include "tf_ops/core/factor_plan.h"

#include <algorithm>

#include "tf_ops/core/backend_checks.h"

namespace hvd_ctr {
namespace {

/// Columns that are transposed together: the int32 of a cache line.
constexpr int64_t kBlock = 16;

}  // namespace

Status FactorPlan::Make(Span<const int32_t> row_of_id, int64_t samples, int64_t features, int64_t unique,
                        const FactorLimits& limits) {
  if (row_of_id.size() != samples * features || !(limits.max_share >= 0.0 && limits.max_share <= 1.0) ||
      limits.max_distinct < 0) {
    return MakeStatus(StatusCode::kInvalidArgument, "FactorPlan: ", row_of_id.size(), " ids for ", samples, " samples of ",
                      features, " features, max_share ", limits.max_share, " (allowed 0 .. 1), max_distinct ",
                      limits.max_distinct, " (allowed >= 0)");
  }
  const int64_t bad = FirstOutside(row_of_id, unique);
  if (bad >= 0) {
    return MakeStatus(StatusCode::kInvalidArgument, "FactorPlan: row ", row_of_id[bad], " of sample ", bad / features,
                      ", feature ", bad % features, ", is outside [0, ", unique, ") and is not -1 (dropped)");
  }
  if (static_cast<int64_t>(number_.size()) < unique) number_.resize(unique, -1);
  samples_ = samples;
  features_ = features;
  Transpose(row_of_id);
  candidates_.clear();
  found_.clear();
  // One row more than allowed is never counted, so a feature with many of them costs little.
  const auto limit = std::min(static_cast<int64_t>(limits.max_share * static_cast<double>(samples)), limits.max_distinct);
  for (int64_t f = 0; f < features; ++f) {
    const auto begin = static_cast<int64_t>(found_.size());
    const bool few = CountFeature(f, limit);
    for (auto row = found_.begin() + begin; row != found_.end(); ++row) number_[*row] = -1;
    if (few) {
      candidates_.push_back({static_cast<int32_t>(f), begin, static_cast<int64_t>(found_.size())});
    } else {
      found_.resize(begin);
    }
  }
  Choose(limits.max_distinct);
  return Status::Ok();
}

void FactorPlan::Transpose(Span<const int32_t> row_of_id) {
  // Columns a power of two apart would all fall into the same few places of a cache.
  stride_ = samples_ + kBlock + (samples_ / kBlock % 2 == 0 ? kBlock * 2 : kBlock);
  places_.resize(static_cast<size_t>(features_ * stride_));
  for (int64_t first = 0; first < features_; first += kBlock) {
    const int64_t end = std::min(features_, first + kBlock);
    for (int64_t b = 0; b < samples_; ++b) {
      for (int64_t f = first; f < end; ++f) places_[f * stride_ + b] = row_of_id[b * features_ + f];
    }
  }
}

/// Numbers the rows of one feature by their first samples, in place. False, half done, when there are more than `limit`.
bool FactorPlan::CountFeature(int64_t feature, int64_t limit) {
  int32_t* const places = places_.data() + feature * stride_;
  int32_t* const number = number_.data();
  int32_t rows = 0;
  for (int64_t b = 0; b < samples_; ++b) {
    const int32_t row = places[b];
    if (row < 0) continue;
    if (number[row] < 0) {
      if (rows == limit) return false;
      number[row] = rows++;
      found_.push_back(row);
    }
    places[b] = number[row];
  }
  return true;
}

void FactorPlan::Choose(int64_t max_distinct) {
  std::stable_sort(candidates_.begin(), candidates_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.rows() < b.rows(); });
  int64_t left = max_distinct;
  auto end = candidates_.begin();
  for (; end != candidates_.end() && end->rows() <= left; ++end) left -= end->rows();
  std::sort(candidates_.begin(), end, [](const Candidate& a, const Candidate& b) { return a.feature < b.feature; });
  candidates_.erase(end, candidates_.end());
  direct_.clear();
  factored_.clear();
  distinct_.clear();
  begins_.assign(1, 0);
  int32_t next = 0;
  for (const Candidate& candidate : candidates_) {
    for (; next < candidate.feature; ++next) direct_.push_back(next);
    ++next;
    factored_.push_back(candidate.feature);
    distinct_.insert(distinct_.end(), found_.begin() + candidate.begin, found_.begin() + candidate.end);
    begins_.push_back(static_cast<int32_t>(distinct_.size()));
  }
  for (; next < features_; ++next) direct_.push_back(next);
}

void FactorPlan::WriteSlots(Span<int32_t> slots) const {
  const auto dropped = static_cast<int32_t>(distinct_.size());
  const auto factored = static_cast<int64_t>(factored_.size());
  for (int64_t i = 0; i < factored; ++i) {
    const int32_t* const places = places_.data() + factored_[i] * stride_;
    const int32_t begin = begins_[i];
    int32_t* to = slots.data() + i;
    for (int64_t b = 0; b < samples_; ++b, to += factored) *to = places[b] < 0 ? dropped : begin + places[b];
  }
}

void FactorPlan::WriteDirectIds(Span<const int32_t> row_of_id, Span<int32_t> ids) const {
  int32_t* to = ids.data();
  for (int64_t b = 0; b < samples_; ++b) {
    for (const int32_t feature : direct_) *to++ = row_of_id[b * features_ + feature];
  }
}

}  // namespace hvd_ctr
