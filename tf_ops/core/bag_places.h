// BagPlaces: where the bags of a batch stand in a matrix of floats, so that vectors are pooled straight into the input of a tower
// and their gradients are read from there, without a copy in between.
//
//   BagPlaces(dim)                                       // bag i is row i of a (bags, dim) matrix
//   BagPlaces(features, row_floats, dim)                 // sample by sample: bag i is sample i / features, feature i % features
//   BagPlaces(batch, dim, row_floats)                    // feature by feature: bag i is feature i / batch, sample i % batch
#ifndef HVD_CTR_CORE_BAG_PLACES_H_
#define HVD_CTR_CORE_BAG_PLACES_H_

#include <cstdint>
#include <limits>

#include "tf_ops/core/hash.h"

namespace hvd_ctr {

/// Bag i begins at float (i / inner) * outer_stride + (i % inner) * inner_stride.
struct BagPlaces {
  // Implicit: a stride alone is the usual case.
  BagPlaces(int64_t stride) : inner_stride(stride) {}  // NOLINT(runtime/explicit)
  BagPlaces(int64_t inner_count, int64_t outer, int64_t inner_step)
      : inner(inner_count), outer_stride(outer), inner_stride(inner_step) {}

  HVD_CTR_HD int64_t at(int64_t i) const {
    if (i < inner) return i * inner_stride;
    // Bags are counted in int32; the narrow division is several times faster.
    const auto outer = static_cast<uint32_t>(i) / static_cast<uint32_t>(inner);
    return outer * outer_stride + (i - outer * inner) * inner_stride;
  }

  int64_t inner = std::numeric_limits<int64_t>::max();  ///< >= 1.
  int64_t outer_stride = 0;
  int64_t inner_stride;
};

/// at(i) for ascending i, without the division.
class BagWalk {
 public:
  BagWalk(const BagPlaces& places, int64_t first) : places_(places), offset_(places.at(first)) {
    left_ = first < places.inner ? places.inner - first : places.inner - first % places.inner;
  }
  int64_t offset() const { return offset_; }
  void Next() {
    offset_ += places_.inner_stride;
    if (--left_ > 0) return;
    left_ = places_.inner;
    offset_ += places_.outer_stride - places_.inner * places_.inner_stride;
  }

 private:
  const BagPlaces places_;
  int64_t offset_;
  int64_t left_;  // Bags until the outer index advances.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_BAG_PLACES_H_
