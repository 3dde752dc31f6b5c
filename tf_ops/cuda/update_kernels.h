// Kernels of the row optimizers: row_math.h's rules laid over threads. A rule that needs one value of the row before its columns
// (row-wise Adagrad's root, Adam's own count) has kernels that leave it in row_values (K) first.
#ifndef HVD_CTR_CUDA_UPDATE_KERNELS_H_
#define HVD_CTR_CUDA_UPDATE_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/options.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/types.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/row_kernels.h"

namespace hvd_ctr {

struct TableUpdate {
  OptimizerKind kind = OptimizerKind::kSgd;
  RowUpdate update;
};

/// What all kernels of one update share. The tables of the K rows come as runs of equal table, of which there are few: run r is
/// the rows from run_starts[r] to run_starts[r + 1] (K for the last).
template <typename Rows>
struct UpdateBatch {
  DeviceRecords<Rows> records;
  const Slot* slots = nullptr;           // (K)
  const float* gradients = nullptr;      // (K, dim)
  const int32_t* run_starts = nullptr;   // (runs)
  const int32_t* run_tables = nullptr;   // (runs)
  const TableUpdate* updates = nullptr;  // (T)
  float* row_values = nullptr;           // (K)
  float* lane_sums = nullptr;            // (K, kRowSumLanes), of row-wise Adagrad.
  int64_t first_row = 0;                 // Of the rows that a launch is for.
  int32_t runs = 0;

  /// The last run that does not start behind the row.
  HVD_CTR_HD const TableUpdate& of(int64_t row) const {
    int32_t low = 0, high = runs;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      if (run_starts[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return updates[run_tables[low]];
  }
};

/// The columns of rows whose table has this rule.
template <typename Rows, OptimizerKind kKind, int32_t kFloats>
struct UpdateColumnsKernel {
  RowLayout layout;
  UpdateBatch<Rows> batch;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t in_launch = layout.row(block, thread);
    if (in_launch >= layout.rows) return;
    const int64_t k = batch.first_row + in_launch;
    const Slot slot = batch.slots[k];
    const TableUpdate& table = batch.of(k);
    if (slot == kNoSlot || table.kind != kKind) return;
    const RowUpdate& update = table.update;
    if (kKind == OptimizerKind::kFtrl && update.learning_rate == 0.0f) return;
    const int32_t dim = batch.records.layout.dim;
    const float value = RowValue(update, k);
    typename Rows::Element* const row = batch.records.row(slot);
    float* const state = batch.records.state(slot);
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      const int32_t j = p * kFloats;
      const Piece<kFloats> gradient = LoadPiece<kFloats>(batch.gradients + k * dim + j);
      Piece<kFloats> columns = LoadColumns<Rows, kFloats>(row + j);
      Apply(update, value, gradient, &columns, state + j, state + dim + j);
      StoreColumns<Rows, kFloats>(columns, row + j);
    }
  }

 private:
  static constexpr bool kHasFirst =
      kKind == OptimizerKind::kAdagrad || kKind == OptimizerKind::kAdam || kKind == OptimizerKind::kFtrl;
  static constexpr bool kHasSecond = kKind == OptimizerKind::kAdam || kKind == OptimizerKind::kFtrl;

  HVD_CTR_HD float RowValue(const RowUpdate& update, int64_t k) const {
    if (kKind == OptimizerKind::kRowWiseAdagrad) return batch.row_values[k];
    if (kKind == OptimizerKind::kAdam) return update.row_step ? batch.row_values[k] : update.alpha;
    return 0.0f;
  }

