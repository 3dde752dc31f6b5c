// Kernels of a tower's first dense layer on distinct rows. They run on the CPU; on a GPU the plain layer is faster, and the Keras
// layer takes that one.
#include <algorithm>
#include <mutex>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/bags.h"
#include "tf_ops/core/factor_plan.h"
#include "tf_ops/core/stage_clock.h"
#include "tf_ops/cpu/factorized_dense.h"
#include "tf_ops/cpu/pool_rows.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class FactorPlanOp final : public OpKernel {
 public:
  explicit FactorPlanOp(OpKernelConstruction* c) : OpKernel(c) {
    float max_share = 0.0f;
    OP_REQUIRES_OK(c, c->GetAttr("max_share", &max_share));
    OP_REQUIRES_OK(c, c->GetAttr("max_distinct", &limits_.max_distinct));
    limits_.max_share = max_share;
  }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPool);
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "row_of_id"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 1, 2, "rows"));
    const Tensor& input = ctx->input(0);
    const auto row_of_id = ConstSpan<int32_t>(input);
    const int64_t samples = input.dim_size(0);
    const std::lock_guard<std::mutex> lock(mutex_);
    OP_REQUIRES_OK(ctx, ToTensorFlow(plan_.Make(row_of_id, samples, input.dim_size(1), ctx->input(1).dim_size(0), limits_)));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, plan_.direct()));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 1, plan_.factored()));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 2, plan_.begins()));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 3, plan_.distinct()));
    Tensor* slots = nullptr;
    Tensor* direct_ids = nullptr;
    const auto direct = static_cast<int64_t>(plan_.direct().size());
    const auto factored = static_cast<int64_t>(plan_.factored().size());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({samples, factored}), &slots));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(5, TensorShape({samples, direct}), &direct_ids));
    plan_.WriteSlots(MutableSpan<int32_t>(slots));
    plan_.WriteDirectIds(row_of_id, MutableSpan<int32_t>(direct_ids));
  }

 private:
  FactorLimits limits_;
  std::mutex mutex_;
  FactorPlan plan_;  // Keeps its memory: fresh memory costs page faults.
};

/// The layer from the shapes of inputs `rows` and `kernel`.
absl::Status ReadShape(OpKernelContext* ctx, int rows_index, int kernel_index, int64_t features, FactorizedShape* shape) {
  TF_RETURN_IF_ERROR(CheckRank(ctx, rows_index, 2, "rows"));
  TF_RETURN_IF_ERROR(CheckRank(ctx, kernel_index, 2, "kernel"));
  const Tensor& rows = ctx->input(rows_index);
  const Tensor& kernel = ctx->input(kernel_index);
  shape->unique = rows.dim_size(0);
  shape->dim = rows.dim_size(1);
  shape->features = features;
  shape->units = kernel.dim_size(1);
  // Divided: a product of any number of features could overflow.
  if (shape->dim >= 1 && shape->units >= 1 && features <= kernel.dim_size(0) / shape->dim) {
    shape->beside = kernel.dim_size(0) - features * shape->dim;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(internal::StrCat(
      ctx->op_kernel().type_string(), ": kernel has shape ", kernel.shape().DebugString(),
      "; expected (X + F * D, H) with F = ", features, " features and D = ", shape->dim, ", D and H at least 1"));
}

/// INVALID_ARGUMENT unless input `index` has that shape.
absl::Status CheckShape(OpKernelContext* ctx, int index, const TensorShape& expected, const char* name) {
  if (ctx->input(index).shape() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": ", name, " has shape ",
                                                     ctx->input(index).shape().DebugString(), "; expected ",
                                                     expected.DebugString()));
}

/// The rows of the kernel that belong to the columns beside the features and to the direct features: fn(row, count, direct row)
/// for runs of them.
template <typename Fn>
absl::Status ForDirectRows(OpKernelContext* ctx, const FactorizedShape& shape, Span<const int32_t> direct, const Fn& fn) {
  fn(int64_t{0}, shape.beside, int64_t{0});
  int64_t to = shape.beside;
  for (const int32_t feature : direct) {
    if (feature < 0 || feature >= shape.features) {
      return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": direct feature ", feature,
                                                         " is outside [0, ", shape.features, ")"));
    }
    fn(shape.beside + feature * shape.dim, shape.dim, to);
    to += shape.dim;
  }
  return absl::OkStatus();
}

