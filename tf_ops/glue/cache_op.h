// CacheOp: a kernel whose first input is the handle of a MixCache. It looks the cache up; the kernel has Run. CacheRowsOp: one
// that carries rows or their gradients, which must be where the cached rows are; the kernel has RunWithRows.
#ifndef HVD_CTR_GLUE_CACHE_OP_H_
#define HVD_CTR_GLUE_CACHE_OP_H_

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/glue/device_memory.h"
#include "tf_ops/glue/mix_cache_resource.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {

class CacheOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final {
    tensorflow::core::RefCountPtr<MixCacheResource> resource;
    OP_REQUIRES_OK(ctx, LookupMixCache(ctx, &resource));
    Run(ctx, resource.get());
  }

 protected:
  /// The resource lives as long as the call.
  virtual void Run(tensorflow::OpKernelContext* ctx, MixCacheResource* resource) = 0;
};

class CacheRowsOp : public CacheOp {
 public:
  using CacheOp::CacheOp;

 protected:
  void Run(tensorflow::OpKernelContext* ctx, MixCacheResource* resource) final {
    const Status placed = CheckRowsPlace(ctx, resource->place(), resource->options().name);
    OP_REQUIRES_OK(ctx, ToTensorFlow(placed));
    RunWithRows(ctx, resource);
  }
  virtual void RunWithRows(tensorflow::OpKernelContext* ctx, MixCacheResource* resource) = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_CACHE_OP_H_
