// That rows beyond the 2^31st element of an arena and of an output are where they should be.
#ifndef HVD_CTR_CUDA_CHECK_LARGE_SIZES_H_
#define HVD_CTR_CUDA_CHECK_LARGE_SIZES_H_

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tf_ops/cuda/check/bench_device.h"
#include "tf_ops/cuda/check/bench_runner.h"
#include "tf_ops/cuda/check/report.h"

namespace hvd_ctr {

template <typename Runtime>
class LargeSizes {
 public:
  static constexpr int32_t kDim = 64;
  /// Of device memory: a record with as much state as row, and a row of the output.
  static constexpr int64_t kBytesPerRow = 3 * kDim * static_cast<int64_t>(sizeof(float));

  explicit LargeSizes(const BenchDevice<Runtime>& device) : device_(device), runner_(device.sizes.threads, device.stream) {}

  Status Run(Report* report) {
    const int64_t n = device_.sizes.large_rows;
    const std::string elements = "sizes over 2^31 elements";
    if (n == 0) {
      report->facts.push_back({elements, "NOT checked: the device has not enough free memory"});
      return Status::Ok();
    }
    const std::unique_ptr<DeviceBackend> backend = device_.make_backend();
    HVD_CTR_RETURN_IF_ERROR(backend->Allocate(n, kDim, kDim));
    // Only the last records are used, and asked for again and again.
    std::vector<Slot> last(static_cast<size_t>(kUsed));
    std::iota(last.begin(), last.end(), static_cast<Slot>(n - kUsed));
    std::vector<float> records(last.size() * 2 * kDim);
    for (size_t i = 0; i < records.size(); ++i)
      records[i] = PatternValue(static_cast<int64_t>(i) / (2 * kDim), static_cast<int64_t>(i) % (2 * kDim));
    HVD_CTR_RETURN_IF_ERROR(backend->StoreRecords(last, records.data(), &runner_));
    std::vector<Slot> slots(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) slots[static_cast<size_t>(i)] = last[static_cast<size_t>(i % kUsed)];
    DeviceArray<float, Runtime> rows(device_.runtime);
    HVD_CTR_RETURN_IF_ERROR(rows.Allocate(n * kDim));
    HVD_CTR_RETURN_IF_ERROR(backend->GatherRows(slots, rows.data(), &runner_));
    std::vector<float> values;
    HVD_CTR_RETURN_IF_ERROR(rows.Download((n - kUsed) * kDim, kUsed * kDim, &values, device_.stream));
    for (int64_t i = 0; i < kUsed * kDim; ++i) {
      const int64_t row = n - kUsed + i / kDim;
      const float wanted = PatternValue(row % kUsed, i % kDim);
      if (values[static_cast<size_t>(i)] == wanted) continue;
      return MakeStatus(StatusCode::kInternal, "MISMATCH: gathering ", n, " rows of dim ", kDim, ", row ", row, ": ",
                        values[static_cast<size_t>(i)], ", expected ", wanted);
    }
    if (device_.sizes.timed) {
      report->facts.push_back(
          {elements, "checked, " + std::to_string(n * kDim * 2) + " in the arena, " + std::to_string(n * kDim) + " gathered"});
    }
    return Status::Ok();
  }

 private:
  static constexpr int64_t kUsed = 1000;

  const BenchDevice<Runtime>& device_;
  BenchRunner runner_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_LARGE_SIZES_H_
