// ChunkedArray: an array that grows in chunks which never move, so that growing copies nothing and needs no more memory than the
// new chunk. Elements are not initialised. Allocation failure is a return value, no exception.
//
//   if (!array.Reserve(i)) return MakeStatus(StatusCode::kResourceExhausted, ...);
//   array[i] = value;
#ifndef HVD_CTR_CORE_CHUNKED_ARRAY_H_
#define HVD_CTR_CORE_CHUNKED_ARRAY_H_

#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "tf_ops/core/aligned_block.h"

namespace hvd_ctr {

template <typename T>
class ChunkedArray {
 public:
  static constexpr int kChunkBits = 12;
  static constexpr int64_t kChunkBytes = static_cast<int64_t>(sizeof(T)) << kChunkBits;

  T& operator[](uint32_t i) { return chunk(i)[i & kMask]; }
  const T& operator[](uint32_t i) const { return chunk(i)[i & kMask]; }

  /// Elements for which there is room.
  int64_t capacity() const { return static_cast<int64_t>(chunks_.size()) << kChunkBits; }

  /// Bytes that Reserve(i) would allocate beyond allocated_bytes(), also for a moment.
  int64_t GrowthBytes(uint32_t i) const {
    if (i < capacity()) return 0;
    const bool list_grows = chunks_.size() == chunks_.capacity();
    return kChunkBytes + (list_grows ? static_cast<int64_t>((2 * chunks_.capacity() + 1) * sizeof(AlignedBlock)) : 0);
  }

  /// Makes room for element i, which is at most one chunk beyond the end. False: no memory; nothing has changed.
  bool Reserve(uint32_t i) {
    if (i < capacity()) return true;
    AlignedBlock block;
    if (!block.Allocate(kChunkBytes)) return false;
    try {
      chunks_.push_back(std::move(block));
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  /// allocated_bytes() with room for `elements`.
  static int64_t PlannedBytes(int64_t elements) {
    const int64_t chunks = (elements + (int64_t{1} << kChunkBits) - 1) >> kChunkBits;
    int64_t listed = chunks > 0 ? 1 : 0;  // std::vector doubles.
    while (listed < chunks) listed *= 2;
    return chunks * kChunkBytes + listed * static_cast<int64_t>(sizeof(AlignedBlock));
  }

  int64_t allocated_bytes() const {
    return static_cast<int64_t>(chunks_.size()) * kChunkBytes + static_cast<int64_t>(chunks_.capacity() * sizeof(AlignedBlock));
  }

 private:
  static constexpr uint32_t kMask = (uint32_t{1} << kChunkBits) - 1;

  T* chunk(uint32_t i) const { return static_cast<T*>(chunks_[i >> kChunkBits].data()); }

  std::vector<AlignedBlock> chunks_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_CHUNKED_ARRAY_H_
