#include "tf_ops/glue/tf_convert.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "tensorflow/core/platform/threadpool.h"
#include "tf_ops/glue/device_memory.h"

namespace hvd_ctr {
namespace {

/// Blocks per thread: more than one evens out threads that start late or run on a busy core.
constexpr int64_t kBlocksPerThread = 4;

/// State of one ParallelFor; shared because a helper may start after the call has returned (it then finds no block left and never
/// touches fn, which is gone by then).
struct ParallelLoop {
  int64_t n = 0;
  int64_t block = 0;
  int64_t blocks = 0;
  const std::function<void(int64_t, int64_t)>* fn = nullptr;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;

  void Work() {
    for (int64_t i = next.fetch_add(1); i < blocks; i = next.fetch_add(1)) {
      (*fn)(i* block, std::min(n, (i + 1) * block));
      if (done.fetch_add(1) + 1 == blocks) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load() == blocks; });
  }
};

}  // namespace

absl::Status ToTensorFlow(const Status& status) {
  absl::StatusCode code = absl::StatusCode::kInternal;
  switch (status.code()) {
    case StatusCode::kOk:
      return absl::OkStatus();
    case StatusCode::kInvalidArgument:
      code = absl::StatusCode::kInvalidArgument;
      break;
    case StatusCode::kOutOfRange:
      // TensorFlow and Keras take OUT_OF_RANGE for the end of a dataset: an epoch would end there without a word.
      code = absl::StatusCode::kInvalidArgument;
      break;
    case StatusCode::kResourceExhausted:
      code = absl::StatusCode::kResourceExhausted;
      break;
    case StatusCode::kFailedPrecondition:
      code = absl::StatusCode::kFailedPrecondition;
      break;
    case StatusCode::kNotFound:
      code = absl::StatusCode::kNotFound;
      break;
    case StatusCode::kDataLoss:
      code = absl::StatusCode::kDataLoss;
      break;
    case StatusCode::kInternal:
      break;
  }
  return absl::Status(code, status.message());
}

absl::Status CheckRank(tensorflow::OpKernelContext* ctx, int index, int rank, const char* name) {
  const tensorflow::TensorShape& shape = ctx->input(index).shape();
  if (shape.dims() == rank) return absl::OkStatus();
  return absl::InvalidArgumentError(internal::StrCat(ctx->op_kernel().type_string(), ": ", name, " must have rank ", rank,
                                                     ", received shape ", shape.DebugString()));
}

WorkerRunner::WorkerRunner(tensorflow::OpKernelContext* ctx)
    : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
      threads_(std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads)),
      stream_(StreamOf(ctx)) {}

void WorkerRunner::ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t wanted = threads_ * kBlocksPerThread;
  const int64_t block = std::max(grain, (n + wanted - 1) / wanted);
  const int64_t blocks = (n + block - 1) / block;
  if (threads_ == 1 || blocks == 1) {
    fn(0, n);
    return;
  }
  auto loop = std::make_shared<ParallelLoop>();
  loop->n = n;
  loop->block = block;
  loop->blocks = blocks;
  loop->fn = &fn;
  const int64_t helpers = std::min<int64_t>(threads_, blocks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool_->Schedule([loop] { loop->Work(); });
  loop->Work();
  loop->Wait();
}

}  // namespace hvd_ctr