class FactorizedInputOp final : public OpKernel {
 public:
  explicit FactorizedInputOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("features", &features_)); }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPool);
    FactorizedShape shape;
    OP_REQUIRES_OK(ctx, ReadShape(ctx, 0, 3, features_, &shape));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 2, 2, "beside"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 4, 1, "direct"));
    const auto direct = ConstSpan<int32_t>(ctx->input(4));
    const int64_t samples = ctx->input(2).dim_size(0);
    OP_REQUIRES(
        ctx, ctx->input(1).dims() == 2 && ctx->input(1).dim_size(0) == samples,
        absl::InvalidArgumentError(internal::StrCat(type_string(), ": beside has ", samples, " samples, and the ids have shape ",
                                                    ctx->input(1).shape().DebugString(), "; give both the same batch")));
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 1, TensorShape({samples, direct.size()}), "direct_ids"));
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 2, TensorShape({samples, shape.beside}), "beside"));
    const int64_t columns = shape.beside + direct.size() * shape.dim;
    Tensor* inputs = nullptr;
    Tensor* direct_kernel = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({samples, columns}), &inputs));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({columns, shape.units}), &direct_kernel));
    const float* kernel = ConstSpan<float>(ctx->input(3)).data();
    float* const kernel_out = MutableSpan<float>(direct_kernel).data();
    OP_REQUIRES_OK(ctx, ForDirectRows(ctx, shape, direct, [&](int64_t row, int64_t count, int64_t to) {
                     std::copy_n(kernel + row * shape.units, count * shape.units, kernel_out + to * shape.units);
                   }));
    const float* beside = ConstSpan<float>(ctx->input(2)).data();
    float* const out = MutableSpan<float>(inputs).data();
    for (int64_t b = 0; b < samples; ++b) std::copy_n(beside + b * shape.beside, shape.beside, out + b * columns);
    if (direct.empty() || samples == 0) return;
    Bags bags;
    bags.virtual_ids = ConstSpan<int32_t>(ctx->input(1));
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(
        ctx, ToTensorFlow(PoolRows(bags, ConstSpan<float>(ctx->input(0)).data(), shape.unique, static_cast<int32_t>(shape.dim),
                                   out + shape.beside, BagPlaces(direct.size(), columns, shape.dim), &runner)));
  }

 private:
  int64_t features_ = 0;
};

/// The factored features of inputs factored, begins, distinct, slots from `first` on.
absl::Status ReadFactored(OpKernelContext* ctx, int first, const FactorizedShape& shape, int64_t samples, FactoredIds* ids) {
  ids->features = ConstSpan<int32_t>(ctx->input(first));
  ids->begins = ConstSpan<int32_t>(ctx->input(first + 1));
  ids->distinct = ConstSpan<int32_t>(ctx->input(first + 2));
  ids->slots = ConstSpan<int32_t>(ctx->input(first + 3));
  ids->samples = samples;
  TF_RETURN_IF_ERROR(CheckShape(ctx, first + 3, TensorShape({samples, ids->features.size()}), "slots"));
  return ToTensorFlow(CheckFactoredIds(ctx->op_kernel().type_string().c_str(), *ids, shape));
}

absl::Status AllocateScratch(OpKernelContext* ctx, int64_t floats, Tensor* scratch) {
  tensorflow::AllocatorAttributes on_host;  // Also where TensorFlow has placed the op on a GPU.
  on_host.set_on_host(true);
  return ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({floats}), scratch, on_host);
}

class FactorizedSumOp final : public OpKernel {
 public:
  explicit FactorizedSumOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("features", &features_));
    OP_REQUIRES_OK(c, c->GetAttr("relu", &relu_));
  }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPool);
    FactorizedShape shape;
    OP_REQUIRES_OK(ctx, ReadShape(ctx, 2, 3, features_, &shape));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "products"));
    const int64_t samples = ctx->input(0).dim_size(0);
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 0, TensorShape({samples, shape.units}), "products"));
    const auto bias = ConstSpan<float>(ctx->input(1));
    if (!bias.empty()) OP_REQUIRES_OK(ctx, CheckShape(ctx, 1, TensorShape({shape.units}), "bias"));
    FactoredIds ids;
    OP_REQUIRES_OK(ctx, ReadFactored(ctx, 4, shape, samples, &ids));
    Tensor* outputs = nullptr;
    Tensor scratch;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, ctx->input(0).shape(), &outputs));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, FactorizedSumScratch(ids, shape), &scratch));
    WorkerRunner runner(ctx);
    FactorizedSum(ids, shape, ConstSpan<float>(ctx->input(2)).data(), ConstSpan<float>(ctx->input(3)).data(),
                  bias.empty() ? nullptr : bias.data(), relu_, ConstSpan<float>(ctx->input(0)).data(),
                  MutableSpan<float>(outputs).data(), MutableSpan<float>(&scratch).data(), &runner);
  }

 private:
  int64_t features_ = 0;
  bool relu_ = false;
};

class FactorizedGradOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPoolGradient);
    const auto direct = ConstSpan<int32_t>(ctx->input(6));
    FactorizedShape shape;
    OP_REQUIRES_OK(ctx, ReadShape(ctx, 3, 4, direct.size() + ctx->input(7).NumElements(), &shape));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "d_outputs"));
    const int64_t samples = ctx->input(0).dim_size(0);
    const int64_t columns = shape.beside + direct.size() * shape.dim;
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 0, TensorShape({samples, shape.units}), "d_outputs"));
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 1, TensorShape({samples, columns}), "d_inputs"));
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 2, TensorShape({columns, shape.units}), "d_direct_kernel"));
    OP_REQUIRES_OK(ctx, CheckShape(ctx, 5, TensorShape({samples, direct.size()}), "direct_ids"));
    FactoredIds ids;
    OP_REQUIRES_OK(ctx, ReadFactored(ctx, 7, shape, samples, &ids));
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckFeatures(type_string().c_str(), direct, ids.features, shape.features)));
    Tensor* d_rows = nullptr;
    Tensor* d_kernel = nullptr;
    Tensor scratch;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(3).shape(), &d_rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ctx->input(4).shape(), &d_kernel));
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, FactorizedGradScratch(ids, shape), &scratch));
    float* const d_kernel_out = MutableSpan<float>(d_kernel).data();
    const float* d_direct_kernel = ConstSpan<float>(ctx->input(2)).data();
    OP_REQUIRES_OK(ctx, ForDirectRows(ctx, shape, direct, [&](int64_t row, int64_t count, int64_t from) {
                     std::copy_n(d_direct_kernel + from * shape.units, count * shape.units, d_kernel_out + row * shape.units);
                   }));
    OP_REQUIRES_OK(ctx, DirectRows(ctx, shape, samples, columns, direct.size(), d_rows));
    WorkerRunner runner(ctx);
    FactorizedGrad(ids, shape, ConstSpan<float>(ctx->input(3)).data(), ConstSpan<float>(ctx->input(4)).data(),
                   ConstSpan<float>(ctx->input(0)).data(), MutableSpan<float>(d_rows).data(), d_kernel_out,
                   MutableSpan<float>(&scratch).data(), &runner);
  }

 private:
  /// Overwrites d_rows with what comes from the direct features.
  static absl::Status DirectRows(OpKernelContext* ctx, const FactorizedShape& shape, int64_t samples, int64_t columns,
                                 int64_t direct, Tensor* d_rows) {
    const auto out = MutableSpan<float>(d_rows);
    if (direct == 0 || samples == 0) {
      std::fill(out.begin(), out.end(), 0.0f);
      return absl::OkStatus();
    }
    Bags bags;
    bags.virtual_ids = ConstSpan<int32_t>(ctx->input(5));
    WorkerRunner runner(ctx);
    return ToTensorFlow(PoolRowsGrad(bags, ConstSpan<float>(ctx->input(1)).data() + shape.beside,
                                     BagPlaces(direct, columns, shape.dim), shape.unique, static_cast<int32_t>(shape.dim),
                                     out.data(), &runner));
  }
};

HVD_CTR_REGISTER_KERNEL("HvdCtrFactorPlan", FactorPlanOp, "row_of_id", "rows", "direct", "factored", "begins", "distinct",
                        "slots", "direct_ids");
HVD_CTR_REGISTER_KERNEL("HvdCtrFactorizedInput", FactorizedInputOp, "rows", "direct_ids", "beside", "kernel", "direct", "inputs",
                        "direct_kernel");
HVD_CTR_REGISTER_KERNEL("HvdCtrFactorizedSum", FactorizedSumOp, "products", "bias", "rows", "kernel", "factored", "begins",
                        "distinct", "slots", "outputs");
HVD_CTR_REGISTER_KERNEL("HvdCtrFactorizedGrad", FactorizedGradOp, "d_outputs", "d_inputs", "d_direct_kernel", "rows", "kernel",
                        "direct_ids", "direct", "factored", "begins", "distinct", "slots", "d_rows", "d_kernel");

}  // namespace
}  // namespace hvd_ctr
