// BatchReader: many small records read from one file at once. Records that lie near each other are read together; up to kDepth
// reads are under way. With io_uring where the kernel allows it (raw system calls, no library), else with posix_fadvise(WILLNEED)
// ahead of plain reads, which is nearly as fast but needs the page cache. One call at a time.
//
//   BatchReader reader(options);
//   HVD_CTR_RETURN_IF_ERROR(reader.Allocate());
//   reader.Read(file, reads, [&](int64_t tag, const char* record) { ... });    // reads sorted by offset
#ifndef HVD_CTR_CORE_BATCH_READER_H_
#define HVD_CTR_CORE_BATCH_READER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/record_file.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class UringQueue;

/// One record to read; `tag` is the caller's name for it.
struct RecordRead {
  int64_t offset = 0;  ///< In the file, bytes.
  int64_t tag = 0;
};

class BatchReader {
 public:
  using Done = std::function<void(int64_t tag, const char* record)>;

  /// Blocks of `block_bytes` (power of two) are read whole; buffers take at most about buffer_bytes, but at least one read.
  BatchReader(int64_t record_bytes, int64_t block_bytes, int64_t buffer_bytes);
  ~BatchReader();

  /// RESOURCE_EXHAUSTED: no memory. Call once, before anything else.
  Status Allocate(bool use_uring);
  bool uses_uring() const { return ring_ != nullptr; }

  /// Calls done once for each record, in any order, on this thread. DATA_LOSS naming path, offset, bytes and cause if a record
  /// cannot be read; then some were not handed to done. No read is under way on return.
  Status Read(const RecordFile& file, Span<const RecordRead> sorted, const Done& done);

  /// allocated_bytes() after Allocate.
  int64_t planned_bytes() const { return depth_ * run_bytes_ + static_cast<int64_t>(depth_) * int64_t{sizeof(Run)}; }
  int64_t allocated_bytes() const { return buffers_.bytes() + static_cast<int64_t>(depth_) * int64_t{sizeof(Run)}; }

 private:
  static constexpr int64_t kDepth = 256;
  static constexpr int64_t kRunBytes = 8192;  // Most bytes read at once for several records.

  // Records [first, end) of the call's list, read as one piece.
  struct Run {
    int64_t offset = 0;
    int64_t bytes = 0;
    int64_t first = 0;
    int64_t end = 0;
  };

  Run NextRun(Span<const RecordRead> sorted, int64_t first) const;
  char* buffer(int32_t slot) const { return static_cast<char*>(buffers_.data()) + slot * run_bytes_; }
  Status ReadWithUring(const RecordFile& file, Span<const RecordRead> sorted, const Done& done);
  Status ReadAhead(const RecordFile& file, Span<const RecordRead> sorted, const Done& done);
  void HandOver(const Run& run, const char* data, Span<const RecordRead> sorted, const Done& done) const;

  const int64_t record_bytes_;
  const int64_t block_bytes_;
  int64_t run_bytes_ = 0;
  int32_t depth_ = 0;
  AlignedBlock buffers_;
  std::vector<Run> runs_;  // By buffer.
  std::vector<int32_t> free_;
  std::unique_ptr<UringQueue> ring_;
  bool broken_ = false;  // The ring failed with reads under way: the buffers must not be used again.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_BATCH_READER_H_
