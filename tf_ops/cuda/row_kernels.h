// Kernels that move rows and records, and the segment sum. See kernel_geometry.h for what a kernel is; update_kernels.h has those
// of the row optimizers. Each is compiled for rows of every RowType (Rows) and for pieces of 4 floats and of 1 (kFloats); 4 where
// TakesWidePieces holds for all that it touches.
#ifndef HVD_CTR_CUDA_ROW_KERNELS_H_
#define HVD_CTR_CUDA_ROW_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/row_math.h"
#include "tf_ops/core/row_type.h"
#include "tf_ops/core/types.h"
#include "tf_ops/cuda/kernel_geometry.h"

namespace hvd_ctr {

/// Where things are in a record on the device, in bytes: the row (dim elements of the row type), then the state (float32). With
/// 16-byte pieces: dim, state_offset and stride are whole pieces.
struct RecordLayout {
  int64_t stride = 0;
  int64_t state_offset = 0;
  int32_t dim = 0;
  int32_t record_floats = 0;

  /// Floats from one record to the next where records are packed for their way between host and device: whole pieces.
  HVD_CTR_HD int64_t packed_stride() const { return (int64_t{record_floats} + kPieceFloats - 1) / kPieceFloats * kPieceFloats; }
  bool wide() const { return dim % kPieceFloats == 0; }
};

/// A stride of whole 32-byte sectors where that wastes at most a quarter, so that a row shares none with its neighbour, else of
/// whole pieces.
inline RecordLayout MakeRecordLayout(RowType row_type, int32_t dim, int32_t state_floats) {
  constexpr int64_t kFloat = sizeof(float), kPiece = kPieceFloats * kFloat, kSector = 32;
  const auto whole = [](int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; };
  RecordLayout layout;
  layout.dim = dim;
  layout.record_floats = dim + state_floats;
  layout.state_offset = whole(int64_t{dim} * RowElementBytes(row_type), layout.wide() ? kPiece : kFloat);
  const int64_t bytes = layout.state_offset + state_floats * kFloat;
  const int64_t sectors = whole(bytes, kSector);
  layout.stride = 4 * (sectors - bytes) <= bytes ? sectors : whole(bytes, kPiece);
  return layout;
}

/// The arena.
template <typename Rows>
struct DeviceRecords {
  using Type = Rows;

  uint8_t* arena = nullptr;
  RecordLayout layout;

  HVD_CTR_HD typename Rows::Element* row(Slot slot) const {
    return reinterpret_cast<typename Rows::Element*>(arena + int64_t{slot} * layout.stride);
  }
  HVD_CTR_HD float* state(Slot slot) const {
    return reinterpret_cast<float*>(arena + int64_t{slot} * layout.stride + layout.state_offset);
  }
};

/// kFloats neighbouring columns of a row, loaded and stored at once.
template <typename Rows, int32_t kFloats>
struct alignas(kFloats * sizeof(typename Rows::Element)) Elements {
  typename Rows::Element v[kFloats];
};

template <typename Rows, int32_t kFloats>
HVD_CTR_HD inline Piece<kFloats> LoadColumns(const typename Rows::Element* from) {
  const auto stored = *reinterpret_cast<const Elements<Rows, kFloats>*>(from);
  Piece<kFloats> piece;
  for (int32_t i = 0; i < kFloats; ++i) piece.v[i] = Rows::Widen(stored.v[i]);
  return piece;
}

template <typename Rows, int32_t kFloats>
HVD_CTR_HD inline void StoreColumns(const Piece<kFloats>& piece, typename Rows::Element* to) {
  Elements<Rows, kFloats> stored;
  for (int32_t i = 0; i < kFloats; ++i) stored.v[i] = Rows::Narrow(piece.v[i]);
  *reinterpret_cast<Elements<Rows, kFloats>*>(to) = stored;
}

template <int32_t kFloats>
HVD_CTR_HD inline Piece<kFloats> ZeroPiece() {
  Piece<kFloats> piece;
  for (int32_t i = 0; i < kFloats; ++i) piece.v[i] = 0.0f;
  return piece;
}

/// rows (n, dim) = rows at slots (n); kNoSlot gives zeros. A thread loads the slots of its kRepeats rows before the rows, and
/// those before it stores any: enough loads are on their way for narrow rows too.
template <typename Rows, int32_t kFloats>
struct GatherRowsKernel {
  static constexpr int32_t kRepeats = 4;

  RowLayout layout;
  DeviceRecords<Rows> records;
  const Slot* slots;
  float* rows;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    Slot slot[kRepeats];
    for (int32_t i = 0; i < kRepeats; ++i) {
      const int64_t row = layout.row(block, thread, i);
      slot[i] = row < layout.rows ? slots[row] : kNoSlot;
    }
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      Piece<kFloats> piece[kRepeats];
      for (int32_t i = 0; i < kRepeats; ++i) {
        piece[i] = slot[i] == kNoSlot ? ZeroPiece<kFloats>() : LoadColumns<Rows, kFloats>(records.row(slot[i]) + p * kFloats);
      }
      for (int32_t i = 0; i < kRepeats; ++i) {
        const int64_t row = layout.row(block, thread, i);
        if (row < layout.rows) StorePiece(piece[i], rows + row * records.layout.dim + p * kFloats);
      }
    }
  }
};

