#include "tf_ops/core/key_map.h"

namespace hvd_ctr {

int KeyMap::BitsFor(int64_t keys) {
  int bits = 4;
  while ((int64_t{1} << bits) * 2 < keys * 3) ++bits;
  return bits;
}

void KeyMap::Reserve(int64_t keys) {
  const int bits = BitsFor(keys);
  if (entries_.empty() || bits > 64 - shift_) Rehash(bits);
}

void KeyMap::Rehash(int bits) {
  std::vector<Entry> entries(size_t{1} << bits);
  entries.swap(entries_);
  mask_ = entries_.size() - 1;
  shift_ = 64 - bits;
  for (const Entry& entry : entries) {
    if (entry.table != kEmpty) entries_[Probe({entry.id, entry.table}, Hash(entry))] = entry;
  }
}

uint64_t& KeyMap::FindOrInsert(const Key& key, uint64_t hash) {
  uint64_t at = entries_.empty() ? 0 : Probe(key, hash);
  if (entries_.empty() || entries_[at].table == kEmpty) {
    if (entries_.empty() || (size_ + 1) * 3 > static_cast<int64_t>(entries_.size()) * 2) {
      Reserve(2 * size_ + 1);
      at = Probe(key, hash);
    }
    entries_[at] = Entry{key.id, 0, key.table};
    ++size_;
  }
  return entries_[at].value;
}

void KeyMap::Erase(const Key& key, uint64_t hash) {
  if (size_ == 0) return;
  const uint64_t at = Probe(key, hash);
  if (entries_[at].table != kEmpty) EraseAt(at);
}

uint64_t KeyMap::KeepBits(const Key& key, uint64_t hash, uint64_t bits) {
  if (size_ == 0) return 0;
  const uint64_t at = Probe(key, hash);
  if (entries_[at].table == kEmpty) return 0;
  const uint64_t left = entries_[at].value &= bits;
  if (left == 0) EraseAt(at);
  return left;
}

void KeyMap::EraseAt(uint64_t hole) {
  --size_;
  // Moves back every later entry of the run that may stand in the hole: one whose home is not between hole and its place.
  for (uint64_t at = (hole + 1) & mask_; entries_[at].table != kEmpty; at = (at + 1) & mask_) {
    if (((at - Home(Hash(entries_[at]))) & mask_) < ((at - hole) & mask_)) continue;
    entries_[hole] = entries_[at];
    hole = at;
  }
  entries_[hole] = Entry{};
}

void KeyMap::Clear() {
  std::vector<Entry>().swap(entries_);
  mask_ = 0;
  shift_ = 64;
  size_ = 0;
}

void KeyMap::EraseZeros() {
  // EraseAt may move a later entry to `at`, which is looked at again. What it moves across the end was looked at before.
  for (uint64_t at = 0; at < entries_.size(); ++at) {
    while (entries_[at].table != kEmpty && entries_[at].value == 0) EraseAt(at);
  }
}

}  // namespace hvd_ctr
