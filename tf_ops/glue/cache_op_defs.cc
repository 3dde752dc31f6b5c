// Ops on a MixCache and on the rows its peers answer with. Symbols (B F N U W R K D S M E) are defined in README.md.
//
// All ops that touch a cache are stateful: inside a tf.function they run in program order, once, also when nothing reads their
// output.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/glue/cache_stats_layout.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

/// All inputs from `first` to `last` are scalars.
absl::Status ScalarInputs(InferenceContext* c, int first, int last) {
  ShapeHandle scalar;
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
  return absl::OkStatus();
}

absl::Status ReceivedInputs(InferenceContext* c, ShapeHandle* splits) {
  ShapeHandle words;
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 0));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &words));
  return c->WithRank(c->input(2), 1, splits);
}

absl::Status PrefetchShape(InferenceContext* c) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(ReceivedInputs(c, &splits));
  c->set_output(0, c->Scalar());
  c->set_output(1, splits);
  c->set_output(2, c->Scalar());
  c->set_output(3, c->Scalar());
  c->set_output(4, c->Scalar());
  return absl::OkStatus();
}

absl::Status AnnounceShape(InferenceContext* c) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(ReceivedInputs(c, &splits));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status SetFrequenciesShape(InferenceContext* c) {
  ShapeHandle ids;
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &ids));
  TF_RETURN_IF_ERROR(c->Merge(ids, c->input(3), &ids));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status LookupShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
  c->set_output(0, c->Matrix(c->UnknownDim(), c->UnknownDim()));
  c->set_output(1, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status ReadShape(InferenceContext* c) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(ReceivedInputs(c, &splits));
  c->set_output(0, c->Matrix(c->UnknownDim(), c->UnknownDim()));
  c->set_output(1, splits);
  c->set_output(2, c->Scalar());
  c->set_output(3, c->Scalar());
  c->set_output(4, c->Scalar());
  return absl::OkStatus();
}

absl::Status CheckRowsShape(InferenceContext* c) {
  ShapeHandle rows, splits;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
  TF_RETURN_IF_ERROR(c->Merge(splits, c->input(2), &splits));
  c->set_output(0, rows);
  return absl::OkStatus();
}

absl::Status ApplyShape(InferenceContext* c) {
  ShapeHandle gradients;
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &gradients));
  TF_RETURN_IF_ERROR(ScalarInputs(c, 3, 3));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status ExportShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 3));
  const auto n = c->UnknownDim();
  c->set_output(0, c->Vector(n));
  c->set_output(1, c->Matrix(n, c->UnknownDim()));
  c->set_output(2, c->Matrix(n, c->UnknownDim()));
  c->set_output(3, c->Scalar());
  c->set_output(4, c->Vector(c->UnknownDim()));
  c->set_output(5, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status ImportShape(InferenceContext* c) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(ScalarInputs(c, 0, 1));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &shape));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &shape));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 2, &shape));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrMixCache")
    .Output("handle: resource")
    .Attr("cache_name: string")
    .Attr("dim: int")
    .Attr("slots: int")
    .Attr("row_type: int")
    .Attr("policy: int")
    .Attr("window: int")
    .Attr("rank: int")
    .Attr("world_size: int")
    .Attr("seed: int")
    .Attr("table_names: list(string)")
    .Attr("table_rows: list(int)")
    .Attr("table_hash_ids: list(bool)")
    .Attr("table_invalid_ids: list(int)")
    .Attr("table_min_counts: list(int)")
    .Attr("table_max_idle_steps: list(int)")
    .Attr("table_max_rows: list(int)")
    .Attr("table_sweep_every_steps: list(int)")
    .Attr("optimizer_kinds: list(int)")
    .Attr("learning_rates: list(float)")
    .Attr("initial_accumulators: list(float)")
    .Attr("epsilons: list(float)")
    .Attr("beta1s: list(float)")
    .Attr("beta2s: list(float)")
    .Attr("row_steps: list(bool)")
    .Attr("l1s: list(float)")
    .Attr("l2s: list(float)")
    .Attr("learning_rate_powers: list(float)")
    .Attr("initializer_kinds: list(int)")
    .Attr("initializer_scales: list(float)")
    .Attr("features: list(string)")
    .Attr("feature_tables: list(int)")
    .Attr("prefetch_wait_seconds: float")
    .Attr("host_kind: int")
    .Attr("host_path: string")
    .Attr("host_ram_bytes: int")
    .Attr("host_direct_io: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a MixCache: all tables of one dim, this rank's share of their rows. It is freed with the last copy of its handle.

handle: ().
cache_name: for messages.
dim: D.
slots: S, rows on this rank's device.
row_type: RowType of the rows there; rows that come in and out are float32.
policy: EvictionPolicyKind.
window: batches that may be announced ahead.
seed: with table name, id and column it determines initial values.
table_names: (T); so are all lists named table_*, optimizer_*, initializer_* and those of optimizer fields.
table_max_idle_steps: 0: no limit; likewise table_max_rows.
features: (F), for messages.
feature_tables: (F), non-decreasing.
prefetch_wait_seconds: longest wait for pinned slots to be released.
host_kind: HostKind.
host_path: folder for the file of rows; '' without a disk tier.
host_ram_bytes: budget of the host tier's memory, 0: no limit.
host_direct_io: bypass the page cache where the file system allows it.
)doc");

