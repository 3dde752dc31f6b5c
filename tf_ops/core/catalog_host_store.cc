#include "tf_ops/core/catalog_host_store.h"

#include <algorithm>
#include <mutex>

namespace hvd_ctr {

int64_t CatalogHostStore::Remove(Span<const Key> keys) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  const int64_t before = catalog_.row_count();
  RowCatalog::Block block;
  for (int64_t begin = 0; begin < keys.size(); begin += RowCatalog::kBlock) {
    const int64_t count = std::min(RowCatalog::kBlock, keys.size() - begin);
    catalog_.Find(keys.subspan(begin, count), &block);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t row = block.rows[static_cast<size_t>(i)];
      if (row == RowCatalog::kNoRow) continue;
      ForgetRecord(row);
      catalog_.Remove(row);
    }
  }
  return before - catalog_.row_count();
}

void CatalogHostStore::Contains(Span<const Key> keys, uint8_t* found) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  RowCatalog::Block block;
  for (int64_t begin = 0; begin < keys.size(); begin += RowCatalog::kBlock) {
    const int64_t count = std::min(RowCatalog::kBlock, keys.size() - begin);
    catalog_.Find(keys.subspan(begin, count), &block);
    for (int64_t i = 0; i < count; ++i) found[begin + i] = block.rows[static_cast<size_t>(i)] != RowCatalog::kNoRow;
  }
}

int64_t CatalogHostStore::row_count() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return catalog_.row_count();
}

int64_t CatalogHostStore::row_count(int32_t table) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return catalog_.row_count(table);
}

int64_t CatalogHostStore::allocated_bytes() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return HeldBytes();
}

Status CatalogHostStore::ScanRange(int32_t table, int64_t cursor, int64_t max_rows, int64_t* end) const {
  const Status range = catalog_.ScanRange(table, cursor, max_rows, end);
  return range.ok() ? range : MakeStatus(range.code(), owner_, ": ", range.message());
}

}  // namespace hvd_ctr
