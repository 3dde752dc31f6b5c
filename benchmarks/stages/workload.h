// The ids of the benchmarks: 26 features with Criteo-Kaggle's cardinalities times 0.25 (8.44 million rows), power law of exponent
// 1.1 spread over each table by a bijection, as in hvd_ctr/bench/train_step.py; or uniform.
#ifndef HVD_CTR_BENCHMARKS_STAGES_WORKLOAD_H_
#define HVD_CTR_BENCHMARKS_STAGES_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/core/id_dedupe.h"
#include "tf_ops/core/key_exchange.h"
#include "tf_ops/core/options.h"
#include "tf_ops/core/rank_partition.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr::bench {

constexpr int32_t kFeatures = 26;
constexpr int32_t kRanks = 2;

enum class Ids { kWorkload, kUniform };
inline const char* Name(Ids ids) { return ids == Ids::kWorkload ? "workload" : "uniform"; }

/// Rows of each table.
const std::vector<int64_t>& Cardinalities();

/// One batch: ids (batch, 26), row-major. A function of the arguments.
std::vector<int64_t> MakeIds(Ids ids, int64_t batch, int32_t rank, int64_t number);

/// The same ids as columns of `tables` features, one per table: those of feature f are split by id among its share of the tables,
/// so that ids, unique ids and work are the same and only the number of tables differs.
struct SplitIds {
  std::vector<int64_t> ids;      ///< (N) feature by feature.
  std::vector<int64_t> offsets;  ///< (tables + 1)
};
SplitIds SplitByTable(const std::vector<int64_t>& ids, int32_t tables);

/// One rank's side of a batch up to the key exchange, with buffers that are kept.
class Preparation {
 public:
  explicit Preparation(int32_t tables);
  /// Dedupe, partition, virtual ids in owner order, counts in owner order, message: what the op HvdCtrPrepareBatch does.
  void Run(Span<const IdColumn> columns, Span<const IdRule> rules, Span<int32_t> virtual_ids);

  const std::vector<int64_t>& words() const { return words_; }
  const std::vector<int32_t>& splits() const { return splits_; }
  const PartitionResult& partition() const { return partition_; }
  const DedupeResult& unique() const { return unique_; }

 private:
  BatchInfo info_;
  IdDedupe dedupe_;
  DedupeResult unique_;
  PartitionResult partition_;
  std::vector<int32_t> counts_;
  std::vector<int64_t> words_;
  std::vector<int32_t> splits_;
};

/// Columns of a row-major batch.
std::vector<IdColumn> RowMajorColumns(const std::vector<int64_t>& ids, std::vector<int32_t>* virtual_ids);
std::vector<IdColumn> SplitColumns(const SplitIds& split, std::vector<int32_t>* virtual_ids);
std::vector<IdRule> Rules(int32_t tables);

/// What rank `to` receives, given the preparations of all ranks.
void Exchange(const std::vector<Preparation*>& ranks, int32_t to, std::vector<int64_t>* words, std::vector<int32_t>* splits);

MixCacheOptions CacheOptions(int32_t tables, int32_t dim, int64_t slots, OptimizerKind optimizer);

/// Calls function(table, ids (n)) for the unique ids of a row-major batch, table by table in order of first occurrence.
std::vector<Key> UniqueKeys(const std::vector<int64_t>& ids);

}  // namespace hvd_ctr::bench

#endif  // HVD_CTR_BENCHMARKS_STAGES_WORKLOAD_H_
