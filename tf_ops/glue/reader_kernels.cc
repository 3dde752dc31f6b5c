// Kernels of the readers: SplitLines, ParseCriteo, HashStrings.
#include <string_view>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/criteo_parser.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

/// Strings per task.
constexpr int64_t kStringGrain = 4096;

/// Input 0 as text.
Span<const char> TextInput(OpKernelContext* ctx) {
  const tensorflow::tstring& text = ctx->input(0).scalar<tensorflow::tstring>()();
  return Span<const char>(text.data(), static_cast<int64_t>(text.size()));
}

class SplitLinesOp final : public OpKernel {
 public:
  explicit SplitLinesOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("final", &final_)); }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 0, "text"));
    std::vector<int64_t> offsets;
    SplitLines(TextInput(ctx), final_, &offsets);
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, offsets));
  }

 private:
  bool final_ = false;
};

class ParseCriteoOp final : public OpKernel {
 public:
  explicit ParseCriteoOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("has_label", &options_.has_label));
  }

  void Compute(OpKernelContext* ctx) override {
    const int texts_end = ctx->num_inputs() - 2;
    std::vector<std::string_view> texts;
    for (int i = 0; i < texts_end; ++i) {
      OP_REQUIRES_OK(ctx, CheckRank(ctx, i, 0, "texts"));
      const tensorflow::tstring& text = ctx->input(i).scalar<tensorflow::tstring>()();
      texts.emplace_back(text.data(), text.size());
    }
    OP_REQUIRES_OK(ctx, CheckRank(ctx, texts_end, 1, "begins"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, texts_end + 1, 1, "ends"));
    std::vector<std::string_view> lines;
    OP_REQUIRES_OK(ctx, ToTensorFlow(LocateLines(texts, ConstSpan<int64_t>(ctx->input(texts_end)),
                                                 ConstSpan<int64_t>(ctx->input(texts_end + 1)), &lines)));
    const int64_t n = static_cast<int64_t>(lines.size());
    Tensor* labels = nullptr;
    Tensor* dense = nullptr;
    Tensor* ids = nullptr;
    Tensor* faults = nullptr;
    Tensor* stripped = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &labels));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n, int64_t{kCriteoDense}}), &dense));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({n, int64_t{kCriteoSparse}}), &ids));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, TensorShape({n}), &faults));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({n}), &stripped));
    static_assert(sizeof(bool) == sizeof(uint8_t), "the parser writes flags as bytes");
    const CriteoOutput out = {MutableSpan<float>(labels).data(), MutableSpan<float>(dense).data(),
                              MutableSpan<int64_t>(ids).data(), MutableSpan<int32_t>(faults).data(),
                              reinterpret_cast<uint8_t*>(MutableSpan<bool>(stripped).data())};
    WorkerRunner runner(ctx);
    ParseCriteoLines(lines, options_, out, &runner);
  }

 private:
  CriteoOptions options_;
};

class HashStringsOp final : public OpKernel {
 public:
  explicit HashStringsOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("seed", &seed_)); }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 0, "data"));
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 1, 1, "offsets"));
    const Span<const char> data = TextInput(ctx);
    const Span<const int64_t> offsets = ConstSpan<int64_t>(ctx->input(1));
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckOffsets(data.size(), offsets)));
    const int64_t n = offsets.size() - 1;
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &output));
    const Span<int64_t> ids = MutableSpan<int64_t>(output);
    WorkerRunner(ctx).ParallelFor(n, kStringGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t hash = HashBytes(data.data() + offsets[i], offsets[i + 1] - offsets[i], static_cast<uint64_t>(seed_));
        ids[i] = static_cast<int64_t>(hash >> 1);  // Ids are not negative.
      }
    });
  }

 private:
  static Status CheckOffsets(int64_t data_bytes, Span<const int64_t> offsets) {
    bool valid = !offsets.empty() && offsets[0] >= 0 && offsets[offsets.size() - 1] <= data_bytes;
    for (int64_t i = 0; valid && i + 1 < offsets.size(); ++i) valid = offsets[i] <= offsets[i + 1];
    if (valid) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "HvdCtrHashStrings: offsets (", offsets.size(),
                      " entries) must ascend within [0, ", data_bytes,
                      "], the bytes of data, and have one entry more than strings");
  }

  int64_t seed_ = 0;
};

HVD_CTR_REGISTER_KERNEL("HvdCtrSplitLines", SplitLinesOp, "text", "offsets");
HVD_CTR_REGISTER_KERNEL("HvdCtrParseCriteo", ParseCriteoOp, "texts", "begins", "ends", "labels", "dense", "ids", "faults",
                        "stripped");
HVD_CTR_REGISTER_KERNEL("HvdCtrHashStrings", HashStringsOp, "data", "offsets", "ids");

}  // namespace
}  // namespace hvd_ctr
