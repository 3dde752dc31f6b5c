// HvdCtrPlanMemory: the memory of a MixCache that is not there yet. HvdCtrPlanSharedMemory: that of collectives between ranks.
#include <string>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf_ops/core/memory_plan.h"
#include "tf_ops/core/shared_collectives.h"
#include "tf_ops/core/shared_group.h"
#include "tf_ops/cpu/cpu_backend.h"
#include "tf_ops/cuda/row_kernels.h"
#include "tf_ops/glue/device_memory.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kDemandFields = 8;  // MemoryDemand after rows.
constexpr int64_t kPlanFields = 13;   // device_bytes, then MemoryPlan.
static_assert(sizeof(MemoryPlan) == (kPlanFields - 1) * sizeof(int64_t), "see PlannedMemory in hvd_ctr/ops/plan_ops.py");

absl::Status PlanShape(InferenceContext* c) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &vector));
  c->set_output(0, c->Vector(kPlanFields));
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrPlanMemory")
    .Input("rows: int64")
    .Input("demand: int64")
    .Output("plan: int64")
    .Attr("dim: int >= 1")
    .Attr("slots: int >= 1")
    .Attr("row_type: int")
    .Attr("policy: int")
    .Attr("optimizer_kinds: list(int) >= 1")
    .Attr("row_steps: list(bool) >= 1")
    .Attr("host_kind: int")
    .Attr("host_ram_bytes: int >= 0")
    .Attr("on_gpu: bool = false")
    .SetShapeFn(PlanShape)
    .Doc(R"doc(
What a MixCache will take: figures of HvdCtrStats for a number of rows and a size of batch. Makes no cache.

rows: (T), rows of each table on this rank.
demand: (8), the fields of MemoryDemand after rows, in their order.
plan: (13), device bytes, then the fields of MemoryPlan in their order; sum_bytes are in batch_bytes with the CPU backend.
dim: D.
slots: S.
row_type: RowType.
policy: EvictionPolicyKind.
optimizer_kinds: (T), OptimizerKind of each table.
row_steps: (T), as in HvdCtrMixCache.
host_kind: HostKind.
host_ram_bytes: as in HvdCtrMixCache.
on_gpu: the device tier will be on a GPU, else where a kernel here would have it.
)doc");

