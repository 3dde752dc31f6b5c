// MixCache: Flush, Read, Export, Import. Each runs alone with respect to Prefetch (order_mutex_).
#include <algorithm>

#include "tf_ops/core/mix_cache_impl.h"
#include "tf_ops/core/row_math.h"

namespace hvd_ctr {

Status MixCacheImpl::Flush(TaskRunner* runner) {
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("a flush", [&]() { return FlushInOrder(runner); });
}

Status MixCacheImpl::FlushInOrder(TaskRunner* runner) {
  // Held throughout, so that all rows written are rows after the same number of steps.
  std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
  for (int64_t next = 0; next < options_.slots;) {
    move_keys_.clear();
    move_slots_.clear();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; next < options_.slots && static_cast<int64_t>(move_slots_.size()) < kMoveRows; ++next) {
        if (!dirty_[static_cast<size_t>(next)]) continue;
        move_slots_.push_back(static_cast<Slot>(next));
        move_keys_.push_back(directory_.key(static_cast<Slot>(next)));
      }
    }
    HVD_CTR_RETURN_IF_ERROR(WriteBack(move_keys_, move_slots_, runner));
    // No Apply could have made a row newer in between: it needs rows_mutex_.
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Slot slot : move_slots_) dirty_[static_cast<size_t>(slot)] = 0;
  }
  return Status::Ok();
}

Status MixCacheImpl::Read(const ReceivedKeys& received, float* rows, TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckReceived(received));
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("the rows of an evaluation batch", [&]() { return ReadInOrder(received, rows, runner); });
}

Status MixCacheImpl::ReadInOrder(const ReceivedKeys& received, float* rows, TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(merge_.Run(received.ids, received.tables, &other_keys_));
  const std::vector<int32_t>& inverse = other_keys_.inverse;
  std::vector<Slot>& slots = other_slots_;
  slots.resize(other_keys_.keys.size() + inverse.size());
  directory_.Find(other_keys_.keys, other_keys_.hashes, slots.data());
  Slot* received_slots = slots.data() + other_keys_.keys.size();
  sources_.clear();
  for (size_t i = 0; i < inverse.size(); ++i) {
    received_slots[i] = inverse[i] < 0 ? kNoSlot : slots[static_cast<size_t>(inverse[i])];
    if (inverse[i] >= 0 && received_slots[i] == kNoSlot) sources_.push_back(static_cast<int32_t>(i));
  }
  {
    std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
    HVD_CTR_RETURN_IF_ERROR(
        backend_->GatherRows(Span<const Slot>(received_slots, static_cast<int64_t>(inverse.size())), rows, runner));
  }
  const Span<const int32_t> missing(sources_);
  for (int64_t begin = 0; begin < missing.size(); begin += kMoveRows) {
    const int64_t count = std::min(kMoveRows, missing.size() - begin);
    HVD_CTR_RETURN_IF_ERROR(ReadHostChunk(received, missing.subspan(begin, count), rows, runner));
  }
  return Status::Ok();
}

Status MixCacheImpl::ReadHostChunk(const ReceivedKeys& received, Span<const int32_t> sources, float* rows, TaskRunner* runner) {
  move_keys_.clear();
  for (const int32_t i : sources)
    move_keys_.push_back({received.ids[static_cast<size_t>(i)], received.tables[static_cast<size_t>(i)]});
  float* records = Staging(sources.size());
  found_.resize(static_cast<size_t>(sources.size()));
  HVD_CTR_RETURN_IF_ERROR(store_->Load(move_keys_, records, found_.data(), runner));
  runner->Run(sources.size(), kRowGrain, [this, records](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!found_[static_cast<size_t>(i)]) FirstRow(move_keys_[static_cast<size_t>(i)], records + i * record_floats_);
    }
  });
  return backend_->PlaceRows(sources, records, {options_.dim, record_floats_}, rows, runner);
}

Status MixCacheImpl::Export(int32_t table, int64_t* cursor, int64_t max_rows, ExportChunk* chunk, TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckTable(table, "Export"));
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("a chunk of exported rows", [&]() { return ExportInOrder(table, cursor, max_rows, chunk, runner); });
}

