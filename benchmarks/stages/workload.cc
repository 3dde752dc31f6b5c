#include "benchmarks/stages/workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "tf_ops/core/hash.h"

namespace hvd_ctr::bench {
namespace {

constexpr double kExponent = 1.1;
constexpr double kScale = 0.25;

int64_t Stride(int64_t rows) {
  int64_t stride = static_cast<int64_t>(static_cast<double>(rows) * 0.6180339887) | 1;
  while (std::gcd(stride, rows) != 1) ++stride;
  return stride;
}

int64_t PowerLawRank(double u, int64_t rows) {
  const double e = 1.0 - kExponent;
  const double x = std::pow(1.0 - u * (1.0 - std::pow(static_cast<double>(rows), e)), 1.0 / e);
  return std::clamp<int64_t>(static_cast<int64_t>(x) - 1, 0, rows - 1);
}

}  // namespace

const std::vector<int64_t>& Cardinalities() {
  static const std::vector<int64_t> scaled = [] {
    std::vector<int64_t> rows = {1460, 583,   10131227, 2202608, 305,  24,   12517, 633,     3,  93145, 5683,   8351593, 3194,
                                 27,   14992, 5461306,  10,      5652, 2173, 4,     7046547, 18, 15,    286181, 105,     142572};
    for (int64_t& count : rows) count = std::max<int64_t>(3, static_cast<int64_t>(static_cast<double>(count) * kScale));
    return rows;
  }();
  return scaled;
}

std::vector<int64_t> MakeIds(Ids kind, int64_t batch, int32_t rank, int64_t number) {
  std::mt19937_64 random(7 + 1000 * static_cast<uint64_t>(rank) + 1000000 * static_cast<uint64_t>(number) +
                         (kind == Ids::kUniform ? 500 : 0));
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<int64_t> ids(static_cast<size_t>(batch * kFeatures));
  for (int32_t f = 0; f < kFeatures; ++f) {
    const int64_t rows = Cardinalities()[static_cast<size_t>(f)];
    const int64_t stride = Stride(rows);
    for (int64_t b = 0; b < batch; ++b) {
      const double u = uniform(random);
      ids[static_cast<size_t>(b * kFeatures + f)] =
          kind == Ids::kWorkload ? PowerLawRank(u, rows) * stride % rows : static_cast<int64_t>(u * static_cast<double>(rows));
    }
  }
  return ids;
}

SplitIds SplitByTable(const std::vector<int64_t>& ids, int32_t tables) {
  SplitIds split;
  split.offsets.push_back(0);
  const auto batch = static_cast<int64_t>(ids.size()) / kFeatures;
  for (int32_t f = 0; f < kFeatures; ++f) {
    const int32_t share = tables * (f + 1) / kFeatures - tables * f / kFeatures;
    for (int32_t s = 0; s < share; ++s) {
      for (int64_t b = 0; b < batch; ++b) {
        const int64_t id = ids[static_cast<size_t>(b * kFeatures + f)];
        if (share == 1 || Mix64(static_cast<uint64_t>(id)) % static_cast<uint64_t>(share) == static_cast<uint64_t>(s)) {
          split.ids.push_back(id);
        }
      }
      split.offsets.push_back(static_cast<int64_t>(split.ids.size()));
    }
  }
  return split;
}

Preparation::Preparation(int32_t tables) { info_.invalid_counts.assign(static_cast<size_t>(tables), 0); }

void Preparation::Run(Span<const IdColumn> columns, Span<const IdRule> rules, Span<int32_t> virtual_ids) {
  const Status status = dedupe_.Run(columns, rules, &unique_);
  if (!status.ok()) std::abort();
  PartitionByOwner(unique_.keys, unique_.table_offsets, kRanks, &partition_);
  const int32_t* restore = partition_.restore.data();
  for (int32_t& id : virtual_ids) {
    if (id != kNoVirtualId) id = restore[id];
  }
  counts_.resize(unique_.counts.size());
  for (size_t i = 0; i < counts_.size(); ++i) counts_[static_cast<size_t>(restore[i])] = unique_.counts[i];
  PackKeys(info_, partition_, KeyCounts{counts_, {}}, kRanks, &words_, &splits_);
}

std::vector<IdColumn> RowMajorColumns(const std::vector<int64_t>& ids, std::vector<int32_t>* virtual_ids) {
  virtual_ids->resize(ids.size());
  std::vector<IdColumn> columns(kFeatures);
  for (int32_t f = 0; f < kFeatures; ++f) {
    IdColumn& column = columns[static_cast<size_t>(f)];
    column.ids = ids.data() + f;
    column.virtual_ids = virtual_ids->data() + f;
    column.count = static_cast<int64_t>(ids.size()) / kFeatures;
    column.stride = kFeatures;
    column.table = f;
  }
  return columns;
}

std::vector<IdColumn> SplitColumns(const SplitIds& split, std::vector<int32_t>* virtual_ids) {
  virtual_ids->resize(split.ids.size());
  std::vector<IdColumn> columns(split.offsets.size() - 1);
  for (size_t t = 0; t < columns.size(); ++t) {
    columns[t].ids = split.ids.data() + split.offsets[t];
    columns[t].virtual_ids = virtual_ids->data() + split.offsets[t];
    columns[t].count = split.offsets[t + 1] - split.offsets[t];
    columns[t].table = static_cast<int32_t>(t);
  }
  return columns;
}

std::vector<IdRule> Rules(int32_t tables) {
  std::vector<IdRule> rules(static_cast<size_t>(tables));
  for (int32_t t = 0; t < tables; ++t) {
    rules[static_cast<size_t>(t)].rows = tables == kFeatures ? Cardinalities()[static_cast<size_t>(t)] : -1;
  }
  return rules;
}

void Exchange(const std::vector<Preparation*>& ranks, int32_t to, std::vector<int64_t>* words, std::vector<int32_t>* splits) {
  words->clear();
  splits->clear();
  for (const Preparation* rank : ranks) {
    const int64_t* begin = rank->words().data();
    for (int32_t w = 0; w < to; ++w) begin += rank->splits()[static_cast<size_t>(w)];
    const int32_t count = rank->splits()[static_cast<size_t>(to)];
    words->insert(words->end(), begin, begin + count);
    splits->push_back(count);
  }
}

MixCacheOptions CacheOptions(int32_t tables, int32_t dim, int64_t slots, OptimizerKind optimizer) {
  MixCacheOptions options;
  options.name = "stages";
  options.dim = dim;
  options.slots = slots;
  options.world_size = kRanks;
  options.seed = 7;
  for (int32_t t = 0; t < tables; ++t) {
    TableOptions table;
    table.name = "C" + std::to_string(t + 1);
    table.optimizer.kind = optimizer;
    options.tables.push_back(table);
  }
  return options;
}

std::vector<Key> UniqueKeys(const std::vector<int64_t>& ids) {
  std::vector<int32_t> virtual_ids;
  DedupeResult unique;
  IdDedupe dedupe;
  const std::vector<IdColumn> columns = RowMajorColumns(ids, &virtual_ids);
  const std::vector<IdRule> rules = Rules(kFeatures);
  if (!dedupe.Run(columns, rules, &unique).ok()) std::abort();
  std::vector<Key> keys;
  for (int32_t t = 0; t < kFeatures; ++t) {
    for (int64_t i = unique.table_offsets[static_cast<size_t>(t)]; i < unique.table_offsets[static_cast<size_t>(t) + 1]; ++i) {
      keys.push_back({unique.keys[static_cast<size_t>(i)], t});
    }
  }
  return keys;
}

}  // namespace hvd_ctr::bench
