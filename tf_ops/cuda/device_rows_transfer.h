// DeviceRows: its memory, and calls on the stream of its own. Included by device_rows.h alone.
#ifndef HVD_CTR_CUDA_DEVICE_ROWS_TRANSFER_H_
#define HVD_CTR_CUDA_DEVICE_ROWS_TRANSFER_H_

#include "tf_ops/cuda/device_rows.h"

namespace hvd_ctr {

template <typename Runtime>
DeviceRows<Runtime>::~DeviceRows() {
  (void)runtime_.Use().ok();
  // The callers' streams may be gone by now; what was on them is before computed_.
  if (computed_.handle != nullptr) (void)runtime_.Synchronize(computed_).ok();
  for (const Stream stream : {transfer_, uploads_}) {
    if (stream != nullptr) (void)runtime_.Synchronize(stream).ok();
  }
  compute_staging_.Destroy(runtime_);
  transfer_staging_.Destroy(runtime_);
  for (void* memory : {static_cast<void*>(arena_.data), workspace_.data, update_scratch_.data}) runtime_.Free(memory);
  for (const Event event : {loaded_, computed_}) runtime_.DestroyEvent(event);
  for (const Stream stream : {transfer_, uploads_}) runtime_.DestroyStream(stream);
}

template <typename Runtime>
Status DeviceRows<Runtime>::Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) {
  HVD_CTR_RETURN_IF_ERROR(checks_.Allocate(slots, dim, state_floats));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Bind());
  const RecordLayout layout = MakeRecordLayout(row_type, dim, state_floats);
  int64_t bytes = 0;
  if (__builtin_mul_overflow(slots, layout.stride, &bytes)) bytes = std::numeric_limits<int64_t>::max();
  void* memory = nullptr;
  const Status allocated = runtime_.Allocate(bytes, &memory);
  if (!allocated.ok()) {
    return MakeStatus(allocated.code(), name_, "::Allocate: no memory for ", slots, " slots of ", layout.stride,
                      " bytes: ", allocated.message(), "; lower cache.slots");
  }
  arena_ = {static_cast<uint8_t*>(memory), layout, row_type};
  bytes_ = bytes;
  HVD_CTR_RETURN_IF_ERROR(runtime_.NewStream(&uploads_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.NewStream(&transfer_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.NewEvent(&loaded_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.NewEvent(&computed_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Zero(memory, bytes, transfer_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Record(loaded_, transfer_));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Synchronize(transfer_));
  checks_.Allocated(slots, dim, state_floats);
  return Status::Ok();
}

template <typename Runtime>
Status DeviceRows<Runtime>::BeginMoves() {
  HVD_CTR_RETURN_IF_ERROR(checks_.CalledAfterAllocate("BeginMoves"));
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  std::lock_guard<std::mutex> lock(transfer_mutex_);
  HVD_CTR_RETURN_IF_ERROR(runtime_.Wait(transfer_, computed_));
  moving_ = true;
  moved_ = false;
  return Status::Ok();
}

template <typename Runtime>
Status DeviceRows<Runtime>::EndMoves() {
  std::lock_guard<std::mutex> lock(transfer_mutex_);
  const bool moved = moving_ && moved_;
  moving_ = false;
  if (!moved) return Status::Ok();
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  return runtime_.Record(loaded_, transfer_);
}

template <typename Runtime>
template <typename Fill, typename Enqueue>
Status DeviceRows<Runtime>::Load(int64_t pinned_bytes, int64_t device_bytes, const Fill& fill, const Enqueue& enqueue) {
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  StagingBlock* block = nullptr;
  HVD_CTR_RETURN_IF_ERROR(transfer_staging_.Take(runtime_, pinned_bytes, device_bytes, &block));
  const StagedLoad staged = fill(block->pinned.data);
  Status status;
  if (staged.records > 0) {
    std::lock_guard<std::mutex> lock(transfer_mutex_);
    status = runtime_.CopyToDevice(block->device.data, block->pinned.data, staged.bytes, transfer_);
    if (status.ok()) status = JoinTransfer();
    if (status.ok()) status = enqueue(block->device.data, staged.records);
    moved_ = true;
    if (status.ok() && !moving_) status = runtime_.Record(loaded_, transfer_);
  }
  return transfer_staging_.GiveBack(runtime_, block, transfer_, status);
}

template <typename Runtime>
Status DeviceRows<Runtime>::StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(checks_.Slots("StoreRecords", slots));
  return ForParts(slots, [&](Span<const Slot> part, int64_t begin) {
    return StorePart(part, records + begin * arena_.layout.record_floats, runner);
  });
}

template <typename Runtime>
Status DeviceRows<Runtime>::StorePart(Span<const Slot> slots, const float* records, TaskRunner* runner) {
  constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float);
  StagingParts parts;
  const int64_t at_slots = parts.Add(slots.size() * kInt);
  const int64_t at_records = parts.Add(slots.size() * packed_floats() * kFloat);
  const int64_t device_bytes = parts.bytes();
  const int64_t at_sources = parts.Add(slots.size() * kInt);  // Not for the device.
  const int64_t floats = arena_.layout.record_floats;
  return Load(
      parts.bytes(), device_bytes,
      [&](void* pinned) -> StagedLoad {
        const int32_t* const sources = PartAt<int32_t>(pinned, at_sources);
        float* const packed = PartAt<float>(pinned, at_records);
        const int64_t n = UsedSlots(slots, PartAt<Slot>(pinned, at_slots), PartAt<int32_t>(pinned, at_sources));
        runner->Run(n, kRowGrain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            std::memcpy(packed + i * packed_floats(), records + sources[i] * floats, static_cast<size_t>(floats * kFloat));
          }
        });
        return {n, at_records + n * packed_floats() * kFloat};
      },
      [&](const void* device, int64_t n) {
        return LaunchMove<true>(runtime_, arena_, PartAt<const Slot>(device, at_slots), n, PartAt<float>(device, at_records),
                                transfer_);
      });
}

