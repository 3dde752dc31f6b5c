#include "tf_ops/core/shared_group.h"

#include <sched.h>
#include <signal.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>

#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

constexpr uint64_t kMagic = 0x6876645f63747231ULL;
constexpr int64_t kMaxChannels = 4096;
constexpr int64_t kNameBytes = 96;
constexpr int64_t kLine = 64;
constexpr int64_t kLookAgain = 500'000'000;  // ns between two looks at whether a rank that is waited for lives.

struct Header {
  uint32_t number;
  SharedOperation operation;
  int64_t row_bytes;
  int64_t rows;
  char name[kNameBytes];
};

int64_t DataOffset(int32_t ranks) {
  return (static_cast<int64_t>(sizeof(Header)) + ranks * static_cast<int64_t>(sizeof(int64_t)) + kLine - 1) / kLine * kLine;
}

// A quarter more than the message, so that messages of alike size do not grow the slot again and again.
int64_t SlotBytes(int64_t message_bytes) { return message_bytes + message_bytes / 4; }

void CopyName(const std::string& name, char* to) {
  std::memset(to, 0, kNameBytes);
  std::memcpy(to, name.data(), std::min<size_t>(name.size(), kNameBytes - 1));
}

}  // namespace

// What a rank tells the others of one channel.
struct Entry {
  std::atomic<uint64_t> hash;       // Of the name; 0: free.
  std::atomic<uint32_t> posted;     // Number of the newest message.
  std::atomic<int64_t> offsets[2];  // Of the slots in the rank's file.
  std::atomic<int64_t> bytes[2];    // That the slots have.
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free, "shared by processes");

struct Control {
  uint64_t magic;
  int64_t token;
  int32_t rank;
  int32_t size;
  std::atomic<uint32_t> channels;  // Entries in use.
  Entry entries[kMaxChannels];
};

struct SharedChannel::Peer {
  const Entry* entry = nullptr;
  SharedView slots[2];
};

// ---- group ----

Result<std::unique_ptr<SharedGroup>> SharedGroup::Create(int32_t rank, int32_t size, const SharedLimits& limits) {
  std::unique_ptr<SharedGroup> group(new SharedGroup(rank, size, limits));
  const Status opened = group->file_.Open();
  if (!opened.ok()) return opened;
  const Status reserved = group->control_.Reserve(sizeof(Control));
  if (!reserved.ok()) return reserved;
  if (getrandom(&group->token_, sizeof(group->token_), 0) != sizeof(group->token_)) {
    return MakeStatus(StatusCode::kFailedPrecondition, "getrandom: ", std::strerror(errno));
  }
  Control* control = new (group->control_.data()) Control();
  control->magic = kMagic;
  control->token = group->token_;
  control->rank = rank;
  control->size = size;
  return group;
}

SharedAddress SharedGroup::address() const { return {getpid(), file_.fd(), token_}; }

Status SharedGroup::Connect(Span<const SharedAddress> addresses) {
  if (addresses.size() != size_) {
    return MakeStatus(StatusCode::kInvalidArgument, "Connect with ", addresses.size(), " addresses of ", size_, " ranks");
  }
  addresses_.assign(addresses.begin(), addresses.end());
  controls_.clear();
  files_.clear();
  for (int32_t rank = 0; rank < size_; ++rank) {
    controls_.push_back(std::make_unique<SharedView>());
    files_.push_back(std::make_unique<PeerFile>());
    if (rank == rank_) continue;
    const SharedAddress& address = addresses[rank];
    HVD_CTR_RETURN_IF_ERROR(files_.back()->Open(address.pid, static_cast<int>(address.fd)));
    // The control block is what a rank reserves first.
    HVD_CTR_RETURN_IF_ERROR(controls_.back()->Map(*files_.back(), 0, sizeof(Control)));
    const auto* control = reinterpret_cast<const Control*>(controls_.back()->data());
    if (control->magic == kMagic && control->token == address.token && control->rank == rank && control->size == size_) continue;
    return MakeStatus(StatusCode::kFailedPrecondition, "process ", address.pid, " is not rank ", rank,
                      " here: the ranks run on other hosts or in other containers");
  }
  return Status::Ok();
}

int64_t SharedGroup::PlannedBytes() { return SharedRegion::PlannedBytes(sizeof(Control)); }

Result<SharedChannel*> SharedGroup::Channel(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<SharedChannel>& channel = channels_[name];
  if (channel == nullptr) {
    std::unique_ptr<SharedChannel> made(new SharedChannel(this, name));
    const Status registered = made->Register();
    if (!registered.ok()) {
      channels_.erase(name);
      return registered;
    }
    channel = std::move(made);
  }
  return channel.get();
}

// ---- channel ----