REGISTER_OP("HvdCtrPrefetch")
    .Input("handle: resource")
    .Input("received: int64")
    .Input("received_splits: int32")
    .Output("ticket: int64")
    .Output("reply_splits: int32")
    .Output("global_rows: int64")
    .Output("global_weight: double")
    .Output("active_ranks: int64")
    .SetIsStateful()
    .SetShapeFn(PrefetchShape)
    .Doc(R"doc(
Plans and loads the rows that all ranks asked this rank for, and pins them until Apply or Release.

Fails where the ranks' headers agree on an error (the same on all ranks). An error of this rank alone (cache too small, ...) does
not fail here: the ticket is negative, and Lookup answers with the error, so that all ranks fail in CheckRows.

received: key messages of all ranks, in rank order.
received_splits: (W), words per rank.
ticket: (), names the batch.
reply_splits: (W), rows that Lookup answers to each rank, sum R.
global_rows: (), sum of B over the ranks.
global_weight: (), sum of the sample weights over the ranks.
active_ranks: (), ranks whose batch_rows is not -1.
)doc");

REGISTER_OP("HvdCtrAnnounce")
    .Input("handle: resource")
    .Input("received: int64")
    .Input("received_splits: int32")
    .Output("noted: bool")
    .SetIsStateful()
    .SetShapeFn(AnnounceShape)
    .Doc(R"doc(
Tells the policy `lookahead` the keys of a batch that will be prefetched after those announced before. Changes no number.

A batch with an error (of a rank, or an invalid id) is not noted; its Prefetch reports the error.

received: key messages of all ranks, in rank order, as for Prefetch.
received_splits: (W), words per rank.
noted: (), false where the policy is another, the window is full, or the batch has no keys or an error.
)doc");

REGISTER_OP("HvdCtrSetFrequencies")
    .Input("handle: resource")
    .Input("table: int64")
    .Input("ids: int64")
    .Input("counts: int64")
    .Output("foreign: int64")
    .SetIsStateful()
    .SetShapeFn(SetFrequenciesShape)
    .Doc(R"doc(
Tells the policy `freq` how often the ids among `ids` that this rank owns occur.

ids: (n), distinct.
counts: (n), >= 0.
foreign: (), ids that other ranks own; they were ignored.
)doc");

REGISTER_OP("HvdCtrWarmStart")
    .Input("handle: resource")
    .Output("rows: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Loads the rows with the largest counts (SetFrequencies) into the free slots.

rows: (), rows loaded.
)doc");

REGISTER_OP("HvdCtrEndAnnouncements")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 0); })
    .Doc("The batches announced so far will not be prefetched: what they need is no longer kept for them.");

REGISTER_OP("HvdCtrLookup")
    .Input("handle: resource")
    .Input("ticket: int64")
    .Output("rows: float")
    .Output("send_splits: int32")
    .SetIsStateful()
    .SetShapeFn(LookupShape)
    .Doc(R"doc(
Rows of a prefetched batch, in the order received; the error payload of a failed one.

ticket: ().
rows: (R, D).
send_splits: (W), rows for each rank.
)doc");

