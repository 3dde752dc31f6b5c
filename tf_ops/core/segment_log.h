// SegmentLog: records on disk, appended and never written in place: one large sequential write costs a hundredth of as many small
// ones. The file is a row of segments; a segment is full of records, followed by the row number of each. The open segment is
// filled in memory and written as one piece.
//
//   HVD_CTR_RETURN_IF_ERROR(log.MakeRoom());        // writes the open segment if it is full
//   place = log.Append(row, record);
//   log.Forget(place);                              // the row is stored elsewhere now; segments without records are used again
//
// A record is found by its place, a number below kMostPlaces. Whoever moves the records of a thinly used segment elsewhere
// (EmptiestSegment, ReadRows, Forget) gives its space back; wants_compaction says when that is due: the file then holds more than
// twice what is needed. A failed write changes nothing: the open segment stays in memory, readable, and the next MakeRoom tries
// again.
#ifndef HVD_CTR_CORE_SEGMENT_LOG_H_
#define HVD_CTR_CORE_SEGMENT_LOG_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tf_ops/core/aligned_block.h"
#include "tf_ops/core/record_file.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

class SegmentLog {
 public:
  static constexpr uint32_t kMostPlaces = uint32_t{1} << 31;
  static constexpr uint32_t kNoSegment = 0xffffffffu;

  /// Records of `payload_bytes`; segments of about `segment_bytes`, at least two records. The file must outlive the log.
  SegmentLog(const RecordFile* file, int64_t payload_bytes, int64_t segment_bytes);
  /// RESOURCE_EXHAUSTED: no memory. Call once, before anything else.
  Status Allocate();

  /// After it there is room for one record. Sets *wrote if a segment was written and a new one begun. RESOURCE_EXHAUSTED or
  /// DATA_LOSS (RecordFile::Write) if the open segment is full and cannot be written.
  Status MakeRoom(bool* wrote);
  /// Copies the record into the open segment. Precondition: MakeRoom.
  uint32_t Append(uint32_t row, const void* record);
  /// The record at this place is not needed any more.
  void Forget(uint32_t place);
  /// Its record if the place is in the open segment, else null.
  const void* Buffered(uint32_t place) const;
  /// Where it is in the file, bytes. Precondition: not Buffered.
  int64_t Offset(uint32_t place) const;

  bool wants_compaction() const;
  /// The written segment with the fewest needed records, kNoSegment if none.
  uint32_t EmptiestSegment() const;
  uint32_t needed_records(uint32_t segment) const { return needed_[segment]; }
  /// Row number of each record of a written segment, in order; valid until the next call.
  Status ReadRows(uint32_t segment, Span<const uint32_t>* rows);
  uint32_t FirstPlace(uint32_t segment) const { return segment << segment_bits_; }

  int64_t records_per_segment() const { return int64_t{1} << segment_bits_; }
  /// Bytes of one record in the file.
  int64_t stride() const { return stride_; }
  int64_t file_bytes() const { return static_cast<int64_t>(needed_.size()) * segment_bytes_; }
  int64_t rows_written() const { return rows_written_; }
  int64_t allocated_bytes() const;
  /// Bytes that Allocate takes.
  int64_t planned_bytes() const { return 2 * segment_bytes_ - rows_offset_; }
  /// file_bytes() when `appended` records were appended in all and `needed` of them are still needed: segments are used again
  /// once wants_compaction is true.
  int64_t PlannedFileBytes(int64_t needed, int64_t appended) const;
  /// Most bytes that the next MakeRoom allocates beyond that, also for a moment.
  int64_t growth_bytes() const { return 2 * ListBytes() + 64; }

 private:
  /// Records in segments that may be used before wants_compaction is true.
  int64_t MostRecords(int64_t needed) const { return needed + std::max(needed, 8 * records_per_segment()); }
  int64_t ListBytes() const { return static_cast<int64_t>((needed_.capacity() + unused_.capacity()) * sizeof(uint32_t)); }
  uint32_t* open_rows() const;
  Status OpenNext();

  const RecordFile* file_;
  const int64_t payload_bytes_;
  int64_t stride_ = 0;
  int segment_bits_ = 1;
  int64_t rows_offset_ = 0;  // Of the row numbers in a segment.
  int64_t segment_bytes_ = 0;
  AlignedBlock open_segment_;
  AlignedBlock rows_;             // Of ReadRows.
  std::vector<uint32_t> needed_;  // By segment.
  std::vector<uint32_t> unused_;  // Segments without records, to be used again.
  uint32_t open_ = kNoSegment;
  int64_t filled_ = 0;  // Records in the open segment.
  int64_t needed_total_ = 0;
  int64_t rows_written_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_SEGMENT_LOG_H_
