#include "tf_ops/core/segment_log.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace hvd_ctr {
namespace {

constexpr int64_t kSector = 512;
constexpr int64_t kSmallestStride = 16;
constexpr int kMostSegmentBits = 14;

// A small record lies within one sector, a large one is a whole number of them: so one record costs one small read.
int64_t Stride(int64_t payload_bytes) {
  if (payload_bytes > kSector) return (payload_bytes + kSector - 1) / kSector * kSector;
  int64_t stride = kSmallestStride;
  while (stride < payload_bytes) stride *= 2;
  return stride;
}

int64_t RoundUp(int64_t bytes) {
  constexpr int64_t kBlock = RecordFile::kMostBlockBytes;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

}  // namespace

SegmentLog::SegmentLog(const RecordFile* file, int64_t payload_bytes, int64_t segment_bytes)
    : file_(file), payload_bytes_(payload_bytes), stride_(Stride(payload_bytes)) {
  while (segment_bits_ < kMostSegmentBits && (stride_ << (segment_bits_ + 1)) <= segment_bytes) ++segment_bits_;
  rows_offset_ = RoundUp(stride_ << segment_bits_);
  segment_bytes_ = rows_offset_ + RoundUp(int64_t{sizeof(uint32_t)} << segment_bits_);
}

Status SegmentLog::Allocate() {
  if (!open_segment_.AllocatePages(segment_bytes_) || !rows_.AllocatePages(segment_bytes_ - rows_offset_)) {
    return MakeStatus(StatusCode::kResourceExhausted, "no memory for a segment of ", segment_bytes_, " bytes");
  }
  return OpenNext();
}

uint32_t* SegmentLog::open_rows() const {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(open_segment_.data()) + rows_offset_);
}

Status SegmentLog::OpenNext() {
  if (!unused_.empty()) {
    open_ = unused_.back();
    unused_.pop_back();
  } else {
    const auto next = static_cast<uint32_t>(needed_.size());
    if ((int64_t{next} + 1) << segment_bits_ > int64_t{kMostPlaces}) {
      return MakeStatus(StatusCode::kResourceExhausted, file_->path(), ": ", kMostPlaces,
                        " records are the most one file can hold; use more ranks");
    }
    try {
      needed_.push_back(0);
      unused_.reserve(needed_.capacity());  // Forget must not fail.
    } catch (const std::bad_alloc&) {
      return MakeStatus(StatusCode::kResourceExhausted, file_->path(), ": no memory for one more segment");
    }
    open_ = next;
  }
  filled_ = 0;
  return Status::Ok();
}

Status SegmentLog::MakeRoom(bool* wrote) {
  *wrote = false;
  if (open_ != kNoSegment && filled_ < records_per_segment()) return Status::Ok();
  if (open_ != kNoSegment && needed_[open_] == 0) {
    filled_ = 0;  // Everything in it was stored elsewhere since.
    return Status::Ok();
  }
  if (open_ != kNoSegment) {
    HVD_CTR_RETURN_IF_ERROR(file_->Write(open_segment_.data(), segment_bytes_, int64_t{open_} * segment_bytes_));
    rows_written_ += records_per_segment();
    *wrote = true;
    open_ = kNoSegment;  // Written, whatever happens to the next one.
  }
  return OpenNext();
}

uint32_t SegmentLog::Append(uint32_t row, const void* record) {
  std::memcpy(static_cast<char*>(open_segment_.data()) + filled_ * stride_, record, static_cast<size_t>(payload_bytes_));
  open_rows()[filled_] = row;
  ++needed_[open_];
  ++needed_total_;
  return FirstPlace(open_) + static_cast<uint32_t>(filled_++);
}

void SegmentLog::Forget(uint32_t place) {
  const uint32_t segment = place >> segment_bits_;
  --needed_total_;
  if (--needed_[segment] == 0 && segment != open_) unused_.push_back(segment);
}

const void* SegmentLog::Buffered(uint32_t place) const {
  if (place >> segment_bits_ != open_) return nullptr;
  return static_cast<const char*>(open_segment_.data()) + int64_t{place & ((uint32_t{1} << segment_bits_) - 1)} * stride_;
}

int64_t SegmentLog::Offset(uint32_t place) const {
  return int64_t{place >> segment_bits_} * segment_bytes_ + int64_t{place & ((uint32_t{1} << segment_bits_) - 1)} * stride_;
}

bool SegmentLog::wants_compaction() const {
  const auto used = static_cast<int64_t>(needed_.size() - unused_.size());
  return used << segment_bits_ > MostRecords(needed_total_);
}

int64_t SegmentLog::PlannedFileBytes(int64_t needed, int64_t appended) const {
  const int64_t records = std::min(std::max(needed, appended), MostRecords(needed));
  return std::max<int64_t>(1, (records + records_per_segment() - 1) >> segment_bits_) * segment_bytes_;
}

uint32_t SegmentLog::EmptiestSegment() const {
  uint32_t best = kNoSegment;
  for (uint32_t segment = 0; segment < needed_.size(); ++segment) {
    if (segment == open_ || needed_[segment] == 0) continue;
    if (best == kNoSegment || needed_[segment] < needed_[best]) best = segment;
  }
  return best;
}

Status SegmentLog::ReadRows(uint32_t segment, Span<const uint32_t>* rows) {
  const int64_t bytes = segment_bytes_ - rows_offset_;
  HVD_CTR_RETURN_IF_ERROR(file_->Read(rows_.data(), bytes, int64_t{segment} * segment_bytes_ + rows_offset_));
  *rows = Span<const uint32_t>(static_cast<const uint32_t*>(rows_.data()), records_per_segment());
  return Status::Ok();
}

int64_t SegmentLog::allocated_bytes() const { return open_segment_.bytes() + rows_.bytes() + ListBytes(); }

}  // namespace hvd_ctr
