// The arguments of DeviceBackend's calls, checked alike by every backend: what is wrong is INVALID_ARGUMENT with the first bad
// value and what is allowed, and calls before Allocate are FAILED_PRECONDITION. Messages begin with the backend's name.
//
//   BackendChecks checks_{"CpuBackend"};
//   HVD_CTR_RETURN_IF_ERROR(checks_.Slots("GatherRows", slots));
#ifndef HVD_CTR_CORE_BACKEND_CHECKS_H_
#define HVD_CTR_CORE_BACKEND_CHECKS_H_

#include <cstdint>

#include "tf_ops/core/options.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Position of the first value outside [-1, limit), or -1 if there is none. One vectorised pass when all is well.
int64_t FirstOutside(Span<const int32_t> values, int64_t limit);

class BackendChecks {
 public:
  /// backend: a literal.
  explicit BackendChecks(const char* backend) : backend_(backend) {}

  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats) const;
  /// From now on these are what the arguments are compared with.
  void Allocated(int64_t slots, int32_t dim, int32_t state_floats);

  Status CalledAfterAllocate(const char* call) const;
  Status Slots(const char* call, Span<const Slot> slots) const;
  /// Of StoreFirstRecords: as many keys as slots, of `tables` tables; dim and record_floats those of the backend.
  Status FirstRecords(Span<const Slot> slots, Span<const Key> keys, int64_t tables, int32_t dim, int64_t record_floats) const;
  Status Inverse(Span<const int32_t> inverse, int64_t unique) const;
  /// Of UpdateRows.
  Status Update(Span<const Slot> slots, Span<const int32_t> tables, Span<const RowOptimizerOptions> optimizers) const;

 private:
  const char* const backend_;
  bool allocated_ = false;
  int64_t slots_ = 0;
  int32_t dim_ = 0;
  int64_t record_floats_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_BACKEND_CHECKS_H_
