// Kernels of the interactions of a sample's vectors, and of their gradients.
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/cpu/interactions.h"
#include "tf_ops/glue/device_functions.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

using Interaction = Status (DeviceFunctions::*)(OpKernelContext*, const SampleVectors&, float*);
using InteractionGrad = Status (DeviceFunctions::*)(OpKernelContext*, const SampleVectors&, const float*, float*);

/// Input 0 as (B, F, D); INVALID_ARGUMENT for another rank or no feature.
absl::Status ReadVectors(OpKernelContext* ctx, SampleVectors* vectors) {
  const Tensor& input = ctx->input(0);
  if (input.dims() != 3 || input.dim_size(1) < 1) {
    return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": vectors has shape ",
                                                       input.shape().DebugString(), "; expected (B, F, D) with F at least 1"));
  }
  *vectors = SampleVectors{ConstSpan<float>(input).data(), input.dim_size(0), input.dim_size(1), input.dim_size(2)};
  return absl::OkStatus();
}

int64_t OutputColumns(const SampleVectors& vectors, bool sum) { return sum ? 1 : vectors.pairs(); }

template <Interaction kInteraction, bool kSum>
class InteractionOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    SampleVectors vectors;
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, &vectors));
    Tensor* out = nullptr;
    const TensorShape shape({vectors.samples, OutputColumns(vectors, kSum)});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    OP_REQUIRES_OK(ctx, ToTensorFlow((functions_.*kInteraction)(ctx, vectors, MutableSpan<float>(out).data())));
  }

 private:
  DeviceFunctions functions_;
};

template <InteractionGrad kInteractionGrad, bool kSum>
class InteractionGradOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    SampleVectors vectors;
    OP_REQUIRES_OK(ctx, ReadVectors(ctx, &vectors));
    const Tensor& upstream = ctx->input(1);
    const TensorShape expected({vectors.samples, OutputColumns(vectors, kSum)});
    OP_REQUIRES(
        ctx, upstream.shape() == expected,
        absl::InvalidArgumentError(internal::StrCat(type_string(), ": the gradient has shape ", upstream.shape().DebugString(),
                                                    "; expected ", expected.DebugString())));
    Tensor* d_vectors = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &d_vectors));
    OP_REQUIRES_OK(ctx, ToTensorFlow((functions_.*kInteractionGrad)(ctx, vectors, ConstSpan<float>(upstream).data(),
                                                                    MutableSpan<float>(d_vectors).data())));
  }

 private:
  DeviceFunctions functions_;
};

using DotPairsOp = InteractionOp<&DeviceFunctions::DotPairs, false>;
using DotPairsGradOp = InteractionGradOp<&DeviceFunctions::DotPairsGrad, false>;
using PairSumOp = InteractionOp<&DeviceFunctions::PairSum, true>;
using PairSumGradOp = InteractionGradOp<&DeviceFunctions::PairSumGrad, true>;

HVD_CTR_REGISTER_KERNEL("HvdCtrDotPairs", DotPairsOp);
HVD_CTR_REGISTER_KERNEL("HvdCtrDotPairsGrad", DotPairsGradOp);
HVD_CTR_REGISTER_KERNEL("HvdCtrPairSum", PairSumOp);
HVD_CTR_REGISTER_KERNEL("HvdCtrPairSumGrad", PairSumGradOp);

}  // namespace
}  // namespace hvd_ctr
