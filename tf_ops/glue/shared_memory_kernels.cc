// Kernels of the collectives over shared memory. A kernel posts what the rank brings on TensorFlow's thread; if the others have
// posted already it finishes there, else on the channel's own thread, which waits: no thread of TensorFlow's ever does.
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/shared_collectives.h"
#include "tf_ops/core/shared_group.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The process' group: there is one job, and one communicator for it. Never destroyed: at the end of a process its channels'
// threads may still wait.
std::mutex group_mutex;
SharedGroup* group = nullptr;

absl::Status FindChannel(const std::string& name, SharedChannel** channel) {
  std::lock_guard<std::mutex> lock(group_mutex);
  if (group == nullptr) return absl::FailedPreconditionError("collectives over shared memory are used before they were set up");
  Result<SharedChannel*> found = group->Channel(name);
  if (found.ok()) *channel = found.value();
  return ToTensorFlow(found.status());
}

class SharedGroupCreateOp final : public OpKernel {
 public:
  explicit SharedGroupCreateOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(c, c->GetAttr("size", &size_));
    OP_REQUIRES_OK(c, c->GetAttr("warn_seconds", &warn_seconds_));
    OP_REQUIRES_OK(c, c->GetAttr("fail_seconds", &fail_seconds_));
    OP_REQUIRES_OK(c, c->GetAttr("spin_seconds", &spin_seconds_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::lock_guard<std::mutex> lock(group_mutex);
    OP_REQUIRES(ctx, group == nullptr, absl::FailedPreconditionError("the shared memory of this process was made before"));
    Result<std::unique_ptr<SharedGroup>> made = SharedGroup::Create(rank_, size_, {warn_seconds_, fail_seconds_, spin_seconds_});
    OP_REQUIRES_OK(ctx, ToTensorFlow(made.status()));
    group = made.value().release();
    const SharedAddress address = group->address();
    OP_REQUIRES_OK(ctx, SetVectorOutput<int64_t>(ctx, 0, {address.pid, address.fd, address.token}));
  }

 private:
  int32_t rank_ = 0;
  int32_t size_ = 1;
  float warn_seconds_ = 0;
  float fail_seconds_ = 0;
  float spin_seconds_ = 0;
};

class SharedGroupConnectOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 2, "addresses"));
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(ctx, input.dim_size(1) == 3, absl::InvalidArgumentError("HvdCtrSharedGroupConnect: an address has 3 numbers"));
    const Span<const int64_t> numbers = ConstSpan<int64_t>(input);
    std::vector<SharedAddress> addresses;
    for (int64_t i = 0; i < input.dim_size(0); ++i) {
      addresses.push_back({numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]});
    }
    std::lock_guard<std::mutex> lock(group_mutex);
    OP_REQUIRES(ctx, group != nullptr, absl::FailedPreconditionError("HvdCtrSharedGroupConnect comes before its Create"));
    Tensor* error = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &error));
    error->scalar<tensorflow::tstring>()() = group->Connect(addresses).message();
  }
};

/// Post, wait, finish, for the three collectives.
class SharedOp : public AsyncOpKernel {
 public:
  explicit SharedOp(OpKernelConstruction* c) : AsyncOpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("channel", &name_)); }

 protected:
  /// Runs post() and, when all ranks have posted, finish(); then done.
  void Exchange(OpKernelContext* ctx, DoneCallback done, SharedChannel* channel, bool waits_again, absl::Status posted,
                std::function<absl::Status()> finish) {
    OP_REQUIRES_OK_ASYNC(ctx, posted, done);
    auto complete = [ctx, channel, finish = std::move(finish), done = std::move(done)] {
      absl::Status status = ToTensorFlow(channel->Wait());
      if (status.ok()) status = ToTensorFlow(channel->CheckPosted());
      if (status.ok()) status = finish();
      // After an error the channel stays as it is: the ranks are no longer in step.
      if (status.ok()) channel->End();
      ctx->SetStatus(status);
      done();
    };
    if (!waits_again && channel->Arrived()) return complete();
    channel->Later(std::move(complete));
  }

  absl::Status Channel(SharedChannel** channel) {
    if (channel_ == nullptr) TF_RETURN_IF_ERROR(FindChannel(name_, &channel_));
    *channel = channel_;
    return absl::OkStatus();
  }

 private:
  std::string name_;
  SharedChannel* channel_ = nullptr;
};

