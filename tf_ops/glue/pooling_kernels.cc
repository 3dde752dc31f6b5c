// Kernels of expand and pool, and of its gradient.
#include <algorithm>
#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/bags.h"
#include "tf_ops/core/stage_clock.h"
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

/// The attributes of both ops, and where the bags of a batch stand in the pooled tensor.
struct Layout {
  Combiner combiner = Combiner::kSum;
  int64_t features = 0;
  bool feature_major = false;

  absl::Status Read(OpKernelConstruction* c) {
    TF_RETURN_IF_ERROR(ReadCombiner(c, &combiner));
    TF_RETURN_IF_ERROR(c->GetAttr("features", &features));
    return c->GetAttr("feature_major", &feature_major);
  }
  /// Of bags of width dim, behind the first columns of rows of row_floats floats.
  BagPlaces places(int64_t samples, int64_t row_floats, int64_t dim) const {
    if (features == 0 || samples == 0) return dim;
    return feature_major ? BagPlaces(samples, dim, row_floats) : BagPlaces(features, row_floats, dim);
  }
};

class PoolRowsOp final : public OpKernel {
 public:
  explicit PoolRowsOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, layout_.Read(c)); }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPool);
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "rows"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 4, 2, "beside"));
    Bags bags;
    OP_REQUIRES_OK(ctx, ReadBags(ctx, 1, layout_.combiner, &bags));
    const Tensor& rows = ctx->input(0);
    const Tensor& beside = ctx->input(4);
    const int64_t dim = rows.dim_size(1);
    const bool alone = layout_.features == 0;
    const int64_t samples = alone ? bags.bags() : beside.dim_size(0);
    const int64_t columns = alone ? 0 : beside.dim_size(1);
    const int64_t row_floats = alone ? dim : columns + layout_.features * dim;
    OP_REQUIRES(ctx, alone || bags.bags() == samples * layout_.features,
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPoolRows: beside has ", samples, " rows and there are ",
                                                            layout_.features, " features, so ", samples * layout_.features,
                                                            " bags are expected; received ", bags.bags())));
    Tensor* pooled = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({samples, row_floats}), &pooled));
    float* out = MutableSpan<float>(pooled).data();
    const BesideColumns copied{ConstSpan<float>(beside).data(), samples, columns, out, row_floats};
    OP_REQUIRES_OK(ctx, ToTensorFlow(functions_.CopyBeside(ctx, copied)));
    OP_REQUIRES_OK(ctx, ToTensorFlow(functions_.PoolRows(ctx, bags, ConstSpan<float>(rows).data(), rows.dim_size(0),
                                                         static_cast<int32_t>(dim), out + columns,
                                                         layout_.places(samples, row_floats, dim))));
  }

 private:
  Layout layout_;
  DeviceFunctions functions_;
};

class PoolRowsGradOp final : public OpKernel {
 public:
  explicit PoolRowsGradOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, layout_.Read(c)); }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPoolGradient);
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "d_pooled"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 1, 2, "rows"));
    Bags bags;
    OP_REQUIRES_OK(ctx, ReadBags(ctx, 2, layout_.combiner, &bags));
    const Tensor& d_pooled = ctx->input(0);
    const Tensor& rows = ctx->input(1);
    const int64_t unique = rows.dim_size(0);
    const int64_t dim = rows.dim_size(1);
    const int64_t per_sample = std::max<int64_t>(1, layout_.features);
    const int64_t samples = d_pooled.dim_size(0);
    const int64_t row_floats = d_pooled.dim_size(1);
    const bool fits = layout_.features == 0 ? row_floats == dim : row_floats >= per_sample * dim;
    OP_REQUIRES(ctx, fits && samples * per_sample == bags.bags(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPoolRowsGrad: d_pooled has shape ",
                                                            d_pooled.shape().DebugString(), ", expected ", bags.bags(),
                                                            " bags of ", dim, " floats, ", per_sample, " to a row")));
    Tensor* d_rows = nullptr;
    Tensor* d_weights = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, rows.shape(), &d_rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ctx->input(4).shape(), &d_weights));
    const float* d_out = ConstSpan<float>(d_pooled).data() + row_floats - per_sample * dim;
    const BagPlaces places = layout_.places(samples, row_floats, dim);
    const int32_t columns = static_cast<int32_t>(dim);
    OP_REQUIRES_OK(
        ctx, ToTensorFlow(functions_.PoolRowsGrad(ctx, bags, d_out, places, unique, columns, MutableSpan<float>(d_rows).data())));
    if (bags.weights.empty()) return;
    OP_REQUIRES_OK(ctx, ToTensorFlow(functions_.PoolRowsWeightGrad(ctx, bags, ConstSpan<float>(rows).data(), d_out, places,
                                                                   unique, columns, MutableSpan<float>(d_weights).data())));
  }

 private:
  Layout layout_;
  DeviceFunctions functions_;
};

HVD_CTR_REGISTER_KERNEL("HvdCtrPoolRows", PoolRowsOp, "virtual_ids", "bag_splits");
HVD_CTR_REGISTER_KERNEL("HvdCtrPoolRowsGrad", PoolRowsGradOp, "virtual_ids", "bag_splits");

}  // namespace
}  // namespace hvd_ctr
