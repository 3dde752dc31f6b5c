// What the MixCache tests share: building received batches, and ReferenceRows, the slow and obvious oracle: every row in a map,
// no cache.
#ifndef HVD_CTR_TESTS_CPP_MIX_CACHE_FIXTURE_H_
#define HVD_CTR_TESTS_CPP_MIX_CACHE_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/test_backends.h"
#include "tests/cpp/thread_runner.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/core/row_math.h"

namespace hvd_ctr {

/// One batch: the keys that each rank asks for.
inline ReceivedKeys Received(const std::vector<std::vector<Key>>& ranks) {
  ReceivedKeys received;
  for (const std::vector<Key>& keys : ranks) {
    PeerMessage peer;
    peer.key_offset = static_cast<int64_t>(received.ids.size());
    peer.key_count = static_cast<int64_t>(keys.size());
    received.peers.push_back(peer);
    for (const Key& key : keys) {
      received.ids.push_back(key.id);
      received.tables.push_back(key.table);
    }
  }
  return received;
}

/// Ids [begin, end) of one table, asked for by the only rank.
inline ReceivedKeys Range(int64_t begin, int64_t end, int32_t table = 0) {
  std::vector<Key> keys;
  for (int64_t id = begin; id < end; ++id) keys.push_back({id, table});
  return Received({keys});
}

inline TableOptions Table(const std::string& name, OptimizerKind kind = OptimizerKind::kSgd, float learning_rate = 0.5f) {
  TableOptions table;
  table.name = name;
  table.optimizer.kind = kind;
  table.optimizer.learning_rate = learning_rate;
  return table;
}

inline MixCacheOptions CacheOptions(int64_t slots, std::vector<TableOptions> tables, int32_t dim = 2) {
  MixCacheOptions options;
  options.name = "test";
  options.dim = dim;
  options.slots = slots;
  options.seed = 7;
  options.prefetch_wait_seconds = 0.0;
  options.tables = std::move(tables);
  return options;
}

inline int32_t RecordFloats(const MixCacheOptions& options) {
  int32_t state = 0;
  for (const TableOptions& table : options.tables) state = std::max(state, StateFloats(table.optimizer, options.dim));
  return options.dim + state;
}

/// With the host store that options.host asks for.
inline std::unique_ptr<MixCache> MakeCache(const MixCacheOptions& options, BackendFactory backend = &MakeCpuBackend) {
  auto store = MakeHostStore(options);
  EXPECT_TRUE(store.ok()) << store.status().message();
  auto cache = MakeMixCache(options, backend(), std::move(store.value()));
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return std::move(cache.value());
}

/// Tests whose caches are on each of TestBackends.
class OnEveryBackend : public testing::TestWithParam<NamedBackend> {
 protected:
  static std::unique_ptr<MixCache> MakeCache(const MixCacheOptions& options) {
    return hvd_ctr::MakeCache(options, GetParam().make);
  }
};

#define EXPECT_OK(expression)                       \
  do {                                              \
    const ::hvd_ctr::Status status_ = (expression); \
    EXPECT_TRUE(status_.ok()) << status_.message(); \
  } while (false)
#define ASSERT_OK(expression)                       \
  do {                                              \
    const ::hvd_ctr::Status status_ = (expression); \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

inline bool Mentions(const Status& status, const std::string& text) { return status.message().find(text) != std::string::npos; }

/// Every row in a map; the row math of row_math.h, rounded to the row type after each change; no slots, no tiers, no eviction.
class ReferenceRows {
 public:
  explicit ReferenceRows(const MixCacheOptions& options) : options_(options) {}

  bool Owned(int32_t table, int64_t id) const { return OwnerOf(table, id, options_.world_size) == options_.rank; }

  /// Rows (R, D) as they are now; foreign keys give zeros, keys without a row their first value. Creates nothing.
  std::vector<float> Read(const ReceivedKeys& received) const {
    std::vector<float> rows;
    for (size_t i = 0; i < received.ids.size(); ++i) {
      std::vector<float> record(static_cast<size_t>(options_.dim), 0.0f);
      if (Owned(received.tables[i], received.ids[i])) record = Record(received.tables[i], received.ids[i]);
      rows.insert(rows.end(), record.begin(), record.begin() + options_.dim);
    }
    return rows;
  }

  void Apply(const ReceivedKeys& received, const std::vector<float>& gradients, float scale) {
    ++step_;
    const auto dim = static_cast<size_t>(options_.dim);
    std::map<std::pair<int32_t, int64_t>, std::vector<float>> sums;
    for (size_t i = 0; i < received.ids.size(); ++i) {
      if (!Owned(received.tables[i], received.ids[i])) continue;
      std::vector<float>& sum = sums[{received.tables[i], received.ids[i]}];
      sum.resize(dim, 0.0f);
      for (size_t d = 0; d < dim; ++d) sum[d] += gradients[i * dim + d];
    }
    const auto refused = CountIds(received);
    for (const auto& [key, sum] : sums) {
      if (refused.count(key) > 0) continue;
      const RowOptimizerOptions& optimizer = options_.tables[static_cast<size_t>(key.first)].optimizer;
      std::vector<float>& record = Touch(key.first, key.second);
      UpdateRow(optimizer, step_, optimizer.learning_rate * scale, sum.data(), options_.dim, record.data(), record.data() + dim);
      Round(&record);
    }
  }

  void Set(int32_t table, int64_t id, const std::vector<float>& record) {
    rows_[{table, id}] = record;
    Round(&rows_[{table, id}]);
    if (Tracks(table)) life_[{table, id}] = {options_.tables[static_cast<size_t>(table)].min_count, step_};
  }

  /// As ImportLife of one id.
  void SetLife(int32_t table, int64_t id, RowLife::Id known) {
    if (!Tracks(table)) return;
    const int64_t min_count = options_.tables[static_cast<size_t>(table)].min_count;
    const bool row = rows_.count({table, id}) > 0;
    known.count = row ? std::max(known.count, min_count) : std::min(known.count, min_count - 1);
    life_.erase({table, id});
    if (known.count > 0) life_[{table, id}] = known;
  }

  bool Tracks(int32_t table) const {
    const TableOptions& options = options_.tables[static_cast<size_t>(table)];
    return options.min_count > 1 || options.max_idle_steps > 0 || options.max_rows > 0;
  }

  bool Due(int32_t table) const {
    const TableOptions& options = options_.tables[static_cast<size_t>(table)];
    return (options.max_idle_steps > 0 || options.max_rows > 0) && step_ % options.sweep_every_steps == 0;
  }

  /// As RowAges.
  std::vector<int64_t> Ages() const {
    std::vector<int64_t> ages;
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      const int64_t idle = options_.tables[t].max_idle_steps;
      if (options_.tables[t].max_rows == 0) continue;
      std::vector<int64_t> bins(static_cast<size_t>(kAgeBins), 0);
      for (const auto& [key, known] : life_) {
        if (!Due(key.first) || static_cast<size_t>(key.first) != t || rows_.count(key) == 0) continue;
        const int64_t age = std::max<int64_t>(0, step_ - known.last_step);
        if (idle == 0 || age <= idle) ++bins[static_cast<size_t>(AgeBin(age))];
      }
      ages.insert(ages.end(), bins.begin(), bins.end());
    }
    return ages;
  }

  /// As Sweep; returns how many rows were deleted.
  int64_t Sweep(const std::vector<int64_t>& ages) {
    const size_t before = rows_.size();
    size_t limited = 0;
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      const TableOptions& options = options_.tables[t];
      int64_t first_ended = kAgeBins;
      if (options.max_rows > 0) {
        const int64_t* bins = ages.data() + static_cast<int64_t>(limited++) * kAgeBins;
        int64_t left = std::accumulate(bins, bins + kAgeBins, int64_t{0});
        while (left > options.max_rows) left -= bins[--first_ended];
      }
      for (auto at = life_.begin(); at != life_.end();) {
        const int64_t age = std::max<int64_t>(0, step_ - at->second.last_step);
        const bool idle = options.max_idle_steps > 0 && age > options.max_idle_steps;
        const bool excess = rows_.count(at->first) > 0 && AgeBin(age) >= first_ended;
        const bool ends = static_cast<size_t>(at->first.first) == t && Due(at->first.first) && (idle || excess);
        if (ends) rows_.erase(at->first);
        at = ends ? life_.erase(at) : std::next(at);
      }
    }
    return static_cast<int64_t>(before - rows_.size());
  }

