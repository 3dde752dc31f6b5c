#include "tf_ops/core/shared_collectives.h"

#include <algorithm>
#include <cstring>

namespace hvd_ctr {
namespace {

constexpr int64_t kTwoPhaseBytes = 1 << 20;
constexpr int64_t kBlock = 2048;  // Elements added at a time: the sums stay in the first-level cache.

int64_t TypeBytes(SharedType type) { return type == SharedType::kFloat64 || type == SharedType::kInt64 ? 8 : 4; }

bool InTwoPhases(int32_t ranks, int64_t bytes) { return ranks > 2 && bytes >= kTwoPhaseBytes; }

int64_t TotalElements(Span<const SharedAddend> addends) {
  int64_t total = 0;
  for (const SharedAddend& addend : addends) total += addend.elements;
  return total;
}

/// sum (n) of elements [begin, begin + n) of what the ranks posted; mine: those of this rank.
template <typename T>
void SumBlock(const SharedChannel& channel, int64_t begin, const T* mine, int64_t n, T* sum) {
  for (int32_t rank = 0; rank < channel.size(); ++rank) {
    const T* from = rank == channel.rank() ? mine : reinterpret_cast<const T*>(channel.From(rank).data) + begin;
    if (rank == 0) {
      std::copy_n(from, n, sum);
    } else {
      for (int64_t i = 0; i < n; ++i) sum[i] += from[i];
    }
  }
}

template <typename T>
void SumAll(const SharedChannel& channel, Span<const SharedAddend> addends) {
  int64_t begin = 0;
  for (const SharedAddend& addend : addends) {
    const T* mine = static_cast<const T*>(addend.mine);
    T* sum = static_cast<T*>(addend.sum);
    for (int64_t i = 0; i < addend.elements; i += kBlock) {
      SumBlock<T>(channel, begin + i, mine + i, std::min(kBlock, addend.elements - i), sum + i);
    }
    begin += addend.elements;
  }
}

/// function(addend, first element in it, first element overall, elements) for the parts of [begin, end) in the addends.
template <typename Function>
void ForParts(Span<const SharedAddend> addends, int64_t begin, int64_t end, const Function& function) {
  int64_t first = 0;
  for (const SharedAddend& addend : addends) {
    const int64_t from = std::max(begin, first);
    const int64_t to = std::min(end, first + addend.elements);
    if (from < to) function(addend, from - first, from, to - from);
    first += addend.elements;
  }
}

/// Each rank adds up its share and posts it; everybody collects the shares.
template <typename T>
Status SumInTwoPhases(SharedChannel* channel, Span<const SharedAddend> addends, std::vector<char>* scratch) {
  const int64_t total = TotalElements(addends);
  const auto share = [total, channel](int32_t rank) { return total * rank / channel->size(); };
  const int64_t begin = share(channel->rank());
  const int64_t end = share(channel->rank() + 1);
  scratch->resize(static_cast<size_t>(end - begin) * sizeof(T));
  T* sums = reinterpret_cast<T*>(scratch->data());
  ForParts(addends, begin, end, [&](const SharedAddend& addend, int64_t first, int64_t overall, int64_t count) {
    for (int64_t i = 0; i < count; i += kBlock) {
      SumBlock<T>(*channel, overall + i, static_cast<const T*>(addend.mine) + first + i, std::min(kBlock, count - i),
                  sums + (overall - begin) + i);
    }
  });
  channel->End();
  const SharedMessage::Piece piece{sums, static_cast<int64_t>(scratch->size())};
  HVD_CTR_RETURN_IF_ERROR(
      channel->Post({SharedOperation::kAllGather, sizeof(T), {}, end - begin, Span<const SharedMessage::Piece>(&piece, 1)}));
  HVD_CTR_RETURN_IF_ERROR(channel->Wait());
  HVD_CTR_RETURN_IF_ERROR(channel->CheckPosted());
  for (int32_t rank = 0; rank < channel->size(); ++rank) {
    const T* from = rank == channel->rank() ? sums : reinterpret_cast<const T*>(channel->From(rank).data);
    const int64_t at = share(rank);
    ForParts(addends, at, share(rank + 1), [&](const SharedAddend& addend, int64_t first, int64_t overall, int64_t count) {
      std::copy_n(from + (overall - at), count, static_cast<T*>(addend.sum) + first);
    });
  }
  return Status::Ok();
}

template <typename T>
Status Sum(SharedChannel* channel, bool two_phases, Span<const SharedAddend> addends, std::vector<char>* scratch) {
  if (two_phases) return SumInTwoPhases<T>(channel, addends, scratch);
  SumAll<T>(*channel, addends);
  return Status::Ok();
}

}  // namespace

int64_t ArrivedRows(const SharedChannel& channel) {
  int64_t rows = 0;
  for (int32_t rank = 0; rank < channel.size(); ++rank) rows += channel.From(rank).rows;
  return rows;
}

void CopyArrived(const SharedChannel& channel, int64_t row_bytes, const void* mine, void* out) {
  char* to = static_cast<char*>(out);
  for (int32_t rank = 0; rank < channel.size(); ++rank) {
    const SharedChannel::Part part = channel.From(rank);
    const auto bytes = static_cast<size_t>(part.rows * row_bytes);
    if (bytes > 0) std::memcpy(to, rank == channel.rank() ? mine : part.data, bytes);
    to += bytes;
  }
}

Status PostAllReduce(SharedChannel* channel, SharedType type, Span<const SharedAddend> addends) {
  std::vector<SharedMessage::Piece> pieces;
  pieces.reserve(static_cast<size_t>(addends.size()));
  for (const SharedAddend& addend : addends) pieces.push_back({addend.mine, addend.elements * TypeBytes(type)});
  return channel->Post({SharedOperation::kAllReduce, TypeBytes(type), {}, TotalElements(addends), pieces});
}

bool ReducesInTwoPhases(const SharedChannel& channel, SharedType type, Span<const SharedAddend> addends) {
  return InTwoPhases(channel.size(), TotalElements(addends) * TypeBytes(type));
}

int64_t PlannedAllReduceBytes(int32_t ranks, int64_t bytes) {
  // The two messages of two phases take turns, so each has a slot of its own.
  const int64_t second = InTwoPhases(ranks, bytes) ? (bytes + ranks - 1) / ranks : bytes;
  return SharedChannel::PlannedSlotBytes(ranks, bytes) + SharedChannel::PlannedSlotBytes(ranks, second);
}

Status FinishAllReduce(SharedChannel* channel, SharedType type, Span<const SharedAddend> addends, std::vector<char>* scratch) {
  const int64_t total = TotalElements(addends);
  for (int32_t rank = 0; rank < channel->size(); ++rank) {
    if (channel->From(rank).rows == total) continue;
    return MakeStatus(StatusCode::kInvalidArgument, "collective '", channel->name(), "': rank ", rank, " came with ",
                      channel->From(rank).rows, " elements, rank ", channel->rank(), " with ", total,
                      "; all ranks must bring tensors of the same shapes");
  }
  const bool two_phases = ReducesInTwoPhases(*channel, type, addends);
  switch (type) {
    case SharedType::kFloat32:
      return Sum<float>(channel, two_phases, addends, scratch);
    case SharedType::kFloat64:
      return Sum<double>(channel, two_phases, addends, scratch);
    case SharedType::kInt32:
      return Sum<int32_t>(channel, two_phases, addends, scratch);
    case SharedType::kInt64:
      return Sum<int64_t>(channel, two_phases, addends, scratch);
  }
  return MakeStatus(StatusCode::kInternal, "no such type of sums");
}

}  // namespace hvd_ctr
