// CacheOp: a kernel whose first input is the handle of a MixCache. It looks the cache up; the kernel has Run.
#ifndef HVD_CTR_GLUE_CACHE_OP_H_
#define HVD_CTR_GLUE_CACHE_OP_H_

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/glue/mix_cache_resource.h"

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

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_CACHE_OP_H_