SharedChannel::SharedChannel(SharedGroup* group, std::string name)
    : group_(group),
      name_(std::move(name)),
      hash_(HashBytes(name_.data(), static_cast<int64_t>(name_.size())) | 1),
      slots_{SharedRegion(&group->file_), SharedRegion(&group->file_)},
      parts_(static_cast<size_t>(group->size_)) {
  for (int32_t rank = 0; rank < group_->size_; ++rank) peers_.push_back(std::make_unique<Peer>());
}

SharedChannel::~SharedChannel() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

int64_t SharedChannel::PlannedSlotBytes(int32_t ranks, int64_t message_bytes) {
  return SharedRegion::PlannedBytes(SlotBytes(DataOffset(ranks) + message_bytes));
}

int32_t SharedChannel::rank() const { return group_->rank_; }
int32_t SharedChannel::size() const { return group_->size_; }

// Under the group's mutex.
Status SharedChannel::Register() {
  auto* control = reinterpret_cast<Control*>(group_->control_.data());
  const uint32_t index = control->channels.load(std::memory_order_relaxed);
  if (index >= kMaxChannels) {
    return MakeStatus(StatusCode::kResourceExhausted, "collective '", name_, "' would be number ", index + 1, "; at most ",
                      kMaxChannels, " names are possible");
  }
  entry_ = &control->entries[index];
  entry_->hash.store(hash_, std::memory_order_release);
  control->channels.store(index + 1, std::memory_order_release);
  WakeAll(&control->channels);
  return Status::Ok();
}

Status SharedChannel::Post(const SharedMessage& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) {
      return MakeStatus(StatusCode::kFailedPrecondition, "collective '", name_,
                        "' was called again before the call before has ended; each needs a name of its own");
    }
    busy_ = true;
  }
  operation_ = message.operation;
  row_bytes_ = message.row_bytes;
  const uint32_t number = ++number_;
  SharedRegion& slot = slots_[number % 2];
  int64_t bytes = DataOffset(size());
  for (const SharedMessage::Piece& piece : message.pieces) bytes += piece.bytes;
  if (bytes > slot.bytes()) HVD_CTR_RETURN_IF_ERROR(slot.Reserve(SlotBytes(bytes)));
  auto* header = reinterpret_cast<Header*>(slot.data());
  header->number = number;
  header->operation = message.operation;
  header->row_bytes = message.row_bytes;
  header->rows = message.rows;
  CopyName(name_, header->name);
  if (!message.splits.empty()) {
    std::memcpy(slot.data() + sizeof(Header), message.splits.data(), static_cast<size_t>(size()) * sizeof(int64_t));
  }
  char* to = slot.data() + DataOffset(size());
  for (const SharedMessage::Piece& piece : message.pieces) {
    if (piece.bytes > 0) std::memcpy(to, piece.data, static_cast<size_t>(piece.bytes));
    to += piece.bytes;
  }
  parts_[static_cast<size_t>(rank())] = {nullptr, message.splits.empty() ? message.rows : message.splits[rank()]};
  entry_->offsets[number % 2].store(slot.offset(), std::memory_order_relaxed);
  entry_->bytes[number % 2].store(slot.bytes(), std::memory_order_relaxed);
  entry_->posted.store(number, std::memory_order_release);
  WakeAll(&entry_->posted);
  return Status::Ok();
}

bool SharedChannel::HasPosted(int32_t rank) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  if (peer.entry == nullptr) {
    const auto* control = reinterpret_cast<const Control*>(group_->controls_[static_cast<size_t>(rank)]->data());
    const int64_t channels = std::min<int64_t>(kMaxChannels, control->channels.load(std::memory_order_acquire));
    for (int64_t i = 0; i < channels && peer.entry == nullptr; ++i) {
      if (control->entries[i].hash.load(std::memory_order_acquire) == hash_) peer.entry = &control->entries[i];
    }
    if (peer.entry == nullptr) return false;
  }
  return static_cast<int32_t>(peer.entry->posted.load(std::memory_order_acquire) - number_) >= 0;
}

bool SharedChannel::AllPosted() {
  for (int32_t rank = 0; rank < size(); ++rank) {
    if (rank != this->rank() && !HasPosted(rank)) return false;
  }
  return true;
}

bool SharedChannel::Arrived() {
  if (AllPosted()) return true;
  const auto spin = std::chrono::duration<double>(group_->limits_.spin_seconds);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < spin) {
    sched_yield();
    if (AllPosted()) return true;
  }
  return false;
}

Status SharedChannel::Wait() {
  double waited = 0;
  bool warned = false;
  for (int32_t rank = 0; rank < size(); ++rank) {
    if (rank != this->rank()) HVD_CTR_RETURN_IF_ERROR(WaitFor(rank, &waited, &warned));
  }
  return Status::Ok();
}

