#include "tf_ops/core/bags.h"

#include "tf_ops/core/backend_checks.h"

namespace hvd_ctr {

Status CheckBags(const char* call, const Bags& bags, int64_t unique, int32_t dim, const BagPlaces& places) {
  const int64_t n = bags.virtual_ids.size();
  if (dim < 1 || unique < 0 || places.inner < 1 || places.inner_stride < dim) {
    return MakeStatus(StatusCode::kInvalidArgument, call, ": dim ", dim, " (allowed >= 1), unique ", unique,
                      " (allowed >= 0), stride of the bags ", places.inner_stride, " floats (allowed >= dim)");
  }
  if (!bags.weights.empty() && bags.weights.size() != n) {
    return MakeStatus(StatusCode::kInvalidArgument, call, ": ", bags.weights.size(), " weights for ", n,
                      " ids; pass one weight per id, or none");
  }
  if (!bags.splits.empty()) {
    if (bags.splits[0] != 0 || bags.splits[bags.splits.size() - 1] != n) {
      return MakeStatus(StatusCode::kInvalidArgument, call, ": bag splits run from ", bags.splits[0], " to ",
                        bags.splits[bags.splits.size() - 1], ", they must run from 0 to the number of ids ", n);
    }
    for (int64_t i = 1; i < bags.splits.size(); ++i) {
      if (bags.splits[i] >= bags.splits[i - 1]) continue;
      return MakeStatus(StatusCode::kInvalidArgument, call, ": bag splits decrease from ", bags.splits[i - 1], " to ",
                        bags.splits[i], " at position ", i);
    }
  }
  const int64_t bad = FirstOutside(bags.virtual_ids, unique);
  if (bad < 0) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, call, ": virtual id ", bags.virtual_ids[bad], " at position ", bad,
                    " is outside [0, ", unique, ") and is not -1 (dropped)");
}

}  // namespace hvd_ctr
