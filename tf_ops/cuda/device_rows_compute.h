// DeviceRows: calls on the caller's stream. Included by device_rows.h alone.
#ifndef HVD_CTR_CUDA_DEVICE_ROWS_COMPUTE_H_
#define HVD_CTR_CUDA_DEVICE_ROWS_COMPUTE_H_

#include "tf_ops/cuda/device_rows.h"
#include "tf_ops/cuda/update_runs.h"

namespace hvd_ctr {

template <typename Runtime>
template <typename Fill, typename Enqueue>
Status DeviceRows<Runtime>::Compute(int64_t bytes, TaskRunner* runner, const Fill& fill, const Enqueue& enqueue) const {
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  StagingBlock* block = nullptr;
  HVD_CTR_RETURN_IF_ERROR(compute_staging_.Take(runtime_, bytes, bytes, &block));
  fill(block->pinned.data);
  const Stream stream = runner->stream();
  Status status;
  {
    std::lock_guard<std::mutex> lock(compute_mutex_);
    status = Upload(block, bytes, stream);
    if (status.ok()) status = JoinCompute(stream);
    if (status.ok()) {
      status = enqueue(block->device.data, stream);
      // Also after an error: some of it may be on the stream. Before that the stream need not wait for the call before, for which
      // computed_ stands until now.
      const Status recorded = runtime_.Record(computed_, stream);
      if (status.ok()) status = recorded;
    }
  }
  return compute_staging_.GiveBack(runtime_, block, stream, status);
}

template <typename Runtime>
Status DeviceRows<Runtime>::Upload(StagingBlock* block, int64_t bytes, Stream stream) const {
  if (bytes == 0) return Status::Ok();
  HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToDevice(block->device.data, block->pinned.data, bytes, uploads_));
  Status status = runtime_.Record(block->uploaded, uploads_);
  if (status.ok()) status = runtime_.Wait(stream, block->uploaded);
  if (!status.ok()) (void)runtime_.Synchronize(uploads_).ok();
  return status;
}

template <typename Runtime>
Status DeviceRows<Runtime>::JoinCompute(Stream stream) const {
  if (stream != last_stream_) HVD_CTR_RETURN_IF_ERROR(runtime_.Wait(stream, computed_));
  last_stream_ = stream;
  return runtime_.Wait(stream, loaded_);
}

template <typename Runtime>
Status DeviceRows<Runtime>::GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const {
  HVD_CTR_RETURN_IF_ERROR(checks_.Slots("GatherRows", slots));
  if (slots.empty()) return Status::Ok();
  const int64_t bytes = slots.size() * static_cast<int64_t>(sizeof(Slot));
  return Compute(
      bytes, runner, [&](void* pinned) { std::memcpy(pinned, slots.data(), static_cast<size_t>(bytes)); },
      [&](const void* device, Stream stream) {
        return LaunchGather(runtime_, arena_, static_cast<const Slot*>(device), slots.size(), rows, stream);
      });
}

