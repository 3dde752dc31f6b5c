// One function per operation on the arena: picks the kernel for the row type and the widest pieces, and launches it. All pointers
// are device memory; nothing here waits or copies.
#ifndef HVD_CTR_CUDA_ROW_LAUNCHES_H_
#define HVD_CTR_CUDA_ROW_LAUNCHES_H_

#include <cstdint>
#include <type_traits>

#include "tf_ops/core/row_type.h"
#include "tf_ops/core/status.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/row_kernels.h"
#include "tf_ops/cuda/runtime_types.h"
#include "tf_ops/cuda/update_kernels.h"

namespace hvd_ctr {

/// Calls function(std::integral_constant) with the floats of a piece.
template <typename Function>
Status WithPieces(bool wide, const Function& function) {
  if (wide) return function(std::integral_constant<int32_t, kPieceFloats>());
  return function(std::integral_constant<int32_t, 1>());
}

/// The arena before its row type is known to the compiler.
struct RecordArena {
  uint8_t* data = nullptr;
  RecordLayout layout;
  RowType row_type = RowType::kFloat32;

  /// Calls function(DeviceRecords<Rows>, integral_constant) for this row type.
  template <typename Function>
  Status With(bool wide, const Function& function) const {
    return WithRowType(row_type, [&](auto rows) {
      const DeviceRecords<decltype(rows)> records{data, layout};
      return WithPieces(wide && layout.wide(), [&](auto floats) { return function(records, floats); });
    });
  }
};

template <typename Runtime>
Status LaunchGather(const Runtime& runtime, const RecordArena& arena, const Slot* slots, int64_t n, float* rows, Stream stream) {
  const int32_t dim = arena.layout.dim;
  return arena.With(TakesWidePieces(rows, dim, dim), [&](auto records, auto floats) {
    using Kernel = GatherRowsKernel<typename decltype(records)::Type, floats.value>;
    const RowLayout layout = MakeRowLayout(n, dim / floats.value, Kernel::kRepeats);
    return runtime.Launch("GatherRows", layout.geometry(), Kernel{layout, records, slots, rows}, stream);
  });
}

/// kStore: packed -> slots, else slots -> packed.
template <bool kStore, typename Runtime>
Status LaunchMove(const Runtime& runtime, const RecordArena& arena, const Slot* slots, int64_t n, float* packed, Stream stream) {
  return arena.With(true, [&](auto records, auto floats) {
    using Kernel = MoveRecordsKernel<typename decltype(records)::Type, floats.value, kStore>;
    const bool wide = floats.value > 1;
    const int64_t pieces = wide ? arena.layout.packed_stride() / floats.value : arena.layout.record_floats;
    const RowLayout layout = MakeRowLayout(n, static_cast<int32_t>(pieces));
    return runtime.Launch(kStore ? "StoreRecords" : "FetchRecords", layout.geometry(), Kernel{layout, records, slots, packed},
                          stream);
  });
}

template <typename Runtime>
Status LaunchFirst(const Runtime& runtime, const RecordArena& arena, const Slot* slots, int64_t n, const Key* keys,
                   const RowInit* tables, Stream stream) {
  return WithRowType(arena.row_type, [&](auto rows) {
    using Rows = decltype(rows);
    const RowLayout layout = MakeRowLayout(n, arena.layout.record_floats);
    const FirstRecordsKernel<Rows> kernel{layout, {arena.data, arena.layout}, slots, keys, tables};
    return runtime.Launch("StoreFirstRecords", layout.geometry(), kernel, stream);
  });
}

/// positions: null for the identity.
template <typename Runtime>
Status LaunchSumSingles(const Runtime& runtime, const int32_t* positions, const float* gradients, int64_t unique, int32_t dim,
                        float* sums, Stream stream) {
  return WithPieces(TakesWidePieces(gradients, dim, dim) && TakesWidePieces(sums, dim, dim), [&](auto floats) {
    const RowLayout layout = MakeRowLayout(unique, dim / floats.value);
    const SumSinglesKernel<floats.value> kernel{layout, positions, gradients, sums, dim};
    return runtime.Launch("SegmentSum of single rows", layout.geometry(), kernel, stream);
  });
}

struct Segments {
  const int32_t* starts = nullptr;     ///< (unique + 1)
  const int32_t* positions = nullptr;  ///< (starts[unique])
  int64_t unique = 0;
};

template <typename Runtime>
Status LaunchSumSegments(const Runtime& runtime, const Segments& segments, const float* gradients, int32_t dim, float* sums,
                         Stream stream) {
  return WithPieces(TakesWidePieces(gradients, dim, dim) && TakesWidePieces(sums, dim, dim), [&](auto floats) {
    const RowLayout layout = MakeRowLayout(segments.unique, dim / floats.value);
    const SumSegmentsKernel<floats.value> kernel{layout, segments.starts, segments.positions, gradients, sums, dim};
    return runtime.Launch("SegmentSum", layout.geometry(), kernel, stream);
  });
}

/// from (n, dim) is aligned.
template <typename Runtime>
Status LaunchPlace(const Runtime& runtime, const int32_t* positions, int64_t n, const float* from, int32_t dim, float* rows,
                   Stream stream) {
  return WithPieces(TakesWidePieces(rows, dim, dim), [&](auto floats) {
    const RowLayout layout = MakeRowLayout(n, dim / floats.value);
    return runtime.Launch("PlaceRows", layout.geometry(), PlaceRowsKernel<floats.value>{layout, positions, from, rows, dim},
                          stream);
  });
}

/// Rows that an update's kernels of one kind are launched for; those of other kinds among them are left alone.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  void Include(int64_t first, int64_t last) {
    begin = empty() ? first : begin;
    end = last;
  }
};

