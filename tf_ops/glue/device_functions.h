// DeviceFunctions: pooling and interactions on the device of a kernel, by the code that belongs to it (RowCode). A kernel keeps
// one as a member and calls it with its context; tensors are where device_memory.h says.
//
//   OP_REQUIRES_OK(ctx, ToTensorFlow(functions_.PoolRows(ctx, bags, rows, unique, dim, out, places)));
#ifndef HVD_CTR_GLUE_DEVICE_FUNCTIONS_H_
#define HVD_CTR_GLUE_DEVICE_FUNCTIONS_H_

#include <memory>
#include <mutex>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/bags.h"
#include "tf_ops/core/status.h"
#include "tf_ops/cpu/interactions.h"
#include "tf_ops/cuda/device_pool.h"

namespace hvd_ctr {

/// See cpu/pool_rows.h, cpu/interactions.h and cuda/device_pool.h: the same functions with the same results. Calls are safe from
/// several threads.
class DeviceFunctions {
 public:
  using Context = tensorflow::OpKernelContext;

  Status PoolRows(Context* ctx, const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out,
                  const BagPlaces& places);
  Status PoolRowsGrad(Context* ctx, const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim,
                      float* d_rows);
  Status PoolRowsWeightGrad(Context* ctx, const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places,
                            int64_t unique, int32_t dim, float* d_weights);
  Status CopyBeside(Context* ctx, const BesideColumns& beside);

  Status DotPairs(Context* ctx, const SampleVectors& vectors, float* out);
  Status DotPairsGrad(Context* ctx, const SampleVectors& vectors, const float* d_out, float* d_vectors);
  Status PairSum(Context* ctx, const SampleVectors& vectors, float* out);
  Status PairSumGrad(Context* ctx, const SampleVectors& vectors, const float* d_out, float* d_vectors);

 private:
  /// Of a kernel on a GPU; nullptr: the CPU's own functions.
  DevicePool* Pool(const Context* ctx);

  std::once_flag once_;
  std::unique_ptr<DevicePool> pool_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_DEVICE_FUNCTIONS_H_
