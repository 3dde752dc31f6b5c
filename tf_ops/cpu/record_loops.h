// RecordLoops: the loops behind record_kernels.h for one type of rows. Each type is instantiated in a source file of its own.
//
// Float32 rows are updated where they are; narrower ones are widened into a scratch row, updated there, and rounded back.
#ifndef HVD_CTR_CPU_RECORD_LOOPS_H_
#define HVD_CTR_CPU_RECORD_LOOPS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/record_kernels.h"
#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {

/// Rows: Float32Rows, Float16Rows or Bfloat16Rows.
template <typename Rows>
class RecordLoops {
 public:
  /// See record_kernels.h.
  static void Read(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
    ReadRange(records, slots, floats, out);
  }
  static void Write(const Records& records, Span<const Slot> slots, const float* from) { WriteRange(records, slots, from); }
  static void WriteFirst(const FirstRun& run) { WriteFirstRange(run); }
  static void Update(OptimizerKind kind, const UpdateRun& run) {
    switch (kind) {
      case OptimizerKind::kSgd:
        return UpdateLoop<OptimizerKind::kSgd>::Range(run);
      case OptimizerKind::kAdagrad:
        return UpdateLoop<OptimizerKind::kAdagrad>::Range(run);
      case OptimizerKind::kRowWiseAdagrad:
        return UpdateLoop<OptimizerKind::kRowWiseAdagrad>::Range(run);
      case OptimizerKind::kAdam:
        return UpdateLoop<OptimizerKind::kAdam>::Range(run);
      case OptimizerKind::kFtrl:
        return UpdateLoop<OptimizerKind::kFtrl>::Range(run);
    }
  }

 private:
  using Element = typename Rows::Element;
  static constexpr bool kWide = std::is_same_v<Element, float>;

  HVD_CTR_SIMD_BODY static Element* RowAt(const Records& records, Slot slot) {
    return reinterpret_cast<Element*>(records.at(slot));
  }
  HVD_CTR_SIMD_BODY static float* StateAt(const Records& records, Slot slot) {
    return reinterpret_cast<float*>(records.at(slot) + records.state_offset);
  }

  HVD_CTR_SIMD_BODY static void WidenRow(const Element* __restrict__ from, int64_t n, float* __restrict__ to) {
    for (int64_t j = 0; j < n; ++j) to[j] = Rows::Widen(from[j]);
  }
  HVD_CTR_SIMD_BODY static void NarrowRow(const float* __restrict__ from, int64_t n, Element* __restrict__ to) {
    for (int64_t j = 0; j < n; ++j) to[j] = Rows::Narrow(from[j]);
  }

  /// floats: of the record in float32.
  HVD_CTR_SIMD_BODY static void PrefetchSlot(const Records& records, Span<const Slot> slots, int64_t i, int64_t floats) {
    if (i >= slots.size() || slots[i] == kNoSlot) return;
    // Narrow records seldom begin at a line, so that their ends lie in one line more.
    if (!kWide) floats = kLineFloats - 1 + (floats <= records.dim ? (floats + 1) / 2 : floats - records.dim / 2);
    PrefetchRecord(reinterpret_cast<const float*>(records.at(slots[i])), floats);
  }

  /// kFloats 0: the width is `floats`.
  template <int32_t kFloats>
  HVD_CTR_SIMD_BODY static void ReadWidth(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
    if (kFloats > 0) floats = kFloats;
    for (int64_t i = 0; i < slots.size(); ++i) {
      PrefetchSlot(records, slots, i + kPrefetchRows, floats);
      float* const to = out + i * floats;
      if (slots[i] == kNoSlot) {
        ZeroRow(floats, to);
      } else if constexpr (kWide) {
        CopyRow(RowAt(records, slots[i]), floats, to);
      } else if (kFloats > 0) {
        WidenRow(RowAt(records, slots[i]), floats, to);
      } else {
        WidenRow(RowAt(records, slots[i]), records.dim, to);
        CopyRow(StateAt(records, slots[i]), floats - records.dim, to + records.dim);
      }
    }
  }

