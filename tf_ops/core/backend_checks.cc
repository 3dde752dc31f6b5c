#include "tf_ops/core/backend_checks.h"

#include <algorithm>
#include <limits>

#include "tf_ops/core/row_math.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

/// The greatest of value + 1, where -1 wraps to 0; unsigned, so what is below -1 is great.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY uint32_t HighestBody(const int32_t* values, int64_t n) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < n; ++i) highest = std::max(highest, static_cast<uint32_t>(values[i]) + 1u);
  return highest;
}

HVD_CTR_SIMD_KERNEL(uint32_t, Highest, (const int32_t* values, int64_t n), (values, n))

}  // namespace

int64_t FirstOutside(Span<const int32_t> values, int64_t limit) {
  const uint32_t bound = static_cast<uint32_t>(std::clamp<int64_t>(limit, 0, INT32_MAX));
  if (Highest(values.data(), values.size()) <= bound) return -1;
  for (int64_t i = 0; i < values.size(); ++i) {
    if (static_cast<uint32_t>(values[i]) + 1u > bound) return i;
  }
  return -1;
}

Status BackendChecks::Allocate(int64_t slots, int32_t dim, int32_t state_floats) const {
  if (allocated_) return MakeStatus(StatusCode::kFailedPrecondition, backend_, "::Allocate was called twice");
  if (slots < 0 || slots > std::numeric_limits<Slot>::max() || dim < 1 || state_floats < 0 ||
      int64_t{dim} + state_floats > std::numeric_limits<int32_t>::max()) {
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::Allocate: slots ", slots, " (allowed 0 .. 2^31-1), dim ", dim,
                      " (allowed >= 1), state_floats ", state_floats, " (allowed >= 0; dim + state_floats < 2^31)");
  }
  return Status::Ok();
}

void BackendChecks::Allocated(int64_t slots, int32_t dim, int32_t state_floats) {
  allocated_ = true;
  slots_ = slots;
  dim_ = dim;
  record_floats_ = int64_t{dim} + state_floats;
}

Status BackendChecks::CalledAfterAllocate(const char* call) const {
  if (allocated_) return Status::Ok();
  return MakeStatus(StatusCode::kFailedPrecondition, backend_, "::", call, " was called before Allocate");
}

Status BackendChecks::Slots(const char* call, Span<const Slot> slots) const {
  HVD_CTR_RETURN_IF_ERROR(CalledAfterAllocate(call));
  const int64_t bad = FirstOutside(slots, slots_);
  if (bad < 0) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, backend_, "::", call, ": slots[", bad, "] = ", slots[bad], " is outside [0, ",
                    slots_, ") and is not kNoSlot (-1)");
}

Status BackendChecks::FirstRecords(Span<const Slot> slots, Span<const Key> keys, int64_t tables, int32_t dim,
                                   int64_t record_floats) const {
  HVD_CTR_RETURN_IF_ERROR(Slots("StoreFirstRecords", slots));
  if (slots.size() != keys.size() || dim != dim_ || record_floats != record_floats_) {
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::StoreFirstRecords: ", slots.size(), " slots, ", keys.size(),
                      " keys, dim ", dim, ", records of ", record_floats, " floats; needed are as many keys as slots, dim ", dim_,
                      " and records of ", record_floats_);
  }
  for (int64_t i = 0; i < keys.size(); ++i) {
    if (keys[i].table >= 0 && keys[i].table < tables) continue;
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::StoreFirstRecords: keys[", i, "] is of table ", keys[i].table,
                      ", which is outside [0, ", tables, ")");
  }
  return Status::Ok();
}

Status BackendChecks::Inverse(Span<const int32_t> inverse, int64_t unique) const {
  HVD_CTR_RETURN_IF_ERROR(CalledAfterAllocate("SegmentSum"));
  if (unique < 0) {
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::SegmentSum: unique is ", unique, ", allowed >= 0");
  }
  const int64_t bad = FirstOutside(inverse, unique);
  if (bad < 0) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, backend_, "::SegmentSum: inverse[", bad, "] = ", inverse[bad],
                    " is outside [-1, ", unique, ")");
}

Status BackendChecks::Update(Span<const Slot> slots, Span<const int32_t> tables,
                             Span<const RowOptimizerOptions> optimizers) const {
  HVD_CTR_RETURN_IF_ERROR(Slots("UpdateRows", slots));
  if (slots.size() != tables.size()) {
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::UpdateRows: ", slots.size(), " slots but ", tables.size(),
                      " tables");
  }
  for (int64_t k = 0; k < tables.size(); ++k) {
    if (tables[k] >= 0 && tables[k] < optimizers.size()) continue;
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::UpdateRows: tables[", k, "] = ", tables[k], " is outside [0, ",
                      optimizers.size(), ")");
  }
  for (int64_t t = 0; t < optimizers.size(); ++t) {
    const int32_t needed = StateFloats(optimizers[t], dim_);
    if (int64_t{dim_} + needed <= record_floats_) continue;
    return MakeStatus(StatusCode::kInvalidArgument, backend_, "::UpdateRows: the optimizer of table ", t, " needs ", needed,
                      " state floats per row, but records were allocated with ", record_floats_ - dim_);
  }
  return Status::Ok();
}

}  // namespace hvd_ctr
