// Collectives between the ranks of one host over shared memory (core/shared_group.h). They are not stateful, so that those of one
// step overlap: their inputs must not be constants, or TensorFlow would run them once only.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status AnyRows(InferenceContext* c) {
  ShapeHandle rows, out;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &rows));
  TF_RETURN_IF_ERROR(c->ReplaceDim(rows, 0, c->UnknownDim(), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrSharedGroupCreate")
    .Output("address: int64")
    .Attr("rank: int >= 0")
    .Attr("size: int >= 1")
    .Attr("warn_seconds: float")
    .Attr("fail_seconds: float")
    .Attr("spin_seconds: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes this process' part of the shared memory; once per process.

warn_seconds, fail_seconds: how long a rank waits in a collective before it says so, and before it fails.
spin_seconds: how long it looks for the others without sleeping.
address: (3), what the other ranks need to find it.
)doc");

REGISTER_OP("HvdCtrSharedGroupConnect")
    .Input("addresses: int64")
    .Output("error: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle addresses;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &addresses));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Finds the memory of the other ranks.

addresses: (W, 3), in the order of the ranks.
error: empty, or why one of them cannot be reached.
)doc");

REGISTER_OP("HvdCtrSharedAlltoall")
    .Input("rows: T")
    .Input("splits: int32")
    .Output("received: T")
    .Output("received_splits: int32")
    .Attr("channel: string")
    .Attr("T: type")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(AnyRows(c));
      ShapeHandle splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
      c->set_output(1, splits);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends splits[p] consecutive rows to every rank p.

rows: (n, ...), sum of splits n.
splits: (W).
received: rows from all ranks, in their order.
received_splits: (W), how many came from each.
channel: names the collective on all ranks.
)doc");

REGISTER_OP("HvdCtrSharedAllgather")
    .Input("rows: T")
    .Output("everything: T")
    .Attr("channel: string")
    .Attr("T: type")
    .SetShapeFn(AnyRows)
    .Doc(R"doc(
Concatenates the rows (n, ...) of all ranks, in their order; n may differ.
)doc");

REGISTER_OP("HvdCtrSharedAllreduce")
    .Input("values: N * T")
    .Output("sums: N * T")
    .Attr("channel: string")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums tensors over the ranks, in the order of the ranks: the same bits on each.
)doc");

}  // namespace
}  // namespace hvd_ctr
