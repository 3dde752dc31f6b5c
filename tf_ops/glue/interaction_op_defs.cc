// Interactions of the vectors of a sample, and their gradients.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status DotPairsShape(InferenceContext* c) {
  ShapeHandle vectors;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &vectors));
  const DimensionHandle features = c->Dim(vectors, 1);
  const int64_t f = c->ValueKnown(features) ? c->Value(features) : -1;
  c->set_output(0, c->Matrix(c->Dim(vectors, 0), f < 0 ? c->UnknownDim() : c->MakeDim(f * (f - 1) / 2)));
  return absl::OkStatus();
}

absl::Status PairSumShape(InferenceContext* c) {
  ShapeHandle vectors;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &vectors));
  c->set_output(0, c->Matrix(c->Dim(vectors, 0), 1));
  return absl::OkStatus();
}

absl::Status GradShape(InferenceContext* c) {
  ShapeHandle vectors, upstream;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &vectors));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &upstream));
  c->set_output(0, vectors);
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrDotPairs").Input("vectors: float").Output("pairs: float").SetShapeFn(DotPairsShape).Doc(R"doc(
The scalar product of every pair of vectors of a sample.

vectors: (B, F, D).
pairs: (B, F (F - 1) / 2), in the order (1,0), (2,0), (2,1), (3,0), ...
)doc");

REGISTER_OP("HvdCtrDotPairsGrad")
    .Input("vectors: float")
    .Input("d_pairs: float")
    .Output("d_vectors: float")
    .SetShapeFn(GradShape)
    .Doc(R"doc(
Gradient of HvdCtrDotPairs.

vectors: (B, F, D).
d_pairs: (B, F (F - 1) / 2).
d_vectors: (B, F, D).
)doc");

REGISTER_OP("HvdCtrPairSum").Input("vectors: float").Output("sums: float").SetShapeFn(PairSumShape).Doc(R"doc(
The sum of the scalar products of all pairs of vectors of a sample (factorization machine), in O(F D).

vectors: (B, F, D).
sums: (B, 1).
)doc");

REGISTER_OP("HvdCtrPairSumGrad")
    .Input("vectors: float")
    .Input("d_sums: float")
    .Output("d_vectors: float")
    .SetShapeFn(GradShape)
    .Doc(R"doc(
Gradient of HvdCtrPairSum.

vectors: (B, F, D).
d_sums: (B, 1).
d_vectors: (B, F, D).
)doc");

}  // namespace
}  // namespace hvd_ctr