/// Bytes of one row of (n, ...).
int64_t RowBytes(const Tensor& rows) {
  int64_t bytes = tensorflow::DataTypeSize(rows.dtype());
  for (int i = 1; i < rows.dims(); ++i) bytes *= rows.dim_size(i);
  return bytes;
}

absl::Status AllocateRows(OpKernelContext* ctx, const Tensor& like, int64_t rows, Tensor** out) {
  TensorShape shape = like.shape();
  shape.set_dim(0, rows);
  return ctx->allocate_output(0, shape, out);
}

absl::Status CheckRows(OpKernelContext* ctx) {
  const Tensor& rows = ctx->input(0);
  if (rows.dims() >= 1 && tensorflow::DataTypeSize(rows.dtype()) > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": rows must be numbers (n, ...), received ",
                                                     tensorflow::DataTypeString(rows.dtype()), " ", rows.shape().DebugString()));
}

class SharedAlltoallOp final : public SharedOp {
 public:
  using SharedOp::SharedOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    SharedChannel* channel = nullptr;
    std::vector<int64_t> splits;
    OP_REQUIRES_OK_ASYNC(ctx, Channel(&channel), done);
    OP_REQUIRES_OK_ASYNC(ctx, CheckInputs(ctx, channel, &splits), done);
    const Tensor& rows = ctx->input(0);
    const int64_t row_bytes = RowBytes(rows);
    const char* data = rows.tensor_data().data();
    int64_t before = 0;
    for (int32_t rank = 0; rank < channel->rank(); ++rank) before += splits[rank];
    const int64_t after = before + splits[channel->rank()];
    const SharedMessage::Piece pieces[2] = {{data, before * row_bytes},
                                            {data + after * row_bytes, (rows.dim_size(0) - after) * row_bytes}};
    const SharedMessage message{SharedOperation::kAllToAll, row_bytes, splits, rows.dim_size(0),
                                Span<const SharedMessage::Piece>(pieces, 2)};
    const char* mine = data + before * row_bytes;
    Exchange(ctx, std::move(done), channel, false, ToTensorFlow(channel->Post(message)), [ctx, channel, row_bytes, mine] {
      Tensor* received = nullptr;
      Tensor* received_splits = nullptr;
      TF_RETURN_IF_ERROR(AllocateRows(ctx, ctx->input(0), ArrivedRows(*channel), &received));
      TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({channel->size()}), &received_splits));
      CopyArrived(*channel, row_bytes, mine, const_cast<char*>(received->tensor_data().data()));
      for (int32_t rank = 0; rank < channel->size(); ++rank) {
        received_splits->vec<int32_t>()(rank) = static_cast<int32_t>(channel->From(rank).rows);
      }
      return absl::OkStatus();
    });
  }

 private:
  static absl::Status CheckInputs(OpKernelContext* ctx, const SharedChannel* channel, std::vector<int64_t>* splits) {
    TF_RETURN_IF_ERROR(CheckRows(ctx));
    TF_RETURN_IF_ERROR(CheckRank(ctx, 1, 1, "splits"));
    const Span<const int32_t> given = ConstSpan<int32_t>(ctx->input(1));
    int64_t total = 0;
    bool fits = given.size() == channel->size();
    for (const int32_t rows : given) {
      fits = fits && rows >= 0;
      total += rows;
    }
    splits->assign(given.begin(), given.end());
    if (fits && total == ctx->input(0).dim_size(0)) return absl::OkStatus();
    return absl::InvalidArgumentError(internal::StrCat(
        "collective '", channel->name(), "': ", given.size(), " splits that sum to ", total, " for ", ctx->input(0).dim_size(0),
        " rows and ", channel->size(), " ranks; needed is one per rank, not negative, with the sum of the rows"));
  }
};