REGISTER_OP("HvdCtrRead")
    .Input("handle: resource")
    .Input("received: int64")
    .Input("received_splits: int32")
    .Output("rows: float")
    .Output("send_splits: int32")
    .Output("global_rows: int64")
    .Output("global_weight: double")
    .Output("active_ranks: int64")
    .SetIsStateful()
    .SetShapeFn(ReadShape)
    .Doc(R"doc(
Evaluation: rows as they are now; nothing is created, moved or updated. Inputs and errors as in Prefetch and Lookup.

rows: (R, D).
send_splits: (W).
)doc");

REGISTER_OP("HvdCtrCheckRows")
    .Input("rows: float")
    .Input("received_splits: int32")
    .Input("expected_splits: int32")
    .Output("checked: float")
    .SetIsStateful()
    .SetShapeFn(CheckRowsShape)
    .Doc(R"doc(
Passes on the rows that the owners answered with, or fails with the error of the lowest owner that had one.

rows: (U, D), in owner order; more or fewer rows where an owner answered with an error.
received_splits: (W), rows received from each owner.
expected_splits: (W), keys asked from each owner (row_splits of PrepareBatch).
checked: (U, D), the same buffer.
)doc");

REGISTER_OP("HvdCtrApply")
    .Input("handle: resource")
    .Input("ticket: int64")
    .Input("gradients: float")
    .Input("learning_rate_scale: float")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(ApplyShape)
    .Doc(R"doc(
Sums gradients by key, updates the rows, unpins them and ends the ticket. Counts one optimizer step, also for R = 0.

ticket: ().
gradients: (R, D), in the order received.
learning_rate_scale: (), factor on every table's learning rate.
step: (), the optimizer's global step after this one.
)doc");

REGISTER_OP("HvdCtrRelease")
    .Input("handle: resource")
    .Input("ticket: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 1); })
    .Doc("Ends a ticket without an update.");

REGISTER_OP("HvdCtrFlush")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 0); })
    .Doc("Writes all dirty rows back to the host store; they stay cached.");

REGISTER_OP("HvdCtrExport")
    .Input("handle: resource")
    .Input("table: int64")
    .Input("cursor: int64")
    .Input("max_rows: int64")
    .Output("ids: int64")
    .Output("rows: float")
    .Output("state: float")
    .Output("next_cursor: int64")
    .Output("counts: int64")
    .Output("last_steps: int64")
    .SetIsStateful()
    .SetShapeFn(ExportShape)
    .Doc(R"doc(
The next rows of one table that this rank owns; flushes when cursor is 0.

cursor: (), 0 at the start, then next_cursor of the call before.
ids: (n), n <= max_rows.
rows: (n, D).
state: (n, state floats of the table's optimizer).
next_cursor: (), -1 at the end.
counts: (n), occurrences of the ids; (0) unless the table has min_count, max_idle_steps or max_rows. Likewise:
last_steps: (n), step at which each row was trained last.
)doc");

REGISTER_OP("HvdCtrImport")
    .Input("handle: resource")
    .Input("table: int64")
    .Input("ids: int64")
    .Input("rows: float")
    .Input("state: float")
    .Output("foreign: int64")
    .SetIsStateful()
    .SetShapeFn(ImportShape)
    .Doc(R"doc(
Creates or overwrites the rows among ids that this rank owns.

ids: (n), distinct.
rows: (n, D).
state: (n, state floats of the table's optimizer), or (0, 0): the initial state.
foreign: (), ids that other ranks own; they were ignored.
)doc");

REGISTER_OP("HvdCtrStep")
    .Input("handle: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("The row optimizer's global step: applied tickets.");

REGISTER_OP("HvdCtrSetStep")
    .Input("handle: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInputs(c, 0, 1); })
    .Doc("Sets the global step when a checkpoint is restored; fails while tickets are open.");

REGISTER_OP("HvdCtrStats")
    .Input("handle: resource")
    .Output("tables: int64")
    .Output("totals: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), kTableStats));
      c->set_output(1, c->Vector(kTotalStats));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Counters since creation.

tables: (T, 15): requested, unique, hits, misses, created, evictions, write_backs, invalid_ids, host_rows, cached_rows,
loads, not_admitted, waiting_ids, deleted_idle, deleted_max_rows.
totals: (10): steps, foreign_keys, pinned_slots, pinned_peak, device_bytes, host_bytes, disk_bytes, disk_rows_read,
disk_rows_written, record_bytes.
)doc");

}  // namespace
}  // namespace hvd_ctr
