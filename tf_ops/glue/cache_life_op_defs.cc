// Ops on the rows' coming and going (tf_ops/core/row_life.h): sweeps, and what a checkpoint keeps of ids.
#include <initializer_list>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status Scalars(InferenceContext* c, std::initializer_list<int> inputs) {
  ShapeHandle scalar;
  for (const int input : inputs) TF_RETURN_IF_ERROR(c->WithRank(c->input(input), 0, &scalar));
  return absl::OkStatus();
}

absl::Status ExportWaitingShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(Scalars(c, {0, 1, 2, 3}));
  const auto n = c->UnknownDim();
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(n));
  c->set_output(3, c->Scalar());
  return absl::OkStatus();
}

absl::Status ImportLifeShape(InferenceContext* c) {
  ShapeHandle ids;
  TF_RETURN_IF_ERROR(Scalars(c, {0, 1}));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &ids));
  TF_RETURN_IF_ERROR(c->Merge(ids, c->input(3), &ids));
  TF_RETURN_IF_ERROR(c->Merge(ids, c->input(4), &ids));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrExportWaiting")
    .Input("handle: resource")
    .Input("table: int64")
    .Input("cursor: int64")
    .Input("max_ids: int64")
    .Output("ids: int64")
    .Output("counts: int64")
    .Output("last_steps: int64")
    .Output("next_cursor: int64")
    .SetIsStateful()
    .SetShapeFn(ExportWaitingShape)
    .Doc(R"doc(
The next ids of one table that this rank owns and that have occurred, but not min_count times, so that they have no row.

cursor: (), 0 at the start, then next_cursor of the call before.
ids: (n), n <= max_ids, perhaps 0 before the end.
counts: (n), occurrences.
last_steps: (n), step of the last occurrence.
next_cursor: (), -1 at the end.
)doc");

REGISTER_OP("HvdCtrImportLife")
    .Input("handle: resource")
    .Input("table: int64")
    .Input("ids: int64")
    .Input("counts: int64")
    .Input("last_steps: int64")
    .Output("foreign: int64")
    .SetIsStateful()
    .SetShapeFn(ImportLifeShape)
    .Doc(R"doc(
Restores occurrences and last steps of the ids that this rank owns; of rows after their import. Nothing for other tables than
those with min_count, max_idle_steps or max_rows.

ids: (n), distinct.
counts: (n), occurrences.
last_steps: (n).
foreign: (), ids that other ranks own; they were ignored.
)doc");

REGISTER_OP("HvdCtrRowAges")
    .Input("handle: resource")
    .Output("ages: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, {0}));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
How many rows of this rank have which age in steps, in bins, for the tables with max_rows whose sweep is due at this step; zeros
for the others with max_rows. To be summed over all ranks, for Sweep.

ages: (tables with max_rows * bins).
)doc");

REGISTER_OP("HvdCtrSweep")
    .Input("handle: resource")
    .Input("ages: int64")
    .Output("deleted: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ages;
      TF_RETURN_IF_ERROR(Scalars(c, {0}));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &ages));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Deletes the rows that max_idle_steps and max_rows end at this step, where a sweep is due.

ages: RowAges, summed over all ranks.
deleted: (), rows of this rank.
)doc");

}  // namespace
}  // namespace hvd_ctr
