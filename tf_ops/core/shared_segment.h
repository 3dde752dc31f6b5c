// Memory that processes of one host share: regions of one file per process that has no name (memfd), so nothing is left behind
// however a process ends, and the small /dev/shm of containers does not limit it. A process with the same user and the same
// process numbers finds the file by (pid, fd).
//
//   SharedFile mine;  SharedRegion region(&mine);      PeerFile theirs;  SharedView view;
//   mine.Open(); region.Reserve(bytes);                theirs.Open(pid, fd); view.Map(theirs, region.offset, bytes);
#ifndef HVD_CTR_CORE_SHARED_SEGMENT_H_
#define HVD_CTR_CORE_SHARED_SEGMENT_H_

#include <atomic>
#include <cstdint>

#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// The file of this process.
class SharedFile {
 public:
  SharedFile() = default;
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile();

  /// FAILED_PRECONDITION where the system has no such files.
  Status Open();
  int fd() const { return fd_; }

 private:
  friend class SharedRegion;

  int fd_ = -1;
  std::atomic<int64_t> end_{0};
};

/// A part of it.
class SharedRegion {
 public:
  explicit SharedRegion(SharedFile* file) : file_(file) {}
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;
  ~SharedRegion() { Free(); }

  /// At least `bytes` of memory, zero at first; kept when it is enough already, else at another place of the file, without what
  /// it held. The pages are taken at once, so running out of memory is RESOURCE_EXHAUSTED here and no signal later.
  Status Reserve(int64_t bytes);
  char* data() const { return data_; }
  int64_t offset() const { return offset_; }
  int64_t bytes() const { return bytes_; }
  /// bytes() after Reserve(bytes).
  static int64_t PlannedBytes(int64_t bytes);

 private:
  void Free();

  SharedFile* const file_;
  char* data_ = nullptr;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
};

/// The file of another process (or of this one), to be read.
class PeerFile {
 public:
  PeerFile() = default;
  PeerFile(const PeerFile&) = delete;
  PeerFile& operator=(const PeerFile&) = delete;
  ~PeerFile();

  /// FAILED_PRECONDITION where the system does not let us.
  Status Open(int64_t pid, int fd);

 private:
  friend class SharedView;

  int fd_ = -1;
};

/// A region of it.
class SharedView {
 public:
  SharedView() = default;
  SharedView(const SharedView&) = delete;
  SharedView& operator=(const SharedView&) = delete;
  ~SharedView();

  /// Kept when just this is mapped already. FAILED_PRECONDITION where the file has no such region.
  Status Map(const PeerFile& file, int64_t offset, int64_t bytes);
  const char* data() const { return data_; }

 private:
  const char* data_ = nullptr;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
};

/// Sleeps while *word is `value`, at most `nanoseconds`; may return early. The word may stand in memory of another process.
void WaitForChange(const std::atomic<uint32_t>* word, uint32_t value, int64_t nanoseconds);
/// Wakes all that sleep on the word.
void WakeAll(const std::atomic<uint32_t>* word);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_SHARED_SEGMENT_H_
