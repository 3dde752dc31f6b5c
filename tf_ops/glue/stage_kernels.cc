// Ops of the stage clock: StageClock, DrainStages, StageNames, StageMark.
#include <algorithm>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/core/stage_clock.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("HvdCtrStageClock")
    .Input("on: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle scalar;
      return c->WithRank(c->input(0), 0, &scalar);
    })
    .Doc(R"doc(
Starts or stops the clock of this process' stages, see tf_ops/core/stage_clock.h.

on: ().
)doc");

REGISTER_OP("HvdCtrDrainStages")
    .Output("events: int64")
    .Output("lost: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 3));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes the events that were recorded since the last call.

events: (n, 3), stage number, begin and end in nanoseconds of CLOCK_MONOTONIC.
lost: (), events that found no room.
)doc");

REGISTER_OP("HvdCtrStageNames")
    .Output("names: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(static_cast<int64_t>(kStageNames.size())));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Names of the stages by number.

names: (stages).
)doc");

// Not stateful, though it has an effect: TensorFlow would order it among all stateful ops, and so change the course of the step
// that it is to measure. What it passes on keeps it in the graph, and its inputs depend on the batch, so it is not folded.
REGISTER_OP("HvdCtrStageMark")
    .Input("values: T")
    .Input("since: int64")
    .Output("passed: T")
    .Output("now: int64")
    .Attr("T: list(type) >= 1")
    .Attr("stage: string = ''")
    .Attr("moment: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      const int since = c->num_inputs() - 1;
      ShapeHandle scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(since), 0, &scalar));
      for (int i = 0; i < since; ++i) c->set_output(i, c->input(i));
      c->set_output(since, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Passes tensors on, without a copy, once all of them are there, and tells the time. With a stage it records an event: a moment, or the
time from `since` until now. Gradients pass after the tensors have.

values: any shapes.
since: (), `now` of another mark; 0: the clock was off.
passed: values.
now: (), nanoseconds of CLOCK_MONOTONIC; 0 while the clock is off.
stage: name of a stage, or empty: record nothing.
moment: record no duration; `since` does not count.
)doc");

class StageClockOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 0, "on"));
    if (ctx->input(0).scalar<bool>()()) {
      StageClock::Start();
    } else {
      StageClock::Stop();
    }
  }
};

class DrainStagesOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    std::vector<StageEvent> events;
    int64_t lost = 0;
    StageClock::Drain(&events, &lost);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({static_cast<int64_t>(events.size()), 3}), &output));
    int64_t* out = MutableSpan<int64_t>(output).data();
    for (const StageEvent& event : events) {
      *out++ = static_cast<int64_t>(event.stage);
      *out++ = event.begin_ns;
      *out++ = event.end_ns;
    }
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 1, lost));
  }
};

class StageNamesOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, std::vector<tensorflow::tstring>(kStageNames.begin(), kStageNames.end())));
  }
};

class StageMarkOp final : public OpKernel {
 public:
  explicit StageMarkOp(OpKernelConstruction* c) : OpKernel(c) {
    std::string stage;
    OP_REQUIRES_OK(c, c->GetAttr("moment", &moment_));
    OP_REQUIRES_OK(c, c->GetAttr("stage", &stage));
    records_ = !stage.empty();
    const auto* const found = std::find(kStageNames.begin(), kStageNames.end(), stage);
    OP_REQUIRES(c, !records_ || found != kStageNames.end(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrStageMark: no stage is called '", stage,
                                                            "'; kStageNames in tf_ops/core/stage_clock.h lists them")));
    stage_ = static_cast<Stage>(found - kStageNames.begin());
  }

  void Compute(OpKernelContext* ctx) override {
    const int since_input = ctx->num_inputs() - 1;
    for (int i = 0; i < since_input; ++i) ctx->set_output(i, ctx->input(i));
    const int64_t now = StageClock::on() ? StageClock::NowNs() : 0;
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, since_input, now));
    if (!records_ || now == 0) return;
    const int64_t since = moment_ ? now : ctx->input(since_input).scalar<int64_t>()();
    if (since != 0) StageClock::Record(stage_, since, now);
  }

  /// It runs where it is: handing it to another thread would take longer than it does.
  bool IsExpensive() override { return false; }

 private:
  Stage stage_ = Stage::kDedupe;
  bool records_ = false;
  bool moment_ = false;
};

HVD_CTR_REGISTER_KERNEL("HvdCtrStageClock", StageClockOp, "on");
HVD_CTR_REGISTER_KERNEL("HvdCtrDrainStages", DrainStagesOp, "events", "lost");
HVD_CTR_REGISTER_KERNEL("HvdCtrStageNames", StageNamesOp, "names");
HVD_CTR_REGISTER_KERNEL("HvdCtrStageMark", StageMarkOp, "since", "now");

}  // namespace
}  // namespace hvd_ctr