class PlanMemoryOp final : public OpKernel {
 public:
  explicit PlanMemoryOp(OpKernelConstruction* c) : OpKernel(c) {
    int32_t policy = 0, row_type = 0, host_kind = 0;
    std::vector<int32_t> kinds;
    std::vector<bool> row_steps;
    OP_REQUIRES_OK(c, c->GetAttr("dim", &options_.dim));
    OP_REQUIRES_OK(c, c->GetAttr("slots", &options_.slots));
    OP_REQUIRES_OK(c, c->GetAttr("row_type", &row_type));
    OP_REQUIRES_OK(c, c->GetAttr("policy", &policy));
    OP_REQUIRES_OK(c, c->GetAttr("optimizer_kinds", &kinds));
    OP_REQUIRES_OK(c, c->GetAttr("row_steps", &row_steps));
    OP_REQUIRES_OK(c, c->GetAttr("host_kind", &host_kind));
    OP_REQUIRES_OK(c, c->GetAttr("host_ram_bytes", &options_.host.ram_bytes));
    OP_REQUIRES_OK(c, c->GetAttr("on_gpu", &on_gpu_));
    OP_REQUIRES(c, row_steps.size() == kinds.size(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPlanMemory: row_steps has ", row_steps.size(),
                                                            " entries, optimizer_kinds has ", kinds.size())));
    OP_REQUIRES(c, host_kind != static_cast<int32_t>(HostKind::kDisk) || options_.host.ram_bytes > 0,
                absl::InvalidArgumentError("HvdCtrPlanMemory: host_ram_bytes must be above 0 for rows on disk"));
    options_.row_type = static_cast<RowType>(row_type);
    options_.policy = static_cast<EvictionPolicyKind>(policy);
    options_.host.kind = static_cast<HostKind>(host_kind);
    options_.tables.resize(kinds.size());
    for (size_t t = 0; t < kinds.size(); ++t) {
      options_.tables[t].optimizer.kind = static_cast<OptimizerKind>(kinds[t]);
      options_.tables[t].optimizer.row_step = row_steps[t];
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Span<const int64_t> rows = ConstSpan<int64_t>(ctx->input(0));
    const Span<const int64_t> given = ConstSpan<int64_t>(ctx->input(1));
    OP_REQUIRES(
        ctx, rows.size() == static_cast<int64_t>(options_.tables.size()) && given.size() == kDemandFields,
        absl::InvalidArgumentError(internal::StrCat("HvdCtrPlanMemory: received ", rows.size(), " rows and ", given.size(),
                                                    " demands; needed are ", options_.tables.size(), " and ", kDemandFields)));
    MemoryDemand demand;
    demand.rows.assign(rows.begin(), rows.end());
    int64_t next = 0;
    for (int64_t* field : {&demand.received, &demand.unique, &demand.evictions, &demand.tickets, &demand.coming, &demand.counted,
                           &demand.read, &demand.appended}) {
      *field = given[next++];
    }
    const MemoryPlan plan = PlanMemory(options_, demand);
    const auto state_floats = static_cast<int32_t>(plan.record_floats - options_.dim);
    const bool cuda = on_gpu_ || RowCodeOf(ctx) != RowCode::kCpu;
    const int64_t stride = cuda ? MakeRecordLayout(options_.row_type, options_.dim, state_floats).stride
                                : LayOutCpuRecords(options_.row_type, options_.dim, state_floats).stride_bytes;
    // The CPU backend's sums are in the host tier's figures (MixCacheStats::host_bytes).
    const int64_t sums_in_batch = cuda ? 0 : plan.sum_bytes;
    OP_REQUIRES_OK(ctx, SetVectorOutput<int64_t>(
                            ctx, 0,
                            {options_.slots * stride, plan.record_bytes, plan.index_bytes, plan.buffer_bytes, plan.slot_bytes,
                             plan.batch_bytes + sums_in_batch, plan.sum_bytes - sums_in_batch, plan.cached_rows, plan.disk_bytes,
                             plan.disk_row_bytes, plan.least_ram_bytes, plan.needed_ram_bytes, plan.record_floats}));
  }

 private:
  MixCacheOptions options_;
  bool on_gpu_ = false;
};

absl::Status SharedPlanShape(InferenceContext* c) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &vector));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("HvdCtrPlanSharedMemory")
    .Input("messages: int64")
    .Input("sums: int64")
    .Output("planned: int64")
    .Attr("ranks: int >= 1")
    .SetShapeFn(SharedPlanShape)
    .Doc(R"doc(
The memory of its own that a rank shares with the others of its host for collectives.

messages: (n), of each slot of an alltoall or allgather, which has two: bytes that the rank brings for other ranks.
sums: (m), of each allreduce: bytes of its tensors.
planned: bytes of the slots of all of them, and what comes on top of them once.
ranks: W.
)doc");

class PlanSharedMemoryOp final : public OpKernel {
 public:
  explicit PlanSharedMemoryOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_)); }

  void Compute(OpKernelContext* ctx) override {
    int64_t planned = SharedGroup::PlannedBytes();
    for (const int64_t bytes : ConstSpan<int64_t>(ctx->input(0))) planned += SharedChannel::PlannedSlotBytes(ranks_, bytes);
    for (const int64_t bytes : ConstSpan<int64_t>(ctx->input(1))) planned += PlannedAllReduceBytes(ranks_, bytes);
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, planned));
  }

 private:
  int32_t ranks_ = 1;
};

HVD_CTR_REGISTER_KERNEL("HvdCtrPlanSharedMemory", PlanSharedMemoryOp, "messages", "sums", "planned");
HVD_CTR_REGISTER_KERNEL("HvdCtrPlanMemory", PlanMemoryOp, "rows", "demand", "plan");

}  // namespace
}  // namespace hvd_ctr