/// Between records at slots (n, none kNoSlot, distinct) and packed (n, packed_stride). kStore: to the slots, else from them.
template <typename Rows, int32_t kFloats, bool kStore>
struct MoveRecordsKernel {
  RowLayout layout;
  DeviceRecords<Rows> records;
  const Slot* slots;
  float* packed;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t i = layout.row(block, thread);
    if (i >= layout.rows) return;
    const Slot slot = slots[i];
    typename Rows::Element* const row = records.row(slot);
    float* const state = records.state(slot);
    const int32_t dim = records.layout.dim;
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      const int32_t j = p * kFloats;
      float* const beside = packed + i * records.layout.packed_stride() + j;
      if (kStore && j < dim) {
        StoreColumns<Rows, kFloats>(LoadPiece<kFloats>(beside), row + j);
      } else if (kStore) {
        StorePiece(LoadPiece<kFloats>(beside), state + (j - dim));
      } else {
        StorePiece(j < dim ? LoadColumns<Rows, kFloats>(row + j) : LoadPiece<kFloats>(state + (j - dim)), beside);
      }
    }
  }
};

/// The first record of each key (n) at its slot (n, none kNoSlot). A piece is one float.
template <typename Rows>
struct FirstRecordsKernel {
  RowLayout layout;
  DeviceRecords<Rows> records;
  const Slot* slots;
  const Key* keys;
  const RowInit* tables;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t i = layout.row(block, thread);
    if (i >= layout.rows) return;
    const Key key = keys[i];
    const RowInit init = tables[key.table];
    const int32_t dim = records.layout.dim;
    for (int32_t j = layout.lane(thread); j < layout.pieces; j += layout.lanes()) {
      const float value = InitialColumnOf(init, key.id, dim, j);
      if (j < dim) {
        records.row(slots[i])[j] = Rows::Narrow(value);
      } else {
        records.state(slots[i])[j - dim] = value;
      }
    }
  }
};

/// sums (K, dim): each of the K segments has exactly one position: positions (K), null for position k of segment k.
template <int32_t kFloats>
struct SumSinglesKernel {
  RowLayout layout;
  const int32_t* positions;
  const float* gradients;
  float* sums;
  int32_t dim;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t k = layout.row(block, thread);
    if (k >= layout.rows) return;
    const int64_t from = positions == nullptr ? k : positions[k];
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      Piece<kFloats> piece = LoadPiece<kFloats>(gradients + from * dim + p * kFloats);
      for (int32_t i = 0; i < kFloats; ++i) piece.v[i] = 0.0f + piece.v[i];  // -0 becomes 0, as in any sum.
      StorePiece(piece, sums + k * dim + p * kFloats);
    }
  }
};

/// sums (K, dim): segment k is the positions from starts[k] to starts[k + 1]; they are added in this order, a few loads ahead.
template <int32_t kFloats>
struct SumSegmentsKernel {
  static constexpr int32_t kAhead = 4;

  RowLayout layout;
  const int32_t* starts;
  const int32_t* positions;
  const float* gradients;
  float* sums;
  int32_t dim;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t k = layout.row(block, thread);
    if (k >= layout.rows) return;
    const int32_t begin = starts[k], end = starts[k + 1];
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      const float* const column = gradients + p * kFloats;
      Piece<kFloats> sum = ZeroPiece<kFloats>();
      int32_t i = begin;
      for (; end - i >= kAhead; i += kAhead) {
        Piece<kFloats> terms[kAhead];
        for (int32_t a = 0; a < kAhead; ++a) terms[a] = LoadPiece<kFloats>(column + int64_t{positions[i + a]} * dim);
        for (int32_t a = 0; a < kAhead; ++a) Add(terms[a], &sum);
      }
      for (; i < end; ++i) Add(LoadPiece<kFloats>(column + int64_t{positions[i]} * dim), &sum);
      StorePiece(sum, sums + k * dim + p * kFloats);
    }
  }

 private:
  HVD_CTR_HD static void Add(const Piece<kFloats>& term, Piece<kFloats>* sum) {
    for (int32_t i = 0; i < kFloats; ++i) sum->v[i] += term.v[i];
  }
};

/// rows[positions[i]] = from[i]: positions (n, distinct), from (n, dim), rows (?, dim).
template <int32_t kFloats>
struct PlaceRowsKernel {
  RowLayout layout;
  const int32_t* positions;
  const float* from;
  float* rows;
  int32_t dim;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t i = layout.row(block, thread);
    if (i >= layout.rows) return;
    const int64_t to = positions[i];
    for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) {
      StorePiece(LoadPiece<kFloats>(from + i * dim + p * kFloats), rows + to * dim + p * kFloats);
    }
  }
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_ROW_KERNELS_H_
