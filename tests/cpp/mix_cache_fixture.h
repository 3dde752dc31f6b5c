// What the MixCache tests share: building received batches, and ReferenceRows, the slow and obvious oracle: every row in a map,
// no cache.
#ifndef HVD_CTR_TESTS_CPP_MIX_CACHE_FIXTURE_H_
#define HVD_CTR_TESTS_CPP_MIX_CACHE_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/thread_runner.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/mix_cache.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/cpu/cpu_backend.h"

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
inline std::unique_ptr<MixCache> MakeCache(const MixCacheOptions& options) {
  auto store = MakeHostStore(options);
  EXPECT_TRUE(store.ok()) << store.status().message();
  auto cache = MakeMixCache(options, MakeCpuBackend(), std::move(store.value()));
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return std::move(cache.value());
}

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

/// Every row in a map; the row math of row_math.h; no slots, no tiers, no eviction.
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
    for (const auto& [key, sum] : sums) {
      const RowOptimizerOptions& optimizer = options_.tables[static_cast<size_t>(key.first)].optimizer;
      std::vector<float>& record = Touch(key.first, key.second);
      UpdateRow(optimizer, step_, optimizer.learning_rate * scale, sum.data(), options_.dim, record.data(), record.data() + dim);
    }
  }

  void Set(int32_t table, int64_t id, const std::vector<float>& record) { rows_[{table, id}] = record; }

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

 private:
  std::vector<float> First(int32_t table, int64_t id) const {
    const TableOptions& options = options_.tables[static_cast<size_t>(table)];
    std::vector<float> record(static_cast<size_t>(options_.dim + StateFloats(options.optimizer, options_.dim)));
    InitialRow(options.initializer, options_.seed, HashBytes(options.name.data(), static_cast<int64_t>(options.name.size())), id,
               options_.dim, record.data());
    InitialState(options.optimizer, options_.dim, record.data() + options_.dim);
    return record;
  }

  std::vector<float>& Touch(int32_t table, int64_t id) {
    auto found = rows_.find({table, id});
    if (found == rows_.end()) found = rows_.emplace(std::make_pair(table, id), First(table, id)).first;
    return found->second;
  }

  const MixCacheOptions options_;
  std::map<std::pair<int32_t, int64_t>, std::vector<float>> rows_;
  int64_t step_ = 0;
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