  /// What is known of the table's ids, with or without a row.
  std::map<int64_t, std::pair<int64_t, int64_t>> LifeOf(int32_t table, bool rows) const {
    std::map<int64_t, std::pair<int64_t, int64_t>> found;
    for (const auto& [key, known] : life_) {
      if (key.first == table && (rows_.count(key) > 0) == rows) found[key.second] = {known.count, known.last_step};
    }
    return found;
  }

  /// Row followed by the optimizer state of its table.
  std::vector<float> Record(int32_t table, int64_t id) const {
    const auto found = rows_.find({table, id});
    return found != rows_.end() ? found->second : First(table, id);
  }

  std::map<int64_t, std::vector<float>> RowsOf(int32_t table) const {
    std::map<int64_t, std::vector<float>> rows;
    for (const auto& [key, record] : rows_) {
      if (key.first == table) rows[key.second] = record;
    }
    return rows;
  }

  int64_t step() const { return step_; }
  int64_t not_admitted() const { return not_admitted_; }

 private:
  // Counts the batch's ids in tables that are tracked; returns those that have not occurred often enough.
  std::set<std::pair<int32_t, int64_t>> CountIds(const ReceivedKeys& received) {
    std::map<std::pair<int32_t, int64_t>, int64_t> counts;
    for (size_t i = 0; i < received.ids.size(); ++i) {
      const int32_t table = received.tables[i];
      if (!Owned(table, received.ids[i]) || !Tracks(table)) continue;
      int64_t& count = counts[{table, received.ids[i]}];
      const bool counted = !received.counts.empty() && options_.tables[static_cast<size_t>(table)].min_count > 1;
      count = counted ? count + received.counts[i] : 1;
    }
    std::set<std::pair<int32_t, int64_t>> refused;
    for (const auto& [key, count] : counts) {
      life_[key] = {life_[key].count + count, step_};
      if (life_[key].count < options_.tables[static_cast<size_t>(key.first)].min_count) refused.insert(key);
    }
    not_admitted_ += static_cast<int64_t>(refused.size());
    return refused;
  }

