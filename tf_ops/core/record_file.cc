#include "tf_ops/core/record_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "tf_ops/core/aligned_block.h"

namespace hvd_ctr {
namespace {

// Thread-safe, unlike strerror.
std::string ErrorText(int error) { return std::generic_category().message(error); }

// With direct access the smallest blocks: 512 bytes on most disks, 4096 on others.
constexpr int64_t kBlockSizes[] = {512, 1024, 2048, RecordFile::kMostBlockBytes};

}  // namespace

Result<std::unique_ptr<RecordFile>> RecordFile::Open(const Options& options) {
  std::unique_ptr<RecordFile> file(new RecordFile());
  file->owner_ = options.owner;
  file->path_ = options.folder + "/" + options.name;
  const Status locked = file->Lock(options);
  if (!locked.ok()) return locked;
  if (options.direct) {
    const int flags = fcntl(file->fd_, F_GETFL);
    file->direct_ = flags >= 0 && fcntl(file->fd_, F_SETFL, flags | O_DIRECT) == 0;
    if (file->direct_ && !file->ProbeBlocks().ok()) {
      file->direct_ = false;
      (void)fcntl(file->fd_, F_SETFL, flags);
    }
  }
  if (!file->direct_) {
    file->block_bytes_ = 1;
    // Records are read at random: no read-ahead. Advice only.
    (void)posix_fadvise(file->fd_, 0, 0, POSIX_FADV_RANDOM);
  }
  return file;
}

Status RecordFile::Lock(const Options& options) {
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) {
    const int error = errno;
    return MakeStatus(error == ENOENT || error == ENOTDIR ? StatusCode::kNotFound : StatusCode::kFailedPrecondition, owner_,
                      ": cannot create ", path_, ": ", ErrorText(error), "; embedding.host.path is '", options.folder,
                      "' and must be a folder on a local disk of each host that this process may write to");
  }
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EWOULDBLOCK) {
      return MakeStatus(StatusCode::kFailedPrecondition, owner_, ": ", path_,
                        " is in use by another run or another embedding of the same name; give each its own embedding.host.path");
    }
    return MakeStatus(StatusCode::kFailedPrecondition, owner_, ": cannot lock ", path_, ": ", ErrorText(error),
                      "; embedding.host.path must be on a local disk");
  }
  // Whoever held the lock before may have removed the file between our open and our lock.
  struct stat held, named;
  if (fstat(fd_, &held) != 0 || stat(path_.c_str(), &named) != 0 || held.st_ino != named.st_ino || held.st_dev != named.st_dev) {
    return MakeStatus(StatusCode::kFailedPrecondition, owner_, ": ", path_, " was removed while it was opened; try again");
  }
  locked_ = true;
  if (ftruncate(fd_, 0) == 0) return Status::Ok();
  const int error = errno;
  return MakeStatus(StatusCode::kFailedPrecondition, owner_, ": cannot empty ", path_, ": ", ErrorText(error));
}

// Finds the smallest block that direct access allows, by trying; leaves the file empty.
Status RecordFile::ProbeBlocks() {
  AlignedBlock memory;
  if (!memory.Allocate(3 * kMostBlockBytes)) return MakeStatus(StatusCode::kResourceExhausted, "no memory");
  char* data = static_cast<char*>(memory.data());
  data += -reinterpret_cast<uintptr_t>(data) & static_cast<uintptr_t>(kMostBlockBytes - 1);
  std::memset(data, 0, static_cast<size_t>(2 * kMostBlockBytes));
  HVD_CTR_RETURN_IF_ERROR(Write(data, 2 * kMostBlockBytes, 0));
  Status status = MakeStatus(StatusCode::kInternal, "no block size fits");
  for (const int64_t block : kBlockSizes) {
    status = Read(data, block, block);
    if (!status.ok()) continue;
    block_bytes_ = block;
    break;
  }
  if (ftruncate(fd_, 0) != 0) return MakeStatus(StatusCode::kInternal, "cannot empty");
  return status;
}

RecordFile::~RecordFile() {
  // Removed before it is unlocked, so that nobody can have taken it over.
  if (locked_) (void)unlink(path_.c_str());
  if (fd_ >= 0) close(fd_);
}

Status RecordFile::Write(const void* data, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t written = pwrite(fd_, static_cast<const char*>(data) + done, static_cast<size_t>(bytes - done), offset + done);
    if (written > 0) {
      done += written;
      continue;
    }
    const int error = written == 0 ? ENOSPC : errno;
    if (error == EINTR) continue;
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    return MakeStatus(full ? StatusCode::kResourceExhausted : StatusCode::kDataLoss, owner_, ": cannot write ", bytes,
                      " bytes at offset ", offset, " of ", path_, ": ", ErrorText(error),
                      full ? "; rows in memory are kept: make room on the disk and go on, or save them elsewhere" : "");
  }
  return Status::Ok();
}

Status RecordFile::Read(void* data, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd_, static_cast<char*>(data) + done, static_cast<size_t>(bytes - done), offset + done);
    if (got > 0) {
      done += got;
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    return ReadError(bytes, offset, got < 0 ? -errno : done);
  }
  return Status::Ok();
}

Status RecordFile::ReadError(int64_t bytes, int64_t offset, int64_t result) const {
  if (result < 0) {
    return MakeStatus(StatusCode::kDataLoss, owner_, ": cannot read ", bytes, " bytes at offset ", offset, " of ", path_, ": ",
                      ErrorText(static_cast<int>(-result)));
  }
  return MakeStatus(StatusCode::kDataLoss, owner_, ": short read of ", path_, ": ", result, " of ", bytes, " bytes at offset ",
                    offset, "; the file was cut by someone else while it was in use");
}

}  // namespace hvd_ctr
