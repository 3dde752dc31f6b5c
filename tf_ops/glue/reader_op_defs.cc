// Ops of the readers: line splitting, Criteo parsing, hashing of string categories.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/core/criteo_parser.h"

namespace hvd_ctr {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("HvdCtrSplitLines")
    .Input("text: string")
    .Output("offsets: int64")
    .Attr("final: bool")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle text;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &text));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Offsets of line starts.

text: ().
offsets: (lines+1), the last one is where the unfinished rest begins.
final: true: a rest without a newline is a line.
)doc");

REGISTER_OP("HvdCtrParseCriteo")
    .Input("texts: num_texts * string")
    .Input("begins: int64")
    .Input("ends: int64")
    .Output("labels: float")
    .Output("dense: float")
    .Output("ids: int64")
    .Output("faults: int32")
    .Output("stripped: bool")
    .Attr("has_label: bool")
    .Attr("num_texts: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle text, lines, ends;
      const int texts_end = c->num_inputs() - 2;
      for (int i = 0; i < texts_end; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &text));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(texts_end), 1, &lines));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(texts_end + 1), 1, &ends));
      TF_RETURN_IF_ERROR(c->Merge(lines, ends, &lines));
      c->set_output(0, lines);
      c->set_output(1, c->Matrix(c->Dim(lines, 0), kCriteoDense));
      c->set_output(2, c->Matrix(c->Dim(lines, 0), kCriteoSparse));
      c->set_output(3, lines);
      c->set_output(4, lines);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Parses lines of Criteo TSV: label, 13 integers, 26 hexadecimal categories.

texts: (), each.
begins: (n), line i is [begins[i], ends[i]) of the texts one after another, without its newline, and lies in one of them.
ends: (n).
labels: (n), 0 without has_label.
dense: (n, 13), sign(v) log1p(|v|); missing: 0.
ids: (n, 26), 0 .. 2^32-1; missing: 2^32.
faults: (n), LineFault; a refused line's other outputs are zeros.
stripped: (n), the line was good but lacked trailing empty fields.
has_label: false: 39 fields.
)doc");

REGISTER_OP("HvdCtrHashStrings")
    .Input("data: string")
    .Input("offsets: int64")
    .Output("ids: int64")
    .Attr("seed: int")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle data, offsets;
      tensorflow::shape_inference::DimensionHandle strings;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &data));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &offsets));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(offsets, 0), 1, &strings));
      c->set_output(0, c->Vector(strings));
      return absl::OkStatus();
    })
    .Doc(R"doc(
64-bit hash of each string, halved so that it is a legal (non-negative) id.

data: (), all strings one after another.
offsets: (n+1), string i is data[offsets[i]:offsets[i+1]].
ids: (n).
)doc");

}  // namespace
}  // namespace hvd_ctr