  /// first_at, second_at: these columns of the rule's first and second state of one float per column, where it has them.
  HVD_CTR_HD void Apply(const RowUpdate& update, float value, const Piece<kFloats>& gradient, Piece<kFloats>* row,
                        float* first_at, float* second_at) const {
    Piece<kFloats> first, second;
    if (kHasFirst) first = LoadPiece<kFloats>(first_at);
    if (kHasSecond) second = LoadPiece<kFloats>(second_at);
    for (int32_t i = 0; i < kFloats; ++i) {
      if constexpr (kKind == OptimizerKind::kSgd) {
        SgdColumn(update, gradient.v[i], &row->v[i]);
      } else if constexpr (kKind == OptimizerKind::kAdagrad) {
        AdagradColumn(update, gradient.v[i], &row->v[i], &first.v[i]);
      } else if constexpr (kKind == OptimizerKind::kRowWiseAdagrad) {
        RowWiseAdagradColumn(update, value, gradient.v[i], &row->v[i]);
      } else if constexpr (kKind == OptimizerKind::kAdam) {
        AdamColumn(update, value, gradient.v[i], &row->v[i], &first.v[i], &second.v[i]);
      } else if (update.accumulator_power == 0.5f) {
        FtrlAccumulate<true>(update, gradient.v[i], &row->v[i], &first.v[i], &second.v[i]);
      } else {
        FtrlAccumulate<false>(update, gradient.v[i], &row->v[i], &first.v[i], &second.v[i]);
      }
    }
    if (kHasFirst) StorePiece(first, first_at);
    if (kHasSecond) StorePiece(second, second_at);
  }
};

/// lane_sums of row-wise Adagrad's rows: RowWiseAdagradRoot's lanes. A row's pieces are those of the lanes.
template <typename Rows, int32_t kFloats>
struct LaneSumsKernel {
  RowLayout layout;
  UpdateBatch<Rows> batch;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t in_launch = layout.row(block, thread);
    if (in_launch >= layout.rows) return;
    const int64_t k = batch.first_row + in_launch;
    const Slot slot = batch.slots[k];
    const TableUpdate& table = batch.of(k);
    if (slot == kNoSlot || table.kind != OptimizerKind::kRowWiseAdagrad) return;
    const int32_t dim = batch.records.layout.dim;
    const typename Rows::Element* const row = batch.records.row(slot);
    const int32_t lane = layout.lane(thread) * kFloats;
    Piece<kFloats> sums = ZeroPiece<kFloats>();
    for (int32_t j = lane; j < dim; j += kRowSumLanes) {
      const Piece<kFloats> gradient = LoadPiece<kFloats>(batch.gradients + k * dim + j);
      const Piece<kFloats> columns = LoadColumns<Rows, kFloats>(row + j);
      for (int32_t i = 0; i < kFloats; ++i) {
        const float g = Regularised(table.update, gradient.v[i], columns.v[i]);
        sums.v[i] += g * g;
      }
    }
    StorePiece(sums, batch.lane_sums + k * kRowSumLanes + lane);
  }
};

/// row_values, a thread per row: row-wise Adagrad's root from the lane sums, and Adam's alpha by the row's own count.
template <typename Rows>
struct RowValuesKernel {
  int64_t rows;
  UpdateBatch<Rows> batch;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t k = ThreadIndex(block, thread);
    if (k >= rows) return;
    const Slot slot = batch.slots[k];
    if (slot == kNoSlot) return;
    const TableUpdate& table = batch.of(k);
    const int32_t dim = batch.records.layout.dim;
    if (table.kind == OptimizerKind::kAdam && table.update.row_step) {
      batch.row_values[k] = AdamRowAlpha(table.update, batch.records.state(slot) + 2 * dim);
    } else if (table.kind == OptimizerKind::kRowWiseAdagrad) {
      float lanes[kRowSumLanes];
      for (int32_t i = 0; i < kRowSumLanes; i += kPieceFloats) {
        const Piece<kPieceFloats> piece = LoadPiece<kPieceFloats>(batch.lane_sums + k * kRowSumLanes + i);
        for (int32_t j = 0; j < kPieceFloats; ++j) lanes[i + j] = piece.v[j];
      }
      batch.row_values[k] = RowWiseAdagradRootOf(table.update, lanes, dim, batch.records.state(slot));
    }
  }
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_UPDATE_KERNELS_H_