  template <SimdLevel kLevel>
  HVD_CTR_SIMD_BODY static void ReadRangeBody(const Records& records, Span<const Slot> slots, int64_t floats, float* out) {
    if (!kWide && floats != records.dim) return ReadWidth<0>(records, slots, floats, out);
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
  HVD_CTR_SIMD_BODY static void WriteRangeBody(const Records& records, Span<const Slot> slots, const float* from) {
    const int64_t floats = records.record_floats;
    for (int64_t i = 0; i < slots.size(); ++i) {
      PrefetchSlot(records, slots, i + kPrefetchRows, floats);
      if (slots[i] == kNoSlot) continue;
      if constexpr (kWide) {
        CopyRow(from + i * floats, floats, RowAt(records, slots[i]));
      } else {
        NarrowRow(from + i * floats, records.dim, RowAt(records, slots[i]));
        CopyRow(from + i * floats + records.dim, floats - records.dim, StateAt(records, slots[i]));
      }
    }
  }

  /// kDim 0: the width is that of the records.
  template <int32_t kDim>
  HVD_CTR_SIMD_BODY static void WriteFirstWidth(const FirstRun& run) {
    const Records records = *run.records;
    const int32_t dim = kDim > 0 ? kDim : records.dim;
    for (int64_t i = 0; i < run.slots.size(); ++i) {
      PrefetchSlot(records, run.slots, i + kPrefetchRows, records.record_floats);
      if (run.slots[i] == kNoSlot) continue;
      const RowInit& init = run.tables[run.keys[i].table];
      if constexpr (kWide) {
        InitialRecordOf(init, run.keys[i].id, dim, records.record_floats, RowAt(records, run.slots[i]));
      } else {
        InitialRowOf(init, run.keys[i].id, dim, run.row);
        NarrowRow(run.row, dim, RowAt(records, run.slots[i]));
        InitialStateOf(init, records.record_floats - dim, StateAt(records, run.slots[i]));
      }
    }
  }

  template <SimdLevel kLevel>
  HVD_CTR_SIMD_BODY static void WriteFirstRangeBody(const FirstRun& run) {
    if (run.records->dim == 16) return WriteFirstWidth<16>(run);
    WriteFirstWidth<0>(run);
  }

  HVD_CTR_SIMD_KERNEL(static void, ReadRange, (const Records& records, Span<const Slot> slots, int64_t floats, float* out),
                      (records, slots, floats, out))
  HVD_CTR_SIMD_KERNEL(static void, WriteRange, (const Records& records, Span<const Slot> slots, const float* from),
                      (records, slots, from))
  HVD_CTR_SIMD_KERNEL(static void, WriteFirstRange, (const FirstRun& run), (run))

  template <OptimizerKind kKind>
  struct UpdateLoop {
    template <int32_t kDim>
    HVD_CTR_SIMD_BODY static void Width(const UpdateRun& run) {
      if constexpr (kWide) {
        InPlace<kDim>(run);
      } else {
        ThroughScratch<kDim>(run);
      }
    }

    template <int32_t kDim>
    HVD_CTR_SIMD_BODY static void InPlace(const UpdateRun& run) {
      const Records records = *run.records;
      const RowUpdate update = *run.update;
      const Span<const Slot> slots(run.slots, run.n);
      const int32_t dim = kDim > 0 ? kDim : records.dim;
      for (int64_t k = 0; k < run.n; ++k) {
        PrefetchSlot(records, slots, k + kPrefetchRows, records.record_floats);
        if (slots[k] == kNoSlot) continue;
        float* const row = RowAt(records, slots[k]);
        UpdateRowOf<kKind>(update, run.gradients + k * dim, dim, row, row + dim);
      }
    }

    // Short rows go in groups: what was just stored in pieces of one size cannot be loaded in those of another without a stall,
    // which long rows hide.
    template <int32_t kDim>
    HVD_CTR_SIMD_BODY static void ThroughScratch(const UpdateRun& run) {
      constexpr int64_t kGroup = kDim == 16 ? 16 : 1;
      const Records records = *run.records;
      const RowUpdate update = *run.update;
      const Span<const Slot> slots(run.slots, run.n);
      const int32_t dim = kDim > 0 ? kDim : records.dim;
      float group[kDim > 0 ? kGroup * kDim : 1];
      float* const wide = kDim > 0 ? group : run.row;
      for (int64_t begin = 0; begin < run.n; begin += kGroup) {
        const int64_t end = std::min(run.n, begin + kGroup);
        for (int64_t k = begin; k < end; ++k) {
          PrefetchSlot(records, slots, k + kPrefetchRows, records.record_floats);
          if (slots[k] != kNoSlot) WidenRow(RowAt(records, slots[k]), dim, wide + (k - begin) * dim);
        }
        for (int64_t k = begin; k < end; ++k) {
          if (slots[k] == kNoSlot) continue;
          UpdateRowOf<kKind>(update, run.gradients + k * dim, dim, wide + (k - begin) * dim, StateAt(records, slots[k]));
        }
        for (int64_t k = begin; k < end; ++k) {
          if (slots[k] != kNoSlot) NarrowRow(wide + (k - begin) * dim, dim, RowAt(records, slots[k]));
        }
      }
    }

    template <SimdLevel kLevel>
    HVD_CTR_SIMD_BODY static void RangeBody(const UpdateRun& run) {
      switch (run.records->dim) {
        case 16:
          return Width<16>(run);
        case 64:
          return Width<64>(run);
        default:
          return Width<0>(run);
      }
    }

    HVD_CTR_SIMD_KERNEL(static void, Range, (const UpdateRun& run), (run))
  };
};

extern template class RecordLoops<Float32Rows>;
extern template class RecordLoops<Float16Rows>;
extern template class RecordLoops<Bfloat16Rows>;

}  // namespace hvd_ctr

#endif  // HVD_CTR_CPU_RECORD_LOOPS_H_
