// MixCache::Prefetch: merge requests, plan, wait for room, write back, load, pin. Everything that can fail comes before Commit,
// so a failed Prefetch leaves no pins behind and loses no row.
#include <algorithm>
#include <chrono>

#include "tf_ops/core/mix_cache_impl.h"
#include "tf_ops/core/stage_clock.h"

namespace hvd_ctr {

Status MixCacheImpl::Prefetch(const ReceivedKeys& received, int64_t* ticket, TaskRunner* runner) {
  std::lock_guard<std::mutex> serial(prefetch_mutex_);
  return Guard("the rows of a batch", [&]() { return PrefetchSerially(received, ticket, runner); });
}

Status MixCacheImpl::PrefetchSerially(const ReceivedKeys& received, int64_t* number, TaskRunner* runner) {
  const StageTimer timer(Stage::kPlan);
  HVD_CTR_RETURN_IF_ERROR(CheckReceived(received));
  std::unique_lock<std::mutex> order(order_mutex_);
  HVD_CTR_RETURN_IF_ERROR(merge_.Run(received.ids, received.tables, &merged_));
  HVD_CTR_RETURN_IF_ERROR(CheckCapacity());
  HVD_CTR_RETURN_IF_ERROR(PlanOrWait(&order));
  std::unique_ptr<Ticket> ticket = FillTicket(received);
  HVD_CTR_RETURN_IF_ERROR(MovePlannedRows(runner));
  *number = OpenTicket(std::move(ticket), received);
  return Status::Ok();
}

Status MixCacheImpl::CheckCapacity() const {
  const auto needed = static_cast<int64_t>(merged_.keys.size());
  if (needed <= options_.slots) return Status::Ok();
  const auto largest = std::max_element(merged_.unique.begin(), merged_.unique.end());
  const std::string& table = options_.tables[static_cast<size_t>(largest - merged_.unique.begin())].name;
  return MakeStatus(StatusCode::kResourceExhausted, Where(), ": this batch needs ", needed, " rows (most of them, ", *largest,
                    ", from table '", table, "'), have ", options_.slots, " slots; raise embedding.cache.slots to at least ",
                    needed, " or lower train.global_batch");
}

Status MixCacheImpl::PlanOrWait(std::unique_lock<std::mutex>* order) {
  const auto wait = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(options_.prefetch_wait_seconds));
  const auto deadline = std::chrono::steady_clock::now() + wait;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const PlanRequest request{merged_.keys, merged_.hashes, pins_, dirty_, pinned_slots_};
      if (PlanBatch(directory_, policy_.get(), request, &plan_scratch_, &plan_)) return Status::Ok();
      // Whoever holds the pins may want to read or flush before it ends its ticket: it must not wait for us meanwhile.
      order->unlock();
      const StageTimer timer(Stage::kWaiting);
      const int64_t seen = releases_;
      if (!released_.wait_until(lock, deadline, [this, seen] { return releases_ != seen; }))
        return NoRoom(options_.prefetch_wait_seconds);
    }
    order->lock();
  }
}

Status MixCacheImpl::NoRoom(double waited_seconds) const {
  const auto needed = static_cast<int64_t>(merged_.keys.size());
  int64_t pinned_too = 0;
  for (const Slot slot : plan_.slots) pinned_too += slot != kNoSlot && pins_[static_cast<size_t>(slot)] > 0;
  const int64_t together = needed + pinned_slots_ - pinned_too;
  return MakeStatus(StatusCode::kResourceExhausted, Where(), ": this batch needs ", needed, " rows, and ", pinned_slots_, " of ",
                    options_.slots, " slots are held by ", open_.size(), " batches in flight (", pinned_too,
                    " of them are wanted by both); none was ended within ", waited_seconds,
                    " s (prefetch_wait_seconds); raise embedding.cache.slots to at least ", together,
                    ", prefetch fewer batches ahead, or lower train.global_batch");
}

