#include "tf_ops/core/rank_partition.h"

#include <algorithm>
#include <numeric>

#include "tf_ops/core/key_hashes.h"

namespace hvd_ctr {
namespace {

void KeepOnOneRank(Span<const int64_t> keys, Span<const int64_t> table_offsets, PartitionResult* result) {
  result->grouped.assign(keys.begin(), keys.end());
  std::iota(result->restore.begin(), result->restore.end(), 0);
  result->splits[0] = keys.size();
  for (int64_t t = 0; t + 1 < table_offsets.size(); ++t) {
    result->owner_table_counts[t] = table_offsets[t + 1] - table_offsets[t];
  }
}

}  // namespace

void PartitionByOwner(Span<const int64_t> keys, Span<const int64_t> table_offsets, int32_t world_size, PartitionResult* result) {
  const int64_t tables = std::max<int64_t>(table_offsets.size() - 1, 0);
  result->restore.resize(static_cast<size_t>(keys.size()));
  result->splits.assign(static_cast<size_t>(world_size), 0);
  result->owner_table_counts.assign(static_cast<size_t>(world_size * tables), 0);
  if (world_size == 1) {
    KeepOnOneRank(keys, table_offsets, result);
    return;
  }
  // `restore` holds the owners until the keys are placed.
  for (int64_t t = 0; t < tables; ++t) {
    const int64_t begin = table_offsets[t];
    int32_t* const owners = result->restore.data() + begin;
    const int64_t count = table_offsets[t + 1] - begin;
    OwnersOfKeys(static_cast<int32_t>(t), keys.data() + begin, count, world_size, owners);
    for (int64_t i = 0; i < count; ++i) ++result->owner_table_counts[owners[i] * tables + t];
  }
  result->next.resize(static_cast<size_t>(world_size));
  int64_t begin = 0;
  for (int32_t w = 0; w < world_size; ++w) {
    const auto counts = result->owner_table_counts.begin() + w * tables;
    result->splits[w] = std::accumulate(counts, counts + tables, int64_t{0});
    result->next[w] = begin;
    begin += result->splits[w];
  }
  // Keys come table by table, so one cursor per owner keeps the table groups in order.
  result->grouped.resize(static_cast<size_t>(begin));
  int64_t* const grouped = result->grouped.data();
  int64_t* const next = result->next.data();
  int32_t* const restore = result->restore.data();
  for (int64_t i = 0; i < begin; ++i) {
    const int64_t place = next[restore[i]]++;
    grouped[place] = keys[i];
    restore[i] = static_cast<int32_t>(place);
  }
}

}  // namespace hvd_ctr