  std::vector<float> First(int32_t table, int64_t id) const {
    const TableOptions& options = options_.tables[static_cast<size_t>(table)];
    std::vector<float> record(static_cast<size_t>(options_.dim + StateFloats(options.optimizer, options_.dim)));
    InitialRow(options.initializer, options_.seed, HashBytes(options.name.data(), static_cast<int64_t>(options.name.size())), id,
               options_.dim, record.data());
    InitialState(options.optimizer, options_.dim, record.data() + options_.dim);
    Round(&record);
    return record;
  }

  void Round(std::vector<float>* record) const {
    for (int32_t d = 0; d < options_.dim; ++d) {
      float& value = (*record)[static_cast<size_t>(d)];
      value = RoundToRowType(options_.row_type, value);
    }
  }

  std::vector<float>& Touch(int32_t table, int64_t id) {
    auto found = rows_.find({table, id});
    if (found == rows_.end()) found = rows_.emplace(std::make_pair(table, id), First(table, id)).first;
    return found->second;
  }

  const MixCacheOptions options_;
  std::map<std::pair<int32_t, int64_t>, std::vector<float>> rows_;
  std::map<std::pair<int32_t, int64_t>, RowLife::Id> life_;
  int64_t step_ = 0;
  int64_t not_admitted_ = 0;
};

