#include "tf_ops/core/mix_cache.h"

#include <algorithm>
#include <cmath>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/mix_cache_impl.h"
#include "tf_ops/core/mix_cache_options.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/stage_clock.h"

namespace hvd_ctr {

MixCacheImpl::MixCacheImpl(const MixCacheOptions& options, std::unique_ptr<DeviceBackend> backend,
                           std::unique_ptr<HostStore> store)
    : options_(options),
      dim_(options.dim),
      backend_(std::move(backend)),
      store_(std::move(store)),
      merge_(static_cast<int32_t>(options.tables.size()), options.rank, options.world_size),
      announce_merge_(static_cast<int32_t>(options.tables.size()), options.rank, options.world_size),
      life_(options.tables) {
  int32_t largest_state = 0;
  for (const TableOptions& table : options_.tables) {
    optimizers_.push_back(table.optimizer);
    state_floats_.push_back(StateFloats(table.optimizer, options_.dim));
    largest_state = std::max(largest_state, state_floats_.back());
  }
  record_floats_ = dim_ + largest_state;
  for (size_t t = 0; t < options_.tables.size(); ++t) {
    const std::string& name = options_.tables[t].name;
    const uint64_t table_hash = HashBytes(name.data(), static_cast<int64_t>(name.size()));
    row_inits_.push_back(MakeRowInit(options_.tables[t].initializer, optimizers_[t], options_.seed, table_hash, options_.dim));
  }
  stats_.tables.resize(options_.tables.size());
}

Status MixCacheImpl::Allocate() {
  return Guard("the metadata of the cache slots (lower embedding.cache.slots)", [this]() -> Status {
    HVD_CTR_RETURN_IF_ERROR(
        backend_->Allocate(options_.slots, options_.dim, static_cast<int32_t>(record_floats_ - dim_), options_.row_type));
    HVD_CTR_RETURN_IF_ERROR(directory_.Allocate(options_.slots));
    policy_ = MakeEvictionPolicy(options_.policy, options_.slots, options_.window);
    AssignHuge(static_cast<size_t>(options_.slots), 0, &pins_);
    AssignHuge(static_cast<size_t>(options_.slots), uint8_t{0}, &dirty_);
    return Status::Ok();
  });
}

std::string MixCacheImpl::Where() const { return internal::StrCat("mix_cache '", options_.name, "' on rank ", options_.rank); }

Status MixCacheImpl::CheckTable(int32_t table, const char* what) const {
  const auto tables = static_cast<int32_t>(options_.tables.size());
  if (table >= 0 && table < tables) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, Where(), ": ", what, " of table ", table, "; allowed are 0 .. ", tables - 1);
}

Status MixCacheImpl::CheckReceived(const ReceivedKeys& received) const {
  int64_t keys = 0;
  for (const PeerMessage& peer : received.peers) keys += peer.key_count;
  if (static_cast<int32_t>(received.peers.size()) == options_.world_size && keys == static_cast<int64_t>(received.ids.size()) &&
      received.tables.size() == received.ids.size() &&
      (received.counts.empty() || received.counts.size() == received.ids.size())) {
    return Status::Ok();
  }
  return MakeStatus(StatusCode::kInvalidArgument, Where(), ": received ", received.ids.size(), " ids, ", received.tables.size(),
                    " tables and ", received.counts.size(), " counts from ", received.peers.size(), " peers that announce ", keys,
                    " keys; needed are messages from ", options_.world_size,
                    " ranks and equal numbers of ids, tables, counts (or none) and announced keys");
}

Status MixCacheImpl::FindTicket(int64_t number, const char* what, Ticket** ticket) const {
  for (const std::unique_ptr<Ticket>& open : open_) {
    if (open->number != number) continue;
    *ticket = open.get();
    return Status::Ok();
  }
  if (number >= 1 && number < next_ticket_) {
    return MakeStatus(StatusCode::kFailedPrecondition, Where(), ": ", what, " of ticket ", number,
                      ", which was applied or released before; each ticket ends exactly once");
  }
  return MakeStatus(StatusCode::kFailedPrecondition, Where(), ": ", what, " of ticket ", number, ", which was never handed out (",
                    next_ticket_ - 1, " were, numbered from 1); call Prefetch first");
}

