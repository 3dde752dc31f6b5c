#include "tf_ops/glue/device_functions.h"

#include <algorithm>

#include "tf_ops/cpu/pool_rows.h"
#include "tf_ops/glue/device_memory.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

DeviceVectors OnDevice(const SampleVectors& vectors) {
  return DeviceVectors{vectors.data, vectors.samples, vectors.features, vectors.dim};
}

std::unique_ptr<DevicePool> MakePool(const tensorflow::OpKernelContext* ctx) {
  switch (RowCodeOf(ctx)) {
    case RowCode::kCudaOnCpu:
      return MakeCudaPoolOnCpu();
    case RowCode::kCuda:
#ifdef HVD_CTR_CUDA
      return MakeCudaPool(CudaDeviceOf(ctx));
#else
      break;
#endif
    case RowCode::kCpu:
      break;
  }
  return nullptr;
}

}  // namespace

DevicePool* DeviceFunctions::Pool(const Context* ctx) {
  std::call_once(once_, [&] { pool_ = MakePool(ctx); });
  return pool_.get();
}

Status DeviceFunctions::PoolRows(Context* ctx, const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out,
                                 const BagPlaces& places) {
  if (DevicePool* pool = Pool(ctx)) return pool->PoolRows(bags, rows, unique, dim, out, places, StreamOf(ctx));
  WorkerRunner runner(ctx);
  return hvd_ctr::PoolRows(bags, rows, unique, dim, out, places, &runner);
}

Status DeviceFunctions::PoolRowsGrad(Context* ctx, const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique,
                                     int32_t dim, float* d_rows) {
  if (DevicePool* pool = Pool(ctx)) return pool->PoolRowsGrad(bags, d_out, places, unique, dim, d_rows, StreamOf(ctx));
  WorkerRunner runner(ctx);
  return hvd_ctr::PoolRowsGrad(bags, d_out, places, unique, dim, d_rows, &runner);
}

Status DeviceFunctions::PoolRowsWeightGrad(Context* ctx, const Bags& bags, const float* rows, const float* d_out,
                                           const BagPlaces& places, int64_t unique, int32_t dim, float* d_weights) {
  if (DevicePool* pool = Pool(ctx)) {
    return pool->PoolRowsWeightGrad(bags, rows, d_out, places, unique, dim, d_weights, StreamOf(ctx));
  }
  WorkerRunner runner(ctx);
  return hvd_ctr::PoolRowsWeightGrad(bags, rows, d_out, places, unique, dim, d_weights, &runner);
}

Status DeviceFunctions::CopyBeside(Context* ctx, const BesideColumns& beside) {
  if (DevicePool* pool = Pool(ctx)) return pool->CopyBeside(beside, StreamOf(ctx));
  for (int64_t i = 0; beside.columns > 0 && i < beside.samples; ++i) {
    std::copy_n(beside.from + i * beside.columns, beside.columns, beside.to + i * beside.stride);
  }
  return Status::Ok();
}

Status DeviceFunctions::DotPairs(Context* ctx, const SampleVectors& vectors, float* out) {
  if (DevicePool* pool = Pool(ctx)) return pool->DotPairs(OnDevice(vectors), out, StreamOf(ctx));
  WorkerRunner runner(ctx);
  hvd_ctr::DotPairs(vectors, out, &runner);
  return Status::Ok();
}

Status DeviceFunctions::DotPairsGrad(Context* ctx, const SampleVectors& vectors, const float* d_out, float* d_vectors) {
  if (DevicePool* pool = Pool(ctx)) return pool->DotPairsGrad(OnDevice(vectors), d_out, d_vectors, StreamOf(ctx));
  WorkerRunner runner(ctx);
  hvd_ctr::DotPairsGrad(vectors, d_out, d_vectors, &runner);
  return Status::Ok();
}

Status DeviceFunctions::PairSum(Context* ctx, const SampleVectors& vectors, float* out) {
  if (DevicePool* pool = Pool(ctx)) return pool->PairSum(OnDevice(vectors), out, StreamOf(ctx));
  WorkerRunner runner(ctx);
  hvd_ctr::PairSum(vectors, out, &runner);
  return Status::Ok();
}

Status DeviceFunctions::PairSumGrad(Context* ctx, const SampleVectors& vectors, const float* d_out, float* d_vectors) {
  if (DevicePool* pool = Pool(ctx)) return pool->PairSumGrad(OnDevice(vectors), d_out, d_vectors, StreamOf(ctx));
  WorkerRunner runner(ctx);
  hvd_ctr::PairSumGrad(vectors, d_out, d_vectors, &runner);
  return Status::Ok();
}

}  // namespace hvd_ctr
