// Ops on ids: the batch's ids -> virtual ids and the key message; hashes and initial rows for references and tests.
// Symbols (B F N U W R K D S M E) are defined in README.md.
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status PrepareBatchShape(InferenceContext* c) {
  bool row_major = false;
  std::vector<tensorflow::int32> feature_tables;
  int64_t world_size = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("row_major", &row_major));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_tables", &feature_tables));
  TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
  ShapeHandle ids = c->input(0);
  if (row_major) {
    TF_RETURN_IF_ERROR(c->Merge(ids, c->Matrix(c->UnknownDim(), feature_tables.size()), &ids));
  } else {
    ShapeHandle splits;
    TF_RETURN_IF_ERROR(c->WithRank(ids, 1, &ids));
    TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->Vector(feature_tables.size() + 1), &splits));
  }
  ShapeHandle scalar;
  for (int i = 2; i < 5; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
  c->set_output(0, ids);
  c->set_output(1, c->Vector(c->UnknownDim()));
  c->set_output(2, c->Vector(world_size));
  c->set_output(3, c->Vector(world_size));
  c->set_output(4, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status InitialRowsShape(InferenceContext* c) {
  int64_t dim = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  ShapeHandle ids;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));
  c->set_output(0, c->Matrix(c->Dim(ids, 0), dim));
  return absl::OkStatus();
}

// Stateful although it keeps nothing: TensorFlow folds a pure op over a constant batch and merges two over equal batches, and
// with it the key exchange behind it, which would leave the other ranks waiting.
REGISTER_OP("HvdCtrPrepareBatch")
    .Input("ids: int64")
    .Input("feature_splits: int64")
    .Input("batch_rows: int64")
    .Input("weight_sum: float64")
    .Input("error_text: string")
    .Output("virtual_ids: int32")
    .Output("send: int64")
    .Output("send_splits: int32")
    .Output("row_splits: int32")
    .Output("counts: int32")
    .Attr("row_major: bool")
    .Attr("feature_tables: list(int) >= 1")
    .Attr("table_rows: list(int) >= 1")
    .Attr("table_hash_ids: list(bool) >= 1")
    .Attr("table_counts_ids: list(bool) >= 1")
    .Attr("feature_has_padding: list(bool) >= 1")
    .Attr("feature_padding_ids: list(int) >= 1")
    .Attr("world_size: int >= 1")
    .SetIsStateful()
    .SetShapeFn(PrepareBatchShape)
    .Doc(R"doc(
Ids of one batch -> virtual ids and the key message to every rank.

De-duplicates ids per table, groups the unique keys by owner rank and packs them with the batch's header. Errors of this rank's
data do not fail here: they travel in the header, so that all ranks fail together.

ids: (B, F) if row_major, column f is feature f; else (N), feature f is ids[feature_splits[f]:feature_splits[f+1]].
feature_splits: (F+1), or (0) if row_major.
batch_rows: (), B; -1: this rank's data has ended (pass no ids).
weight_sum: (), sum of the sample weights; B when there are none.
error_text: (), not empty: this rank failed; no keys are sent, all ranks raise INTERNAL with this text.
virtual_ids: shape of ids; index into the rows (U, D) that come back in owner order; -1: dropped (padding, invalid, or error).
send: words of the key messages, by peer.
send_splits: (W), words per peer.
row_splits: (W), keys per owner, sum U: the number of rows each owner will answer with.
counts: (U), occurrences of each key, in owner order.
feature_tables: (F), index of each feature's table, non-decreasing.
table_rows: (T), ids must lie in [0, rows); -1: any id >= 0.
table_hash_ids: (T), true: ids are mapped to [0, rows) by hash first.
table_counts_ids: (T), true: the messages also tell the owner how often each key of the table occurs.
feature_has_padding: (F), true: ids equal to the feature's padding id are dropped.
feature_padding_ids: (F).
world_size: W.
)doc");

REGISTER_OP("HvdCtrHashToRange")
    .Input("ids: int64")
    .Output("hashed: int64")
    .Attr("rows: int >= 1")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Maps any 64-bit ids evenly to [0, rows), as a table with hash_ids does.

ids: any shape.
hashed: same shape.
)doc");

REGISTER_OP("HvdCtrInitialRows")
    .Input("ids: int64")
    .Output("rows: float")
    .Attr("table: string")
    .Attr("seed: int")
    .Attr("dim: int >= 1")
    .Attr("initializer: int")
    .Attr("scale: float")
    .SetShapeFn(InitialRowsShape)
    .Doc(R"doc(
First values of rows: a function of seed, table name, id and column only.

ids: (n).
rows: (n, D).
initializer: InitializerKind.
)doc");

}  // namespace
}  // namespace hvd_ctr
