// Times of the row and pooling kernels, and that they did what they should on what was timed.
//
// Rates count what must be moved: each row read and written once per use, and the integers that say which. Rows that are read
// again come from a cache, so rates above the copy's are possible with skewed ids.
#ifndef HVD_CTR_CUDA_CHECK_KERNEL_TIMINGS_H_
#define HVD_CTR_CUDA_CHECK_KERNEL_TIMINGS_H_

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tf_ops/cuda/bag_segments.h"
#include "tf_ops/cuda/check/bench_device.h"
#include "tf_ops/cuda/check/report.h"
#include "tf_ops/cuda/pool_kernels.h"
#include "tf_ops/cuda/row_launches.h"
#include "tf_ops/cuda/update_runs.h"

namespace hvd_ctr {

/// Bytes per second, counted as read plus written.
template <typename Runtime>
Status MeasureCopy(const BenchDevice<Runtime>& device, double* rate) {
  const int64_t floats = device.sizes.copy_bytes / static_cast<int64_t>(sizeof(float));
  DeviceArray<float, Runtime> from(device.runtime), to(device.runtime);
  HVD_CTR_RETURN_IF_ERROR(from.Allocate(floats));
  HVD_CTR_RETURN_IF_ERROR(to.Allocate(floats));
  HVD_CTR_RETURN_IF_ERROR(device.runtime.Zero(from.data(), device.sizes.copy_bytes, device.stream));
  StreamTimer<Runtime> timer(device.runtime, device.stream, device.sizes.repeats);
  double seconds = 0.0;
  HVD_CTR_RETURN_IF_ERROR(timer.Seconds(
      [&] { return device.runtime.CopyOnDevice(to.data(), from.data(), device.sizes.copy_bytes, device.stream); }, &seconds));
  *rate = 2.0 * static_cast<double>(device.sizes.copy_bytes) / seconds;
  return Status::Ok();
}

/// One dim, row type and skew.
template <typename Runtime>
class KernelBench {
 public:
  KernelBench(const BenchDevice<Runtime>& device, int32_t dim, RowType row_type, double copy_rate)
      : device_(device), dim_(dim), copy_rate_(copy_rate), timer_(device.runtime, device.stream, device.sizes.repeats) {
    arena_.row_type = row_type;
    arena_.layout = MakeRecordLayout(row_type, dim, dim);
  }

