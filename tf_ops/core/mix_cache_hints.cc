// MixCache: Announce, EndAnnouncements, SetFrequencies, WarmStart. They decide which rows are cached, never their values.
#include <algorithm>

#include "tf_ops/core/mix_cache_impl.h"

namespace hvd_ctr {

Status MixCacheImpl::Announce(const ReceivedKeys& received, bool* noted) {
  *noted = false;
  if (options_.policy != EvictionPolicyKind::kLookahead || options_.window == 0) return Status::Ok();
  HVD_CTR_RETURN_IF_ERROR(CheckReceived(received));
  std::lock_guard<std::mutex> serial(announce_mutex_);
  return Guard("an announced batch (lower embedding.cache.window)", [&]() -> Status {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Expectation expectation = policy_->Expect(received.ids.size(), directory_.free_slots());
      *noted = expectation == Expectation::kNoted;
      if (expectation != Expectation::kWantsKeys) return Status::Ok();
    }
    HVD_CTR_RETURN_IF_ERROR(announce_merge_.Run(received.ids, received.tables, &announced_));
    announced_slots_.resize(announced_.keys.size());
    std::lock_guard<std::mutex> lock(mutex_);
    directory_.Find(announced_.keys, announced_.hashes, announced_slots_.data());
    policy_->Announce({announced_.keys, announced_.hashes, announced_slots_, static_cast<int64_t>(received.ids.size())});
    *noted = true;
    announce_bytes_ =
        announce_merge_.allocated_bytes() +
        static_cast<int64_t>(announced_.keys.capacity() * sizeof(Key) + announced_.hashes.capacity() * sizeof(uint64_t) +
                             announced_.inverse.capacity() * sizeof(int32_t) + announced_slots_.capacity() * sizeof(Slot));
    return Status::Ok();
  });
}

void MixCacheImpl::EndAnnouncements() {
  std::lock_guard<std::mutex> lock(mutex_);
  policy_->EndAnnouncements();
}

Status MixCacheImpl::SetFrequencies(int32_t table, Span<const int64_t> ids, Span<const int64_t> counts, int64_t* foreign) {
  HVD_CTR_RETURN_IF_ERROR(CheckTable(table, "SetFrequencies"));
  if (ids.size() != counts.size()) {
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": SetFrequencies of ", ids.size(), " ids with ", counts.size(),
                      " counts; needed is one count per id");
  }
  const int64_t* negative = std::find_if(counts.begin(), counts.end(), [](int64_t count) { return count < 0; });
  if (negative != counts.end()) {
    return MakeStatus(StatusCode::kInvalidArgument, Where(), ": SetFrequencies of id ", ids[negative - counts.begin()],
                      " with count ", *negative, "; allowed are values >= 0");
  }
  std::lock_guard<std::mutex> order(order_mutex_);
  return Guard("the counts of ids", [&]() { return SetFrequenciesInOrder(table, ids, counts, foreign); });
}

Status MixCacheImpl::SetFrequenciesInOrder(int32_t table, Span<const int64_t> ids, Span<const int64_t> counts, int64_t* foreign) {
  const std::vector<int32_t> tables(static_cast<size_t>(ids.size()), table);
  HVD_CTR_RETURN_IF_ERROR(merge_.Run(ids, tables, &other_keys_));
  std::vector<int64_t> owned(other_keys_.keys.size());
  for (int64_t i = 0; i < ids.size(); ++i) {
    const int32_t k = other_keys_.inverse[static_cast<size_t>(i)];
    if (k >= 0) owned[static_cast<size_t>(k)] = counts[i];
  }
  *foreign = other_keys_.foreign;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!policy_->SetFrequencies(other_keys_.keys, owned)) {
    return MakeStatus(StatusCode::kFailedPrecondition, Where(),
                      ": SetFrequencies, but the policy uses no counts; set embedding.cache.policy to freq");
  }
  for (int64_t s = 0; directory_.size() > 0 && s < options_.slots; ++s) {
    const auto slot = static_cast<Slot>(s);
    if (directory_.occupied(slot)) policy_->Load(slot, directory_.key(slot), SlotDirectory::Hash(directory_.key(slot)));
  }
  return Status::Ok();
}

Status MixCacheImpl::WarmStart(int64_t* rows, TaskRunner* runner) {
  std::lock_guard<std::mutex> order(order_mutex_);
  *rows = 0;
  return Guard("the rows of a warm start", [&]() { return WarmStartInOrder(rows, runner); });
}

Status MixCacheImpl::WarmStartInOrder(int64_t* rows, TaskRunner* runner) {
  std::vector<Key> keys;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    keys = policy_->MostFrequent(options_.slots);
    const auto cached = [this](const Key& key) { return directory_.Find(key) != kNoSlot; };
    keys.erase(std::remove_if(keys.begin(), keys.end(), cached), keys.end());
    keys.resize(std::min(keys.size(), static_cast<size_t>(directory_.free_slots())));
  }
  const Span<const Key> all(keys);
  for (int64_t begin = 0; begin < all.size(); begin += kMoveRows) {
    const int64_t count = std::min(kMoveRows, all.size() - begin);
    HVD_CTR_RETURN_IF_ERROR(WarmChunk(all.subspan(begin, count), runner));
    *rows += count;
  }
  return Status::Ok();
}

// The slots are free, so nobody looks at them before they enter the directory.
Status MixCacheImpl::WarmChunk(Span<const Key> keys, TaskRunner* runner) {
  move_slots_.resize(static_cast<size_t>(keys.size()));
  for (int64_t i = 0; i < keys.size(); ++i) move_slots_[static_cast<size_t>(i)] = directory_.free_slot(i);
  found_.resize(static_cast<size_t>(keys.size()));
  bool overwritten = false;
  HVD_CTR_RETURN_IF_ERROR(FillSlots(keys, move_slots_, found_.data(), &overwritten, runner));
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < keys.size(); ++i) {
    const uint64_t hash = SlotDirectory::Hash(keys[i]);
    const Slot slot = directory_.Insert(keys[i], hash);
    policy_->Load(slot, keys[i], hash);
    // Not dirty, even if it does not exist yet: it exists from its first update on.
    ++stats_.tables[static_cast<size_t>(keys[i].table)].cached_rows;
    ++stats_.tables[static_cast<size_t>(keys[i].table)].loads;
  }
  policy_->Use(move_slots_);
  return Status::Ok();
}

}  // namespace hvd_ctr
