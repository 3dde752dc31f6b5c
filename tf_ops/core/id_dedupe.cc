#include "tf_ops/core/id_dedupe.h"

#include <algorithm>
#include <limits>

#include "tf_ops/core/hash.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

// Ids per block: its scratch stays in L1.
constexpr int64_t kBlockIds = 64;
constexpr int64_t kMinSlots = 1024;
constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();

// Columns copied at a time: a cache line of ids.
constexpr int64_t kPanelColumns = 8;

// Ids of one block that are neither padding nor invalid.
struct IdBlock {
  const int64_t* ids;  // The column itself where nothing was dropped, else `kept`.
  int64_t size;
  int64_t kept[kBlockIds];
  int32_t positions[kBlockIds];  // Within the block.
  uint64_t slots[kBlockIds];
};

// What LoadBlock has dropped.
struct Dropped {
  int64_t invalid = 0;
  int64_t first_invalid = 0;
};

// What makes an id of a column valid. `limit` is the first one that is too large, as unsigned: negative ids exceed it as well.
struct Validity {
  bool padded;
  int64_t padding_id;
  uint64_t limit;
};

// Whether none of the ids is dropped.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY bool AllValidBody(const int64_t* ids, int64_t n, const Validity& validity) {
  const Validity valid = validity;
  uint64_t dropped = 0;
  for (int64_t i = 0; i < n; ++i) {
    dropped |= static_cast<uint64_t>(static_cast<uint64_t>(ids[i]) >= valid.limit) |
               static_cast<uint64_t>(valid.padded & (ids[i] == valid.padding_id));
  }
  return dropped == 0;
}
HVD_CTR_SIMD_KERNEL(bool, AllValid, (const int64_t* ids, int64_t n, const Validity& validity), (ids, n, validity))

// Two multiplies, cheaper than Mix64. One would not do: ids in equal steps (a usual thing) would for some steps fall into one run
// of slots. The result of Run does not depend on it.
HVD_CTR_SIMD_BODY uint64_t SlotOf(int64_t id, int shift) {
  uint64_t x = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ULL;
  x ^= x >> 32;
  return (x * 0xbf58476d1ce4e5b9ULL) >> shift;
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void HashBlockBody(const int64_t* ids, int64_t n, int shift, uint64_t* slots) {
  for (int64_t i = 0; i < n; ++i) slots[i] = SlotOf(ids[i], shift);
}
HVD_CTR_SIMD_KERNEL(void, HashBlock, (const int64_t* ids, int64_t n, int shift, uint64_t* slots), (ids, n, shift, slots))

// Reads n ids, writes kNoVirtualId for the dropped ones and keeps the others. Keeping is branch-free: features padded at random
// would otherwise pay a misprediction per id.
template <bool kHashed>
void KeepValid(const int64_t* ids, int64_t n, const Validity& valid, int64_t rows, int32_t* virtual_ids, IdBlock* block,
               Dropped* dropped) {
  int64_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t raw = ids[i];
    const bool padding = valid.padded & (raw == valid.padding_id);
    const int64_t id = kHashed ? HashToRange(raw, rows) : raw;
    const bool invalid = !kHashed && static_cast<uint64_t>(id) >= valid.limit;
    block->kept[size] = id;
    block->positions[size] = static_cast<int32_t>(i);
    size += !(padding | invalid);
    virtual_ids[i] = kNoVirtualId;
    if (invalid && !padding && dropped->invalid++ == 0) dropped->first_invalid = raw;
  }
  block->ids = block->kept;
  block->size = size;
}

void LoadBlock(const int64_t* ids, int64_t n, const Validity& valid, const IdRule& rule, int32_t* virtual_ids, IdBlock* block,
               Dropped* dropped) {
  if (rule.hash_ids) return KeepValid<true>(ids, n, valid, rule.rows, virtual_ids, block, dropped);
  if (!AllValid(ids, n, valid)) return KeepValid<false>(ids, n, valid, rule.rows, virtual_ids, block, dropped);
  block->ids = ids;
  block->size = n;
}

