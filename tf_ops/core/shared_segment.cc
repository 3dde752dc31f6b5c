#include "tf_ops/core/shared_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <string>

namespace hvd_ctr {
namespace {

constexpr int64_t kPage = 4096;
constexpr unsigned int kCloseOnExec = 1;  // MFD_CLOEXEC, which older headers lack.

}  // namespace

SharedFile::~SharedFile() {
  if (fd_ >= 0) close(fd_);
}

Status SharedFile::Open() {
  fd_ = static_cast<int>(syscall(SYS_memfd_create, "hvd_ctr", kCloseOnExec));
  if (fd_ >= 0) return Status::Ok();
  return MakeStatus(StatusCode::kFailedPrecondition, "memfd_create: ", std::strerror(errno));
}

void SharedRegion::Free() {
  if (data_ == nullptr) return;
  munmap(data_, static_cast<size_t>(bytes_));
  // Gives the pages back; the place in the file is not used again.
  (void)fallocate(file_->fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

int64_t SharedRegion::PlannedBytes(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Status SharedRegion::Reserve(int64_t bytes) {
  if (data_ != nullptr && bytes <= bytes_) return Status::Ok();
  Free();
  const int64_t wanted = PlannedBytes(bytes);
  const int64_t offset = file_->end_.fetch_add(wanted);
  const int failed = posix_fallocate(file_->fd_, offset, wanted);
  if (failed != 0) {
    return MakeStatus(StatusCode::kResourceExhausted, "no memory for ", wanted,
                      " bytes shared between ranks: ", std::strerror(failed),
                      "; use a smaller batch or HVD_CTR_TRANSPORT=horovod");
  }
  void* mapped =
      mmap(nullptr, static_cast<size_t>(wanted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_->fd_, offset);
  if (mapped == MAP_FAILED)
    return MakeStatus(StatusCode::kResourceExhausted, "mmap of ", wanted, " bytes: ", std::strerror(errno));
  data_ = static_cast<char*>(mapped);
  offset_ = offset;
  bytes_ = wanted;
  return Status::Ok();
}

PeerFile::~PeerFile() {
  if (fd_ >= 0) close(fd_);
}

Status PeerFile::Open(int64_t pid, int fd) {
  const std::string path = internal::StrCat("/proc/", pid, "/fd/", fd);
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) return MakeStatus(StatusCode::kFailedPrecondition, "opening ", path, ": ", std::strerror(errno));
  return Status::Ok();
}

SharedView::~SharedView() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), static_cast<size_t>(bytes_));
}

Status SharedView::Map(const PeerFile& file, int64_t offset, int64_t bytes) {
  if (data_ != nullptr && offset == offset_ && bytes == bytes_) return Status::Ok();
  if (data_ != nullptr) munmap(const_cast<char*>(data_), static_cast<size_t>(bytes_));
  data_ = nullptr;
  // Beyond the end of the file a read would be a signal.
  const int64_t size = lseek(file.fd_, 0, SEEK_END);
  if (offset < 0 || offset % kPage != 0 || bytes < 0 || offset > size - bytes) {
    return MakeStatus(StatusCode::kFailedPrecondition, "no bytes ", offset, " .. ", offset, " + ", bytes,
                      " in the shared memory of another rank, which has ", size);
  }
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED | MAP_POPULATE, file.fd_, offset);
  if (mapped == MAP_FAILED) {
    return MakeStatus(StatusCode::kFailedPrecondition, "mapping the shared memory of another rank: ", std::strerror(errno));
  }
  data_ = static_cast<const char*>(mapped);
  offset_ = offset;
  bytes_ = bytes;
  return Status::Ok();
}

void WaitForChange(const std::atomic<uint32_t>* word, uint32_t value, int64_t nanoseconds) {
  timespec limit;
  limit.tv_sec = nanoseconds / 1000000000;
  limit.tv_nsec = nanoseconds % 1000000000;
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void WakeAll(const std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hvd_ctr