Status SharedChannel::WaitFor(int32_t rank, double* waited_seconds, bool* warned) {
  const Peer& peer = *peers_[static_cast<size_t>(rank)];
  const auto* control = reinterpret_cast<const Control*>(group_->controls_[static_cast<size_t>(rank)]->data());
  const int64_t pid = group_->addresses_[static_cast<size_t>(rank)].pid;
  while (true) {
    // Read before HasPosted looks, so that a change in between ends the sleep at once.
    const uint32_t channels = control->channels.load(std::memory_order_acquire);
    const uint32_t posted = peer.entry == nullptr ? 0 : peer.entry->posted.load(std::memory_order_acquire);
    const bool known = peer.entry != nullptr;
    if (HasPosted(rank)) return Status::Ok();
    if (known != (peer.entry != nullptr)) continue;
    const auto begin = std::chrono::steady_clock::now();
    if (known) {
      WaitForChange(&peer.entry->posted, posted, kLookAgain);
    } else {
      WaitForChange(&control->channels, channels, kLookAgain);
    }
    *waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH && !HasPosted(rank)) {
      return MakeStatus(StatusCode::kDataLoss, "rank ", rank, " (process ", pid, ") has ended; rank ", this->rank(),
                        " waits for it in collective '", name_, "'");
    }
    if (*waited_seconds >= group_->limits_.fail_seconds) {
      return MakeStatus(StatusCode::kDataLoss, "rank ", this->rank(), " waited ", group_->limits_.fail_seconds, " s for rank ",
                        rank, " in collective '", name_,
                        "'; it lives and does not come: it is stopped, or in another collective (",
                        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS sets the time)");
    }
    if (!*warned && *waited_seconds >= group_->limits_.warn_seconds) {
      *warned = true;
      std::fprintf(stderr, "hvd_ctr: rank %d has waited %.0f s for rank %d in collective '%s'\n", this->rank(), *waited_seconds,
                   rank, name_.c_str());
    }
  }
}

Status SharedChannel::Disagreement(int32_t rank, const char* what, int64_t theirs, int64_t mine) const {
  return MakeStatus(StatusCode::kInvalidArgument, "collective '", name_, "': rank ", rank, " came with ", what, " ", theirs,
                    ", rank ", this->rank(), " with ", mine, "; all ranks must make the same calls");
}

Status SharedChannel::CheckPosted() {
  for (int32_t rank = 0; rank < size(); ++rank) {
    if (rank != this->rank()) HVD_CTR_RETURN_IF_ERROR(CheckPeer(rank));
  }
  return Status::Ok();
}

Status SharedChannel::CheckPeer(int32_t rank) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  const int32_t slot = static_cast<int32_t>(number_ % 2);
  const int64_t bytes = peer.entry->bytes[slot].load(std::memory_order_acquire);
  SharedView& view = peer.slots[slot];
  const int64_t offset = DataOffset(size());
  if (bytes < offset) return Disagreement(rank, "a message of bytes", bytes, offset);
  const int64_t place = peer.entry->offsets[slot].load(std::memory_order_acquire);
  HVD_CTR_RETURN_IF_ERROR(view.Map(*group_->files_[static_cast<size_t>(rank)], place, bytes));
  Header header;
  std::memcpy(&header, view.data(), sizeof(header));
  char name[kNameBytes];
  CopyName(name_, name);
  if (std::memcmp(header.name, name, kNameBytes) != 0) {
    return MakeStatus(StatusCode::kInvalidArgument, "collective '", name_, "': rank ", rank, " is in another one");
  }
  if (header.number != number_) return Disagreement(rank, "call number", header.number, number_);
  if (header.operation != operation_) {
    return Disagreement(rank, "operation", static_cast<int64_t>(header.operation), static_cast<int64_t>(operation_));
  }
  if (header.row_bytes != row_bytes_) return Disagreement(rank, "rows of bytes", header.row_bytes, row_bytes_);
  const int64_t most = row_bytes_ == 0 ? INT32_MAX : (bytes - offset) / row_bytes_;
  int64_t begin = 0;
  int64_t rows = header.rows;
  if (operation_ == SharedOperation::kAllToAll) {
    const char* splits = view.data() + sizeof(Header);
    for (int32_t to = 0; to <= this->rank(); ++to) {
      if (to == rank && to != this->rank()) continue;
      std::memcpy(&rows, splits + static_cast<size_t>(to) * sizeof(int64_t), sizeof(rows));
      if (rows < 0 || rows > most - begin) return Disagreement(rank, "a number of rows of", rows, most - begin);
      if (to < this->rank()) begin += rows;
    }
  }
  if (rows < 0 || rows > most - begin) return Disagreement(rank, "a number of rows of", rows, most - begin);
  parts_[static_cast<size_t>(rank)] = {view.data() + offset + begin * row_bytes_, rows};
  return Status::Ok();
}

void SharedChannel::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  busy_ = false;
}

void SharedChannel::Later(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  task_ = std::move(task);
  if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  wake_.notify_all();
}

void SharedChannel::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return task_ != nullptr || ending_; });
    if (task_ == nullptr) return;
    const std::function<void()> task = std::move(task_);
    task_ = nullptr;
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace hvd_ctr