void MixCacheImpl::EndTicket(Ticket* ticket, Span<const Slot> updated) {
  for (const Slot slot : updated) {
    if (slot != kNoSlot) dirty_[static_cast<size_t>(slot)] = 1;
  }
  for (const Slot slot : ticket->slots) {
    if (--pins_[static_cast<size_t>(slot)] == 0) --pinned_slots_;
  }
  const auto ended = std::find_if(open_.begin(), open_.end(), [ticket](const auto& open) { return open.get() == ticket; });
  spare_.push_back(std::move(*ended));
  open_.erase(ended);
  ++releases_;
  released_.notify_all();
}

Status MixCacheImpl::TicketSplits(int64_t ticket, std::vector<int32_t>* splits) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Ticket* found = nullptr;
  HVD_CTR_RETURN_IF_ERROR(FindTicket(ticket, "TicketSplits", &found));
  *splits = found->splits;
  return Status::Ok();
}

Status MixCacheImpl::Lookup(int64_t ticket, float* rows, TaskRunner* runner) {
  const StageTimer timer(Stage::kLookup);
  std::shared_lock<std::shared_mutex> rows_lock(rows_mutex_);
  Ticket* found = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    HVD_CTR_RETURN_IF_ERROR(FindTicket(ticket, "Lookup", &found));
  }
  return backend_->GatherRows(found->received_slots, rows, runner);
}

Status MixCacheImpl::Apply(int64_t ticket, const float* gradients, float learning_rate_scale, TaskRunner* runner) {
  const StageTimer timer(Stage::kUpdate);
  if (!std::isfinite(learning_rate_scale) || learning_rate_scale < 0) {
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": Apply with learning-rate scale ", learning_rate_scale,
                      "; allowed are finite values >= 0");
  }
  return Guard("the gradient sums of a batch", [&]() -> Status {
    std::unique_lock<std::shared_mutex> rows_lock(rows_mutex_);
    Ticket* found = nullptr;
    int64_t step = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      HVD_CTR_RETURN_IF_ERROR(FindTicket(ticket, "Apply", &found));
      step = stats_.steps + 1;
    }
    const auto unique = static_cast<int64_t>(found->slots.size());
    float* sums = nullptr;
    HVD_CTR_RETURN_IF_ERROR(backend_->Workspace(unique * dim_, &sums));
    const Span<const Slot> slots = AdmittedSlots(*found);
    HVD_CTR_RETURN_IF_ERROR(
        TimeStage(Stage::kSegmentSum, [&] { return backend_->SegmentSum(gradients, found->inverse, unique, sums, runner); }));
    HVD_CTR_RETURN_IF_ERROR(backend_->UpdateRows(slots, found->tables, sums, optimizers_, step, learning_rate_scale, runner));
    life_.Count(found->tracked, step);
    std::lock_guard<std::mutex> lock(mutex_);
    NoteAdmitted(*found);
    EndTicket(found, slots);
    stats_.steps = step;
    sums_bytes_ = backend_->workspace_bytes();
    return Status::Ok();
  });
}

Status MixCacheImpl::Release(int64_t ticket) {
  std::unique_lock<std::shared_mutex> rows_lock(rows_mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  Ticket* found = nullptr;
  HVD_CTR_RETURN_IF_ERROR(FindTicket(ticket, "Release", &found));
  EndTicket(found, {});
  return Status::Ok();
}

int64_t MixCacheImpl::step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_.steps;
}

Status MixCacheImpl::SetStep(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step < 0) return MakeStatus(StatusCode::kInvalidArgument, Where(), ": SetStep to ", step, "; allowed are values >= 0");
  if (!open_.empty()) {
    return MakeStatus(StatusCode::kFailedPrecondition, Where(), ": SetStep while ", open_.size(),
                      " tickets are open (the first is ", open_.front()->number, "); apply or release them before");
  }
  stats_.steps = step;
  return Status::Ok();
}