template <typename Runtime>
Status DeviceRows<Runtime>::SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                                       TaskRunner* runner) const {
  HVD_CTR_RETURN_IF_ERROR(checks_.Inverse(inverse, unique));
  if (inverse.size() > std::numeric_limits<int32_t>::max()) {
    return MakeStatus(StatusCode::kInvalidArgument, name_, "::SegmentSum of ", inverse.size(),
                      " gradients; allowed are less than 2^31");
  }
  if (unique == 0) return Status::Ok();
  const int32_t dim = arena_.layout.dim;
  StagingParts parts;
  const int64_t at_positions = parts.Add(inverse.size() * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t at_starts = parts.Add((unique + 1) * static_cast<int64_t>(sizeof(int32_t)));
  const bool identity = IsIdentity(inverse, unique);
  SegmentOrder order = SegmentOrder::kIdentity;
  return Compute(
      identity ? 0 : parts.bytes(), runner,
      [&](void* pinned) {
        if (identity) return;
        order = MakeSegmentOrder(inverse, unique, PartAt<int32_t>(pinned, at_positions), PartAt<int32_t>(pinned, at_starts));
      },
      [&](const void* device, Stream stream) {
        const int32_t* const positions = identity ? nullptr : PartAt<const int32_t>(device, at_positions);
        if (order != SegmentOrder::kSegments) {
          return LaunchSumSingles(runtime_, positions, gradients, unique, dim, sums, stream);
        }
        return LaunchSumSegments(runtime_, {PartAt<const int32_t>(device, at_starts), positions, unique}, gradients, dim, sums,
                                 stream);
      });
}

template <typename Runtime>
Status DeviceRows<Runtime>::UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                                       Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                                       TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(checks_.Update(slots, tables, optimizers));
  const int64_t rows = slots.size();
  if (rows == 0) return Status::Ok();
  constexpr int64_t kInt = sizeof(int32_t);
  const int32_t runs = CountRuns(tables);
  StagingParts parts;
  const int64_t at_slots = parts.Add(rows * kInt);
  const int64_t at_starts = parts.Add(runs * kInt);
  const int64_t at_tables = parts.Add(runs * kInt);
  const int64_t at_updates = parts.Add(optimizers.size() * static_cast<int64_t>(sizeof(TableUpdate)));
  UpdateRequest request;
  request.gradients = gradients;
  request.rows = rows;
  request.runs = runs;
  return Compute(
      parts.bytes(), runner,
      [&](void* pinned) {
        std::memcpy(PartAt<Slot>(pinned, at_slots), slots.data(), static_cast<size_t>(rows * kInt));
        FillRuns(tables, optimizers, PartAt<int32_t>(pinned, at_starts), PartAt<int32_t>(pinned, at_tables), &request);
        FillUpdates(optimizers, step, learning_rate_scale, PartAt<TableUpdate>(pinned, at_updates));
      },
      [&](const void* device, Stream stream) {
        request.slots = PartAt<const Slot>(device, at_slots);
        request.run_starts = PartAt<const int32_t>(device, at_starts);
        request.run_tables = PartAt<const int32_t>(device, at_tables);
        request.updates = PartAt<const TableUpdate>(device, at_updates);
        HVD_CTR_RETURN_IF_ERROR(TakeUpdateScratch(&request));
        return LaunchUpdate(runtime_, arena_, request, stream);
      });
}

template <typename Runtime>
Status DeviceRows<Runtime>::TakeUpdateScratch(UpdateRequest* request) {
  if (!request->needs_row_values) return Status::Ok();
  constexpr int64_t kFloat = sizeof(float);
  const bool lanes = !request->ranges[static_cast<int32_t>(OptimizerKind::kRowWiseAdagrad)].empty();
  StagingParts parts;
  const int64_t at_values = parts.Add(request->rows * kFloat);
  const int64_t at_lanes = parts.Add(lanes ? request->rows * kRowSumLanes * kFloat : 0);
  HVD_CTR_RETURN_IF_ERROR(GrowOnDevice(runtime_, parts.bytes(), &update_scratch_));
  request->row_values = PartAt<float>(update_scratch_.data, at_values);
  request->lane_sums = PartAt<float>(update_scratch_.data, at_lanes);
  return Status::Ok();
}

template <typename Runtime>
Status DeviceRows<Runtime>::Workspace(int64_t floats, float** memory) {
  HVD_CTR_RETURN_IF_ERROR(checks_.CalledAfterAllocate("Workspace"));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  std::lock_guard<std::mutex> lock(compute_mutex_);
  HVD_CTR_RETURN_IF_ERROR(GrowOnDevice(runtime_, floats * static_cast<int64_t>(sizeof(float)), &workspace_));
  *memory = static_cast<float*>(workspace_.data);
  return Status::Ok();
}

template <typename Runtime>
Status DeviceRows<Runtime>::PlaceRows(Span<const int32_t> positions, const float* records, const RecordWidth& width, float* rows,
                                      TaskRunner* runner) const {
  if (positions.empty()) return Status::Ok();
  const size_t row_bytes = static_cast<size_t>(width.dim) * sizeof(float);
  StagingParts parts;
  const int64_t at_positions = parts.Add(positions.size() * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t at_rows = parts.Add(positions.size() * static_cast<int64_t>(row_bytes));
  return Compute(
      parts.bytes(), runner,
      [&](void* pinned) {
        std::memcpy(PartAt<int32_t>(pinned, at_positions), positions.data(),
                    static_cast<size_t>(positions.size()) * sizeof(int32_t));
        float* const packed = PartAt<float>(pinned, at_rows);
        runner->Run(positions.size(), kRowGrain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            std::memcpy(packed + i * width.dim, records + i * width.record_floats, row_bytes);
          }
        });
      },
      [&](const void* device, Stream stream) {
        return LaunchPlace(runtime_, PartAt<const int32_t>(device, at_positions), positions.size(),
                           PartAt<const float>(device, at_rows), width.dim, rows, stream);
      });
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_DEVICE_ROWS_COMPUTE_H_
