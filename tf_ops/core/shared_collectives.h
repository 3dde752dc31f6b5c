// What a SharedChannel's messages are made into: rows of an alltoall or allgather one after the other, sums of an allreduce.
//
// The sum runs over the ranks in their order, element by element, on every rank: the same bits on all of them, however the work
// is shared out.
#ifndef HVD_CTR_CORE_SHARED_COLLECTIVES_H_
#define HVD_CTR_CORE_SHARED_COLLECTIVES_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/shared_group.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

enum class SharedType : int32_t { kFloat32 = 0, kFloat64 = 1, kInt32 = 2, kInt64 = 3 };

/// Rows (n) that the arrived collective brings, of all ranks together.
int64_t ArrivedRows(const SharedChannel& channel);
/// Writes them in the order of the ranks; mine: the rows that stay on this rank.
void CopyArrived(const SharedChannel& channel, int64_t row_bytes, const void* mine, void* out);

/// One tensor of a grouped allreduce.
struct SharedAddend {
  const void* mine;
  void* sum;  ///< Must not overlap `mine`.
  int64_t elements;
};

/// Posts the addends of an allreduce.
Status PostAllReduce(SharedChannel* channel, SharedType type, Span<const SharedAddend> addends);
/// Whether FinishAllReduce waits for a second message, so that it belongs on the channel's own thread: with more than two ranks,
/// large sums are shared out over the ranks.
bool ReducesInTwoPhases(const SharedChannel& channel, SharedType type, Span<const SharedAddend> addends);
/// Memory of the slots of a channel for allreduces of addends of `bytes` in all, after two of them.
int64_t PlannedAllReduceBytes(int32_t ranks, int64_t bytes);
/// After all ranks have posted: the sums. `scratch` is kept by the caller for its memory.
Status FinishAllReduce(SharedChannel* channel, SharedType type, Span<const SharedAddend> addends, std::vector<char>* scratch);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_SHARED_COLLECTIVES_H_