std::unique_ptr<MixCacheImpl::Ticket> MixCacheImpl::FillTicket(const ReceivedKeys& received) {
  std::unique_ptr<Ticket> ticket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.reserve(open_.size() + 1);
    spare_.reserve(spare_.size() + open_.size() + 1);
    if (!spare_.empty()) {
      ticket = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (ticket == nullptr) ticket = std::make_unique<Ticket>();
  ticket->slots = plan_.slots;
  ticket->tables.resize(merged_.keys.size());
  std::transform(merged_.keys.begin(), merged_.keys.end(), ticket->tables.begin(), [](const Key& key) { return key.table; });
  if (!life_.empty()) TrackKeys(received, ticket.get());
  ticket->inverse.swap(merged_.inverse);
  ticket->received_slots.resize(ticket->inverse.size());
  std::transform(ticket->inverse.begin(), ticket->inverse.end(), ticket->received_slots.begin(),
                 [&ticket](int32_t k) { return k < 0 ? kNoSlot : ticket->slots[static_cast<size_t>(k)]; });
  ticket->splits.resize(received.peers.size());
  std::transform(received.peers.begin(), received.peers.end(), ticket->splits.begin(),
                 [](const PeerMessage& peer) { return static_cast<int32_t>(peer.key_count); });
  return ticket;
}

Status MixCacheImpl::MovePlannedRows(TaskRunner* runner) {
  // The slots to write back and to fill are pinned by no ticket, so no Lookup or Apply meanwhile uses them.
  HVD_CTR_RETURN_IF_ERROR(backend_->BeginMoves());
  bool overwritten = false;
  // Also without memory the moves end, and slots that were overwritten are forgotten.
  Status moved = Guard("the rows of a batch", [&]() { return WriteBackAndLoad(&overwritten, runner); });
  const Status ended = backend_->EndMoves();
  if (moved.ok()) moved = ended;
  if (!moved.ok() && overwritten) {
    // The host has the evicted rows, but some of their slots hold other rows by now: only forgetting them keeps the cache true.
    std::lock_guard<std::mutex> lock(mutex_);
    CommitEvictions(plan_, &directory_, policy_.get());
    CountEvictions();
  }
  return moved;
}

Status MixCacheImpl::WriteBackAndLoad(bool* overwritten, TaskRunner* runner) {
  move_keys_.clear();
  move_slots_.clear();
  for (const Eviction& eviction : plan_.evictions) {
    if (!eviction.dirty) continue;
    move_keys_.push_back(eviction.key);
    move_slots_.push_back(eviction.slot);
  }
  HVD_CTR_RETURN_IF_ERROR(TimeStage(Stage::kWriteBack, [&] { return WriteBack(move_keys_, move_slots_, runner); }));
  const StageTimer timer(Stage::kHostIo);
  const auto loads = static_cast<int64_t>(plan_.loads.size());
  found_.resize(static_cast<size_t>(loads));
  for (int64_t begin = 0; begin < loads; begin += kMoveRows) {
    HVD_CTR_RETURN_IF_ERROR(LoadChunk(begin, std::min(loads, begin + kMoveRows), overwritten, runner));
  }
  return Status::Ok();
}

Status MixCacheImpl::LoadChunk(int64_t begin, int64_t end, bool* overwritten, TaskRunner* runner) {
  move_keys_.clear();
  move_slots_.clear();
  for (int64_t m = begin; m < end; ++m) {
    const auto k = static_cast<size_t>(plan_.loads[static_cast<size_t>(m)]);
    move_keys_.push_back(merged_.keys[k]);
    move_slots_.push_back(plan_.slots[k]);
  }
  return FillSlots(move_keys_, move_slots_, found_.data() + begin, overwritten, runner);
}

void MixCacheImpl::CountEvictions() {
  for (const Eviction& eviction : plan_.evictions) {
    MixCacheTableStats& table = stats_.tables[static_cast<size_t>(eviction.key.table)];
    ++table.evictions;
    --table.cached_rows;
    dirty_[static_cast<size_t>(eviction.slot)] = 0;
  }
}

int64_t MixCacheImpl::OpenTicket(std::unique_ptr<Ticket> ticket, const ReceivedKeys& received) {
  std::lock_guard<std::mutex> lock(mutex_);
  CommitPlan(plan_, merged_.keys, merged_.hashes, static_cast<int64_t>(received.ids.size()), &directory_, policy_.get());
  CountEvictions();
  CountBatch(received);
  for (const Slot slot : ticket->slots) pinned_slots_ += pins_[static_cast<size_t>(slot)]++ == 0;
  stats_.pinned_peak = std::max(stats_.pinned_peak, pinned_slots_);
  scratch_bytes_ = ScratchBytes();
  ticket->number = next_ticket_++;
  open_.push_back(std::move(ticket));
  return open_.back()->number;
}

void MixCacheImpl::CountBatch(const ReceivedKeys& received) {
  for (size_t t = 0; t < stats_.tables.size(); ++t) {
    MixCacheTableStats& table = stats_.tables[t];
    table.requested += merged_.requested[t];
    table.unique += merged_.unique[t];
    table.hits += merged_.unique[t];  // Less the misses, below.
    for (const PeerMessage& peer : received.peers) {
      if (t < peer.info.invalid_counts.size()) table.invalid_ids += peer.info.invalid_counts[t];
    }
  }
  // Loads come in runs of one table.
  const auto loads = static_cast<int64_t>(plan_.loads.size());
  for (int64_t begin = 0; begin < loads;) {
    const auto table_of = [this](int64_t m) {
      return merged_.keys[static_cast<size_t>(plan_.loads[static_cast<size_t>(m)])].table;
    };
    const int32_t number = table_of(begin);
    int64_t end = begin;
    int64_t found = 0;
    for (; end < loads && table_of(end) == number; ++end) found += found_[static_cast<size_t>(end)];
    MixCacheTableStats& table = stats_.tables[static_cast<size_t>(number)];
    table.hits -= end - begin;
    table.misses += end - begin;
    table.loads += end - begin;
    table.cached_rows += end - begin;
    table.created += end - begin - found;
    begin = end;
  }
  // The new slots were free, so they are not dirty. A new row exists from its first update on; until then any load gives its
  // initial value again, so a batch that is prefetched and never trained leaves no trace.
  stats_.foreign_keys += merged_.foreign;
}

int64_t MixCacheImpl::ScratchBytes() const {
  const auto bytes = [](const auto& vector) { return static_cast<int64_t>(vector.capacity() * sizeof(vector[0])); };
  return bytes(merged_.keys) + bytes(merged_.hashes) + bytes(merged_.inverse) + bytes(plan_.slots) + bytes(plan_.loads) +
         bytes(plan_.evictions) + bytes(plan_scratch_.marks) + bytes(plan_scratch_.victims) + merge_.allocated_bytes() +
         bytes(other_keys_.keys) + bytes(other_keys_.hashes) + bytes(other_keys_.inverse) + bytes(other_slots_) +
         bytes(sources_) + bytes(move_keys_) + bytes(move_slots_) + bytes(part_slots_) + bytes(found_) + bytes(staging_);
}

}  // namespace hvd_ctr
