// MixCache: what row_life.h decides. Apply counts occurrences and refuses rows; Sweep deletes rows; both are kept in checkpoints.
#include <algorithm>

#include "tf_ops/core/mix_cache_impl.h"

namespace hvd_ctr {

// Fills ticket->tracked from merged_. What an id counts for is the sum over the ranks, so it does not depend on their number;
// where the messages have no counts, because no table has a min_count above 1, a batch is one occurrence.
void MixCacheImpl::TrackKeys(const ReceivedKeys& received, Ticket* ticket) {
  ticket->tracked.clear();
  for (size_t k = 0; k < merged_.keys.size(); ++k) {
    if (!life_.tracks(merged_.keys[k].table)) continue;
    ticket->tracked.push_back({merged_.keys[k], merged_.hashes[k], 1, static_cast<int32_t>(k)});
  }
  if (received.counts.empty()) return;
  std::vector<int64_t> counts(merged_.keys.size(), 0);
  for (size_t i = 0; i < merged_.inverse.size(); ++i) {
    if (merged_.inverse[i] >= 0) counts[static_cast<size_t>(merged_.inverse[i])] += received.counts[i];
  }
  for (RowLife::Occurrence& key : ticket->tracked) {
    if (options_.tables[static_cast<size_t>(key.key.table)].min_count > 1) key.count = counts[static_cast<size_t>(key.k)];
  }
}

// The ticket's slots, kNoSlot where the row is not trained yet. Valid until the next call.
Span<const Slot> MixCacheImpl::AdmittedSlots(const Ticket& ticket) {
  if (ticket.tracked.empty()) return ticket.slots;
  admitted_.resize(ticket.tracked.size());
  life_.Decide(ticket.tracked, admitted_.data());
  admitted_slots_ = ticket.slots;
  for (size_t i = 0; i < ticket.tracked.size(); ++i) {
    if (!admitted_[i]) admitted_slots_[static_cast<size_t>(ticket.tracked[i].k)] = kNoSlot;
  }
  return admitted_slots_;
}

// After AdmittedSlots of the same ticket.
void MixCacheImpl::NoteAdmitted(const Ticket& ticket) {
  if (ticket.tracked.empty()) return;
  for (size_t i = 0; i < ticket.tracked.size(); ++i) {
    stats_.tables[static_cast<size_t>(ticket.tracked[i].key.table)].not_admitted += !admitted_[i];
  }
  NoteLife();
}

void MixCacheImpl::NoteLife() {
  for (size_t t = 0; t < stats_.tables.size(); ++t) stats_.tables[t].waiting_ids = life_.waiting(static_cast<int32_t>(t));
  life_bytes_ = life_.allocated_bytes() + static_cast<int64_t>(admitted_.capacity() + admitted_slots_.capacity() * sizeof(Slot));
}

Status MixCacheImpl::RowAges(std::vector<int64_t>* ages) const {
  return Guard("the ages of rows", [&]() -> Status {
    std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
    const int64_t now = step();
    ages->clear();
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      if (options_.tables[t].max_rows == 0) continue;
      ages->resize(ages->size() + kAgeBins, 0);
      const auto table = static_cast<int32_t>(t);
      if (life_.due(table, now)) life_.Ages(table, now, Span<int64_t>(ages->data() + ages->size() - kAgeBins, kAgeBins));
    }
    return Status::Ok();
  });
}

Status MixCacheImpl::Sweep(Span<const int64_t> ages, int64_t* deleted, TaskRunner* runner) {
  *deleted = 0;
  const auto limited =
      std::count_if(options_.tables.begin(), options_.tables.end(), [](const TableOptions& table) { return table.max_rows > 0; });
  if (ages.size() != limited * kAgeBins) {
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": Sweep with ", ages.size(), " row ages; needed are ",
                      limited * kAgeBins, ": RowAges of ", limited, " tables with max_rows, summed over the ranks");
  }
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("the rows to delete", [&]() { return SweepInOrder(ages, deleted, runner); });
}

