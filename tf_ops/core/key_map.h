// KeyMap: key -> 64-bit value. Open addressing with linear probing, at most two thirds full, deletion by shifting entries back.
//
//   KeyMap map;
//   map.Reserve(keys);                    // throws std::bad_alloc; what fits the reservation allocates nothing more
//   map.FindOrInsert(key, hash) = 7;      // 0 at first
//   uint64_t value = map.Find(key, hash); // 0 where the key is absent
//
// Invariant: one entry per key; keys compare by table and all 63 bits of the id. `hash` is SlotDirectory::Hash
// of the key. Not thread-safe.
#ifndef HVD_CTR_CORE_KEY_MAP_H_
#define HVD_CTR_CORE_KEY_MAP_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class KeyMap {
 public:
  int64_t size() const { return size_; }
  /// allocated_bytes() after Reserve(keys).
  static int64_t PlannedBytes(int64_t keys) { return int64_t{sizeof(Entry)} << BitsFor(keys); }
  int64_t allocated_bytes() const { return static_cast<int64_t>(entries_.capacity() * sizeof(Entry)); }

  /// Room for `keys` keys in all.
  void Reserve(int64_t keys);
  /// 0 where the key is absent.
  uint64_t Find(const Key& key, uint64_t hash) const { return size_ == 0 ? 0 : entries_[Probe(key, hash)].value; }
  /// Asks for the memory that the calls for a key with this hash will read.
  void Prefetch(uint64_t hash) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[Home(hash)]);
  }
  /// The key's value, 0 where it was absent; the reference holds until the next change.
  uint64_t& FindOrInsert(const Key& key, uint64_t hash);
  /// Clears all bits of the key's value that are not in `bits`, erases the key where none is left, and returns what is left.
  uint64_t KeepBits(const Key& key, uint64_t hash, uint64_t bits);
  /// Nothing happens where the key is absent.
  void Erase(const Key& key, uint64_t hash);
  /// Empties the map and frees its memory.
  void Clear();

  /// function(key, value&) for every entry, in no particular order; the map must not change meanwhile.
  template <typename Function>
  void ForEach(const Function& function) {
    for (Entry& entry : entries_) {
      if (entry.table != kEmpty) function(Key{entry.id, entry.table}, entry.value);
    }
  }
  template <typename Function>
  void ForEach(const Function& function) const {
    for (const Entry& entry : entries_) {
      if (entry.table != kEmpty) function(Key{entry.id, entry.table}, entry.value);
    }
  }
  /// The same for the keys in the next `entries` places from place `from` on; returns the place to go on from, -1 at the end.
  template <typename Function>
  int64_t ForSome(int64_t from, int64_t entries, const Function& function) const {
    const auto all = static_cast<int64_t>(entries_.size());
    const int64_t end = entries < all - from ? from + entries : all;
    for (int64_t at = from; at < end; ++at) {
      const Entry& entry = entries_[static_cast<size_t>(at)];
      if (entry.table != kEmpty) function(Key{entry.id, entry.table}, entry.value);
    }
    return end < all ? end : -1;
  }
  /// Drops the entries whose value is 0.
  void EraseZeros();

 private:
  static constexpr int32_t kEmpty = -1;
  struct Entry {
    int64_t id = 0;
    uint64_t value = 0;
    int32_t table = kEmpty;
  };

  static int BitsFor(int64_t keys);
  static uint64_t Hash(const Entry& entry) { return HashKey(entry.table, entry.id, kDirectorySalt); }
  uint64_t Home(uint64_t hash) const { return hash >> shift_; }
  uint64_t Probe(const Key& key, uint64_t hash) const {
    uint64_t at = Home(hash);
    while (entries_[at].table != kEmpty && (entries_[at].id != key.id || entries_[at].table != key.table)) at = (at + 1) & mask_;
    return at;
  }
  void Rehash(int bits);
  void EraseAt(uint64_t hole);

  std::vector<Entry> entries_;  // A power of two, or none.
  uint64_t mask_ = 0;
  int shift_ = 64;  // The upper bits of the hash pick the first entry.
  int64_t size_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_KEY_MAP_H_