MixCacheStats MixCacheImpl::Stats() const {
  // The store first: it may be busy with a write-back, and nobody shall wait for that at mutex_.
  std::vector<int64_t> host_rows;
  for (size_t t = 0; t < options_.tables.size(); ++t) host_rows.push_back(store_->row_count(static_cast<int32_t>(t)));
  const int64_t store_bytes = store_->allocated_bytes();
  const DiskStats disk = store_->disk();
  std::lock_guard<std::mutex> lock(mutex_);
  MixCacheStats stats = stats_;
  for (size_t t = 0; t < host_rows.size(); ++t) stats.tables[t].host_rows = host_rows[t];
  stats.disk_bytes = disk.bytes;
  stats.disk_rows_read = disk.rows_read;
  stats.disk_rows_written = disk.rows_written;
  stats.record_bytes = record_floats_ * static_cast<int64_t>(sizeof(float));
  stats.pinned_slots = pinned_slots_;
  stats.device_bytes = backend_->allocated_bytes();
  stats.host_bytes = store_bytes + directory_.allocated_bytes() + policy_->allocated_bytes() + scratch_bytes_ + sums_bytes_ +
                     announce_bytes_ + life_bytes_ + static_cast<int64_t>(pins_.capacity() * sizeof(int32_t) + dirty_.capacity());
  for (const auto* tickets : {&open_, &spare_}) {
    for (const std::unique_ptr<Ticket>& ticket : *tickets) {
      stats.host_bytes += static_cast<int64_t>((ticket->slots.capacity() + ticket->received_slots.capacity()) * sizeof(Slot) +
                                               (ticket->tables.capacity() + ticket->inverse.capacity()) * sizeof(int32_t) +
                                               ticket->tracked.capacity() * sizeof(RowLife::Occurrence));
    }
  }
  return stats;
}

float* MixCacheImpl::Staging(int64_t rows) {
  if (staging_.size() < static_cast<size_t>(rows * record_floats_)) staging_.resize(static_cast<size_t>(rows * record_floats_));
  return staging_.data();
}

void MixCacheImpl::FirstRow(const Key& key, float* row) const {
  InitialRowOf(row_inits_[static_cast<size_t>(key.table)], key.id, options_.dim, row);
  RoundRow(options_.row_type, dim_, row);
}

Status MixCacheImpl::FillSlots(Span<const Key> keys, Span<const Slot> slots, uint8_t* found, bool* overwritten,
                               TaskRunner* runner) {
  const int64_t count = keys.size();
  float* records = Staging(count);
  HVD_CTR_RETURN_IF_ERROR(store_->Load(keys, records, found, runner));
  *overwritten = true;
  const auto loaded = std::count_if(found, found + count, [](uint8_t there) { return there != 0; });
  part_slots_.resize(static_cast<size_t>(count));
  const auto keep = [&](bool there) {
    for (int64_t i = 0; i < count; ++i) part_slots_[static_cast<size_t>(i)] = (found[i] != 0) == there ? slots[i] : kNoSlot;
  };
  if (loaded < count) {
    keep(false);
    HVD_CTR_RETURN_IF_ERROR(StoreFirstRecords(part_slots_, keys, runner));
  }
  if (loaded == 0) return Status::Ok();
  keep(true);
  return backend_->StoreRecords(part_slots_, records, runner);
}

Status MixCacheImpl::WriteBack(Span<const Key> keys, Span<const Slot> slots, TaskRunner* runner) {
  for (int64_t begin = 0; begin < keys.size(); begin += kMoveRows) {
    const int64_t count = std::min(kMoveRows, keys.size() - begin);
    float* records = Staging(count);
    HVD_CTR_RETURN_IF_ERROR(backend_->FetchRecords(slots.subspan(begin, count), records, runner));
    HVD_CTR_RETURN_IF_ERROR(store_->Store(keys.subspan(begin, count), records, runner));
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Key& key : keys.subspan(begin, count)) ++stats_.tables[static_cast<size_t>(key.table)].write_backs;
  }
  return Status::Ok();
}

Result<std::unique_ptr<MixCache>> MakeMixCache(const MixCacheOptions& options, std::unique_ptr<DeviceBackend> backend,
                                               std::unique_ptr<HostStore> store) {
  const Status checked = CheckMixCacheOptions(options);
  if (!checked.ok()) return checked;
  if (backend == nullptr || store == nullptr) {
    return MakeStatus(StatusCode::kInvalidArgument, "mix_cache '", options.name, "' needs a device backend and a host store");
  }
  auto cache = std::make_unique<MixCacheImpl>(options, std::move(backend), std::move(store));
  const Status allocated = cache->Allocate();
  if (!allocated.ok()) return allocated;
  return std::unique_ptr<MixCache>(std::move(cache));
}

}  // namespace hvd_ctr
