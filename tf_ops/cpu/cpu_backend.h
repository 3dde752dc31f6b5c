// CpuBackend: the device tier in RAM. One arena of S records, aligned and padded to cache lines, in huge pages when it is large.
//
//   std::unique_ptr<DeviceBackend> backend = MakeCpuBackend();
//   HVD_CTR_RETURN_IF_ERROR(backend->Allocate(slots, dim, state_floats, row_type));
#ifndef HVD_CTR_CPU_CPU_BACKEND_H_
#define HVD_CTR_CPU_CPU_BACKEND_H_

#include <cstdint>
#include <memory>

#include "tf_ops/core/device_backend.h"

namespace hvd_ctr {

/// Concurrent calls are safe while their slots are disjoint. StoreRecords and UpdateRows skip kNoSlot; FetchRecords and
/// GatherRows answer it with zeros. Fresh records are zeros. Memory is reserved by Allocate and committed by the system at first
/// touch.
std::unique_ptr<DeviceBackend> MakeCpuBackend();

/// Where the parts of a record lie, in bytes.
struct CpuRecordLayout {
  int64_t state_offset_bytes = 0;  ///< From a record to its state.
  int64_t stride_bytes = 0;        ///< From one record to the next.
};

/// Stride: whole cache lines when that wastes at most a quarter (D=16 with Adagrad is exactly two lines), else a multiple of 16
/// bytes, so that small records (row-wise Adagrad, D=1) stay small.
CpuRecordLayout LayOutCpuRecords(RowType row_type, int32_t dim, int64_t state_floats);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_CPU_BACKEND_H_
