// How the work of a kernel is laid over blocks and threads, the same on a GPU and in the loops of HostRuntime.
//
// A kernel is a trivially copyable struct of pointers and sizes with
//   HVD_CTR_HD void operator()(int64_t block, int32_t thread) const;
// Every thread's work is independent of all others (no shared memory, no barrier, no atomic), so a launch gives the same bits
// whichever order its threads run in. Indices of rows and elements are 64 bits wide.
//
//   struct Double {
//     RowLayout layout;
//     const float* from;
//     float* to;
//     HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
//       const int64_t row = layout.row(block, thread);
//       if (row >= layout.rows) return;
//       for (int32_t p = layout.lane(thread); p < layout.pieces; p += layout.lanes()) { ... piece p of the row ... }
//     }
//   };
//   const RowLayout layout = MakeRowLayout(rows, dim / kPieceFloats);
//   HVD_CTR_RETURN_IF_ERROR(runtime.Launch("Double", layout.geometry(), Double{layout, from, to}, stream));
#ifndef HVD_CTR_CUDA_KERNEL_GEOMETRY_H_
#define HVD_CTR_CUDA_KERNEL_GEOMETRY_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// What is launched: `blocks` times `threads`. No blocks: nothing is launched.
struct Geometry {
  int64_t blocks = 0;
  int32_t threads = 0;
};

constexpr int32_t kWarpThreads = 32;
/// Threads of every block. A kernel is compiled for no more.
constexpr int32_t kBlockThreads = 256;
/// The longest grid that a GPU takes at once; a runtime splits a longer launch.
constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();

/// One thread for each of n items: the item of a thread is ThreadIndex, and those from n on have none.
inline Geometry OverItems(int64_t n) { return {n / kBlockThreads + (n % kBlockThreads != 0), kBlockThreads}; }
HVD_CTR_HD inline int64_t ThreadIndex(int64_t block, int32_t thread) { return block * kBlockThreads + thread; }

/// Lays rows of equally many pieces over threads. A power of two of threads, at most a warp, shares a row: thread `lane` of them
/// has the pieces lane, lane + lanes(), ... So a row of 128 floats is a warp with 16 bytes per thread, narrower rows are several
/// per warp, and wider ones several pieces per thread. With `repeats` each thread has so many rows, which it may load together.
struct RowLayout {
  int64_t rows = 0;
  int32_t pieces = 0;
  int32_t lane_bits = 0;
  int32_t repeats = 1;

  HVD_CTR_HD int32_t lanes() const { return 1 << lane_bits; }
  HVD_CTR_HD int32_t lane(int32_t thread) const { return thread & (lanes() - 1); }
  /// May be `rows` or more: then there is nothing to do.
  HVD_CTR_HD int64_t row(int64_t block, int32_t thread, int32_t repeat = 0) const {
    return ((block * repeats + repeat) << (kBlockBits - lane_bits)) + (thread >> lane_bits);
  }
  Geometry geometry() const {
    const int64_t block_rows = static_cast<int64_t>(repeats) << (kBlockBits - lane_bits);
    return {pieces == 0 ? 0 : rows / block_rows + (rows % block_rows != 0), kBlockThreads};
  }

  static constexpr int32_t kBlockBits = 8;
};
static_assert(1 << RowLayout::kBlockBits == kBlockThreads, "a block has 2^kBlockBits threads");

/// rows >= 0, pieces >= 0, repeats >= 1.
inline RowLayout MakeRowLayout(int64_t rows, int32_t pieces, int32_t repeats = 1) {
  RowLayout layout;
  layout.rows = rows;
  layout.pieces = pieces;
  layout.repeats = repeats;
  while (layout.lanes() < pieces && layout.lanes() < kWarpThreads) ++layout.lane_bits;
  return layout;
}

/// Floats of a wide piece: 16 bytes, the most that a thread loads or stores at once.
constexpr int32_t kPieceFloats = 4;

/// kFloats (1, 2 or 4) neighbouring floats, loaded and stored at once.
template <int32_t kFloats>
struct alignas(kFloats * sizeof(float)) Piece {
  float v[kFloats];
};

/// `from` and `to` are aligned to the piece.
template <int32_t kFloats>
HVD_CTR_HD inline Piece<kFloats> LoadPiece(const float* from) {
  return *reinterpret_cast<const Piece<kFloats>*>(from);
}
template <int32_t kFloats>
HVD_CTR_HD inline void StorePiece(const Piece<kFloats>& piece, float* to) {
  *reinterpret_cast<Piece<kFloats>*>(to) = piece;
}

/// Whether rows of `dim` floats, `stride` floats apart, from `base` on can be moved in pieces of kPieceFloats.
inline bool TakesWidePieces(const void* base, int64_t dim, int64_t stride) {
  return dim % kPieceFloats == 0 && stride % kPieceFloats == 0 &&
         reinterpret_cast<uintptr_t>(base) % (kPieceFloats * sizeof(float)) == 0;
}

/// Calls launch(first block, blocks) -> Status for consecutive parts of at most most_blocks blocks until one fails.
template <typename Function>
Status ForLaunches(const Geometry& geometry, int64_t most_blocks, const Function& launch) {
  for (int64_t first = 0; first < geometry.blocks; first += most_blocks) {
    HVD_CTR_RETURN_IF_ERROR(launch(first, std::min(most_blocks, geometry.blocks - first)));
  }
  return Status::Ok();
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_KERNEL_GEOMETRY_H_
