// RequestMerge: the keys that all ranks ask this rank for -> unique working keys. Two ranks that ask for the same row get the
// same working key, so its gradients are summed before the row optimizer sees them.
//
// Example, W=2: rank 0 asks for {4, 7}, rank 1 for {9, 4} (one table) -> keys {4, 7, 9}, inverse {0, 1, 2, 0}.
//
// Invariant: keys stand in order of first occurrence. Keys that another rank owns are dropped (inverse -1) and counted, never
// mapped to a neighbour.
#ifndef HVD_CTR_CORE_REQUEST_MERGE_H_
#define HVD_CTR_CORE_REQUEST_MERGE_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

struct MergedKeys {
  std::vector<Key> keys;           ///< (K)
  std::vector<uint64_t> hashes;    ///< (K) SlotDirectory::Hash of each key.
  std::vector<int32_t> inverse;    ///< (R) index into keys, -1 for a foreign key.
  std::vector<int64_t> requested;  ///< (T) received keys per table, foreign ones included.
  std::vector<int64_t> unique;     ///< (T) working keys per table.
  int64_t foreign = 0;
};

/// Reusable: scratch memory is kept between calls. Not thread-safe.
class RequestMerge {
 public:
  RequestMerge(int32_t tables, int32_t rank, int32_t world_size) : tables_(tables), rank_(rank), world_size_(world_size) {}

  /// ids (R), tables (R). INVALID_ARGUMENT for a negative id, a table out of [0, T), or R > 2^31-1; nothing is promised of
  /// *merged then.
  Status Run(Span<const int64_t> ids, Span<const int32_t> tables, MergedKeys* merged);
  int64_t allocated_bytes() const;
  /// allocated_bytes() after many batches of about `count` keys and one of `once` keys.
  static int64_t PlannedBytes(int64_t count, int64_t once);

 private:
  friend class RequestMergeTestPeer;  // Moves base_ next to its wrap.

  // Number of a working key and the lower half of its hash, which tells most other keys apart without reading them. Numbers go up
  // from batch to batch, so that entries of earlier ones (number <= base_) count as empty and nothing is cleared.
  struct Entry {
    uint32_t tag;
    uint32_t number;
  };

  static int EntryBits(int64_t count);
  void PrepareEntries(int64_t count);
  Status HashAll(Span<const int64_t> ids, Span<const int32_t> tables, MergedKeys* merged);

  const int32_t tables_;
  const int32_t rank_;
  const int32_t world_size_;
  std::vector<uint64_t> hashes_;  // (R)
  std::vector<Entry> entries_;
  uint32_t base_ = 0;  // Working key k of the batch has number base_ + k + 1.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_REQUEST_MERGE_H_
