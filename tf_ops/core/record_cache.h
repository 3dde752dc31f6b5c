// RecordCache: records of a disk store that are kept in RAM, in slots of chunks that come and go with the budget. Rows leave by
// the clock rule: the hand passes over a hot row once, making it cold, and takes a cold one.
//
//   slot = cache.TakeFree(row);                   // kNoSlot: add a chunk, or evict the row of Victim() and Release its slot
//   cache.record(slot)
//
// Not thread-safe.
#ifndef HVD_CTR_CORE_RECORD_CACHE_H_
#define HVD_CTR_CORE_RECORD_CACHE_H_

#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "tf_ops/core/aligned_block.h"

namespace hvd_ctr {

class RecordCache {
 public:
  static constexpr uint32_t kNoSlot = 0xffffffffu;
  static constexpr uint32_t kNoRow = 0xffffffffu;

  /// Chunks of at most most_chunk_bytes, but at least one record; all together within most_bytes.
  RecordCache(int64_t record_bytes, int64_t most_chunk_bytes, int64_t most_bytes) : record_bytes_(record_bytes) {
    while (chunk_bits_ < 20 && ((record_bytes_ + kSlotBytes) << (chunk_bits_ + 1)) <= most_chunk_bytes) ++chunk_bits_;
    chunks_.reserve(static_cast<size_t>(most_bytes / chunk_bytes() + 1));
  }

  int64_t chunks() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t chunk_bytes() const { return (record_bytes_ + kSlotBytes) << chunk_bits_; }
  int64_t slots() const { return chunks() << chunk_bits_; }
  int64_t chunk_slots() const { return int64_t{1} << chunk_bits_; }
  int64_t allocated_bytes() const {
    return chunks() * chunk_bytes() + static_cast<int64_t>(chunks_.capacity() * sizeof(AlignedBlock));
  }

  /// False: no memory.
  bool AddChunk() {
    AlignedBlock block;
    if (!block.Allocate(chunk_bytes())) return false;
    try {
      chunks_.push_back(std::move(block));
    } catch (const std::bad_alloc&) {
      return false;
    }
    for (auto slot = static_cast<uint32_t>(slots()); slot-- > first_of_last();) PushFree(slot);
    return true;
  }

  /// First slot of the chunk that RemoveChunk frees.
  uint32_t first_of_last() const { return static_cast<uint32_t>((chunks() - 1) << chunk_bits_); }

  /// Frees the last chunk. Precondition: none of its slots holds a row.
  void RemoveChunk() {
    const uint32_t end = first_of_last();
    for (uint32_t* link = &free_; *link != kNoSlot;) {
      if (*link < end) {
        link = &meta(*link).link;
      } else {
        *link = meta(*link).link;
      }
    }
    chunks_.pop_back();
    if (hand_ >= end) hand_ = 0;
  }

  bool has_free() const { return free_ != kNoSlot; }

  /// A slot for this row, hot; kNoSlot if all are taken.
  uint32_t TakeFree(uint32_t row) {
    const uint32_t slot = free_;
    if (slot == kNoSlot) return kNoSlot;
    free_ = meta(slot).link;
    meta(slot) = Meta{row, kHot};
    return slot;
  }

  void Release(uint32_t slot) {
    meta(slot).row = kNoRow;
    PushFree(slot);
  }

  /// kNoRow: free.
  uint32_t row(uint32_t slot) const { return meta(slot).row; }
  void* record(uint32_t slot) const {
    return static_cast<char*>(chunks_[slot >> chunk_bits_].data()) + int64_t{slot & mask()} * record_bytes_;
  }
  void MakeHot(uint32_t slot) { meta(slot).link = kHot; }
  void MakeCold(uint32_t slot) { meta(slot).link = kCold; }

  /// A slot whose row may leave. Precondition: some slot holds a row.
  uint32_t Victim() {
    while (true) {
      const uint32_t slot = hand_;
      hand_ = slot + 1 == slots() ? 0 : slot + 1;
      Meta& entry = meta(slot);
      if (entry.row == kNoRow) continue;
      if (entry.link == kCold) return slot;
      entry.link = kCold;
    }
  }

 private:
  struct Meta {
    uint32_t row;
    uint32_t link;  // Of a free slot: the next free one. Else kHot or kCold.
  };
  static constexpr int64_t kSlotBytes = sizeof(Meta);
  static constexpr uint32_t kCold = 0;
  static constexpr uint32_t kHot = 1;

  uint32_t mask() const { return (uint32_t{1} << chunk_bits_) - 1; }
  Meta& meta(uint32_t slot) const {
    char* metas = static_cast<char*>(chunks_[slot >> chunk_bits_].data()) + (record_bytes_ << chunk_bits_);
    return reinterpret_cast<Meta*>(metas)[slot & mask()];
  }
  void PushFree(uint32_t slot) {
    meta(slot) = Meta{kNoRow, free_};
    free_ = slot;
  }

  const int64_t record_bytes_;
  int chunk_bits_ = 0;
  std::vector<AlignedBlock> chunks_;
  uint32_t free_ = kNoSlot;
  uint32_t hand_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_RECORD_CACHE_H_
