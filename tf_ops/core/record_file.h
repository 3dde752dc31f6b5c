// RecordFile: the file of one store on disk. Opening locks it, so that two stores never write one file; a file that no process
// holds is a leftover of a run that was killed, and is emptied. Closing removes it: without the store's index it means nothing.
//
//   Result<std::unique_ptr<RecordFile>> file = RecordFile::Open({path, owner, direct});
#ifndef HVD_CTR_CORE_RECORD_FILE_H_
#define HVD_CTR_CORE_RECORD_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tf_ops/core/status.h"

namespace hvd_ctr {

class RecordFile {
 public:
  struct Options {
    std::string folder;
    std::string name;
    std::string owner;   ///< For messages.
    bool direct = true;  ///< Bypass the page cache if the file system can.
  };

  /// NOT_FOUND: no such folder. FAILED_PRECONDITION: another process uses the file, or the folder cannot be used; the message
  /// names path and cause.
  static Result<std::unique_ptr<RecordFile>> Open(const Options& options);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }
  /// Offset, length and memory of each access are multiples of it (power of two, at most kMostBlockBytes).
  int64_t block_bytes() const { return block_bytes_; }
  static constexpr int64_t kMostBlockBytes = 4096;

  /// RESOURCE_EXHAUSTED: the disk, the quota or a limit is reached. DATA_LOSS: any other failure. The message names path, bytes,
  /// offset and cause.
  Status Write(const void* data, int64_t bytes, int64_t offset) const;
  /// Reads exactly `bytes`, or DATA_LOSS naming path, offset, bytes and cause.
  Status Read(void* data, int64_t bytes, int64_t offset) const;
  /// DATA_LOSS for a read that gave `result` bytes, or failed with error number -result.
  Status ReadError(int64_t bytes, int64_t offset, int64_t result) const;

 private:
  RecordFile() = default;
  Status Lock(const Options& options);
  Status ProbeBlocks();

  std::string owner_;
  std::string path_;
  int fd_ = -1;
  bool locked_ = false;
  bool direct_ = false;
  int64_t block_bytes_ = 1;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_RECORD_FILE_H_