class SharedAllgatherOp final : public SharedOp {
 public:
  using SharedOp::SharedOp;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    SharedChannel* channel = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, Channel(&channel), done);
    OP_REQUIRES_OK_ASYNC(ctx, CheckRows(ctx), done);
    const Tensor& rows = ctx->input(0);
    const int64_t row_bytes = RowBytes(rows);
    const char* mine = rows.tensor_data().data();
    const SharedMessage::Piece piece{mine, rows.dim_size(0) * row_bytes};
    const SharedMessage message{
        SharedOperation::kAllGather, row_bytes, {}, rows.dim_size(0), Span<const SharedMessage::Piece>(&piece, 1)};
    Exchange(ctx, std::move(done), channel, false, ToTensorFlow(channel->Post(message)), [ctx, channel, row_bytes, mine] {
      Tensor* everything = nullptr;
      TF_RETURN_IF_ERROR(AllocateRows(ctx, ctx->input(0), ArrivedRows(*channel), &everything));
      CopyArrived(*channel, row_bytes, mine, const_cast<char*>(everything->tensor_data().data()));
      return absl::OkStatus();
    });
  }
};

class SharedAllreduceOp final : public SharedOp {
 public:
  explicit SharedAllreduceOp(OpKernelConstruction* c) : SharedOp(c) {
    tensorflow::DataType type;
    OP_REQUIRES_OK(c, c->GetAttr("T", &type));
    type_ = type == tensorflow::DT_FLOAT    ? SharedType::kFloat32
            : type == tensorflow::DT_DOUBLE ? SharedType::kFloat64
            : type == tensorflow::DT_INT32  ? SharedType::kInt32
                                            : SharedType::kInt64;
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    SharedChannel* channel = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, Channel(&channel), done);
    OpInputList values;
    OP_REQUIRES_OK_ASYNC(ctx, ctx->input_list("values", &values), done);
    std::vector<SharedAddend> addends;
    for (int i = 0; i < values.size(); ++i) {
      Tensor* sum = nullptr;
      OP_REQUIRES_OK_ASYNC(ctx, ctx->allocate_output(i, values[i].shape(), &sum), done);
      addends.push_back({values[i].tensor_data().data(), const_cast<char*>(sum->tensor_data().data()), values[i].NumElements()});
    }
    const bool waits_again = ReducesInTwoPhases(*channel, type_, addends);
    const absl::Status posted = ToTensorFlow(PostAllReduce(channel, type_, addends));
    Exchange(ctx, std::move(done), channel, waits_again, posted, [this, channel, addends = std::move(addends)] {
      return ToTensorFlow(FinishAllReduce(channel, type_, addends, &scratch_));
    });
  }

 private:
  SharedType type_ = SharedType::kFloat32;
  std::vector<char> scratch_;  // Kept for its memory: calls of one name do not overlap, which Post checks.
};

HVD_CTR_REGISTER_KERNEL("HvdCtrSharedGroupCreate", SharedGroupCreateOp, "address");
HVD_CTR_REGISTER_KERNEL("HvdCtrSharedGroupConnect", SharedGroupConnectOp, "addresses", "error");
HVD_CTR_REGISTER_KERNEL("HvdCtrSharedAlltoall", SharedAlltoallOp, "rows", "splits", "received", "received_splits");
HVD_CTR_REGISTER_KERNEL("HvdCtrSharedAllgather", SharedAllgatherOp, "rows", "everything");
HVD_CTR_REGISTER_KERNEL("HvdCtrSharedAllreduce", SharedAllreduceOp, "values", "sums");

}  // namespace
}  // namespace hvd_ctr