template <typename Runtime>
Status DeviceRows<Runtime>::StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init,
                                              TaskRunner* /*runner*/) {
  HVD_CTR_RETURN_IF_ERROR(checks_.FirstRecords(slots, keys, init.tables.size(), init.dim, init.record_floats));
  return ForParts(slots,
                  [&](Span<const Slot> part, int64_t begin) { return StoreFirstPart(part, keys.data() + begin, init.tables); });
}

template <typename Runtime>
Status DeviceRows<Runtime>::StoreFirstPart(Span<const Slot> slots, const Key* keys, Span<const RowInit> tables) {
  StagingParts parts;
  const int64_t table_bytes = tables.size() * static_cast<int64_t>(sizeof(RowInit));
  const int64_t at_tables = parts.Add(table_bytes);
  const int64_t at_slots = parts.Add(slots.size() * static_cast<int64_t>(sizeof(Slot)));
  const int64_t at_keys = parts.Add(slots.size() * static_cast<int64_t>(sizeof(Key)));
  return Load(
      parts.bytes(), parts.bytes(),
      [&](void* pinned) -> StagedLoad {
        std::memcpy(PartAt<RowInit>(pinned, at_tables), tables.data(), static_cast<size_t>(table_bytes));
        Slot* const staged_slots = PartAt<Slot>(pinned, at_slots);
        Key* const staged_keys = PartAt<Key>(pinned, at_keys);
        int64_t n = 0;
        for (int64_t i = 0; i < slots.size(); ++i) {
          if (slots[i] == kNoSlot) continue;
          staged_slots[n] = slots[i];
          std::memcpy(staged_keys + n++, keys + i, sizeof(Key));
        }
        return {n, at_keys + n * static_cast<int64_t>(sizeof(Key))};
      },
      [&](const void* device, int64_t n) {
        return LaunchFirst(runtime_, arena_, PartAt<const Slot>(device, at_slots), n, PartAt<const Key>(device, at_keys),
                           PartAt<const RowInit>(device, at_tables), transfer_);
      });
}

template <typename Runtime>
Status DeviceRows<Runtime>::FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const {
  HVD_CTR_RETURN_IF_ERROR(checks_.Slots("FetchRecords", slots));
  return ForParts(slots, [&](Span<const Slot> part, int64_t begin) {
    return FetchPart(part, records + begin * arena_.layout.record_floats, runner);
  });
}

template <typename Runtime>
Status DeviceRows<Runtime>::FetchPart(Span<const Slot> slots, float* records, TaskRunner* runner) const {
  constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float);
  StagingParts parts;
  const int64_t at_slots = parts.Add(slots.size() * kInt);
  const int64_t at_records = parts.Add(slots.size() * packed_floats() * kFloat);
  const int64_t device_bytes = parts.bytes();
  const int64_t at_sources = parts.Add(slots.size() * kInt);
  HVD_CTR_RETURN_IF_ERROR(runtime_.Use());
  StagingBlock* block = nullptr;
  HVD_CTR_RETURN_IF_ERROR(transfer_staging_.Take(runtime_, parts.bytes(), device_bytes, &block));
  void* const pinned = block->pinned.data;
  const int32_t* const sources = PartAt<int32_t>(pinned, at_sources);
  float* const packed = PartAt<float>(pinned, at_records);
  const int64_t n = UsedSlots(slots, PartAt<Slot>(pinned, at_slots), PartAt<int32_t>(pinned, at_sources));
  Status status;
  if (n > 0) {
    std::lock_guard<std::mutex> lock(transfer_mutex_);
    status = runtime_.CopyToDevice(block->device.data, pinned, n * kInt, transfer_);
    float* const gathered = PartAt<float>(block->device.data, at_records);
    if (status.ok()) status = JoinTransfer();
    if (status.ok()) {
      status = LaunchMove<false>(runtime_, arena_, PartAt<const Slot>(block->device.data, at_slots), n, gathered, transfer_);
    }
    if (status.ok()) status = runtime_.CopyToHost(packed, gathered, n * packed_floats() * kFloat, transfer_);
    if (status.ok()) status = runtime_.Record(block->done, transfer_);
  }
  if (status.ok()) status = runtime_.Synchronize(block->done);
  if (status.ok()) {
    const int64_t floats = arena_.layout.record_floats;
    if (n < slots.size()) std::fill(records, records + slots.size() * floats, 0.0f);
    runner->Run(n, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(records + sources[i] * floats, packed + i * packed_floats(), static_cast<size_t>(floats * kFloat));
      }
    });
  }
  return transfer_staging_.GiveBack(runtime_, block, transfer_, status);
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_DEVICE_ROWS_TRANSFER_H_
