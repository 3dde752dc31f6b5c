// ReadAhead: records of a file that will be asked for soon, read by a thread of its own, so that whoever asks need not wait for
// the disk. A bounded pool; what does not fit in is left to the asker.
//
//   ahead.Want(row, offset);  ...  ahead.Start();       // of the batches to come
//   if (!ahead.Take(row, record)) { ... read it ... }   // its time has come
//   ahead.Drop(row);                                    // the file's record is not the row's any more
//
// Invariant: what Take gives is what the file had at `offset` when Take was called, provided that the owner calls Drop(row)
// before that record is overwritten or the row's record is another one. A failed read is dropped: the asker's own read reports
// it. The public functions may be called from any thread.
#ifndef HVD_CTR_CORE_READ_AHEAD_H_
#define HVD_CTR_CORE_READ_AHEAD_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/batch_reader.h"
#include "tf_ops/core/options.h"
#include "tf_ops/core/record_file.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

class ReadAhead {
 public:
  /// A pool of about pool_bytes, at least one record; buffers of about buffer_bytes. The file must outlive it.
  ReadAhead(const RecordFile* file, int64_t record_bytes, int64_t block_bytes, int64_t pool_bytes, int64_t buffer_bytes);
  /// Waits for the reads under way.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// Starts the thread. RESOURCE_EXHAUSTED: no memory, or no thread. Call once, before anything else.
  Status Allocate(bool use_uring);

  /// The row's record is at this offset and will be asked for. Nothing happens if it is wanted already or the pool is full. What
  /// nobody has asked for during kLongest calls of Start makes room.
  void Want(uint32_t row, int64_t offset);
  /// Begins to read what was wanted since the last call.
  void Start();
  /// Copies the record, if it has been read, and forgets the row either way.
  bool Take(uint32_t row, void* record);
  void Drop(uint32_t row) { Take(row, nullptr); }

  int64_t rows_read() const;
  /// Records that are read, under way or queued.
  int64_t wanted() const;
  /// Waits until all that was started has been read; for tests.
  void Wait();
  int64_t allocated_bytes() const;
  /// allocated_bytes() after Allocate.
  int64_t planned_bytes() const;

 private:
  enum class State : uint8_t { kFree, kQueued, kReading, kReady, kDropped };
  struct Entry {
    int64_t offset = 0;
    uint32_t row = 0;
    uint32_t series = 0;  // Number of the Start that began it.
    State state = State::kFree;
  };
  static constexpr int64_t kSlotBytes = sizeof(Entry) + 7 * sizeof(int32_t);  // Beside the record, at most.
  static constexpr int64_t kMostReads = 512;  // At a time: what was read is there for the taking after so many.
  static constexpr uint32_t kLongest = 2 * kMaxWindow;
  static constexpr int64_t kLooks = 16;  // Slots that one Want looks at for something old.
  static constexpr int32_t kNone = -1;

  // All but the thread's own members need mutex_.
  size_t Home(uint32_t row) const { return (row * 0x9E3779B97F4A7C15u) >> index_shift_; }
  int32_t* Find(uint32_t row);
  void Forget(uint32_t row);
  void Free(int32_t slot);
  void FreeOld();
  void Run();
  bool Collect();
  void Finish(bool read);
  char* record(int64_t slot) const { return static_cast<char*>(pool_.data()) + slot * record_bytes_; }

  const RecordFile* file_;
  const int64_t record_bytes_;
  const int64_t slots_;
  int index_shift_ = 0;
  BatchReader reader_;
  AlignedBlock pool_;  // Slots being read belong to the thread.

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Entry> entries_;   // By slot.
  std::vector<int32_t> index_;   // Open addressing by row: slot, or kNone. At most half full.
  std::vector<int32_t> free_;    // Slots.
  std::vector<int32_t> wanted_;  // Queued since the last Start.
  std::vector<int32_t> queue_;   // Started, in order from queue_head_ on.
  size_t queue_head_ = 0;
  uint32_t series_ = 0;  // Calls of Start.
  int64_t hand_ = 0;     // Slot that FreeOld looks at next.
  int64_t rows_read_ = 0;
  bool reading_ = false;
  bool stop_ = false;

  std::vector<RecordRead> reads_;  // The thread's.
  std::thread thread_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_READ_AHEAD_H_