// `width` columns of a row-major matrix -> one after the other, `pitch` apart. width is kPanelColumns nearly always.
template <typename T>
HVD_CTR_SIMD_BODY void ReadColumns(const T* from, int64_t rows, int64_t stride, int64_t width, T* to, int64_t pitch) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < width; ++k) to[k * pitch + i] = from[i * stride + k];
  }
}

// And back.
template <typename T>
HVD_CTR_SIMD_BODY void WriteColumns(const T* from, int64_t pitch, int64_t rows, int64_t width, T* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < width; ++k) to[i * stride + k] = from[k * pitch + i];
  }
}

Status CheckInputs(Span<const IdColumn> columns, Span<const IdRule> rules) {
  for (int64_t t = 0; t < rules.size(); ++t) {
    if (rules[t].hash_ids && rules[t].rows <= 0) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: table ", t, " has hash_ids but rows = ", rules[t].rows,
                        "; hash_ids needs rows > 0");
    }
  }
  int64_t total = 0;
  int32_t last_table = 0;
  for (int64_t f = 0; f < columns.size(); ++f) {
    const IdColumn& column = columns[f];
    if (column.table < 0 || column.table >= rules.size()) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: feature ", f, " names table ", column.table,
                        "; tables are 0 .. ", rules.size() - 1);
    }
    if (column.table < last_table) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: feature ", f, " of table ", column.table,
                        " follows one of table ", last_table, "; features must come in ascending order of their tables");
    }
    last_table = column.table;
    if (column.count < 0) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: feature ", f, " has ", column.count, " ids; allowed: >= 0");
    }
    if (column.count > 0 && (column.ids == nullptr || column.virtual_ids == nullptr)) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: feature ", f, " has ", column.count, " ids but no buffer for ",
                        column.ids == nullptr ? "ids" : "virtual ids");
    }
    if (column.count > kMaxIds - total) {
      return MakeStatus(StatusCode::kInvalidArgument, "IdDedupe: more than ", kMaxIds, " ids in one batch (at feature ", f,
                        "); use a smaller batch");
    }
    total += column.count;
  }
  return Status::Ok();
}

void Reset(int64_t tables, DedupeResult* result) {
  result->keys.clear();
  result->counts.clear();
  result->table_offsets.assign(static_cast<size_t>(tables) + 1, 0);
  result->invalid_counts.assign(static_cast<size_t>(tables), 0);
  result->first_invalid = InvalidId();
}

}  // namespace

inline uint64_t IdDedupe::HomeSlot(int64_t id) const { return SlotOf(id, shift_); }

void IdDedupe::NextEpoch() {
  if (++epoch_ == 0) {
    std::fill(entries_.begin(), entries_.end(), Entry{0, 0, 0});
    epoch_ = 1;
  }
}

// Slots for `unique` keys at a load of at most one half; empties the table.
void IdDedupe::SetCapacity(int64_t unique) {
  int64_t slots = kMinSlots;
  shift_ = 64 - 10;
  while (slots < 2 * unique) {
    slots *= 2;
    --shift_;
  }
  if (static_cast<int64_t>(entries_.size()) < slots) entries_.resize(static_cast<size_t>(slots), Entry{0, 0, 0});
  NextEpoch();
}

void IdDedupe::Rehash(int64_t unique) {
  SetCapacity(unique);
  const uint64_t mask = ~uint64_t{0} >> shift_;
  for (int32_t k = 0; k < unique_; ++k) {
    uint64_t slot = HomeSlot(keys_[k]);
    while (entries_[slot].epoch == epoch_) slot = (slot + 1) & mask;
    entries_[slot] = Entry{keys_[k], k, epoch_};
  }
}

inline int32_t IdDedupe::FindOrInsert(int64_t id, uint64_t slot) {
  const uint64_t mask = ~uint64_t{0} >> shift_;
  Entry* const entries = entries_.data();
  for (;; slot = (slot + 1) & mask) {
    Entry& entry = entries[slot];
    if (entry.epoch != epoch_) {
      entry = Entry{id, unique_, epoch_};
      keys_[unique_] = id;
      counts_[unique_ + 1] = 0;
      return unique_++;
    }
    if (entry.id == id) return entry.index;
  }
}

