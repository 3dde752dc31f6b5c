// HostFacingBackend: a device backend whose `rows`, `gradients` and `sums` are host memory, around one for which they are device
// memory. So tests that know of no device run on one unchanged. Every call copies and waits; it is of no use for speed.
//
//   CudaRuntime runtime;
//   HostFacingBackend<CudaRuntime> backend(runtime, MakeCudaBackend());
#ifndef HVD_CTR_TESTS_CPP_HOST_FACING_BACKEND_H_
#define HVD_CTR_TESTS_CPP_HOST_FACING_BACKEND_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/cuda/runtime_types.h"
#include "tf_ops/cuda/staging.h"

namespace hvd_ctr {

/// A runner with a stream.
class StreamRunner final : public TaskRunner {
 public:
  StreamRunner(TaskRunner* runner, Stream stream) : runner_(runner), stream_(stream) {}
  int threads() const override { return runner_->threads(); }
  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) override {
    runner_->ParallelFor(n, grain, fn);
  }
  void* stream() const override { return stream_; }

 private:
  TaskRunner* runner_;
  Stream stream_;
};

template <typename Runtime>
class HostFacingBackend final : public DeviceBackend {
 public:
  HostFacingBackend(Runtime runtime, std::unique_ptr<DeviceBackend> backend)
      : runtime_(std::move(runtime)), backend_(std::move(backend)) {}
  ~HostFacingBackend() override {
    backend_.reset();
    runtime_.Free(in_.data);
    runtime_.Free(out_.data);
    if (stream_ != nullptr) runtime_.DestroyStream(stream_);
  }

  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) override {
    HVD_CTR_RETURN_IF_ERROR(backend_->Allocate(slots, dim, state_floats, row_type));
    dim_ = dim;
    return runtime_.NewStream(&stream_);
  }
  int64_t allocated_bytes() const override { return backend_->allocated_bytes(); }

  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    return backend_->StoreRecords(slots, records, runner);
  }
  Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init, TaskRunner* runner) override {
    return backend_->StoreFirstRecords(slots, keys, init, runner);
  }
  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    return backend_->FetchRecords(slots, records, runner);
  }

  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override {
    return Call(nullptr, 0, rows, slots.size() * dim_, runner,
                [&](const float*, float* out, TaskRunner* on_stream) { return backend_->GatherRows(slots, out, on_stream); });
  }
  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override {
    return Call(gradients, inverse.size() * dim_, sums, std::max<int64_t>(unique, 0) * dim_, runner,
                [&](const float* in, float* out, TaskRunner* on_stream) {
                  return backend_->SegmentSum(in, inverse, unique, out, on_stream);
                });
  }
  Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                    Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                    TaskRunner* runner) override {
    return Call(gradients, slots.size() * dim_, nullptr, 0, runner, [&](const float* in, float*, TaskRunner* on_stream) {
      return backend_->UpdateRows(slots, tables, in, optimizers, step, learning_rate_scale, on_stream);
    });
  }
  Status PlaceRows(Span<const int32_t> positions, const float* records, const RecordWidth& width, float* rows,
                   TaskRunner* runner) const override {
    if (positions.empty()) return Status::Ok();
    const int64_t floats = (int64_t{*std::max_element(positions.begin(), positions.end())} + 1) * dim_;
    return Call(nullptr, 0, rows, floats, runner, [&](const float*, float* out, TaskRunner* on_stream) {
      HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToDevice(out, rows, floats * kFloat, stream_));
      return backend_->PlaceRows(positions, records, width, out, on_stream);
    });
  }
  Status BeginMoves() override { return backend_->BeginMoves(); }
  Status EndMoves() override { return backend_->EndMoves(); }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  /// Copies `in` to the device, calls call(in, out, runner) with pointers there, and copies `out` back.
  template <typename Function>
  Status Call(const float* in, int64_t in_floats, float* out, int64_t out_floats, TaskRunner* runner,
              const Function& call) const {
    std::lock_guard<std::mutex> lock(mutex_);
    HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
    HVD_CTR_RETURN_IF_ERROR(GrowOnDevice(runtime_, in_floats * kFloat, &in_));
    HVD_CTR_RETURN_IF_ERROR(GrowOnDevice(runtime_, out_floats * kFloat, &out_));
    if (in_floats > 0) HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToDevice(in_.data, in, in_floats * kFloat, stream_));
    StreamRunner on_stream(runner, stream_);
    HVD_CTR_RETURN_IF_ERROR(call(static_cast<const float*>(in_.data), static_cast<float*>(out_.data), &on_stream));
    if (out_floats > 0) HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToHost(out, out_.data, out_floats * kFloat, stream_));
    // Where nothing comes back nobody waits: the work is left to the device.
    return out_floats > 0 ? runtime_.Synchronize(stream_) : Status::Ok();
  }

  Runtime runtime_;
  std::unique_ptr<DeviceBackend> backend_;
  int32_t dim_ = 0;
  Stream stream_ = nullptr;
  mutable std::mutex mutex_;
  mutable GrowingMemory in_, out_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_HOST_FACING_BACKEND_H_
