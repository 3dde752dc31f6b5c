// Times of loads and write-backs: the records that a batch misses, from host memory to their slots and back, as MixCache asks for
// them. Wall time of the whole call, until the records are there: gathering into pinned memory, the bus, the kernel.
#ifndef HVD_CTR_CUDA_CHECK_MOVE_TIMINGS_H_
#define HVD_CTR_CUDA_CHECK_MOVE_TIMINGS_H_

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/cuda/check/bench_device.h"
#include "tf_ops/cuda/check/bench_runner.h"
#include "tf_ops/cuda/check/report.h"

namespace hvd_ctr {

/// Bytes per second between pinned memory and the device.
template <typename Runtime>
Status MeasureBus(const BenchDevice<Runtime>& device, double* to_device, double* to_host) {
  const int64_t bytes = std::min<int64_t>(device.sizes.copy_bytes, int64_t{256} << 20);
  DeviceArray<uint8_t, Runtime> memory(device.runtime);
  HVD_CTR_RETURN_IF_ERROR(memory.Allocate(bytes));
  void* pinned = nullptr;
  HVD_CTR_RETURN_IF_ERROR(device.runtime.AllocatePinned(bytes, &pinned));
  std::memset(pinned, 0, static_cast<size_t>(bytes));
  StreamTimer<Runtime> timer(device.runtime, device.stream, device.sizes.repeats);
  double down = 0.0, up = 0.0;
  Status status = timer.Seconds([&] { return device.runtime.CopyToDevice(memory.data(), pinned, bytes, device.stream); }, &down);
  if (status.ok()) {
    status = timer.Seconds([&] { return device.runtime.CopyToHost(pinned, memory.data(), bytes, device.stream); }, &up);
  }
  device.runtime.FreePinned(pinned);
  *to_device = static_cast<double>(bytes) / std::max(down, 1e-9);
  *to_host = static_cast<double>(bytes) / std::max(up, 1e-9);
  return status;
}

template <typename Runtime>
class MoveBench {
 public:
  MoveBench(const BenchDevice<Runtime>& device, int32_t dim)
      : device_(device), dim_(dim), runner_(device.sizes.threads, device.stream) {}

  Status Prepare() {
    backend_ = device_.make_backend();
    const int64_t slots = 4 * device_.sizes.moved_rows;
    return backend_->Allocate(slots, dim_, dim_);
  }

  /// Rates of the load and of the write-back of so many records, bytes per second.
  Status Run(int64_t records, double* load, double* write_back) {
    const DrawnIds drawn = DrawIds(4 * records, 4 * device_.sizes.moved_rows, false, 3);
    std::vector<Slot> slots(drawn.unique.begin(), drawn.unique.begin() + std::min<int64_t>(records, SizeOf(drawn)));
    const int64_t floats = static_cast<int64_t>(slots.size()) * 2 * dim_;
    std::vector<float> from(static_cast<size_t>(floats)), back(from.size());
    for (int64_t i = 0; i < floats; ++i)
      from[static_cast<size_t>(i)] = PatternValue(slots[static_cast<size_t>(i / (2 * dim_))], i % (2 * dim_));
    std::vector<double> loads, write_backs;
    for (int i = -2; i < device_.sizes.repeats; ++i) {
      const double begin = WallSeconds();
      HVD_CTR_RETURN_IF_ERROR(backend_->StoreRecords(slots, from.data(), &runner_));
      HVD_CTR_RETURN_IF_ERROR(WaitForLoads(slots[0]));
      const double loaded = WallSeconds();
      HVD_CTR_RETURN_IF_ERROR(backend_->FetchRecords(slots, back.data(), &runner_));
      const double done = WallSeconds();
      if (i < 0) continue;
      loads.push_back(loaded - begin);
      write_backs.push_back(done - loaded);
    }
    if (std::memcmp(from.data(), back.data(), from.size() * sizeof(float)) != 0) {
      return MakeStatus(StatusCode::kInternal, "MISMATCH: records of dim ", dim_, " did not come back as they were loaded");
    }
    const double bytes = static_cast<double>(floats) * sizeof(float);
    *load = bytes / std::max(Median(loads), 1e-9);
    *write_back = bytes / std::max(Median(write_backs), 1e-9);
    return Status::Ok();
  }

 private:
  static int64_t SizeOf(const DrawnIds& drawn) { return static_cast<int64_t>(drawn.unique.size()); }

  /// What computes waits for the loads before it.
  Status WaitForLoads(Slot slot) {
    if (row_.size() == 0) HVD_CTR_RETURN_IF_ERROR(row_.Allocate(dim_));
    HVD_CTR_RETURN_IF_ERROR(backend_->GatherRows(Span<const Slot>(&slot, 1), row_.data(), &runner_));
    return device_.runtime.Synchronize(device_.stream);
  }

  const BenchDevice<Runtime>& device_;
  const int32_t dim_;
  BenchRunner runner_;
  std::unique_ptr<DeviceBackend> backend_;
  DeviceArray<float, Runtime> row_{device_.runtime};
};

template <typename Runtime>
Status TimeMoves(const BenchDevice<Runtime>& device, Report* report) {
  double to_device = 0.0, to_host = 0.0;
  HVD_CTR_RETURN_IF_ERROR(MeasureBus(device, &to_device, &to_host));
  const bool timed = device.sizes.timed;
  if (timed) {
    report->facts.push_back({"copy between pinned memory and device", Cell(to_device * 1e-9, 1).text + " GB/s to the device, " +
                                                                          Cell(to_host * 1e-9, 1).text + " GB/s from it"});
  }
  Table table;
  table.title = "Loads and write-backs of the rows (with Adagrad's state) that a batch of " +
                std::to_string(device.sizes.moved_rows) + " working rows misses: GB/s, and % of the copy's of pinned memory.";
  table.columns = {"dim", "hit rate %", "records", "load"};
  if (timed) table.columns.push_back("%");
  table.columns.push_back("write-back");
  if (timed) table.columns.push_back("%");
  for (const int32_t dim : device.sizes.dims) {
    MoveBench<Runtime> bench(device, dim);
    HVD_CTR_RETURN_IF_ERROR(bench.Prepare());
    for (const int hit_percent : {99, 95, 80}) {
      const int64_t records = std::max<int64_t>(1, device.sizes.moved_rows * (100 - hit_percent) / 100);
      double load = 0.0, write_back = 0.0;
      HVD_CTR_RETURN_IF_ERROR(bench.Run(records, &load, &write_back));
      std::vector<Cell> row = {int64_t{dim}, int64_t{hit_percent}, records};
      for (const auto& [rate, bus] : {std::pair(load, to_device), std::pair(write_back, to_host)}) {
        row.push_back(timed ? Cell(rate * 1e-9, 1) : Cell("ran"));
        if (timed) row.push_back(Cell(100.0 * rate / bus, 0));
      }
      table.rows.push_back(std::move(row));
    }
  }
  report->tables.push_back(std::move(table));
  return Status::Ok();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_MOVE_TIMINGS_H_
