#include "tf_ops/core/request_merge.h"

#include <algorithm>
#include <limits>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/key_hashes.h"

namespace hvd_ctr {
namespace {

constexpr int32_t kForeign = -1;

}  // namespace

Status RequestMerge::HashAll(Span<const int64_t> ids, Span<const int32_t> tables, MergedKeys* merged) {
  const int64_t count = ids.size();
  for (int64_t begin = 0; begin < count;) {
    const int32_t table = tables[begin];
    if (table < 0 || table >= tables_) {
      return MakeStatus(StatusCode::kInvalidArgument, "key ", begin, " names table ", table, "; allowed are 0 .. ", tables_ - 1);
    }
    int64_t end = begin;
    int64_t negative = 0;
    for (; end < count && tables[end] == table; ++end) negative |= ids[end];
    if (negative < 0) {
      const int64_t bad = std::find_if(ids.begin() + begin, ids.begin() + end, [](int64_t id) { return id < 0; }) - ids.begin();
      return MakeStatus(StatusCode::kInvalidArgument, "key ", bad, " of table ", table, " has id ", ids[bad],
                        "; allowed are 0 .. 2^63-1");
    }
    const int64_t* const run = ids.data() + begin;
    HashKeys(table, run, end - begin, kDirectorySalt, hashes_.data() + begin);
    if (world_size_ > 1) {
      int32_t* const inverse = merged->inverse.data() + begin;
      OwnersOfKeys(table, run, end - begin, world_size_, inverse);
      for (int64_t i = 0; i < end - begin; ++i) {
        const bool foreign = inverse[i] != rank_;
        inverse[i] = foreign ? kForeign : 0;
        merged->foreign += foreign;
      }
    } else {
      std::fill_n(merged->inverse.begin() + begin, end - begin, 0);
    }
    merged->requested[static_cast<size_t>(table)] += end - begin;
    begin = end;
  }
  return Status::Ok();
}

Status RequestMerge::Run(Span<const int64_t> ids, Span<const int32_t> tables, MergedKeys* merged) {
  const int64_t count = ids.size();
  if (count > std::numeric_limits<int32_t>::max() || tables.size() != count) {
    return MakeStatus(StatusCode::kInvalidArgument, "received ", count, " ids and ", tables.size(),
                      " tables; needed are as many tables as ids, at most 2^31-1");
  }
  merged->foreign = 0;
  merged->requested.assign(static_cast<size_t>(tables_), 0);
  merged->unique.assign(static_cast<size_t>(tables_), 0);
  merged->inverse.resize(static_cast<size_t>(count));
  if (hashes_.size() < static_cast<size_t>(count)) hashes_.resize(static_cast<size_t>(count));
  HVD_CTR_RETURN_IF_ERROR(HashAll(ids, tables, merged));

  merged->keys.resize(static_cast<size_t>(count));
  merged->hashes.resize(static_cast<size_t>(count));
  PrepareEntries(count);
  const int shift = 64 - EntryBits(count);
  const uint64_t mask = ~uint64_t{0} >> shift;
  Entry* const entries = entries_.data();
  Key* const keys = merged->keys.data();
  const uint64_t* const hashes = hashes_.data();
  int32_t* const inverse = merged->inverse.data();
  const uint32_t base = base_;
  constexpr int64_t kAhead = 16;
  uint32_t last = base;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(&entries[hashes[i + kAhead] >> shift]);
    if (inverse[i] == kForeign) continue;
    const uint64_t hash = hashes[i];
    const auto tag = static_cast<uint32_t>(hash);
    const Key key{ids[i], tables[i]};
    uint64_t at = hash >> shift;
    while (entries[at].number > base && (entries[at].tag != tag || keys[entries[at].number - base - 1] != key))
      at = (at + 1) & mask;
    if (entries[at].number <= base) {
      keys[last - base] = key;
      merged->hashes[last - base] = hash;
      entries[at] = Entry{tag, ++last};
      ++merged->unique[static_cast<size_t>(key.table)];
    }
    inverse[i] = static_cast<int32_t>(entries[at].number - base - 1);
  }
  merged->keys.resize(last - base);
  merged->hashes.resize(last - base);
  base_ = last;
  return Status::Ok();
}

// Room for `count` keys in entries that all count as empty.
void RequestMerge::PrepareEntries(int64_t count) {
  const size_t size = size_t{1} << EntryBits(count);
  if (entries_.size() < size) entries_.resize(size, Entry{0, 0});
  if (count <= static_cast<int64_t>(std::numeric_limits<uint32_t>::max() - base_)) return;
  std::fill(entries_.begin(), entries_.end(), Entry{0, 0});
  base_ = 0;
}

int RequestMerge::EntryBits(int64_t count) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * count) ++bits;
  return bits;
}

int64_t RequestMerge::PlannedBytes(int64_t count, int64_t once) {
  // hashes_ is doubled by the first batch that is larger than the first.
  return std::max(2 * count, once) * static_cast<int64_t>(sizeof(uint64_t)) +
         (int64_t{sizeof(Entry)} << EntryBits(std::max(count, once)));
}

int64_t RequestMerge::allocated_bytes() const {
  return static_cast<int64_t>(hashes_.capacity() * sizeof(uint64_t) + entries_.capacity() * sizeof(Entry));
}

}  // namespace hvd_ctr
