// The host store on disk: each record has one place, in RAM (RecordCache) or in the file (SegmentLog). What is stored goes to RAM
// first; when the budget is full, records leave it by the clock rule and are appended to the log. A load from the file leaves the
// record there and takes no room in RAM: the row is on its way to the device, and comes back by Store.
//
// In RAM for each row, whether cached or not: 23 to 34 bytes (RowCatalog and 4 bytes for the place). They are part of the budget:
// as the index grows, the cache gives chunks back.
//
// After a failed write the store goes on: all records are where they were, can be loaded and scanned, and a later Store tries
// again.
#ifndef HVD_CTR_CORE_DISK_HOST_STORE_H_
#define HVD_CTR_CORE_DISK_HOST_STORE_H_

#include <cstdint>
#include <memory>

#include "tf_ops/core/host_store.h"
#include "tf_ops/core/options.h"
#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// For tests and measurements; the defaults are right.
struct DiskStoreTuning {
  bool use_uring = true;    ///< false: as on a kernel without io_uring; then the page cache is used.
  int64_t part_bytes = 0;   ///< Size of cache chunks, of segments and of the reader's buffers, about; 0: by the budget.
  int64_t most_chunks = 0;  ///< Of the cache; 0: by the budget.
};

/// The file is <host.path>/<spec.file_stem>.rows; it is removed with the store. INVALID_ARGUMENT: ram_bytes is too small for this
/// record, with the least possible value; else the errors of RecordFile::Open.
Result<std::unique_ptr<HostStore>> MakeDiskHostStore(const HostStoreSpec& spec, const HostOptions& host,
                                                     const DiskStoreTuning& tuning = DiskStoreTuning());

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_DISK_HOST_STORE_H_
