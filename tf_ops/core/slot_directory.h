// SlotDirectory: which key is cached in which slot, and which slots are free. Open addressing with linear probing in 16-byte
// entries (four to a cache line), at most half full, deletion by shifting entries back, so lookups never meet tombstones.
//
//   SlotDirectory directory(slots);
//   directory.Find(keys, hashes, found.data());       // (K) slots, kNoSlot where the key is not cached
//   Slot slot = directory.Insert(key, hash);          // takes the next free slot
//   directory.Erase(slot);                            // the slot becomes the next free one
//
// Invariant: keys and occupied slots are one-to-one; keys compare by table and all 63 bits of the id. Fixed size: never
// reallocates. Not thread-safe for writes; concurrent reads are fine.
#ifndef HVD_CTR_CORE_SLOT_DIRECTORY_H_
#define HVD_CTR_CORE_SLOT_DIRECTORY_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class SlotDirectory {
 public:
  static constexpr int64_t kMaxSlots = int64_t{1} << 28;

  /// slots: S, 1 .. kMaxSlots. All are free; slot 0 is taken first. RESOURCE_EXHAUSTED with the bytes asked for.
  Status Allocate(int64_t slots);

  static uint64_t Hash(const Key& key) { return HashKey(key.table, key.id, kDirectorySalt); }

  /// slots (K): slot of keys[k], or kNoSlot. hashes[k] == Hash(keys[k]).
  void Find(Span<const Key> keys, Span<const uint64_t> hashes, Slot* slots) const;
  Slot Find(const Key& key) const;

  /// Asks for the memory that Find, Insert or Erase of a key with this hash will read, some keys ahead of the call.
  void Prefetch(uint64_t hash) const { __builtin_prefetch(&entries_[Home(hash)]); }

  /// Preconditions: the key is not cached and free_slots() > 0.
  Slot Insert(const Key& key, uint64_t hash);
  /// Precondition: the slot is occupied.
  void Erase(Slot slot);

  bool occupied(Slot slot) const { return keys_[slot].table >= 0; }
  /// Precondition: the slot is occupied.
  const Key& key(Slot slot) const { return keys_[slot]; }
  int64_t slots() const { return static_cast<int64_t>(keys_.size()); }
  int64_t free_slots() const { return static_cast<int64_t>(free_.size()); }
  /// The slot that the i-th Insert from now would take; i < free_slots().
  Slot free_slot(int64_t i) const { return free_[free_.size() - 1 - static_cast<size_t>(i)]; }
  int64_t size() const { return slots() - free_slots(); }
  int64_t allocated_bytes() const;
  /// allocated_bytes() of a directory of that many slots.
  static int64_t PlannedBytes(int64_t slots);

 private:
  struct Entry {
    int64_t id;
    int32_t table;
    Slot slot;  // kNoSlot: the entry is empty.
  };

  static int EntryBits(int64_t slots);
  uint64_t Home(uint64_t hash) const { return hash >> shift_; }
  uint64_t Probe(const Key& key, uint64_t hash) const;

  AlignedBlock block_;
  Entry* entries_ = nullptr;
  uint64_t mask_ = 0;       // Number of entries - 1; a power of two >= 2 S.
  int shift_ = 64;          // The upper bits of the hash pick the first entry.
  std::vector<Key> keys_;   // (S) key of each slot; table -1: free.
  std::vector<Slot> free_;  // Free slots, next one last.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_SLOT_DIRECTORY_H_
