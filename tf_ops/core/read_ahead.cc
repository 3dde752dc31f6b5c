#include "tf_ops/core/read_ahead.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

namespace hvd_ctr {

ReadAhead::ReadAhead(const RecordFile* file, int64_t record_bytes, int64_t block_bytes, int64_t pool_bytes, int64_t buffer_bytes)
    : file_(file),
      record_bytes_(record_bytes),
      slots_(std::max<int64_t>(1, pool_bytes / (record_bytes + kSlotBytes))),
      reader_(record_bytes, block_bytes, buffer_bytes) {
  int bits = 1;
  while ((int64_t{1} << bits) < 2 * slots_) ++bits;
  index_shift_ = 64 - bits;
}

ReadAhead::~ReadAhead() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status ReadAhead::Allocate(bool use_uring) {
  HVD_CTR_RETURN_IF_ERROR(reader_.Allocate(use_uring));
  if (!pool_.AllocatePages(slots_ * record_bytes_)) return MakeStatus(StatusCode::kResourceExhausted, "no memory to read ahead");
  try {
    entries_.resize(static_cast<size_t>(slots_));
    index_.assign(size_t{1} << (64 - index_shift_), kNone);
    reads_.reserve(static_cast<size_t>(kMostReads));
    for (std::vector<int32_t>* list : {&free_, &wanted_, &queue_}) list->reserve(static_cast<size_t>(slots_));
    for (auto slot = static_cast<int32_t>(slots_); slot-- > 0;) free_.push_back(slot);
    thread_ = std::thread([this] { Run(); });
  } catch (const std::bad_alloc&) {
    return MakeStatus(StatusCode::kResourceExhausted, "no memory to read ahead");
  } catch (const std::system_error& error) {
    return MakeStatus(StatusCode::kResourceExhausted, "no thread to read ahead: ", error.what());
  }
  return Status::Ok();
}

// The entry of the index that holds the row's slot, or null.
int32_t* ReadAhead::Find(uint32_t row) {
  const size_t mask = index_.size() - 1;
  for (size_t at = Home(row); index_[at] != kNone; at = (at + 1) & mask) {
    if (entries_[static_cast<size_t>(index_[at])].row == row) return &index_[at];
  }
  return nullptr;
}

// Takes the row out of the index; what follows it moves up, so that no search ends too early.
void ReadAhead::Forget(uint32_t row) {
  const size_t mask = index_.size() - 1;
  auto hole = static_cast<size_t>(Find(row) - index_.data());
  for (size_t at = (hole + 1) & mask; index_[at] != kNone; at = (at + 1) & mask) {
    const size_t home = Home(entries_[static_cast<size_t>(index_[at])].row);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    index_[hole] = index_[at];
    hole = at;
  }
  index_[hole] = kNone;
}

void ReadAhead::Free(int32_t slot) {
  entries_[static_cast<size_t>(slot)].state = State::kFree;
  free_.push_back(slot);
}

// Rows that were announced and came to the device on another way are never asked for.
void ReadAhead::FreeOld() {
  for (int64_t look = 0; look < kLooks && free_.empty(); ++look) {
    const auto slot = static_cast<int32_t>(hand_);
    hand_ = hand_ + 1 == slots_ ? 0 : hand_ + 1;
    const Entry& entry = entries_[static_cast<size_t>(slot)];
    if (entry.state != State::kReady || series_ - entry.series < kLongest) continue;
    Forget(entry.row);
    Free(slot);
  }
}

void ReadAhead::Want(uint32_t row, int64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Find(row) != nullptr) return;
  if (free_.empty()) FreeOld();
  if (free_.empty()) return;
  const int32_t slot = free_.back();
  free_.pop_back();
  entries_[static_cast<size_t>(slot)] = Entry{offset, row, series_, State::kQueued};
  const size_t mask = index_.size() - 1;
  size_t at = Home(row);
  while (index_[at] != kNone) at = (at + 1) & mask;
  index_[at] = slot;
  wanted_.push_back(slot);
}