// Rows come from the host store in the order of creation. Where the flush could not write (full disk, full budget), the newest
// values come from the device, and at last the rows that only the device has: a full disk must not keep anybody from saving them
// elsewhere. Their cursor is kDeviceCursor + slot.
Status MixCacheImpl::ExportInOrder(int32_t table, int64_t* cursor, int64_t max_rows, ExportChunk* chunk, TaskRunner* runner) {
  if (*cursor == 0) {
    const Status flushed = FlushInOrder(runner);
    const bool no_room = flushed.code() == StatusCode::kResourceExhausted || flushed.code() == StatusCode::kDataLoss;
    if (!flushed.ok() && !no_room) return flushed;
  }
  std::vector<float> records;
  chunk->ids.clear();
  chunk->rows.clear();
  chunk->state.clear();
  std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
  int64_t next = *cursor;
  if (next >= kDeviceCursor) {
    HVD_CTR_RETURN_IF_ERROR(ExportDeviceRows(table, &next, max_rows, &chunk->ids, &records, runner));
  } else {
    HVD_CTR_RETURN_IF_ERROR(ExportHostRows(table, &next, max_rows, &chunk->ids, &records, runner));
    if (next < 0) {
      FindDeviceOnlyRows(table, 0, 1);
      if (!move_slots_.empty()) next = kDeviceCursor;
    }
  }
  *cursor = next;
  const int64_t state = state_floats_[static_cast<size_t>(table)];
  const auto count = static_cast<int64_t>(chunk->ids.size());
  chunk->rows.reserve(static_cast<size_t>(count * dim_));
  chunk->state.reserve(static_cast<size_t>(count * state));
  chunk->life.clear();
  if (life_.tracks(table)) {
    for (const int64_t id : chunk->ids) chunk->life.push_back(life_.Find(Key{id, table}));
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* record = records.data() + i * record_floats_;
    chunk->rows.insert(chunk->rows.end(), record, record + dim_);
    chunk->state.insert(chunk->state.end(), record + dim_, record + dim_ + state);
  }
  return Status::Ok();
}

Status MixCacheImpl::ExportHostRows(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
                                    std::vector<float>* records, TaskRunner* runner) {
  const Status scanned = store_->Scan(table, cursor, max_rows, ids, records);
  if (!scanned.ok()) return MakeStatus(scanned.code(), Where(), ": Export: ", scanned.message());
  const auto count = static_cast<int64_t>(ids->size());
  for (int64_t begin = 0; begin < count; begin += kMoveRows) {
    sources_.clear();
    move_slots_.clear();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = begin; i < std::min(count, begin + kMoveRows); ++i) {
        const Slot slot = directory_.Find(Key{(*ids)[static_cast<size_t>(i)], table});
        if (slot == kNoSlot || !dirty_[static_cast<size_t>(slot)]) continue;
        sources_.push_back(static_cast<int32_t>(i - begin));
        move_slots_.push_back(slot);
      }
    }
    if (move_slots_.empty()) continue;
    float* newer = Staging(static_cast<int64_t>(move_slots_.size()));
    HVD_CTR_RETURN_IF_ERROR(backend_->FetchRecords(move_slots_, newer, runner));
    for (size_t i = 0; i < sources_.size(); ++i) {
      const float* record = newer + static_cast<int64_t>(i) * record_floats_;
      std::copy(record, record + record_floats_, records->begin() + (begin + sources_[i]) * record_floats_);
    }
  }
  return Status::Ok();
}

// Fills move_keys_ and move_slots_ with up to max_rows rows of the table, from this slot on, that the host store does not have;
// returns the slot to go on with, -1 at the end.
int64_t MixCacheImpl::FindDeviceOnlyRows(int32_t table, int64_t slot, int64_t max_rows) {
  move_keys_.clear();
  move_slots_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  for (; slot < options_.slots && static_cast<int64_t>(move_slots_.size()) < max_rows; ++slot) {
    if (!dirty_[static_cast<size_t>(slot)]) continue;
    const Key key = directory_.key(static_cast<Slot>(slot));
    uint8_t in_host = 0;
    if (key.table == table) store_->Contains(Span<const Key>(&key, 1), &in_host);
    if (key.table != table || in_host) continue;
    move_keys_.push_back(key);
    move_slots_.push_back(static_cast<Slot>(slot));
  }
  return slot < options_.slots ? slot : -1;
}

Status MixCacheImpl::ExportDeviceRows(int32_t table, int64_t* cursor, int64_t max_rows, std::vector<int64_t>* ids,
                                      std::vector<float>* records, TaskRunner* runner) {
  const int64_t next = FindDeviceOnlyRows(table, *cursor - kDeviceCursor, max_rows);
  records->resize(move_keys_.size() * static_cast<size_t>(record_floats_));
  HVD_CTR_RETURN_IF_ERROR(backend_->FetchRecords(move_slots_, records->data(), runner));
  for (const Key& key : move_keys_) ids->push_back(key.id);
  *cursor = next < 0 ? -1 : kDeviceCursor + next;
  return Status::Ok();
}

Status MixCacheImpl::Import(int32_t table, Span<const int64_t> ids, const float* rows, const float* state, int64_t* foreign,
                            TaskRunner* runner) {
  HVD_CTR_RETURN_IF_ERROR(CheckTable(table, "Import"));
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("imported rows", [&]() { return ImportInOrder(table, ids, rows, state, foreign, runner); });
}

