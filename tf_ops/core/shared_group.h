// SharedGroup: collectives between the ranks of one host through shared memory, without a coordinator and without threads that
// spin. Each rank writes what it sends into memory of its own and reads what it receives from the memory of the others.
//
//   auto group = SharedGroup::Create(rank, ranks, limits);
//   group->Connect(addresses);                       // address() of every rank, exchanged by other means
//   SharedChannel* channel = group->Channel("rows"); // one per name; names match the calls of different ranks
//   channel->Post({SharedOperation::kAllToAll, row_bytes, splits, pieces});
//   if (!channel->Arrived()) channel->Wait();        // or channel->Later([...] { ... Wait() ... });
//   channel->CheckPosted();
//   channel->From(peer).rows, .data ...
//   channel->End();
//
// Invariants: message n of a channel is written to its slot n % 2. A rank posts n + 2 only after it has got message n + 1 of all
// others, which they post after they have read message n of everybody: nobody overwrites what is being read, and no second signal
// is needed. What another process wrote is checked before it is used as a size.
//
// A rank that waits for one that does not come warns, and then fails, after the times of SharedLimits; at once when that process
// has ended. Not for ranks that are threads of one process, but for tests.
#ifndef HVD_CTR_CORE_SHARED_GROUP_H_
#define HVD_CTR_CORE_SHARED_GROUP_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/core/shared_segment.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// How another rank finds this one's memory.
struct SharedAddress {
  int64_t pid = 0;
  int64_t fd = -1;
  int64_t token = 0;  ///< Random: tells the right process from one that happens to have its number.
};

struct SharedLimits {
  double warn_seconds = 30;
  double fail_seconds = 60;
  /// How long Arrived looks again, giving its core away in between, before it says no. Ranks of one step come close together, and
  /// waking a thread up takes longer than most of them let wait; of no use where ranks share cores.
  double spin_seconds = 0;
};

enum class SharedOperation : int32_t { kAllToAll = 0, kAllGather = 1, kAllReduce = 2 };

/// What a rank brings to a collective.
struct SharedMessage {
  struct Piece {
    const void* data;
    int64_t bytes;
  };
  SharedOperation operation;
  int64_t row_bytes;           ///< The same on all ranks.
  Span<const int64_t> splits;  ///< (W) rows for each rank; of an allgather or allreduce all rows are for everybody: (0).
  int64_t rows;                ///< In the pieces.
  Span<const Piece> pieces;    ///< One after the other. Of an alltoall without the rows that stay on the rank.
};

class SharedGroup;

/// The collectives of one name, one at a time.
class SharedChannel {
 public:
  /// What a rank has posted for this one.
  struct Part {
    const char* data;  ///< Of this rank itself: null, it has its rows at hand.
    int64_t rows;
  };

  ~SharedChannel();

  /// Copies the message to where the others find it. FAILED_PRECONDITION while another collective of this name runs.
  Status Post(const SharedMessage& message);
  /// Whether all others have posted; see SharedLimits::spin_seconds.
  bool Arrived();
  /// Returns when all others have. DATA_LOSS: one has ended, or does not come.
  Status Wait();
  /// INVALID_ARGUMENT where another rank does something else than this one; FAILED_PRECONDITION where its memory cannot be read.
  Status CheckPosted();
  /// Valid after CheckPosted until End.
  Part From(int32_t rank) const { return parts_[static_cast<size_t>(rank)]; }
  void End();
  /// Runs the task on the channel's own thread, which is there to wait.
  void Later(std::function<void()> task);

  int32_t rank() const;
  int32_t size() const;
  const std::string& name() const { return name_; }
  /// Memory of one of the channel's two slots, where all messages of that slot have `message_bytes` in their pieces.
  static int64_t PlannedSlotBytes(int32_t ranks, int64_t message_bytes);

 private:
  friend class SharedGroup;
  struct Peer;
  SharedChannel(SharedGroup* group, std::string name);

  Status Register();
  bool HasPosted(int32_t rank);
  bool AllPosted();
  Status WaitFor(int32_t rank, double* waited_seconds, bool* warned);
  Status CheckPeer(int32_t rank);
  Status Disagreement(int32_t rank, const char* what, int64_t theirs, int64_t mine) const;
  void Work();

  SharedGroup* const group_;
  const std::string name_;
  const uint64_t hash_;
  SharedRegion slots_[2];
  struct Entry* entry_ = nullptr;  // In the group's control block.
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Part> parts_;
  uint32_t number_ = 0;  // Of the message at work.
  bool busy_ = false;
  SharedOperation operation_ = SharedOperation::kAllToAll;
  int64_t row_bytes_ = 0;

  std::mutex mutex_;  // Of what follows, and of busy_.
  std::condition_variable wake_;
  std::function<void()> task_;
  bool ending_ = false;
  std::thread thread_;
};

class SharedGroup {
 public:
  /// RESOURCE_EXHAUSTED or FAILED_PRECONDITION where the system has no such memory.
  static Result<std::unique_ptr<SharedGroup>> Create(int32_t rank, int32_t size, const SharedLimits& limits);

  SharedAddress address() const;
  /// addresses (W), those of all ranks in order. FAILED_PRECONDITION where one cannot be reached: another host or container.
  Status Connect(Span<const SharedAddress> addresses);
  /// The channel of that name, made at first use. Any thread may call.
  Result<SharedChannel*> Channel(const std::string& name);
  /// Memory that it takes beside the slots of its channels.
  static int64_t PlannedBytes();

 private:
  friend class SharedChannel;
  SharedGroup(int32_t rank, int32_t size, const SharedLimits& limits) : rank_(rank), size_(size), limits_(limits) {}

  const int32_t rank_;
  const int32_t size_;
  const SharedLimits limits_;
  int64_t token_ = 0;
  SharedFile file_;
  SharedRegion control_{&file_};
  std::vector<SharedAddress> addresses_;
  std::vector<std::unique_ptr<PeerFile>> files_;       // (W) of the others.
  std::vector<std::unique_ptr<SharedView>> controls_;  // (W) their control blocks.
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<SharedChannel>> channels_;  // Last: they use the rest.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_SHARED_GROUP_H_
