// DevicePool: expand and pool on a device, its gradients, and the feature interactions. The functions of cpu/pool_rows.h and
// cpu/interactions.h: the same bits, the same refusals.
//
//   std::unique_ptr<DevicePool> pool = MakeCudaPool();
//   HVD_CTR_RETURN_IF_ERROR(pool->PoolRows(bags, rows, unique, dim, out, dim, stream));
//
// Of the arguments, virtual ids and splits are in HOST memory: a plan makes them there, and they are checked there. Each call
// stages what it needs of them, 4 bytes per id and 8 per split, so they may be reused when it returns. Everything else - rows,
// weights, pooled vectors, all gradients - is in DEVICE memory, where models read and write it; the span `weights` is not read on
// the host. (The twin's device memory is host memory.)
//
// Work is ordered on `stream`; a call returns before it is done. Calls are safe from several threads and on several streams.
//
// The gradient by the rows sums each row's terms in ascending order of position, which the host finds by a counting sort: no
// atomics, and the bits do not depend on the device. At most 2^31 - 1 ids and bags.
#ifndef HVD_CTR_CUDA_DEVICE_POOL_H_
#define HVD_CTR_CUDA_DEVICE_POOL_H_

#include <cstdint>
#include <memory>

#include "tf_ops/core/bags.h"
#include "tf_ops/core/status.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// Columns that stand beside the pooled vectors of a sample, as in the input of a tower: row i of `from` (samples, columns) is
/// copied to `to` + i * stride.
struct BesideColumns {
  const float* from = nullptr;
  int64_t samples = 0;
  int64_t columns = 0;  ///< 0: nothing to copy; 0 .. stride otherwise.
  float* to = nullptr;
  int64_t stride = 0;
};

/// Vectors of a batch in device memory: (B, F, D), row-major.
struct DeviceVectors {
  const float* data = nullptr;
  int64_t samples = 0;   ///< B >= 0
  int64_t features = 0;  ///< F >= 1
  int64_t dim = 0;       ///< D >= 1
};

class DevicePool {
 public:
  virtual ~DevicePool() = default;

  /// out: bag i is written at out + places.at(i), dim floats. The places of two bags must not overlap.
  virtual Status PoolRows(const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out, const BagPlaces& places,
                          Stream stream) = 0;
  /// d_rows (U, D) = overwritten with the sum over positions in ascending order; d_out bag i at d_out + places.at(i).
  virtual Status PoolRowsGrad(const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim,
                              float* d_rows, Stream stream) = 0;
  /// d_weights (N): derivative of the loss by each per-id weight.
  virtual Status PoolRowsWeightGrad(const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places,
                                    int64_t unique, int32_t dim, float* d_weights, Stream stream) = 0;
  virtual Status CopyBeside(const BesideColumns& beside, Stream stream) = 0;

  /// out (B, F (F-1) / 2), pairs in the order (1,0), (2,0), (2,1), (3,0), ...
  virtual Status DotPairs(const DeviceVectors& vectors, float* out, Stream stream) = 0;
  /// d_vectors (B, F, D) from d_out (B, F (F-1) / 2).
  virtual Status DotPairsGrad(const DeviceVectors& vectors, const float* d_out, float* d_vectors, Stream stream) = 0;
  /// out (B).
  virtual Status PairSum(const DeviceVectors& vectors, float* out, Stream stream) = 0;
  /// d_vectors (B, F, D) from d_out (B).
  virtual Status PairSumGrad(const DeviceVectors& vectors, const float* d_out, float* d_vectors, Stream stream) = 0;
};

/// device: CUDA's number of it; kCurrentDevice: the one that is current to the thread at each call. Exists where the library was
/// built with CUDA.
std::unique_ptr<DevicePool> MakeCudaPool(int device = kCurrentDevice);

/// The same kernels in loops on this machine. Exists in every build.
std::unique_ptr<DevicePool> MakeCudaPoolOnCpu();

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_DEVICE_POOL_H_
