// Expand and pool: unique rows (U, D) + virtual ids -> one vector per bag, and its gradient.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

/// Bags of inputs (virtual_ids, bag_splits): one per id when bag_splits is empty.
absl::Status BagCount(InferenceContext* c, ShapeHandle virtual_ids, ShapeHandle bag_splits, DimensionHandle* bags) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(c->WithRank(bag_splits, 1, &splits));
  if (!c->ValueKnown(c->Dim(splits, 0))) {
    *bags = c->UnknownDim();
    return absl::OkStatus();
  }
  if (c->Value(c->Dim(splits, 0)) == 0) {
    *bags = c->NumElements(virtual_ids);
    return absl::OkStatus();
  }
  return c->Subtract(c->Dim(splits, 0), 1, bags);
}

absl::Status PoolRowsShape(InferenceContext* c) {
  ShapeHandle rows, weights;
  DimensionHandle bags;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &weights));
  ShapeHandle beside;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 2, &beside));
  int64_t features = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("features", &features));
  if (features > 0) {
    DimensionHandle width;
    TF_RETURN_IF_ERROR(c->Multiply(c->Dim(rows, 1), features, &width));
    TF_RETURN_IF_ERROR(c->Add(width, c->Dim(beside, 1), &width));
    c->set_output(0, c->Matrix(c->Dim(beside, 0), width));
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(BagCount(c, c->input(1), c->input(2), &bags));
  c->set_output(0, c->Matrix(bags, c->Dim(rows, 1)));
  return absl::OkStatus();
}

absl::Status PoolRowsGradShape(InferenceContext* c) {
  ShapeHandle d_pooled, rows, weights;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &d_pooled));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &rows));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &weights));
  c->set_output(0, rows);
  c->set_output(1, weights);
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrPoolRows")
    .Input("rows: float")
    .Input("virtual_ids: int32")
    .Input("bag_splits: int64")
    .Input("weights: float")
    .Input("beside: float")
    .Output("pooled: float")
    .Attr("combiner: {'sum', 'mean', 'sqrtn'}")
    .Attr("features: int >= 0 = 0")
    .Attr("feature_major: bool = false")
    .SetShapeFn(PoolRowsShape)
    .Doc(R"doc(
Expands unique rows to the ids of a batch and pools them per bag.

rows: (U, D).
virtual_ids: any shape, N elements in [-1, U); -1 contributes nothing and does not count in a mean.
bag_splits: (bags+1), bag i is virtual_ids[bag_splits[i]:bag_splits[i+1]] of the flattened ids; (0): every id is a bag.
weights: (N), or (0): all 1. mean divides by the sum of weights, sqrtn by the root of the sum of their squares.
beside: (B, X), read where features > 0.
features: 0, or F: the bags of a sample stand in one row, behind those of `beside`.
feature_major: whether the bags come feature by feature, each with all samples; else sample by sample.
pooled: (bags, D), or (B, X + F * D) where features > 0; zeros where the divisor is 0.
)doc");

REGISTER_OP("HvdCtrPoolRowsGrad")
    .Input("d_pooled: float")
    .Input("rows: float")
    .Input("virtual_ids: int32")
    .Input("bag_splits: int64")
    .Input("weights: float")
    .Output("d_rows: float")
    .Output("d_weights: float")
    .Attr("combiner: {'sum', 'mean', 'sqrtn'}")
    .Attr("features: int >= 0 = 0")
    .Attr("feature_major: bool = false")
    .SetShapeFn(PoolRowsGradShape)
    .Doc(R"doc(
Gradient of HvdCtrPoolRows; sums run over the ids in ascending position.

d_pooled: shape of pooled; the columns of `beside` are not read.
d_rows: (U, D).
d_weights: shape of weights.
)doc");

}  // namespace
}  // namespace hvd_ctr