Status MixCacheImpl::SweepInOrder(Span<const int64_t> ages, int64_t* deleted, TaskRunner* runner) {
  std::unique_lock<std::shared_mutex> rows_lock(rows_mutex_);
  const int64_t now = step();
  RowLife::Ended ended;
  int64_t begin = 0;  // Of the table's ages.
  for (size_t t = 0; t < options_.tables.size(); ++t) {
    const auto table = static_cast<int32_t>(t);
    const bool limited = options_.tables[t].max_rows > 0;
    if (life_.due(table, now)) {
      life_.Select(table, now, limited ? ages.subspan(begin, kAgeBins) : Span<const int64_t>(), &ended);
      HVD_CTR_RETURN_IF_ERROR(DeleteRows(ended.idle, &MixCacheTableStats::deleted_idle, runner));
      HVD_CTR_RETURN_IF_ERROR(DeleteRows(ended.excess, &MixCacheTableStats::deleted_max_rows, runner));
      *deleted += static_cast<int64_t>(ended.idle.size() + ended.excess.size());
    }
    if (limited) begin += kAgeBins;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  NoteLife();
  ++releases_;  // A Prefetch that waits may find room now.
  released_.notify_all();
  return Status::Ok();
}

Status MixCacheImpl::DeleteRows(Span<const Key> keys, int64_t MixCacheTableStats::* counter, TaskRunner* runner) {
  for (int64_t begin = 0; begin < keys.size(); begin += kMoveRows) {
    HVD_CTR_RETURN_IF_ERROR(DeleteChunk(keys.subspan(begin, std::min(kMoveRows, keys.size() - begin)), counter, runner));
  }
  return Status::Ok();
}

// Nobody pins or unpins a slot meanwhile: that needs order_mutex_ or rows_mutex_. The rows of batches in flight are set back
// last: should the device fail, they are deleted all the same, and a save afterwards is right.
Status MixCacheImpl::DeleteChunk(Span<const Key> keys, int64_t MixCacheTableStats::* counter, TaskRunner* runner) {
  move_keys_.clear();
  move_slots_.clear();
  move_keys_.reserve(static_cast<size_t>(keys.size()));
  move_slots_.reserve(static_cast<size_t>(keys.size()));
  store_->Remove(keys);
  life_.Erase(keys);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Key& key : keys) {
      MixCacheTableStats& table = stats_.tables[static_cast<size_t>(key.table)];
      ++(table.*counter);
      const Slot slot = directory_.Find(key);
      if (slot == kNoSlot) continue;
      dirty_[static_cast<size_t>(slot)] = 0;
      if (pins_[static_cast<size_t>(slot)] > 0) {
        move_keys_.push_back(key);
        move_slots_.push_back(slot);
        continue;
      }
      directory_.Erase(slot);
      policy_->Remove(slot);
      --table.cached_rows;
    }
  }
  if (move_slots_.empty()) return Status::Ok();
  return StoreFirstRecords(move_slots_, move_keys_, runner);
}

Status MixCacheImpl::ExportWaiting(int32_t table, int64_t* cursor, int64_t max_ids, std::vector<int64_t>* ids,
                                   std::vector<RowLife::Id>* life) const {
  HVD_CTR_RETURN_IF_ERROR(CheckTable(table, "ExportWaiting"));
  if (*cursor < 0 || max_ids < 1) {
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": ExportWaiting from cursor ", *cursor, " for ", max_ids,
                      " ids; allowed are cursors >= 0 and at least 1 id");
  }
  return Guard("exported ids", [&]() -> Status {
    std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
    ids->clear();
    life->clear();
    life_.ScanWaiting(table, cursor, max_ids, ids, life);
    return Status::Ok();
  });
}

Status MixCacheImpl::ImportLife(int32_t table, Span<const int64_t> ids, Span<const RowLife::Id> life, int64_t* foreign) {
  HVD_CTR_RETURN_IF_ERROR(CheckTable(table, "ImportLife"));
  *foreign = 0;
  for (int64_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && life.size() == ids.size() && life[i].count >= 0 && life[i].last_step >= 0) continue;
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": ImportLife into table '",
                      options_.tables[static_cast<size_t>(table)].name, "' of id ", ids[i],
                      "; needed are ids >= 0, each with a count and a last step >= 0");
  }
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("what is known of imported ids", [&]() -> Status {
    std::unique_lock<std::shared_mutex> rows_lock(rows_mutex_);
    for (int64_t i = 0; i < ids.size(); ++i) {
      const Key key{ids[i], table};
      if (OwnerOf(table, key.id, options_.world_size) != options_.rank) {
        ++*foreign;
        continue;
      }
      uint8_t has_row = 0;
      store_->Contains(Span<const Key>(&key, 1), &has_row);
      if (life_.tracks(table)) life_.Set(key, life[i], has_row != 0);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    NoteLife();
    return Status::Ok();
  });
}

}  // namespace hvd_ctr
