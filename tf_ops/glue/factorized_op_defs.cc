// A tower's first dense layer on rows (U, D) and the row of each id (B, F): core/factor_plan.h says what is done once per row.
// hvd_ctr/ops/factorized_ops.py puts these ops together, with the products that are left to TensorFlow.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

/// WithRank of the inputs from `first` on.
absl::Status CheckRanks(InferenceContext* c, int first, std::initializer_list<int> ranks) {
  ShapeHandle checked;
  for (const int rank : ranks) TF_RETURN_IF_ERROR(c->WithRank(c->input(first++), rank, &checked));
  return absl::OkStatus();
}

absl::Status FactorPlanShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, 0, {2, 2}));
  const DimensionHandle samples = c->Dim(c->input(0), 0);
  for (int output = 0; output < 4; ++output) c->set_output(output, c->Vector(c->UnknownDim()));
  c->set_output(4, c->Matrix(samples, c->UnknownDim()));
  c->set_output(5, c->Matrix(samples, c->UnknownDim()));
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrFactorPlan")
    .Input("row_of_id: int32")
    .Input("rows: float")
    .Output("direct: int32")
    .Output("factored: int32")
    .Output("begins: int32")
    .Output("distinct: int32")
    .Output("slots: int32")
    .Output("direct_ids: int32")
    .Attr("max_share: float")
    .Attr("max_distinct: int >= 0")
    .SetShapeFn(FactorPlanShape)
    .Doc(R"doc(
Which features of a batch are multiplied once per distinct row.

row_of_id: (B, F), rows of the batch, -1 for a dropped id.
rows: (U, D); only U is used.
direct: (P), features that are multiplied sample by sample, ascending.
factored: (F - P), the others, ascending.
begins: (F - P + 1), where each factored feature's rows begin in `distinct`.
distinct: (T), rows of the batch, feature by feature.
slots: (B, F - P), positions in `distinct`; T for a dropped id.
direct_ids: (B, P), row_of_id without the factored features.
max_share: distinct rows per sample, at most, of a factored feature.
max_distinct: T at most.
)doc");

absl::Status FactorizedInputShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, 0, {2, 2, 2, 2, 1}));
  c->set_output(0, c->Matrix(c->Dim(c->input(2), 0), c->UnknownDim()));
  c->set_output(1, c->Matrix(c->UnknownDim(), c->Dim(c->input(3), 1)));
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrFactorizedInput")
    .Input("rows: float")
    .Input("direct_ids: int32")
    .Input("beside: float")
    .Input("kernel: float")
    .Input("direct: int32")
    .Output("inputs: float")
    .Output("direct_kernel: float")
    .Attr("features: int >= 1")
    .SetShapeFn(FactorizedInputShape)
    .Doc(R"doc(
Both sides of the matrix product that is left.

rows: (U, D).
direct_ids, direct: of HvdCtrFactorPlan.
beside: (B, X).
kernel: (X + F * D, H).
inputs: (B, X + P * D), the columns of `beside`, then the rows of the direct features.
direct_kernel: (X + P * D, H), the kernel without the rows of the factored features.
features: F.
)doc");

absl::Status FactorizedSumShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, 0, {2, 1, 2, 2, 1, 1, 1, 2}));
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrFactorizedSum")
    .Input("products: float")
    .Input("bias: float")
    .Input("rows: float")
    .Input("kernel: float")
    .Input("factored: int32")
    .Input("begins: int32")
    .Input("distinct: int32")
    .Input("slots: int32")
    .Output("outputs: float")
    .Attr("features: int >= 1")
    .Attr("relu: bool = false")
    .SetShapeFn(FactorizedSumShape)
    .Doc(R"doc(
Adds the products of the factored features' rows with the kernel, and the bias.

products: (B, H), inputs * direct_kernel of HvdCtrFactorizedInput.
bias: (H), or (0) for none.
rows: (U, D).
kernel: (X + F * D, H).
factored, begins, distinct, slots: of HvdCtrFactorPlan.
outputs: (B, H).
features: F.
relu: whether what is below zero becomes zero.
)doc");

absl::Status FactorizedGradShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, 0, {2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 2}));
  c->set_output(0, c->input(3));
  c->set_output(1, c->input(4));
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrFactorizedGrad")
    .Input("d_outputs: float")
    .Input("d_inputs: float")
    .Input("d_direct_kernel: float")
    .Input("rows: float")
    .Input("kernel: float")
    .Input("direct_ids: int32")
    .Input("direct: int32")
    .Input("factored: int32")
    .Input("begins: int32")
    .Input("distinct: int32")
    .Input("slots: int32")
    .Output("d_rows: float")
    .Output("d_kernel: float")
    .SetShapeFn(FactorizedGradShape)
    .Doc(R"doc(
Gradients of the layer by rows and kernel; sums run over the samples in ascending order.

d_outputs: (B, H), before bias and activation.
d_inputs: (B, X + P * D), by the inputs of HvdCtrFactorizedInput.
d_direct_kernel: (X + P * D, H).
rows: (U, D).
kernel: (X + F * D, H).
direct_ids, direct, factored, begins, distinct, slots: of HvdCtrFactorPlan.
d_rows: (U, D).
d_kernel: (X + F * D, H).
)doc");

}  // namespace
}  // namespace hvd_ctr