// First the ids whose home slot holds them, without a branch on it (most of a skewed batch); then, in order, the rest.
template <typename Block>
void IdDedupe::ResolveBlock(const Block& block, int32_t base, int32_t* virtual_ids) {
  const bool all = block.ids != block.kept;  // Then the i-th id is at position i.
  const Entry* const entries = entries_.data();
  int32_t* const counts = counts_.data();
  const uint32_t epoch = epoch_;
  int32_t missed[kBlockIds];
  int64_t misses = 0;
  for (int64_t j = 0; j < block.size; ++j) {
    const Entry& entry = entries[block.slots[j]];
    const bool hit = (entry.id == block.ids[j]) & (entry.epoch == epoch);
    const int64_t index = entry.index;
    virtual_ids[all ? j : block.positions[j]] = base + static_cast<int32_t>(index);
    counts[(index + 1) & -static_cast<int64_t>(hit)] += 1;
    missed[misses] = static_cast<int32_t>(j);
    misses += !hit;
  }
  for (int64_t m = 0; m < misses; ++m) {
    const int32_t j = missed[m];
    const int32_t index = FindOrInsert(block.ids[j], block.slots[j]);
    virtual_ids[all ? j : block.positions[j]] = base + index;
    ++counts[index + 1];
  }
}

void IdDedupe::RunColumn(const IdColumn& column, int32_t feature, const IdRule& rule, int32_t base, DedupeResult* result) {
  const uint64_t limit = rule.rows >= 0 ? static_cast<uint64_t>(rule.rows) : uint64_t{1} << 63;
  const Validity valid{column.has_padding, column.padding_id, limit};
  IdBlock block;
  Dropped dropped;
  for (int64_t begin = 0; begin < column.count; begin += kBlockIds) {
    const int64_t n = std::min(kBlockIds, column.count - begin);
    int32_t* const virtual_ids = column.virtual_ids + begin;
    LoadBlock(column.ids + begin, n, valid, rule, virtual_ids, &block, &dropped);
    const int64_t slots = static_cast<int64_t>(~uint64_t{0} >> shift_) + 1;
    if (2 * (unique_ + block.size) > slots) Rehash(2 * (unique_ + block.size));
    // No prefetch: the processor overlaps the look-ups of a block by itself, and the table is in its cache.
    HashBlock(block.ids, block.size, shift_, block.slots);
    ResolveBlock(block, base, virtual_ids);
  }
  if (dropped.invalid == 0) return;
  result->invalid_counts[column.table] += dropped.invalid;
  if (result->first_invalid.feature < 0) result->first_invalid = InvalidId{feature, dropped.first_invalid};
}

// The column with stride 1: itself, or its copy in the panel, which is filled when its first column is asked for. Columns are
// asked for in ascending order.
IdColumn IdDedupe::Contiguous(Span<const IdColumn> columns, int64_t c) {
  IdColumn column = columns[c];
  if (c >= panel_.end) {
    panel_.begin = panel_.end = c;
    if (column.stride == 1 || column.count == 0) return column;
    const auto beside = [&](int64_t other) {
      const IdColumn& next = columns[other];
      return next.ids == column.ids + (other - c) && next.virtual_ids == column.virtual_ids + (other - c) &&
             next.stride == column.stride && next.count == column.count;
    };
    const int64_t most = std::min(columns.size(), c + std::min(kPanelColumns, column.stride));
    for (panel_.end = c + 1; panel_.end < most && beside(panel_.end);) ++panel_.end;
    // Not a multiple of a page apart: as many lines of one cache set as there are columns would be in use.
    panel_.pitch = column.count + kPanelColumns;
    const auto size = static_cast<size_t>(panel_.pitch * (panel_.end - c));
    if (panel_.ids.size() < size) {
      panel_.ids.resize(size);
      panel_.virtual_ids.resize(size);
    }
    const int64_t width = panel_.end - c;
    int64_t* const ids = panel_.ids.data();
    if (width == kPanelColumns) {
      ReadColumns(column.ids, column.count, column.stride, kPanelColumns, ids, panel_.pitch);
    } else {
      ReadColumns(column.ids, column.count, column.stride, width, ids, panel_.pitch);
    }
  }
  column.ids = panel_.ids.data() + (c - panel_.begin) * panel_.pitch;
  column.virtual_ids = panel_.virtual_ids.data() + (c - panel_.begin) * panel_.pitch;
  column.stride = 1;
  return column;
}

