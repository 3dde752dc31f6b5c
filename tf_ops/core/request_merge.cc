#include "tf_ops/core/request_merge.h"

#include <algorithm>
#include <limits>

#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

constexpr int32_t kForeign = -1;

// HashKey for keys that come in runs of one table: the table's part is computed once per run.
class RunHash {
 public:
  RunHash(uint64_t salt, int32_t table) : mixed_(Mix64(salt + static_cast<uint64_t>(static_cast<uint32_t>(table)))) {}
  uint64_t operator()(int64_t id) const { return Mix64(static_cast<uint64_t>(id) ^ mixed_); }

 private:
  uint64_t mixed_;
};

}  // namespace

Status RequestMerge::HashAll(Span<const int64_t> ids, Span<const int32_t> tables, MergedKeys* merged) {
  const int64_t count = ids.size();
  for (int64_t begin = 0; begin < count;) {
    const int32_t table = tables[begin];
    if (table < 0 || table >= tables_) {
      return MakeStatus(StatusCode::kInvalidArgument, "key ", begin, " names table ", table, "; allowed are 0 .. ", tables_ - 1);
    }
    const RunHash directory_hash(kDirectorySalt, table);
    const RunHash owner_hash(kOwnerSalt, table);
    const auto ranks = static_cast<uint64_t>(world_size_);
    int64_t i = begin;
    for (; i < count && tables[i] == table; ++i) {
      if (ids[i] < 0) {
        return MakeStatus(StatusCode::kInvalidArgument, "key ", i, " of table ", table, " has id ", ids[i],
                          "; allowed are 0 .. 2^63-1");
      }
      hashes_[static_cast<size_t>(i)] = directory_hash(ids[i]);
      const bool foreign = world_size_ > 1 && static_cast<int32_t>(ReduceRange(owner_hash(ids[i]), ranks)) != rank_;
      merged->inverse[static_cast<size_t>(i)] = foreign ? kForeign : 0;
      merged->foreign += foreign;
    }
    merged->requested[static_cast<size_t>(table)] += i - begin;
    begin = i;
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
  const int bits = EntryBits(count);
  const size_t size = size_t{1} << bits;
  entries_.assign(size, Entry{0, 0});
  const int shift = 64 - bits;
  const uint64_t mask = size - 1;
  constexpr int64_t kAhead = 16;
  uint32_t unique = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(&entries_[hashes_[static_cast<size_t>(i + kAhead)] >> shift]);
    if (merged->inverse[static_cast<size_t>(i)] == kForeign) continue;
    const uint64_t hash = hashes_[static_cast<size_t>(i)];
    const auto tag = static_cast<uint32_t>(hash);
    const Key key{ids[i], tables[i]};
    uint64_t at = hash >> shift;
    while (entries_[at].number != 0 && (entries_[at].tag != tag || merged->keys[entries_[at].number - 1] != key))
      at = (at + 1) & mask;
    if (entries_[at].number == 0) {
      merged->keys[unique] = key;
      merged->hashes[unique] = hash;
      entries_[at] = Entry{tag, ++unique};
      ++merged->unique[static_cast<size_t>(key.table)];
    }
    merged->inverse[static_cast<size_t>(i)] = static_cast<int32_t>(entries_[at].number - 1);
  }
  merged->keys.resize(unique);
  merged->hashes.resize(unique);
  return Status::Ok();
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