constexpr int32_t kOptimizerKinds = 5;

/// What UpdateBatch holds, before the row type is known, and the rows of each OptimizerKind.
struct UpdateRequest {
  const Slot* slots = nullptr;
  const float* gradients = nullptr;
  const int32_t* run_starts = nullptr;
  const int32_t* run_tables = nullptr;
  const TableUpdate* updates = nullptr;
  float* row_values = nullptr;
  float* lane_sums = nullptr;
  int64_t rows = 0;
  int32_t runs = 0;
  bool needs_row_values = false;
  RowRange ranges[kOptimizerKinds];
};

namespace internal {

template <OptimizerKind kKind, int32_t kFloats, typename Runtime, typename Rows>
Status LaunchColumns(const Runtime& runtime, const UpdateRequest& request, UpdateBatch<Rows> batch, Stream stream) {
  const RowRange& range = request.ranges[static_cast<int32_t>(kKind)];
  if (range.empty()) return Status::Ok();
  const RowLayout layout = MakeRowLayout(range.end - range.begin, batch.records.layout.dim / kFloats);
  batch.first_row = range.begin;
  return runtime.Launch("UpdateRows", layout.geometry(), UpdateColumnsKernel<Rows, kKind, kFloats>{layout, batch}, stream);
}

template <int32_t kFloats, typename Runtime, typename Rows>
Status LaunchUpdateOf(const Runtime& runtime, const UpdateRequest& request, UpdateBatch<Rows> batch, Stream stream) {
  const RowRange& row_wise = request.ranges[static_cast<int32_t>(OptimizerKind::kRowWiseAdagrad)];
  if (!row_wise.empty()) {
    const RowLayout layout = MakeRowLayout(row_wise.end - row_wise.begin, kRowSumLanes / kFloats);
    batch.first_row = row_wise.begin;
    HVD_CTR_RETURN_IF_ERROR(
        runtime.Launch("UpdateRows, lane sums", layout.geometry(), LaneSumsKernel<Rows, kFloats>{layout, batch}, stream));
    batch.first_row = 0;
  }
  if (request.needs_row_values) {
    HVD_CTR_RETURN_IF_ERROR(
        runtime.Launch("UpdateRows, row values", OverItems(request.rows), RowValuesKernel<Rows>{request.rows, batch}, stream));
  }
  HVD_CTR_RETURN_IF_ERROR((LaunchColumns<OptimizerKind::kSgd, kFloats>(runtime, request, batch, stream)));
  HVD_CTR_RETURN_IF_ERROR((LaunchColumns<OptimizerKind::kAdagrad, kFloats>(runtime, request, batch, stream)));
  HVD_CTR_RETURN_IF_ERROR((LaunchColumns<OptimizerKind::kRowWiseAdagrad, kFloats>(runtime, request, batch, stream)));
  HVD_CTR_RETURN_IF_ERROR((LaunchColumns<OptimizerKind::kAdam, kFloats>(runtime, request, batch, stream)));
  return LaunchColumns<OptimizerKind::kFtrl, kFloats>(runtime, request, batch, stream);
}

}  // namespace internal

template <typename Runtime>
Status LaunchUpdate(const Runtime& runtime, const RecordArena& arena, const UpdateRequest& request, Stream stream) {
  const int32_t dim = arena.layout.dim;
  return arena.With(TakesWidePieces(request.gradients, dim, dim), [&](auto records, auto floats) {
    UpdateBatch<typename decltype(records)::Type> batch;
    batch.records = records;
    batch.slots = request.slots;
    batch.gradients = request.gradients;
    batch.run_starts = request.run_starts;
    batch.run_tables = request.run_tables;
    batch.updates = request.updates;
    batch.row_values = request.row_values;
    batch.lane_sums = request.lane_sums;
    batch.runs = request.runs;
    return internal::LaunchUpdateOf<floats.value>(runtime, request, batch, stream);
  });
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_ROW_LAUNCHES_H_
