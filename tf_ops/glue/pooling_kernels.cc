// Kernels of expand and pool, and of its gradient.
#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/cpu/pool_rows.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ReadCombiner(OpKernelConstruction* c, Combiner* combiner) {
  std::string name;
  TF_RETURN_IF_ERROR(c->GetAttr("combiner", &name));
  *combiner = name == "mean" ? Combiner::kMean : name == "sqrtn" ? Combiner::kSqrtN : Combiner::kSum;
  return absl::OkStatus();
}

/// Bags from inputs virtual_ids, bag_splits, weights at `first`, `first + 1`, `first + 2`.
absl::Status ReadBags(OpKernelContext* ctx, int first, Combiner combiner, Bags* bags) {
  TF_RETURN_IF_ERROR(CheckRank(ctx, first + 1, 1, "bag_splits"));
  TF_RETURN_IF_ERROR(CheckRank(ctx, first + 2, 1, "weights"));
  bags->virtual_ids = ConstSpan<int32_t>(ctx->input(first));
  bags->splits = ConstSpan<int64_t>(ctx->input(first + 1));
  bags->weights = ConstSpan<float>(ctx->input(first + 2));
  bags->combiner = combiner;
  if (bags->weights.empty() || bags->weights.size() == bags->virtual_ids.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": weights has ", bags->weights.size(),
                                                     " entries; expected ", bags->virtual_ids.size(),
                                                     ", one per virtual id, or none"));
}

class PoolRowsOp final : public OpKernel {
 public:
  explicit PoolRowsOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, ReadCombiner(c, &combiner_)); }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "rows"));
    Bags bags;
    OP_REQUIRES_OK(ctx, ReadBags(ctx, 1, combiner_, &bags));
    const Tensor& rows = ctx->input(0);
    const int64_t dim = rows.dim_size(1);
    Tensor* pooled = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({bags.bags(), dim}), &pooled));
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx, ToTensorFlow(PoolRows(bags, ConstSpan<float>(rows).data(), rows.dim_size(0), static_cast<int32_t>(dim),
                                              MutableSpan<float>(pooled).data(), dim, &runner)));
  }

 private:
  Combiner combiner_ = Combiner::kSum;
};

class PoolRowsGradOp final : public OpKernel {
 public:
  explicit PoolRowsGradOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, ReadCombiner(c, &combiner_)); }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "d_pooled"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 1, 2, "rows"));
    Bags bags;
    OP_REQUIRES_OK(ctx, ReadBags(ctx, 2, combiner_, &bags));
    const Tensor& d_pooled = ctx->input(0);
    const Tensor& rows = ctx->input(1);
    const int64_t unique = rows.dim_size(0);
    const int64_t dim = rows.dim_size(1);
    OP_REQUIRES(
        ctx, d_pooled.shape() == TensorShape({bags.bags(), dim}),
        absl::InvalidArgumentError(internal::StrCat("HvdCtrPoolRowsGrad: d_pooled has shape ", d_pooled.shape().DebugString(),
                                                    ", expected [", bags.bags(), ",", dim, "]")));
    Tensor* d_rows = nullptr;
    Tensor* d_weights = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, rows.shape(), &d_rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ctx->input(4).shape(), &d_weights));
    const float* d_out = ConstSpan<float>(d_pooled).data();
    const int32_t columns = static_cast<int32_t>(dim);
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx,
                   ToTensorFlow(PoolRowsGrad(bags, d_out, dim, unique, columns, MutableSpan<float>(d_rows).data(), &runner)));
    if (bags.weights.empty()) return;
    OP_REQUIRES_OK(ctx, ToTensorFlow(PoolRowsWeightGrad(bags, ConstSpan<float>(rows).data(), d_out, dim, unique, columns,
                                                        MutableSpan<float>(d_weights).data(), &runner)));
  }

 private:
  Combiner combiner_ = Combiner::kSum;
};

REGISTER_KERNEL_BUILDER(Name("HvdCtrPoolRows").Device(tensorflow::DEVICE_CPU), PoolRowsOp);
REGISTER_KERNEL_BUILDER(Name("HvdCtrPoolRowsGrad").Device(tensorflow::DEVICE_CPU), PoolRowsGradOp);

}  // namespace
}  // namespace hvd_ctr
