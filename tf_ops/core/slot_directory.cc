#include "tf_ops/core/slot_directory.h"

#include <algorithm>
#include <new>

namespace hvd_ctr {

// At least 16 entries, so that shift_ stays under 64.
int SlotDirectory::EntryBits(int64_t slots) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * slots) ++bits;
  return bits;
}

int64_t SlotDirectory::PlannedBytes(int64_t slots) {
  return (int64_t{sizeof(Entry)} << EntryBits(slots)) + slots * static_cast<int64_t>(sizeof(Key) + sizeof(Slot));
}

Status SlotDirectory::Allocate(int64_t slots) {
  const int bits = EntryBits(slots);
  const int64_t entries = int64_t{1} << bits;
  const int64_t entry_bytes = entries * static_cast<int64_t>(sizeof(Entry));
  bool allocated = block_.Allocate(entry_bytes);
  try {
    AssignHuge(static_cast<size_t>(slots), Key{0, -1}, &keys_);
    AssignHuge(static_cast<size_t>(slots), kNoSlot, &free_);
  } catch (const std::bad_alloc&) {
    allocated = false;
  }
  if (!allocated) {
    return MakeStatus(StatusCode::kResourceExhausted, "no memory for the directory of ", slots, " cache slots: asked for ",
                      PlannedBytes(slots), " bytes; lower embedding.cache.slots");
  }
  entries_ = static_cast<Entry*>(block_.data());
  std::fill(entries_, entries_ + entries, Entry{0, 0, kNoSlot});
  mask_ = static_cast<uint64_t>(entries - 1);
  shift_ = 64 - bits;
  for (int64_t i = 0; i < slots; ++i) free_[static_cast<size_t>(i)] = static_cast<Slot>(slots - 1 - i);
  return Status::Ok();
}

inline uint64_t SlotDirectory::Probe(const Key& key, uint64_t hash) const {
  uint64_t at = Home(hash);
  while (entries_[at].slot != kNoSlot && (entries_[at].id != key.id || entries_[at].table != key.table)) at = (at + 1) & mask_;
  return at;
}

void SlotDirectory::Find(Span<const Key> keys, Span<const uint64_t> hashes, Slot* slots) const {
  constexpr int64_t kAhead = 16;
  const int64_t count = keys.size();
  for (int64_t k = 0; k < std::min(kAhead, count); ++k) Prefetch(hashes[k]);
  for (int64_t k = 0; k < count; ++k) {
    if (k + kAhead < count) Prefetch(hashes[k + kAhead]);
    slots[k] = entries_[Probe(keys[k], hashes[k])].slot;
  }
}

Slot SlotDirectory::Find(const Key& key) const { return entries_[Probe(key, Hash(key))].slot; }

Slot SlotDirectory::Insert(const Key& key, uint64_t hash) {
  const Slot slot = free_.back();
  free_.pop_back();
  // The key is in none of the entries before the first empty one, so they need not be compared.
  uint64_t at = Home(hash);
  while (entries_[at].slot != kNoSlot) at = (at + 1) & mask_;
  entries_[at] = Entry{key.id, key.table, slot};
  keys_[slot] = key;
  return slot;
}

void SlotDirectory::Erase(Slot slot) {
  uint64_t hole = Probe(keys_[slot], Hash(keys_[slot]));
  keys_[slot] = Key{0, -1};
  free_.push_back(slot);
  // Moves back every later entry of the run that may stand in the hole: one whose home is not between hole and its place.
  for (uint64_t at = (hole + 1) & mask_; entries_[at].slot != kNoSlot; at = (at + 1) & mask_) {
    const uint64_t home = Home(Hash(Key{entries_[at].id, entries_[at].table}));
    if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
    entries_[hole] = entries_[at];
    hole = at;
  }
  entries_[hole].slot = kNoSlot;
}

int64_t SlotDirectory::allocated_bytes() const {
  return block_.bytes() + static_cast<int64_t>(keys_.capacity() * sizeof(Key) + free_.capacity() * sizeof(Slot));
}

}  // namespace hvd_ctr
