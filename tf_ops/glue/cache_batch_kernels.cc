// Kernels of one batch's way through a MixCache: Announce and its end, Prefetch, Lookup, Read, CheckRows, Apply, Release,
// RowAges, Sweep.
#include <numeric>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"
#include "tf_ops/core/key_exchange.h"
#include "tf_ops/core/stage_clock.h"
#include "tf_ops/glue/cache_op.h"
#include "tf_ops/glue/device_memory.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/mix_cache_resource.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using MixCachePtr = tensorflow::core::RefCountPtr<MixCacheResource>;

template <typename T>
int64_t Sum(Span<T> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Whether inputs received (1) and received_splits (2) belong together.
Status CheckWords(OpKernelContext* ctx, const MixCacheOptions& options) {
  const Span<const int64_t> words = ConstSpan<int64_t>(ctx->input(1));
  const Span<const int32_t> splits = ConstSpan<int32_t>(ctx->input(2));
  if (splits.size() != options.world_size || Sum(splits) != words.size()) {
    return MakeStatus(StatusCode::kInvalidArgument, "MixCache '", options.name, "': received_splits has ", splits.size(),
                      " entries with sum ", Sum(splits), " for ", words.size(), " received words; expected ", options.world_size,
                      " entries (world_size) with the number of words as their sum");
  }
  return Status::Ok();
}

/// Unpacks inputs received (1) and received_splits (2); not OK when the ranks agree on an error.
Status Receive(OpKernelContext* ctx, const MixCacheOptions& options, ReceivedKeys* received) {
  HVD_CTR_RETURN_IF_ERROR(CheckWords(ctx, options));
  const Span<const int64_t> words = ConstSpan<int64_t>(ctx->input(1));
  const Span<const int32_t> splits = ConstSpan<int32_t>(ctx->input(2));
  const std::vector<uint8_t> counted = CountedTables(options.tables);
  HVD_CTR_RETURN_IF_ERROR(UnpackKeys(words, splits, static_cast<int32_t>(options.tables.size()), counted, received));
  return AgreedStatus(*received, options);
}

/// Outputs `index` to `index + 2`: the global batch's rows and sample weights, and the ranks that still have batches.
absl::Status SetGlobalOutputs(OpKernelContext* ctx, int index, const ReceivedKeys& received) {
  int64_t rows = 0, active_ranks = 0;
  double weight = 0.0;
  for (const PeerMessage& peer : received.peers) {
    if (peer.info.batch_rows == kNoMoreBatches) continue;
    ++active_ranks;
    rows += peer.info.batch_rows;
    weight += peer.info.weight_sum;
  }
  TF_RETURN_IF_ERROR(SetScalarOutput<int64_t>(ctx, index, rows));
  TF_RETURN_IF_ERROR(SetScalarOutput<double>(ctx, index + 1, weight));
  return SetScalarOutput<int64_t>(ctx, index + 2, active_ranks);
}

/// Rows of the error payload for each peer (W).
std::vector<int32_t> PayloadSplits(const Status& status, int32_t dim, const std::vector<int32_t>& asked) {
  std::vector<int32_t> splits;
  splits.reserve(asked.size());
  for (const int32_t rows : asked) splits.push_back(static_cast<int32_t>(ErrorPayloadRows(status, dim, rows)));
  return splits;
}

/// Outputs rows (0) and send_splits (1) of Lookup and Read.
absl::Status SetRowOutputs(OpKernelContext* ctx, const Tensor& rows, const std::vector<int32_t>& splits) {
  ctx->set_output(0, rows);
  return SetVectorOutput(ctx, 1, splits);
}

absl::Status AnswerWithError(OpKernelContext* ctx, const Status& status, int32_t dim, const std::vector<int32_t>& asked) {
  const std::vector<int32_t> splits = PayloadSplits(status, dim, asked);
  Tensor payload(tensorflow::DT_FLOAT, TensorShape({Sum(Span<const int32_t>(splits)), int64_t{dim}}));
  float* out = MutableSpan<float>(&payload).data();
  for (const int32_t payload_rows : splits) {
    EncodeErrorPayload(status, dim, payload_rows, out);
    out += int64_t{payload_rows} * dim;
  }
  Tensor rows;
  TF_RETURN_IF_ERROR(CopyToDevice(ctx, payload, &rows));
  return SetRowOutputs(ctx, rows, splits);
}

/// Allocates rows (R, D), lets `fill(float* rows)` write them, and answers with fill's error where it has one.
template <typename Fill>
absl::Status AnswerWithRows(OpKernelContext* ctx, int32_t dim, const std::vector<int32_t>& splits, const Fill& fill) {
  Tensor rows;
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({Sum(Span<const int32_t>(splits)), int64_t{dim}}), &rows));
  const Status status = fill(MutableSpan<float>(&rows).data());
  return status.ok() ? SetRowOutputs(ctx, rows, splits) : AnswerWithError(ctx, status, dim, splits);
}

