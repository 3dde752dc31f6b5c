#include "tf_ops/core/row_life.h"

#include <algorithm>

namespace hvd_ctr {
namespace {

constexpr int64_t kAhead = 16;  // Ids whose entries are asked for ahead of use.
constexpr int kBinBits = 8;

}  // namespace

int64_t AgeBin(int64_t age) {
  if (age < int64_t{2} << kBinBits) return age;
  const int shift = 63 - __builtin_clzll(static_cast<uint64_t>(age)) - kBinBits;
  return std::min((int64_t{shift} << kBinBits) + (age >> shift), kAgeBins - 1);
}

RowLife::RowLife(const std::vector<TableOptions>& tables) : tables_(tables.size()) {
  for (size_t t = 0; t < tables.size(); ++t) {
    Table& table = tables_[t];
    table.min_count = tables[t].min_count;
    table.max_idle_steps = tables[t].max_idle_steps;
    table.max_rows = tables[t].max_rows;
    table.sweep_every_steps = tables[t].sweep_every_steps;
    table.tracked = table.min_count > 1 || table.max_idle_steps > 0 || table.max_rows > 0;
    empty_ = empty_ && !table.tracked;
  }
}

bool RowLife::due(int32_t table, int64_t step) const {
  const Table& of = tables_[static_cast<size_t>(table)];
  return (of.max_idle_steps > 0 || of.max_rows > 0) && step % of.sweep_every_steps == 0;
}

uint64_t RowLife::Pack(Id id) {
  const auto count = static_cast<uint64_t>(std::min(id.count, kMostCount));
  const auto step = static_cast<uint64_t>(std::clamp<int64_t>(id.last_step, 0, kMostStep));
  return step << kCountBits | count;
}

RowLife::Id RowLife::Unpack(uint64_t value) {
  return Id{static_cast<int64_t>(value & kMostCount), static_cast<int64_t>(value >> kCountBits)};
}

int64_t RowLife::Age(uint64_t value, int64_t step) { return std::max<int64_t>(0, step - Unpack(value).last_step); }

bool RowLife::Idle(const Table& table, uint64_t value, int64_t step) {
  return table.max_idle_steps > 0 && Age(value, step) > table.max_idle_steps;
}

void RowLife::Decide(Span<const Occurrence> batch, uint8_t* admitted) {
  std::vector<int64_t> unknown(tables_.size(), 0);
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (i + kAhead < batch.size()) tables_[static_cast<size_t>(batch[i + kAhead].key.table)].ids.Prefetch(batch[i + kAhead].hash);
    const Occurrence& now = batch[i];
    const Table& table = tables_[static_cast<size_t>(now.key.table)];
    const uint64_t value = table.ids.Find(now.key, now.hash);
    unknown[static_cast<size_t>(now.key.table)] += value == 0;
    admitted[i] = Unpack(value).count + now.count >= table.min_count;
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (unknown[t] > 0) tables_[t].ids.Reserve(tables_[t].ids.size() + unknown[t]);
  }
}

void RowLife::Count(Span<const Occurrence> batch, int64_t step) {
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (i + kAhead < batch.size()) tables_[static_cast<size_t>(batch[i + kAhead].key.table)].ids.Prefetch(batch[i + kAhead].hash);
    const Occurrence& now = batch[i];
    Table& table = tables_[static_cast<size_t>(now.key.table)];
    uint64_t& value = table.ids.FindOrInsert(now.key, now.hash);
    const int64_t before = Unpack(value).count;
    value = Pack({before + now.count, step});
    table.rows += before < table.min_count && before + now.count >= table.min_count;
  }
}

void RowLife::Ages(int32_t table, int64_t step, Span<int64_t> bins) const {
  const Table& of = tables_[static_cast<size_t>(table)];
  of.ids.ForEach([&](const Key& /*key*/, uint64_t value) {
    if (Unpack(value).count >= of.min_count && !Idle(of, value, step)) ++bins[AgeBin(Age(value, step))];
  });
}

void RowLife::Select(int32_t table, int64_t step, Span<const int64_t> ages, Ended* ended) {
  Table& of = tables_[static_cast<size_t>(table)];
  int64_t kept_bins = kAgeBins;
  if (of.max_rows > 0) {
    int64_t rows = 0;
    kept_bins = 0;
    while (kept_bins < kAgeBins && rows + ages[kept_bins] <= of.max_rows) rows += ages[kept_bins++];
  }
  ended->idle.clear();
  ended->excess.clear();
  int64_t forgotten = 0;
  of.ids.ForEach([&](const Key& key, uint64_t& value) {
    const bool row = Unpack(value).count >= of.min_count;
    if (Idle(of, value, step)) {
      if (row) {
        ended->idle.push_back(key);
      } else {
        value = 0;
        ++forgotten;
      }
    } else if (row && kept_bins < kAgeBins && AgeBin(Age(value, step)) >= kept_bins) {
      ended->excess.push_back(key);
    }
  });
  if (forgotten > 0) of.ids.EraseZeros();
}

void RowLife::Erase(Span<const Key> keys) {
  for (const Key& key : keys) {
    Table& table = tables_[static_cast<size_t>(key.table)];
    const uint64_t hash = HashKey(key.table, key.id, kDirectorySalt);
    const uint64_t value = table.ids.Find(key, hash);
    table.rows -= value != 0 && Unpack(value).count >= table.min_count;
    table.ids.Erase(key, hash);
  }
}

RowLife::Id RowLife::Find(const Key& key) const {
  return Unpack(tables_[static_cast<size_t>(key.table)].ids.Find(key, HashKey(key.table, key.id, kDirectorySalt)));
}

void RowLife::Set(const Key& key, Id id, bool has_row) {
  Table& table = tables_[static_cast<size_t>(key.table)];
  id.count = has_row ? std::max(id.count, table.min_count) : std::min(id.count, table.min_count - 1);
  Erase(Span<const Key>(&key, 1));
  if (id.count < 1) return;
  table.ids.FindOrInsert(key, HashKey(key.table, key.id, kDirectorySalt)) = Pack(id);
  table.rows += has_row;
}

void RowLife::ScanWaiting(int32_t table, int64_t* cursor, int64_t entries, std::vector<int64_t>* ids,
                          std::vector<Id>* found) const {
  const Table& of = tables_[static_cast<size_t>(table)];
  *cursor = of.ids.ForSome(*cursor, entries, [&](const Key& key, uint64_t value) {
    const Id id = Unpack(value);
    if (id.count >= of.min_count) return;
    ids->push_back(key.id);
    found->push_back(id);
  });
}

int64_t RowLife::allocated_bytes() const {
  int64_t bytes = 0;
  for (const Table& table : tables_) bytes += table.ids.allocated_bytes();
  return bytes;
}

}  // namespace hvd_ctr
