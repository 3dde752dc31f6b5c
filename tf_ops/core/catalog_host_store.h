// CatalogHostStore: what the host stores share. RowCatalog knows which rows there are; one lock guards it and the records.
#ifndef HVD_CTR_CORE_CATALOG_HOST_STORE_H_
#define HVD_CTR_CORE_CATALOG_HOST_STORE_H_

#include <cstdint>
#include <shared_mutex>
#include <string>

#include "tf_ops/core/host_store.h"
#include "tf_ops/core/row_catalog.h"

namespace hvd_ctr {

class CatalogHostStore : public HostStore {
 public:
  int64_t Remove(Span<const Key> keys) final;
  void Contains(Span<const Key> keys, uint8_t* found) const final;
  int64_t row_count() const final;
  int64_t row_count(int32_t table) const final;
  int64_t allocated_bytes() const final;

 protected:
  CatalogHostStore(const HostStoreSpec& spec, int extent_bits)
      : owner_(spec.owner), record_floats_(spec.record_floats), catalog_(spec.tables, extent_bits) {}

  // All of these need mutex_; ForgetRecord exclusively.
  virtual int64_t HeldBytes() const = 0;
  /// The row is about to be removed: its record is not needed any more.
  virtual void ForgetRecord(uint32_t /*row*/) {}
  /// RowCatalog::ScanRange, with the owner in its message.
  Status ScanRange(int32_t table, int64_t cursor, int64_t max_rows, int64_t* end) const;
  /// Where to go on after a scan that ended at this position.
  int64_t NextCursor(int32_t table, int64_t end) const { return end == catalog_.positions(table) ? -1 : end; }

  const std::string owner_;
  const int64_t record_floats_;
  mutable std::shared_mutex mutex_;
  RowCatalog catalog_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_CATALOG_HOST_STORE_H_
