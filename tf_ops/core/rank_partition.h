// RankPartition: unique keys -> the same keys grouped by the rank that owns them (hash.h OwnerOf), keeping table groups and order
// within each owner. Row-wise sharding by hash; every rank computes the same owner for a key.
//
// Example, W=2, one table, keys {7, 3, 9} with owners {1, 0, 1}: grouped {3, 7, 9}, splits {1, 2}, restore {1, 0, 2}
// (grouped[restore[i]] == keys[i]).
#ifndef HVD_CTR_CORE_RANK_PARTITION_H_
#define HVD_CTR_CORE_RANK_PARTITION_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

struct PartitionResult {
  std::vector<int64_t> grouped;             ///< (U) ids by owner, then table, then order in `keys`.
  std::vector<int64_t> splits;              ///< (W) keys per owner.
  std::vector<int64_t> owner_table_counts;  ///< (W*T) keys of owner w and table t at [w*T + t].
  std::vector<int32_t> restore;             ///< (U) position in `grouped` of keys[i].
  std::vector<int64_t> next;                ///< Scratch.
};

/// keys (U) grouped by table as in DedupeResult; table_offsets (T+1).
void PartitionByOwner(Span<const int64_t> keys, Span<const int64_t> table_offsets, int32_t world_size, PartitionResult* result);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_RANK_PARTITION_H_