void ReadAhead::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  // At most slots_ entries are queued, so the reserved memory suffices once the head is cut off.
  queue_.erase(queue_.begin(), queue_.begin() + static_cast<int64_t>(queue_head_));
  queue_head_ = 0;
  queue_.insert(queue_.end(), wanted_.begin(), wanted_.end());
  wanted_.clear();
  ++series_;
  wake_.notify_all();
}

bool ReadAhead::Take(uint32_t row, void* record_out) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int32_t* found = Find(row);
  if (found == nullptr) return false;
  const int32_t slot = *found;
  Forget(row);
  Entry& entry = entries_[static_cast<size_t>(slot)];
  if (entry.state != State::kReady) {
    entry.state = State::kDropped;  // It is in a queue, or the thread writes into its slot.
    return false;
  }
  if (record_out != nullptr) std::memcpy(record_out, record(slot), static_cast<size_t>(record_bytes_));
  Free(slot);
  return record_out != nullptr;
}

void ReadAhead::Run() {
  while (Collect()) {
    std::sort(reads_.begin(), reads_.end(), [](const RecordRead& a, const RecordRead& b) { return a.offset < b.offset; });
    const Status status = reader_.Read(*file_, reads_, [this](int64_t slot, const char* data) {
      std::memcpy(record(slot), data, static_cast<size_t>(record_bytes_));
    });
    Finish(status.ok());
  }
}

// Waits for something to read; false: the end.
bool ReadAhead::Collect() {
  std::unique_lock<std::mutex> lock(mutex_);
  reads_.clear();
  while (reads_.empty()) {
    wake_.wait(lock, [this] { return stop_ || queue_head_ < queue_.size(); });
    if (stop_) return false;
    while (queue_head_ < queue_.size() && static_cast<int64_t>(reads_.size()) < kMostReads) {
      const int32_t slot = queue_[queue_head_++];
      Entry& entry = entries_[static_cast<size_t>(slot)];
      if (entry.state == State::kDropped) {
        Free(slot);
        continue;
      }
      entry.state = State::kReading;
      reads_.push_back(RecordRead{entry.offset, slot});
    }
    if (reads_.empty()) idle_.notify_all();
  }
  reading_ = true;
  return true;
}

void ReadAhead::Finish(bool read) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RecordRead& one : reads_) {
    const auto slot = static_cast<int32_t>(one.tag);
    Entry& entry = entries_[static_cast<size_t>(slot)];
    if (entry.state == State::kReading && read) {
      entry.state = State::kReady;
      continue;
    }
    if (entry.state == State::kReading) Forget(entry.row);
    Free(slot);
  }
  if (read) rows_read_ += static_cast<int64_t>(reads_.size());
  reading_ = false;
  idle_.notify_all();
}

int64_t ReadAhead::rows_read() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return rows_read_;
}

int64_t ReadAhead::wanted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_ - static_cast<int64_t>(free_.size());
}

void ReadAhead::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return !reading_ && queue_head_ == queue_.size(); });
}

int64_t ReadAhead::allocated_bytes() const {
  return pool_.bytes() + reader_.allocated_bytes() + static_cast<int64_t>(reads_.capacity() * sizeof(RecordRead)) +
         static_cast<int64_t>(entries_.capacity() * sizeof(Entry)) +
         static_cast<int64_t>((index_.capacity() + free_.capacity() + wanted_.capacity() + queue_.capacity()) * sizeof(int32_t));
}

int64_t ReadAhead::planned_bytes() const {
  const int64_t lists = (int64_t{1} << (64 - index_shift_)) + 3 * slots_;
  return slots_ * (record_bytes_ + static_cast<int64_t>(sizeof(Entry))) + reader_.planned_bytes() +
         kMostReads * static_cast<int64_t>(sizeof(RecordRead)) + lists * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace hvd_ctr
