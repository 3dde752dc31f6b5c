// The seam between the core and TensorFlow: statuses, tensors as spans, and TensorFlow's worker threads as a TaskRunner. Kernels
// in this folder stay thin because of it: unpack tensors, one core call, convert the status.
//
//   WorkerRunner runner(ctx);
//   OP_REQUIRES_OK(ctx, ToTensorFlow(cache.Flush(&runner)));
#ifndef HVD_CTR_GLUE_TF_CONVERT_H_
#define HVD_CTR_GLUE_TF_CONVERT_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// The same code and message, one to one.
absl::Status ToTensorFlow(const Status& status);

/// The elements of a tensor in row-major order, whatever its shape.
template <typename T>
Span<const T> ConstSpan(const tensorflow::Tensor& tensor) {
  const auto flat = tensor.flat<T>();
  return Span<const T>(flat.data(), flat.size());
}

template <typename T>
Span<T> MutableSpan(tensorflow::Tensor* tensor) {
  auto flat = tensor->flat<T>();
  return Span<T>(flat.data(), flat.size());
}

/// Allocates output `index` as a vector and copies `values` into it.
template <typename T>
absl::Status SetVectorOutput(tensorflow::OpKernelContext* ctx, int index, const std::vector<T>& values) {
  tensorflow::Tensor* output = nullptr;
  const absl::Status status =
      ctx->allocate_output(index, tensorflow::TensorShape({static_cast<int64_t>(values.size())}), &output);
  if (status.ok()) std::copy(values.begin(), values.end(), MutableSpan<T>(output).begin());
  return status;
}

template <typename T>
absl::Status SetScalarOutput(tensorflow::OpKernelContext* ctx, int index, T value) {
  tensorflow::Tensor* output = nullptr;
  const absl::Status status = ctx->allocate_output(index, tensorflow::TensorShape({}), &output);
  if (status.ok()) output->scalar<T>()() = value;
  return status;
}

/// INVALID_ARGUMENT unless input `index` is a scalar (rank 0), vector (1) or matrix (2); the message names the input.
absl::Status CheckRank(tensorflow::OpKernelContext* ctx, int index, int rank, const char* name);

/// TensorFlow's intra-op threads, and the stream of the kernel's device. The calling thread takes blocks like any other and never
/// waits for a thread that has not started, so a kernel makes progress even when the whole pool is busy.
class WorkerRunner final : public TaskRunner {
 public:
  explicit WorkerRunner(tensorflow::OpKernelContext* ctx);

  int threads() const override { return threads_; }
  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) override;
  void* stream() const override { return stream_; }

 private:
  tensorflow::thread::ThreadPool* pool_;
  int threads_;
  void* stream_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_GLUE_TF_CONVERT_H_
