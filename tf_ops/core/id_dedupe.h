// IdDedupe: ids of one batch -> unique keys + virtual ids (the paper's VSI), so that each row is asked for, moved and updated
// once per batch however often its id occurs.
//
// Example: one table, ids {7, 3, 7, 9} -> keys {7, 3, 9}, virtual ids {0, 1, 0, 2}, counts {2, 1, 1},
// segment order {0, 2, 1, 3} with offsets {0, 2, 3, 4}.
//
// Invariant: keys are grouped by table in ascending table order and, within a table, stand in order of first occurrence
// (columns in the order given), so the result is a function of the ids alone.
#ifndef HVD_CTR_CORE_ID_DEDUPE_H_
#define HVD_CTR_CORE_ID_DEDUPE_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/options.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// The ids of one feature: `count` values at ids[0], ids[stride], ids[2*stride] ...; the virtual id of ids[i*stride] is written
/// to virtual_ids[i*stride]. A row-major (B, F) matrix is F columns of stride F.
struct IdColumn {
  const int64_t* ids = nullptr;
  int32_t* virtual_ids = nullptr;
  int64_t count = 0;
  int64_t stride = 1;
  int32_t table = 0;
  bool has_padding = false;  ///< true: ids equal to padding_id are dropped without being counted as invalid.
  int64_t padding_id = -1;
};

/// What IdDedupe needs to know of a table; the same meaning as in TableOptions.
struct IdRule {
  int64_t rows = -1;
  bool hash_ids = false;
};

/// First invalid id met (in column order, then position), for the message; feature is the column's index.
struct InvalidId {
  int32_t feature = -1;
  int64_t id = 0;
};

struct DedupeResult {
  std::vector<int64_t> keys;            ///< (U) ids after hash_ids, grouped by table.
  std::vector<int32_t> counts;          ///< (U) occurrences.
  std::vector<int64_t> table_offsets;   ///< (T+1) keys of table t are [table_offsets[t], table_offsets[t+1]).
  std::vector<int64_t> invalid_counts;  ///< (T) ids dropped as invalid (negative without hash_ids, or >= rows).
  InvalidId first_invalid;
};

/// Reusable: scratch memory is kept between calls. Not thread-safe.
class IdDedupe {
 public:
  /// Writes virtual ids (index into result->keys, or kNoVirtualId) through the columns, and fills *result.
  /// Columns must come with non-decreasing `table`; rules has one entry per table (T). INVALID_ARGUMENT otherwise, or when there
  /// are more than 2^31-1 ids, a table number or count is out of range, a column lacks its pointers, or hash_ids lacks rows > 0;
  /// *result is empty then. Invalid ids are dropped and counted; whether that is an error is the caller's decision.
  /// An id is looked at in this order: padding (dropped), hash_ids, then range. Steady state allocates nothing.
  Status Run(Span<const IdColumn> columns, Span<const IdRule> rules, DedupeResult* result);

 private:
  friend class IdDedupeTestPeer;  // Moves the epoch next to its wrap.

  /// One slot of the open-addressing table. It is occupied only while `epoch` is the current one, so that going on to the next
  /// table or call costs one increment and no clearing.
  struct Entry {
    int64_t id;
    int32_t index;  ///< Of the key within its table.
    uint32_t epoch;
  };

  /// Columns that stand side by side, as in a row-major matrix, are copied to and from contiguous memory some at a time: read one
  /// by one, each would read all cache lines of the matrix.
  struct Panel {
    int64_t begin = 0;  ///< First column; columns are numbered from the start of the batch.
    int64_t end = 0;
    int64_t pitch = 0;  ///< From one column to the next, in ids.
    std::vector<int64_t> ids;
    std::vector<int32_t> virtual_ids;
  };

  void RunTable(Span<const IdColumn> columns, int64_t begin, int64_t end, const IdRule& rule, DedupeResult* result);
  IdColumn Contiguous(Span<const IdColumn> columns, int64_t column);
  void WritePanel(Span<const IdColumn> columns);
  void RunColumn(const IdColumn& column, int32_t feature, const IdRule& rule, int32_t base, DedupeResult* result);
  template <typename Block>
  void ResolveBlock(const Block& block, int32_t base, int32_t* virtual_ids);
  int32_t FindOrInsert(int64_t id, uint64_t slot);
  void NextEpoch();
  void SetCapacity(int64_t unique);
  void Rehash(int64_t unique);
  uint64_t HomeSlot(int64_t id) const;

  Panel panel_;
  std::vector<Entry> entries_;
  uint32_t epoch_ = 0;
  int shift_ = 63;             ///< 64 - log2(slots in use), a prefix of entries_.
  std::vector<int64_t> keys_;  ///< Keys of the table at work, in order of first occurrence; only [0, unique_) is meaningful.
  std::vector<int32_t>
      counts_;  ///< counts_[k + 1]: occurrences of keys_[k]; counts_[0] takes the updates of what is not found yet.
  int32_t unique_ = 0;
  std::vector<int64_t> unique_hints_;  ///< (T) keys each table had in the previous call: sizes its slots, never the result.
};

/// Segment order of virtual ids (N): order lists the positions with a virtual id >= 0 sorted by virtual id, ties by position;
/// offsets (U+1): positions of virtual id u are order[offsets[u] .. offsets[u+1]). Virtual ids >= unique are left out like
/// negative ones.
void SegmentOrder(Span<const int32_t> virtual_ids, int64_t unique, std::vector<int32_t>* order, std::vector<int32_t>* offsets);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ID_DEDUPE_H_