/// All rows of a table as id -> row followed by state, through Export in chunks.
inline std::map<int64_t, std::vector<float>> ExportAll(MixCache* cache, int32_t table, int64_t max_rows = 7) {
  InlineRunner runner;
  std::map<int64_t, std::vector<float>> rows;
  const auto dim = static_cast<size_t>(cache->options().dim);
  const auto state = static_cast<size_t>(cache->state_floats(table));
  ExportChunk chunk;
  for (int64_t cursor = 0; cursor >= 0;) {
    EXPECT_OK(cache->Export(table, &cursor, max_rows, &chunk, &runner));
    if (chunk.rows.size() != chunk.ids.size() * dim || chunk.state.size() != chunk.ids.size() * state) {
      ADD_FAILURE() << "chunk of " << chunk.ids.size() << " ids, " << chunk.rows.size() << " row and " << chunk.state.size()
                    << " state floats";
      return rows;
    }
    for (size_t i = 0; i < chunk.ids.size(); ++i) {
      EXPECT_EQ(rows.count(chunk.ids[i]), 0u) << "id " << chunk.ids[i] << " was exported twice";
      std::vector<float>& record = rows[chunk.ids[i]];
      record.assign(chunk.rows.data() + i * dim, chunk.rows.data() + (i + 1) * dim);
      record.insert(record.end(), chunk.state.data() + i * state, chunk.state.data() + (i + 1) * state);
    }
  }
  return rows;
}

/// What is known of a table's ids: of rows through Export, of ids that wait through ExportWaiting.
inline std::map<int64_t, std::pair<int64_t, int64_t>> ExportLife(MixCache* cache, int32_t table, bool rows, int64_t chunk_ids) {
  InlineRunner runner;
  std::map<int64_t, std::pair<int64_t, int64_t>> found;
  ExportChunk chunk;
  for (int64_t cursor = 0; cursor >= 0;) {
    if (rows) {
      EXPECT_OK(cache->Export(table, &cursor, chunk_ids, &chunk, &runner));
    } else {
      EXPECT_OK(cache->ExportWaiting(table, &cursor, chunk_ids, &chunk.ids, &chunk.life));
    }
    EXPECT_LE(static_cast<int64_t>(chunk.ids.size()), chunk_ids);
    for (size_t i = 0; i < chunk.life.size(); ++i) {
      EXPECT_EQ(found.count(chunk.ids[i]), 0u);
      found[chunk.ids[i]] = {chunk.life[i].count, chunk.life[i].last_step};
    }
  }
  return found;
}

inline std::vector<float> LookupRows(MixCache* cache, int64_t ticket, size_t received) {
  InlineRunner runner;
  std::vector<float> rows(received * static_cast<size_t>(cache->options().dim), -99.0f);
  EXPECT_OK(cache->Lookup(ticket, rows.data(), &runner));
  return rows;
}

inline std::vector<float> ReadRows(MixCache* cache, const ReceivedKeys& received) {
  InlineRunner runner;
  std::vector<float> rows(received.ids.size() * static_cast<size_t>(cache->options().dim), -99.0f);
  EXPECT_OK(cache->Read(received, rows.data(), &runner));
  return rows;
}

/// Sum of the counters of all tables.
inline MixCacheTableStats Totals(const MixCache& cache) {
  MixCacheTableStats sum;
  for (const MixCacheTableStats& table : cache.Stats().tables) {
    sum.requested += table.requested;
    sum.unique += table.unique;
    sum.hits += table.hits;
    sum.misses += table.misses;
    sum.created += table.created;
    sum.evictions += table.evictions;
    sum.write_backs += table.write_backs;
    sum.invalid_ids += table.invalid_ids;
    sum.host_rows += table.host_rows;
    sum.cached_rows += table.cached_rows;
    sum.loads += table.loads;
    sum.not_admitted += table.not_admitted;
    sum.waiting_ids += table.waiting_ids;
    sum.deleted_idle += table.deleted_idle;
    sum.deleted_max_rows += table.deleted_max_rows;
  }
  return sum;
}

/// One whole step: prefetch, apply the same gradient value everywhere.
inline void Step(MixCache* cache, const ReceivedKeys& received, float gradient = 1.0f) {
  InlineRunner runner;
  int64_t ticket = 0;
  ASSERT_OK(cache->Prefetch(received, &ticket, &runner));
  const std::vector<float> gradients(received.ids.size() * static_cast<size_t>(cache->options().dim), gradient);
  ASSERT_OK(cache->Apply(ticket, gradients.data(), 1.0f, &runner));
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_MIX_CACHE_FIXTURE_H_
