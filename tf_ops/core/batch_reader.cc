#include "tf_ops/core/batch_reader.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "tf_ops/core/uring_queue.h"

namespace hvd_ctr {

BatchReader::BatchReader(int64_t record_bytes, int64_t block_bytes, int64_t buffer_bytes)
    : record_bytes_(record_bytes), block_bytes_(block_bytes) {
  // A record that begins anywhere spans at most one block more than its size.
  const int64_t widest = (record_bytes + 2 * block_bytes - 2) / block_bytes * block_bytes;
  run_bytes_ = std::max(kRunBytes, widest);
  run_bytes_ = (run_bytes_ + RecordFile::kMostBlockBytes - 1) / RecordFile::kMostBlockBytes * RecordFile::kMostBlockBytes;
  depth_ = static_cast<int32_t>(std::clamp<int64_t>(buffer_bytes / run_bytes_, 1, kDepth));
}

BatchReader::~BatchReader() = default;

Status BatchReader::Allocate(bool use_uring) {
  if (use_uring) ring_ = UringQueue::Open(static_cast<uint32_t>(depth_));
  try {
    runs_.resize(static_cast<size_t>(depth_));
    free_.reserve(static_cast<size_t>(depth_));
  } catch (const std::bad_alloc&) {
    return MakeStatus(StatusCode::kResourceExhausted, "no memory for reads");
  }
  if (!buffers_.AllocatePages(depth_ * run_bytes_)) return MakeStatus(StatusCode::kResourceExhausted, "no memory for reads");
  return Status::Ok();
}

Status BatchReader::Read(const RecordFile& file, Span<const RecordRead> sorted, const Done& done) {
  if (sorted.empty()) return Status::Ok();
  if (broken_) return MakeStatus(StatusCode::kInternal, "io_uring failed before; ", file.path(), " cannot be read any more");
  return uses_uring() ? ReadWithUring(file, sorted, done) : ReadAhead(file, sorted, done);
}

BatchReader::Run BatchReader::NextRun(Span<const RecordRead> sorted, int64_t first) const {
  const auto down = [this](int64_t offset) { return offset & ~(block_bytes_ - 1); };
  const auto up = [this](int64_t offset) { return (offset + block_bytes_ - 1) & ~(block_bytes_ - 1); };
  Run run;
  run.first = first;
  run.end = first + 1;
  run.offset = down(sorted[first].offset);
  int64_t end = up(sorted[first].offset + record_bytes_);
  for (; run.end < sorted.size(); ++run.end) {
    const int64_t further = up(sorted[run.end].offset + record_bytes_);
    if (further - run.offset > run_bytes_) break;
    end = further;
  }
  run.bytes = end - run.offset;
  return run;
}

void BatchReader::HandOver(const Run& run, const char* data, Span<const RecordRead> sorted, const Done& done) const {
  for (int64_t i = run.first; i < run.end; ++i) done(sorted[i].tag, data + (sorted[i].offset - run.offset));
}

Status BatchReader::ReadWithUring(const RecordFile& file, Span<const RecordRead> sorted, const Done& done) {
  Status status;
  free_.clear();
  for (int32_t slot = 0; slot < depth_; ++slot) free_.push_back(slot);
  int64_t next = 0;
  // Also after an error: the kernel writes into the buffers until all reads are done.
  while ((next < sorted.size() && status.ok()) || free_.size() < static_cast<size_t>(depth_)) {
    while (next < sorted.size() && status.ok() && !free_.empty()) {
      const int32_t slot = free_.back();
      free_.pop_back();
      Run* run = &runs_[static_cast<size_t>(slot)];
      *run = NextRun(sorted, next);
      next = run->end;
      ring_->Push(file.fd(), buffer(slot), static_cast<uint32_t>(run->bytes), run->offset, static_cast<uint64_t>(slot));
    }
    // While there is more to read, wait for a part only, so that the disk never runs dry.
    const auto pending = static_cast<uint32_t>(static_cast<size_t>(depth_) - free_.size());
    const uint32_t wait_for = next < sorted.size() ? std::max(1u, pending / 4) : pending;
    if (const int error = ring_->Submit(wait_for); error != 0) {
      broken_ = true;
      return MakeStatus(StatusCode::kInternal, "io_uring_enter failed with error ", error, " while reading ", file.path());
    }
    uint64_t tag = 0;
    int32_t result = 0;
    while (ring_->Pop(&tag, &result)) {
      const Run& run = runs_[tag];
      char* data = buffer(static_cast<int32_t>(tag));
      free_.push_back(static_cast<int32_t>(tag));
      if (!status.ok()) continue;
      if (result == run.bytes) {
        HandOver(run, data, sorted, done);
      } else if (result < 0 && result != -EINTR && result != -EAGAIN) {
        status = file.ReadError(run.bytes, run.offset, result);
      } else {
        // Interrupted: once more, as a whole.
        status = file.Read(data, run.bytes, run.offset);
        if (status.ok()) HandOver(run, data, sorted, done);
      }
    }
  }
  return status;
}

Status BatchReader::ReadAhead(const RecordFile& file, Span<const RecordRead> sorted, const Done& done) {
  for (int64_t next = 0; next < sorted.size();) {
    int32_t count = 0;
    for (; count < depth_ && next < sorted.size(); ++count) {
      const Run run = NextRun(sorted, next);
      runs_[static_cast<size_t>(count)] = run;
      next = run.end;
      (void)posix_fadvise(file.fd(), run.offset, run.bytes, POSIX_FADV_WILLNEED);
    }
    for (int32_t slot = 0; slot < count; ++slot) {
      const Run& run = runs_[static_cast<size_t>(slot)];
      HVD_CTR_RETURN_IF_ERROR(file.Read(buffer(slot), run.bytes, run.offset));
      HandOver(run, buffer(slot), sorted, done);
    }
  }
  return Status::Ok();
}

}  // namespace hvd_ctr