  Status Prepare(bool power_law) {
    const CheckSizes& sizes = device_.sizes;
    records_ = std::max<int64_t>(sizes.ids / 2, sizes.arena_bytes / arena_.layout.stride);
    drawn_ = DrawIds(sizes.ids, records_, power_law, 7);
    std::vector<Slot> slots;
    for (const int32_t k : drawn_.inverse) slots.push_back(drawn_.unique[static_cast<size_t>(k)]);
    HVD_CTR_RETURN_IF_ERROR(slots_.Upload(slots, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(unique_.Upload(drawn_.unique, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(inverse_.Upload(drawn_.inverse, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(rows_.Allocate(n() * dim_));
    HVD_CTR_RETURN_IF_ERROR(unique_rows_.Allocate(u() * dim_));
    HVD_CTR_RETURN_IF_ERROR(gradients_.Allocate(n() * dim_));
    HVD_CTR_RETURN_IF_ERROR(PrepareSegments());
    HVD_CTR_RETURN_IF_ERROR(PrepareUpdate());
    return FillArena();
  }

  /// Cells: rates and their fractions of the copy's.
  Status Run(std::vector<Cell>* cells) {
    const double row = static_cast<double>(dim_) * RowElementBytes(arena_.row_type), wide = static_cast<double>(dim_) * 4.0;
    const double n_ids = static_cast<double>(n()), n_unique = static_cast<double>(u());
    HVD_CTR_RETURN_IF_ERROR(Rate([&] { return Gather(slots_, rows_.data()); }, n_ids * (4.0 + row + wide), cells));
    HVD_CTR_RETURN_IF_ERROR(CheckRows("gather", rows_));
    HVD_CTR_RETURN_IF_ERROR(Gather(unique_, unique_rows_.data()));
    HVD_CTR_RETURN_IF_ERROR(device_.runtime.Zero(rows_.data(), n() * dim_ * 4, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(Rate([&] { return Pool(); }, n_ids * (4.0 + 2.0 * wide), cells));
    HVD_CTR_RETURN_IF_ERROR(CheckRows("pool", rows_));
    const auto both = [&] {
      HVD_CTR_RETURN_IF_ERROR(Gather(unique_, unique_rows_.data()));
      return Pool();
    };
    HVD_CTR_RETURN_IF_ERROR(Rate(both, n_unique * (4.0 + row + wide) + n_ids * (4.0 + 2.0 * wide), cells));
    HVD_CTR_RETURN_IF_ERROR(Fill(gradients_.data(), n(), dim_, 1.0f));
    const auto sum = [&] {
      return LaunchSumSegments(device_.runtime, {starts_.data(), order_.data(), u()}, gradients_.data(), dim_,
                               unique_rows_.data(), device_.stream);
    };
    HVD_CTR_RETURN_IF_ERROR(Rate(sum, n_ids * (4.0 + wide) + n_unique * (4.0 + wide), cells));
    HVD_CTR_RETURN_IF_ERROR(CheckCounts());
    const auto update = [&] { return LaunchUpdate(device_.runtime, arena_, request_, device_.stream); };
    return Rate(update, n_unique * (4.0 + wide + 2.0 * (row + wide)), cells);
  }

  int64_t u() const { return static_cast<int64_t>(drawn_.unique.size()); }
  /// Of the copy's rate, of the last Run: gather, ..., update.
  const std::vector<double>& fractions() const { return fractions_; }

 private:
  int64_t n() const { return static_cast<int64_t>(drawn_.inverse.size()); }

  Status FillArena() {
    // Through the packed form, in parts: the records of a slot are its pattern.
    HVD_CTR_RETURN_IF_ERROR(arena_memory_.Allocate(records_ * arena_.layout.stride));
    arena_.data = arena_memory_.data();
    const int64_t part = std::min<int64_t>(records_, 1 << 18), columns = arena_.layout.packed_stride();
    DeviceArray<float, Runtime> packed(device_.runtime);
    DeviceArray<Slot, Runtime> part_slots(device_.runtime);
    HVD_CTR_RETURN_IF_ERROR(packed.Allocate(part * columns));
    for (int64_t first = 0; first < records_; first += part) {
      std::vector<Slot> slots(static_cast<size_t>(std::min(part, records_ - first)));
      std::iota(slots.begin(), slots.end(), static_cast<Slot>(first));
      HVD_CTR_RETURN_IF_ERROR(part_slots.Upload(slots, device_.stream));
      const RowLayout layout = MakeRowLayout(part_slots.size(), static_cast<int32_t>(columns));
      const PatternKernel kernel{layout, part_slots.data(), packed.data(), -1.0f};
      HVD_CTR_RETURN_IF_ERROR(device_.runtime.Launch("pattern", layout.geometry(), kernel, device_.stream));
      HVD_CTR_RETURN_IF_ERROR(
          LaunchMove<true>(device_.runtime, arena_, part_slots.data(), part_slots.size(), packed.data(), device_.stream));
      HVD_CTR_RETURN_IF_ERROR(device_.runtime.Synchronize(device_.stream));
    }
    return Status::Ok();
  }

  Status PrepareSegments() {
    Bags bags;
    bags.virtual_ids = Span<const int32_t>(drawn_.inverse);
    std::vector<int32_t> starts(static_cast<size_t>(u() + 1)), order(drawn_.inverse.size());
    SortByVirtualId(bags, u(), {starts.data(), order.data(), nullptr});
    HVD_CTR_RETURN_IF_ERROR(starts_.Upload(starts, device_.stream));
    return order_.Upload(order, device_.stream);
  }

  Status PrepareUpdate() {
    const std::vector<RowOptimizerOptions> optimizers(1);  // Adagrad.
    const std::vector<int32_t> tables(drawn_.unique.size(), 0);
    std::vector<int32_t> run_starts(1), run_tables(1);
    std::vector<TableUpdate> updates(1);
    request_.rows = u();
    request_.runs = CountRuns(tables);
    FillRuns(tables, optimizers, run_starts.data(), run_tables.data(), &request_);
    FillUpdates(optimizers, 1, 1.0f, updates.data());
    HVD_CTR_RETURN_IF_ERROR(run_starts_.Upload(run_starts, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(run_tables_.Upload(run_tables, device_.stream));
    HVD_CTR_RETURN_IF_ERROR(updates_.Upload(updates, device_.stream));
    request_.slots = unique_.data();
    request_.gradients = gradients_.data();
    request_.run_starts = run_starts_.data();
    request_.run_tables = run_tables_.data();
    request_.updates = updates_.data();
    return Status::Ok();
  }

  Status Fill(float* to, int64_t rows, int32_t columns, float constant) const {
    const RowLayout layout = MakeRowLayout(rows, columns);
    return device_.runtime.Launch("fill", layout.geometry(), PatternKernel{layout, nullptr, to, constant}, device_.stream);
  }

  Status Gather(const DeviceArray<int32_t, Runtime>& slots, float* rows) const {
    return LaunchGather(device_.runtime, arena_, slots.data(), slots.size(), rows, device_.stream);
  }

  /// One id per bag, as most features are.
  Status Pool() const {
    const RowLayout layout = MakeRowLayout(n(), dim_ / kPieceFloats, kCopyBags);
    const CopyBagsKernel<kPieceFloats> kernel{layout, inverse_.data(), unique_rows_.data(), dim_, rows_.data(), BagPlaces(dim_)};
    return device_.runtime.Launch("pool", layout.geometry(), kernel, device_.stream);
  }

  template <typename Work>
  Status Rate(const Work& work, double bytes, std::vector<Cell>* cells) {
    double seconds = 0.0;
    HVD_CTR_RETURN_IF_ERROR(timer_.Seconds(work, &seconds));
    fractions_.push_back(bytes / seconds / copy_rate_);
    if (!device_.sizes.timed) {
      cells->push_back("ran");
      return Status::Ok();
    }
    cells->push_back(Cell(bytes / seconds * 1e-9, 0));
    cells->push_back(Cell(100.0 * fractions_.back(), 0));
    return Status::Ok();
  }

  /// The first and the last rows are the patterns of their slots.
  Status CheckRows(const char* what, const DeviceArray<float, Runtime>& rows) const {
    const int64_t count = std::min<int64_t>(n(), 1000);
    for (const int64_t first : {int64_t{0}, n() - count}) {
      std::vector<float> values;
      HVD_CTR_RETURN_IF_ERROR(rows.Download(first * dim_, count * dim_, &values, device_.stream));
      for (int64_t i = 0; i < count * dim_; ++i) {
        const auto k = static_cast<size_t>(drawn_.inverse[static_cast<size_t>(first + i / dim_)]);
        const float wanted = PatternValue(drawn_.unique[k], i % dim_);
        if (values[static_cast<size_t>(i)] != wanted)
          return Wrong(what, first + i / dim_, values[static_cast<size_t>(i)], wanted);
      }
    }
    return Status::Ok();
  }

  /// Gradients of 1 sum to the number of occurrences.
  Status CheckCounts() const {
    std::vector<float> counts(drawn_.unique.size(), 0.0f), values;
    for (const int32_t k : drawn_.inverse) ++counts[static_cast<size_t>(k)];
    HVD_CTR_RETURN_IF_ERROR(unique_rows_.Download(0, u() * dim_, &values, device_.stream));
    for (int64_t i = 0; i < u() * dim_; ++i) {
      const float wanted = counts[static_cast<size_t>(i / dim_)];
      if (values[static_cast<size_t>(i)] != wanted) return Wrong("segment sum", i / dim_, values[static_cast<size_t>(i)], wanted);
    }
    return Status::Ok();
  }

  Status Wrong(const char* what, int64_t row, float value, float wanted) const {
    return MakeStatus(StatusCode::kInternal, "MISMATCH: ", what, " at dim ", dim_, ", ", RowTypeName(arena_.row_type), ", row ",
                      row, ": ", value, ", expected ", wanted);
  }

  const BenchDevice<Runtime>& device_;
  const int32_t dim_;
  const double copy_rate_;
  StreamTimer<Runtime> timer_;
  RecordArena arena_;
  int64_t records_ = 0;
  DrawnIds drawn_;
  UpdateRequest request_;
  std::vector<double> fractions_;
  DeviceArray<uint8_t, Runtime> arena_memory_{device_.runtime};
  DeviceArray<int32_t, Runtime> slots_{device_.runtime}, unique_{device_.runtime}, inverse_{device_.runtime};
  DeviceArray<int32_t, Runtime> starts_{device_.runtime}, order_{device_.runtime};
  DeviceArray<int32_t, Runtime> run_starts_{device_.runtime}, run_tables_{device_.runtime};
  DeviceArray<TableUpdate, Runtime> updates_{device_.runtime};
  DeviceArray<float, Runtime> rows_{device_.runtime}, unique_rows_{device_.runtime}, gradients_{device_.runtime};
};

template <typename Runtime>
Status TimeKernels(const BenchDevice<Runtime>& device, Report* report) {
  double copy_rate = 0.0;
  HVD_CTR_RETURN_IF_ERROR(MeasureCopy(device, &copy_rate));
  if (device.sizes.timed) {
    report->facts.push_back({"copy from device to device", Cell(copy_rate * 1e-9, 0).text + " GB/s, read plus written"});
  }
  Table table;
  table.title = "Kernels on " + std::to_string(device.sizes.ids) +
                " ids: GB/s, and % of the copy's. Unique rows are pooled and updated (Adagrad); ids are drawn uniformly, or by a "
                "power law of exponent 1.1.";
  table.columns = {"rows", "dim", "ids drawn", "unique"};
  for (const char* name : {"gather", "pool", "gather + pool", "segment sum", "update"}) {
    table.columns.push_back(name);
    if (device.sizes.timed) table.columns.push_back("%");
  }
  for (const RowType row_type : {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16}) {
    for (const int32_t dim : device.sizes.dims) {
      if (row_type != RowType::kFloat32 && dim != 64) continue;
      for (const bool power_law : {false, true}) {
        KernelBench<Runtime> bench(device, dim, row_type, copy_rate);
        HVD_CTR_RETURN_IF_ERROR(bench.Prepare(power_law));
        std::vector<Cell> row = {RowTypeName(row_type), int64_t{dim}, power_law ? "power law" : "uniform", bench.u()};
        HVD_CTR_RETURN_IF_ERROR(bench.Run(&row));
        table.rows.push_back(std::move(row));
        if (power_law || row_type != RowType::kFloat32 || !device.sizes.timed || (dim > 16 && dim < 64)) continue;
        const double goal = dim == 16 ? 0.6 : 0.8, gather = bench.fractions().front(), update = bench.fractions().back();
        report->goals.push_back("goal at dim " + std::to_string(dim) + ", uniform: gather and update at least " +
                                Cell(100.0 * goal, 0).text +
                                " % of the copy's rate: " + (std::min(gather, update) >= goal ? "met" : "NOT met"));
      }
    }
  }
  report->tables.push_back(std::move(table));
  return Status::Ok();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_KERNEL_TIMINGS_H_