Status MixCacheImpl::ImportInOrder(int32_t table, Span<const int64_t> ids, const float* rows, const float* state,
                                   int64_t* foreign, TaskRunner* runner) {
  const std::vector<int32_t> tables(static_cast<size_t>(ids.size()), table);
  HVD_CTR_RETURN_IF_ERROR(merge_.Run(ids, tables, &other_keys_));
  std::unique_lock<std::shared_mutex> rows_lock(rows_mutex_);
  HVD_CTR_RETURN_IF_ERROR(CheckImport(table, ids));
  const auto owned = static_cast<int64_t>(other_keys_.keys.size());
  for (int64_t begin = 0; begin < owned; begin += kMoveRows) {
    HVD_CTR_RETURN_IF_ERROR(ImportChunk(table, begin, std::min(owned, begin + kMoveRows), rows, state, runner));
  }
  *foreign = other_keys_.foreign;
  return Status::Ok();
}

// Refuses everything that can be refused before anything is changed; fills other_slots_ and sources_ (one entry per owned key).
Status MixCacheImpl::CheckImport(int32_t table, Span<const int64_t> ids) {
  const TableOptions& options = options_.tables[static_cast<size_t>(table)];
  sources_.clear();
  for (int64_t i = 0; i < ids.size(); ++i) {
    if (options.rows >= 0 && ids[i] >= options.rows) {
      return MakeStatus(StatusCode::kOutOfRange, Where(), ": Import of id ", ids[i], " into table '", options.name,
                        "'; allowed are 0 .. ", options.rows - 1,
                        "; raise the table's rows or import into the table that was exported");
    }
    if (other_keys_.inverse[static_cast<size_t>(i)] < 0) continue;
    if (other_keys_.inverse[static_cast<size_t>(i)] != static_cast<int32_t>(sources_.size())) {
      return MakeStatus(StatusCode::kInvalidArgument, Where(), ": Import into table '", options.name, "' has id ", ids[i],
                        " twice; ids must be distinct");
    }
    sources_.push_back(static_cast<int32_t>(i));
  }
  other_slots_.resize(other_keys_.keys.size());
  directory_.Find(other_keys_.keys, other_keys_.hashes, other_slots_.data());
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t k = 0; k < other_slots_.size(); ++k) {
    const Slot slot = other_slots_[k];
    if (slot == kNoSlot || pins_[static_cast<size_t>(slot)] == 0) continue;
    for (const std::unique_ptr<Ticket>& ticket : open_) {
      if (std::find(ticket->slots.begin(), ticket->slots.end(), slot) == ticket->slots.end()) continue;
      return MakeStatus(StatusCode::kFailedPrecondition, Where(), ": Import of id ", other_keys_.keys[k].id, " into table '",
                        options.name, "' while ticket ", ticket->number, " uses the row; apply or release the ticket before");
    }
  }
  return Status::Ok();
}

Status MixCacheImpl::ImportChunk(int32_t table, int64_t begin, int64_t end, const float* rows, const float* state,
                                 TaskRunner* runner) {
  const auto t = static_cast<size_t>(table);
  const int64_t state_floats = state_floats_[t];
  float* records = Staging(end - begin);
  runner->Run(end - begin, kRowGrain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t source = sources_[static_cast<size_t>(begin + i)];
      float* record = records + i * record_floats_;
      std::copy(rows + source * dim_, rows + (source + 1) * dim_, record);
      RoundRow(options_.row_type, dim_, record);
      if (state != nullptr) {
        std::copy(state + source * state_floats, state + (source + 1) * state_floats, record + dim_);
      } else {
        InitialState(optimizers_[t], options_.dim, record + dim_);
      }
      std::fill(record + dim_ + state_floats, record + record_floats_, 0.0f);
    }
  });
  const Span<const Key> keys = Span<const Key>(other_keys_.keys).subspan(begin, end - begin);
  HVD_CTR_RETURN_IF_ERROR(store_->Store(keys, records, runner));
  if (life_.tracks(table)) {
    for (const Key& key : keys) life_.Set(key, RowLife::Id{0, step()}, /*has_row=*/true);
    std::lock_guard<std::mutex> lock(mutex_);
    NoteLife();
  }
  const Span<const Slot> slots = Span<const Slot>(other_slots_).subspan(begin, end - begin);
  if (std::all_of(slots.begin(), slots.end(), [](Slot slot) { return slot == kNoSlot; })) return Status::Ok();
  HVD_CTR_RETURN_IF_ERROR(backend_->StoreRecords(slots, records, runner));
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Slot slot : slots) {
    if (slot == kNoSlot) continue;
    dirty_[static_cast<size_t>(slot)] = 0;
    ++stats_.tables[t].loads;
  }
  return Status::Ok();
}

}  // namespace hvd_ctr
