#include "tf_ops/cpu/record_kernels.h"

#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {
namespace {

HVD_CTR_SIMD_BODY void PrefetchSlot(const Records& records, Span<const Slot> slots, int64_t i, int64_t floats) {
  if (i < slots.size() && slots[i] != kNoSlot) PrefetchRecord(records.at(slots[i]), floats);
}

/// kFloats 0: the width is `floats`.
template <int32_t kFloats>
HVD_CTR_SIMD_BODY void ReadWidth(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
  if (kFloats > 0) floats = kFloats;
  for (int64_t i = 0; i < slots.size(); ++i) {
    PrefetchSlot(records, slots, i + kPrefetchRows, floats);
    if (slots[i] == kNoSlot) {
      ZeroRow(floats, out + i * floats);
    } else {
      CopyRow(records.at(slots[i]), floats, out + i * floats);
    }
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void ReadRangeBody(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
  switch (floats) {
    case 16:
      return ReadWidth<16>(records, slots, floats, out);
    case 32:
      return ReadWidth<32>(records, slots, floats, out);
    case 64:
      return ReadWidth<64>(records, slots, floats, out);
    case 128:
      return ReadWidth<128>(records, slots, floats, out);
    default:
      return ReadWidth<0>(records, slots, floats, out);
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void WriteRangeBody(const Records& records, Span<const Slot> slots, const float* from) {
  const int64_t floats = records.record_floats;
  for (int64_t i = 0; i < slots.size(); ++i) {
    PrefetchSlot(records, slots, i + kPrefetchRows, floats);
    if (slots[i] != kNoSlot) CopyRow(from + i * floats, floats, records.at(slots[i]));
  }
}

/// kDim 0: the width is that of the records.
template <int32_t kDim>
HVD_CTR_SIMD_BODY void WriteFirstWidth(const Records& records, Span<const Slot> slots, const Key* keys, const RowInit* tables) {
  const int32_t dim = kDim > 0 ? kDim : records.dim;
  for (int64_t i = 0; i < slots.size(); ++i) {
    PrefetchSlot(records, slots, i + kPrefetchRows, records.record_floats);
    if (slots[i] == kNoSlot) continue;
    InitialRecordOf(tables[keys[i].table], keys[i].id, dim, records.record_floats, records.at(slots[i]));
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void WriteFirstRangeBody(const Records& records, Span<const Slot> slots, const Key* keys,
                                           const RowInit* tables) {
  if (records.dim == 16) return WriteFirstWidth<16>(records, slots, keys, tables);
  WriteFirstWidth<0>(records, slots, keys, tables);
}

template <OptimizerKind kKind, int32_t kDim>
HVD_CTR_SIMD_BODY void UpdateWidth(const UpdateRun& run) {
  const Records records = *run.records;
  const RowUpdate update = *run.update;
  const Span<const Slot> slots(run.slots, run.n);
  const int32_t dim = kDim > 0 ? kDim : records.dim;
  for (int64_t k = 0; k < run.n; ++k) {
    PrefetchSlot(records, slots, k + kPrefetchRows, records.record_floats);
    if (slots[k] == kNoSlot) continue;
    float* record = records.at(slots[k]);
    UpdateRowOf<kKind>(update, run.gradients + k * dim, dim, record, record + dim);
  }
}

template <OptimizerKind kKind>
HVD_CTR_SIMD_BODY void UpdateTable(const UpdateRun& run) {
  switch (run.records->dim) {
    case 16:
      return UpdateWidth<kKind, 16>(run);
    case 64:
      return UpdateWidth<kKind, 64>(run);
    default:
      return UpdateWidth<kKind, 0>(run);
  }
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void UpdateSgdBody(const UpdateRun& run) {
  UpdateTable<OptimizerKind::kSgd>(run);
}
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void UpdateAdagradBody(const UpdateRun& run) {
  UpdateTable<OptimizerKind::kAdagrad>(run);
}
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void UpdateRowWiseAdagradBody(const UpdateRun& run) {
  UpdateTable<OptimizerKind::kRowWiseAdagrad>(run);
}
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void UpdateAdamBody(const UpdateRun& run) {
  UpdateTable<OptimizerKind::kAdam>(run);
}
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void UpdateFtrlBody(const UpdateRun& run) {
  UpdateTable<OptimizerKind::kFtrl>(run);
}

HVD_CTR_SIMD_KERNEL(void, ReadRange, (const Records& records, Span<const Slot> slots, int64_t floats, float* out),
                    (records, slots, floats, out))
HVD_CTR_SIMD_KERNEL(void, WriteRange, (const Records& records, Span<const Slot> slots, const float* from), (records, slots, from))
HVD_CTR_SIMD_KERNEL(void, WriteFirstRange,
                    (const Records& records, Span<const Slot> slots, const Key* keys, const RowInit* tables),
                    (records, slots, keys, tables))
HVD_CTR_SIMD_KERNEL(void, UpdateSgd, (const UpdateRun& run), (run))
HVD_CTR_SIMD_KERNEL(void, UpdateAdagrad, (const UpdateRun& run), (run))
HVD_CTR_SIMD_KERNEL(void, UpdateRowWiseAdagrad, (const UpdateRun& run), (run))
HVD_CTR_SIMD_KERNEL(void, UpdateAdam, (const UpdateRun& run), (run))
HVD_CTR_SIMD_KERNEL(void, UpdateFtrl, (const UpdateRun& run), (run))

}  // namespace

void ReadRecords(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
  ReadRange(records, slots, floats, out);
}

void WriteRecords(const Records& records, Span<const Slot> slots, const float* from) { WriteRange(records, slots, from); }

void WriteFirstRecords(const Records& records, Span<const Slot> slots, const Key* keys, Span<const RowInit> tables) {
  WriteFirstRange(records, slots, keys, tables.data());
}

void UpdateRecords(OptimizerKind kind, const UpdateRun& run) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return UpdateSgd(run);
    case OptimizerKind::kAdagrad:
      return UpdateAdagrad(run);
    case OptimizerKind::kRowWiseAdagrad:
      return UpdateRowWiseAdagrad(run);
    case OptimizerKind::kAdam:
      return UpdateAdam(run);
    case OptimizerKind::kFtrl:
      return UpdateFtrl(run);
  }
}

}  // namespace hvd_ctr