// Asynchronous because a prefetch may wait until another batch is applied: were it to hold one of the few inter-op threads
// meanwhile, that Apply might never get one.
class PrefetchOp final : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    MixCachePtr resource;
    OP_REQUIRES_OK_ASYNC(ctx, LookupMixCache(ctx, &resource), done);
    ReceivedKeys received;
    OP_REQUIRES_OK_ASYNC(ctx, ToTensorFlow(TimeStage(Stage::kPlan, [&] { return Receive(ctx, resource->options(), &received); })),
                         done);
    OP_REQUIRES_OK_ASYNC(ctx, SetGlobalOutputs(ctx, 2, received), done);
    if (!resource->PrefetchMayWait()) {
      Run(ctx, resource.get(), received);
      done();
      return;
    }
    // The context's input keeps the resource alive until done().
    tensorflow::Env::Default()->SchedClosure(
        [ctx, cache = resource.get(), received = std::move(received), done = std::move(done)] {
          Run(ctx, cache, received);
          done();
        });
  }

 private:
  static void Run(OpKernelContext* ctx, MixCacheResource* resource, const ReceivedKeys& received) {
    WorkerRunner runner(ctx);
    const int64_t ticket = resource->Prefetch(received, &runner);
    std::vector<int32_t> reply_splits = AskedRows(received);
    FailedPrefetch failure;
    if (resource->FindFailure(ticket, &failure)) {
      reply_splits = PayloadSplits(failure.status, resource->options().dim, reply_splits);
    }
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, ticket));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 1, reply_splits));
  }
};

class AnnounceOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    const StageTimer timer(Stage::kPlan);
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckWords(ctx, resource->options())));
    ReceivedKeys received;
    bool noted = false;
    // The batches before this one shall still be trained: its error is reported when its turn has come, by Prefetch.
    if (Receive(ctx, resource->options(), &received).ok()) {
      OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->Announce(received, &noted)));
    }
    OP_REQUIRES_OK(ctx, SetScalarOutput<bool>(ctx, 0, noted));
  }
};

class EndAnnouncementsOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* /*ctx*/, MixCacheResource* resource) override { resource->cache()->EndAnnouncements(); }
};

class LookupOp final : public CacheRowsOp {
 public:
  using CacheRowsOp::CacheRowsOp;

  void RunWithRows(OpKernelContext* ctx, MixCacheResource* resource) override {
    const int64_t ticket = ctx->input(1).scalar<int64_t>()();
    const int32_t dim = resource->options().dim;
    FailedPrefetch failure;
    if (resource->FindFailure(ticket, &failure)) {
      OP_REQUIRES_OK(ctx, AnswerWithError(ctx, failure.status, dim, failure.asked));
      return;
    }
    std::vector<int32_t> splits;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->TicketSplits(ticket, &splits)));
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(
        ctx, AnswerWithRows(ctx, dim, splits, [&](float* rows) { return resource->cache()->Lookup(ticket, rows, &runner); }));
  }
};

class ReadOp final : public CacheRowsOp {
 public:
  using CacheRowsOp::CacheRowsOp;

  void RunWithRows(OpKernelContext* ctx, MixCacheResource* resource) override {
    ReceivedKeys received;
    OP_REQUIRES_OK(ctx, ToTensorFlow(Receive(ctx, resource->options(), &received)));
    resource->CountSkippedInRead(received);
    OP_REQUIRES_OK(ctx, SetGlobalOutputs(ctx, 2, received));
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx, AnswerWithRows(ctx, resource->options().dim, AskedRows(received),
                                       [&](float* rows) { return resource->cache()->Read(received, rows, &runner); }));
  }
};

class CheckRowsOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "rows"));
    const Span<const int32_t> received = ConstSpan<int32_t>(ctx->input(1));
    const Span<const int32_t> expected = ConstSpan<int32_t>(ctx->input(2));
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckSplits(ctx->input(0), received, expected)));
    // The splits tell whether an owner failed. Only its answer is looked at: on a GPU that means to wait.
    int64_t begin = 0;
    for (int64_t owner = 0; owner < expected.size(); ++owner) {
      if (received[owner] != expected[owner]) {
        OP_REQUIRES_OK(ctx, ErrorOf(ctx, owner, begin, received[owner], expected[owner]));
      }
      begin += received[owner];
    }
    ctx->set_output(0, ctx->input(0));
  }

 private:
  static Status CheckSplits(const Tensor& rows, Span<const int32_t> received, Span<const int32_t> expected) {
    if (received.size() == expected.size() && Sum(received) == rows.dim_size(0)) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "CheckRows: received_splits has ", received.size(), " entries with sum ",
                      Sum(received), "; expected ", expected.size(), " entries (one per rank) with sum ", rows.dim_size(0),
                      ", the rows received");
  }

  /// What the owner's answer, `count` rows from `begin` on, says; never OK.
  static absl::Status ErrorOf(OpKernelContext* ctx, int64_t owner, int64_t begin, int32_t count, int32_t expected) {
    const Tensor& rows = ctx->input(0);
    Tensor payload;
    TF_RETURN_IF_ERROR(CopyToHost(ctx, rows.Slice(begin, begin + count), &payload));
    const auto dim = static_cast<int32_t>(rows.dim_size(1));
    // A slice of few columns may not be aligned as flat() asks for.
    const auto* data = reinterpret_cast<const float*>(payload.tensor_data().data());
    return ToTensorFlow(DecodeErrorPayload(data, count, dim, static_cast<int32_t>(owner), expected));
  }
};

class ApplyOp final : public CacheRowsOp {
 public:
  using CacheRowsOp::CacheRowsOp;

  void RunWithRows(OpKernelContext* ctx, MixCacheResource* resource) override {
    const int64_t ticket = ctx->input(1).scalar<int64_t>()();
    const Tensor& gradients = ctx->input(2);
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckShape(resource, ticket, gradients.shape())));
    WorkerRunner runner(ctx);
    const float scale = ctx->input(3).scalar<float>()();
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->Apply(ticket, ConstSpan<float>(gradients).data(), scale, &runner)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, resource->cache()->step()));
  }

 private:
  /// A ticket that is not open passes: Apply names it.
  static Status CheckShape(MixCacheResource* resource, int64_t ticket, const TensorShape& shape) {
    std::vector<int32_t> splits;
    if (!resource->cache()->TicketSplits(ticket, &splits).ok()) return Status::Ok();
    const TensorShape expected({Sum(Span<const int32_t>(splits)), int64_t{resource->options().dim}});
    if (shape == expected) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "MixCache '", resource->options().name, "': ticket ", ticket,
                      " needs gradients of shape ", expected.DebugString(), ", received ", shape.DebugString());
  }
};

class ReleaseOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->Release(ctx->input(1).scalar<int64_t>()())));
  }
};

class RowAgesOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    std::vector<int64_t> ages;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->RowAges(&ages)));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, ages));
  }
};

class SweepOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    WorkerRunner runner(ctx);
    int64_t deleted = 0;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->Sweep(ConstSpan<int64_t>(ctx->input(1)), &deleted, &runner)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, deleted));
  }
};

// They are where the rows are, while the handle is the host's.
using Exemption = tensorflow::input_colocation_exemption_registration::InputColocationExemptionRegistration;
[[maybe_unused]] const Exemption exemptions[] = {Exemption("HvdCtrLookup"), Exemption("HvdCtrRead"), Exemption("HvdCtrApply")};

HVD_CTR_REGISTER_KERNEL("HvdCtrPrefetch", PrefetchOp, "handle", "received", "received_splits", "ticket", "reply_splits",
                        "global_rows", "global_weight", "active_ranks");
HVD_CTR_REGISTER_KERNEL("HvdCtrAnnounce", AnnounceOp, "handle", "received", "received_splits", "noted");
HVD_CTR_REGISTER_KERNEL("HvdCtrEndAnnouncements", EndAnnouncementsOp, "handle");
HVD_CTR_REGISTER_KERNEL("HvdCtrLookup", LookupOp, "handle", "ticket", "send_splits");
HVD_CTR_REGISTER_KERNEL("HvdCtrRead", ReadOp, "handle", "received", "received_splits", "send_splits", "global_rows",
                        "global_weight", "active_ranks");
HVD_CTR_REGISTER_KERNEL("HvdCtrCheckRows", CheckRowsOp, "received_splits", "expected_splits");
HVD_CTR_REGISTER_KERNEL("HvdCtrApply", ApplyOp, "handle", "ticket", "learning_rate_scale", "step");
HVD_CTR_REGISTER_KERNEL("HvdCtrRelease", ReleaseOp, "handle", "ticket");
HVD_CTR_REGISTER_KERNEL("HvdCtrRowAges", RowAgesOp, "handle", "ages");
HVD_CTR_REGISTER_KERNEL("HvdCtrSweep", SweepOp, "handle", "ages", "deleted");

}  // namespace
}  // namespace hvd_ctr