// Once the last column of the panel is done.
void IdDedupe::WritePanel(Span<const IdColumn> columns) {
  const IdColumn& first = columns[panel_.begin];
  const int64_t width = panel_.end - panel_.begin;
  const int32_t* const virtual_ids = panel_.virtual_ids.data();
  if (width == kPanelColumns) {
    WriteColumns(virtual_ids, panel_.pitch, first.count, kPanelColumns, first.virtual_ids, first.stride);
  } else {
    WriteColumns(virtual_ids, panel_.pitch, first.count, width, first.virtual_ids, first.stride);
  }
}

void IdDedupe::RunTable(Span<const IdColumn> columns, int64_t begin, int64_t end, const IdRule& rule, DedupeResult* result) {
  int64_t total = 0;
  for (int64_t c = begin; c < end; ++c) total += columns[c].count;
  const int32_t table = columns[begin].table;
  if (static_cast<int64_t>(keys_.size()) < total) {
    keys_.resize(static_cast<size_t>(total));
    counts_.resize(static_cast<size_t>(total) + 1);
  }
  unique_ = 0;
  // A quarter more than last time, so that batches of alike size do not rehash.
  if (total > 0) SetCapacity(std::min(total, unique_hints_[table] + unique_hints_[table] / 4));
  const int32_t base = static_cast<int32_t>(result->keys.size());
  for (int64_t c = begin; c < end; ++c) {
    const IdColumn column = Contiguous(columns, c);
    RunColumn(column, static_cast<int32_t>(c), rule, base, result);
    if (c + 1 == panel_.end) WritePanel(columns);
  }
  if (total == 0) return;
  result->keys.insert(result->keys.end(), keys_.begin(), keys_.begin() + unique_);
  result->counts.insert(result->counts.end(), counts_.begin() + 1, counts_.begin() + 1 + unique_);
  unique_hints_[table] = unique_;
}

Status IdDedupe::Run(Span<const IdColumn> columns, Span<const IdRule> rules, DedupeResult* result) {
  Reset(rules.size(), result);
  HVD_CTR_RETURN_IF_ERROR(CheckInputs(columns, rules));
  if (static_cast<int64_t>(unique_hints_.size()) < rules.size()) unique_hints_.resize(static_cast<size_t>(rules.size()), 0);
  panel_.begin = panel_.end = 0;
  int64_t begin = 0;
  for (int64_t table = 0; table < rules.size(); ++table) {
    int64_t end = begin;
    while (end < columns.size() && columns[end].table == table) ++end;
    if (end > begin) RunTable(columns, begin, end, rules[table], result);
    result->table_offsets[table + 1] = static_cast<int64_t>(result->keys.size());
    begin = end;
  }
  return Status::Ok();
}

void SegmentOrder(Span<const int32_t> virtual_ids, int64_t unique, std::vector<int32_t>* order, std::vector<int32_t>* offsets) {
  const uint64_t limit = static_cast<uint64_t>(unique);
  // Counts go two places up, so that placement leaves the starts where they belong and no second array is needed.
  offsets->assign(static_cast<size_t>(unique) + 2, 0);
  int32_t* const starts = offsets->data();
  for (const int32_t id : virtual_ids) {
    if (static_cast<uint64_t>(static_cast<int64_t>(id)) < limit) ++starts[id + 2];
  }
  for (int64_t u = 1; u <= unique; ++u) starts[u + 1] += starts[u];
  order->resize(static_cast<size_t>(starts[unique + 1]));
  int32_t* const positions = order->data();
  for (int64_t i = 0; i < virtual_ids.size(); ++i) {
    const int32_t id = virtual_ids[i];
    if (static_cast<uint64_t>(static_cast<int64_t>(id)) < limit) positions[starts[id + 1]++] = static_cast<int32_t>(i);
  }
  offsets->resize(static_cast<size_t>(unique) + 1);
}

}  // namespace hvd_ctr
