// What the timings of the check share: arrays on the device, medians of event times, the sizes of a run.
#ifndef HVD_CTR_CUDA_CHECK_BENCH_DEVICE_H_
#define HVD_CTR_CUDA_CHECK_BENCH_DEVICE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/core/device_backend.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/status.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// How much is measured. The small sizes show that everything runs; their times mean nothing.
struct CheckSizes {
  bool timed = true;                               ///< false: on the host, where rates are left out.
  int64_t ids = int64_t{1} << 20;                  ///< N of the kernels' batches.
  int64_t arena_bytes = int64_t{4} << 30;          ///< Of the kernels' records.
  int64_t large_rows = (int64_t{1} << 25) + 1000;  ///< Of dim 64: more than 2^31 elements. 0: left out.
  int64_t copy_bytes = int64_t{1} << 30;           ///< Of the copies that the rates are compared with.
  int64_t moved_rows = int64_t{1} << 18;           ///< Working rows of the batches whose misses are moved.
  int64_t loop_rows = int64_t{1} << 16;            ///< Working rows of a step of the training loop.
  int loop_steps = 12;
  double compute_ms = 10.0;
  int repeats = 9;
  int threads = 8;
  std::vector<int32_t> dims = {16, 32, 64, 128, 256};
};

inline CheckSizes HostSizes() {
  CheckSizes sizes;
  sizes.timed = false;
  sizes.ids = 1000;
  sizes.arena_bytes = int64_t{1} << 20;
  sizes.large_rows = 5000;
  sizes.copy_bytes = int64_t{1} << 16;
  sizes.moved_rows = 500;
  sizes.loop_rows = 300;
  sizes.loop_steps = 4;
  sizes.compute_ms = 0.2;
  sizes.repeats = 5;
  sizes.threads = 2;
  sizes.dims = {16, 64};
  return sizes;
}

using BackendMaker = std::unique_ptr<DeviceBackend> (*)();

/// The device under test.
template <typename Runtime>
struct BenchDevice {
  Runtime runtime;
  Stream stream = nullptr;
  BackendMaker make_backend = nullptr;
  CheckSizes sizes;
};

/// n elements on the device; not copyable.
template <typename T, typename Runtime>
class DeviceArray {
 public:
  explicit DeviceArray(const Runtime& runtime) : runtime_(runtime) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { runtime_.Free(data_); }

  Status Allocate(int64_t n) {
    runtime_.Free(data_);
    data_ = nullptr;
    n_ = n;
    return runtime_.Allocate(n * static_cast<int64_t>(sizeof(T)), &data_);
  }
  Status Upload(const std::vector<T>& values, Stream stream) {
    HVD_CTR_RETURN_IF_ERROR(Allocate(static_cast<int64_t>(values.size())));
    HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToDevice(data_, values.data(), n_ * static_cast<int64_t>(sizeof(T)), stream));
    return runtime_.Synchronize(stream);
  }
  Status Download(int64_t first, int64_t n, std::vector<T>* values, Stream stream) const {
    values->resize(static_cast<size_t>(n));
    HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToHost(values->data(), data() + first, n * static_cast<int64_t>(sizeof(T)), stream));
    return runtime_.Synchronize(stream);
  }
  T* data() const { return static_cast<T*>(data_); }
  int64_t size() const { return n_; }

 private:
  Runtime runtime_;
  void* data_ = nullptr;
  int64_t n_ = 0;
};

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Medians of the time that work takes on a stream, by events. Work that is short is repeated between two events.
template <typename Runtime>
class StreamTimer {
 public:
  StreamTimer(const Runtime& runtime, Stream stream, int repeats) : runtime_(runtime), stream_(stream), repeats_(repeats) {}
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;
  ~StreamTimer() {
    runtime_.DestroyEvent(begin_);
    runtime_.DestroyEvent(end_);
  }

  /// work() -> Status enqueues on the stream.
  template <typename Work>
  Status Seconds(const Work& work, double* median) {
    if (begin_.handle == nullptr) {
      HVD_CTR_RETURN_IF_ERROR(runtime_.NewEvent(&begin_, true));
      HVD_CTR_RETURN_IF_ERROR(runtime_.NewEvent(&end_, true));
    }
    double first = 0.0;
    for (int i = 0; i < 2; ++i) HVD_CTR_RETURN_IF_ERROR(Once(work, 1, &first));
    const int inner = std::clamp(static_cast<int>(1e-3 / std::max(first, 1e-6)), 1, 50);
    std::vector<double> times(static_cast<size_t>(repeats_));
    for (double& time : times) HVD_CTR_RETURN_IF_ERROR(Once(work, inner, &time));
    *median = std::max(Median(times), 1e-9);
    return Status::Ok();
  }

 private:
  template <typename Work>
  Status Once(const Work& work, int count, double* seconds) const {
    HVD_CTR_RETURN_IF_ERROR(runtime_.Record(begin_, stream_));
    for (int i = 0; i < count; ++i) HVD_CTR_RETURN_IF_ERROR(work());
    HVD_CTR_RETURN_IF_ERROR(runtime_.Record(end_, stream_));
    HVD_CTR_RETURN_IF_ERROR(runtime_.Synchronize(end_));
    HVD_CTR_RETURN_IF_ERROR(runtime_.Elapsed(begin_, end_, seconds));
    *seconds /= count;
    return Status::Ok();
  }

  const Runtime runtime_;
  const Stream stream_;
  const int repeats_;
  Event begin_;
  Event end_;
};

/// The value of a column of a record whose number is `record`: a small whole number, exact in every row type.
HVD_CTR_HD inline float PatternValue(int64_t record, int64_t column) { return static_cast<float>((record * 131 + column) & 255); }

/// to (rows, columns): row i is the pattern of record slots[i], or all `constant` where that is not negative.
struct PatternKernel {
  RowLayout layout;
  const Slot* slots;
  float* to;
  float constant;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t row = layout.row(block, thread);
    if (row >= layout.rows) return;
    for (int32_t j = layout.lane(thread); j < layout.pieces; j += layout.lanes()) {
      to[row * layout.pieces + j] = constant < 0.0f ? PatternValue(slots[row], j) : constant;
    }
  }
};

/// A stand-in for a dense model's work: chains of multiplications and additions that stay in registers.
struct BusyKernel {
  float* values;
  int64_t count;
  int32_t rounds;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t i = ThreadIndex(block, thread);
    if (i >= count) return;
    float value = values[i];
    for (int32_t r = 0; r < rounds; ++r) value = value * 0.999f + 0.001f;
    values[i] = value;
  }
};

/// Ids of a batch over `population`, and what dedupe makes of them.
struct DrawnIds {
  std::vector<int32_t> unique;   ///< (U) distinct, in order of first occurrence.
  std::vector<int32_t> inverse;  ///< (N) position in unique.
};

/// power_law: popularity falls as rank^-1.1, else uniform. Ranks are spread over the population.
DrawnIds DrawIds(int64_t n, int64_t population, bool power_law, uint64_t seed);

inline double WallSeconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_BENCH_DEVICE_H_
