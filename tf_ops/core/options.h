// Options of tables, row optimizers and the cache: plain values with default and unit on each field.
// hvd_ctr/config.py is the user's face of the same fields and holds their documentation for users.
#ifndef HVD_CTR_CORE_OPTIONS_H_
#define HVD_CTR_CORE_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/core/row_type.h"

namespace hvd_ctr {

/// Values are passed from Python (hvd_ctr/ops/mix_cache_ops.py) and stored in checkpoints: never renumber.
enum class OptimizerKind : int32_t { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2, kAdam = 3, kFtrl = 4 };

/// Row optimizer of one table. The update rules stand in row_math.h.
struct RowOptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdagrad;
  float learning_rate = 0.01f;
  float initial_accumulator = 0.1f;   ///< Adagrad, row-wise Adagrad, FTRL: first value of the squared-gradient sum.
  float epsilon = 1e-7f;              ///< Adagrad, row-wise Adagrad, Adam: added to the root.
  float beta1 = 0.9f;                 ///< Adam.
  float beta2 = 0.999f;               ///< Adam.
  bool row_step = false;              ///< Adam: bias correction by the row's own update count (true) or the global step (false).
  float l1 = 0.0f;                    ///< FTRL.
  float l2 = 0.0f;                    ///< FTRL's l2; for all others: grad += l2 * row, on touched rows only (lazy).
  float learning_rate_power = -0.5f;  ///< FTRL.
};

enum class InitializerKind : int32_t { kConstant = 0, kUniform = 1, kNormal = 2 };

/// First value of a row: constant `scale`; uniform in [-scale, scale); or normal with standard deviation `scale`.
struct InitializerOptions {
  InitializerKind kind = InitializerKind::kUniform;
  float scale = 0.05f;
};

constexpr int64_t kMostMinCount = (int64_t{1} << 24) - 1;

enum class InvalidIdPolicy : int32_t { kError = 0, kSkip = 1 };

struct TableOptions {
  std::string name;
  int64_t rows = -1;      ///< Ids must lie in [0, rows); -1: any id 0 .. 2^63-1.
  bool hash_ids = false;  ///< true: id -> HashToRange(id) in [0, rows) before anything else; needs rows > 0.
  InvalidIdPolicy invalid_ids = InvalidIdPolicy::kError;
  RowOptimizerOptions optimizer;
  InitializerOptions initializer;
  int64_t min_count = 1;           ///< A row exists from this occurrence of its id on, 1 .. kMostMinCount.
  int64_t max_idle_steps = 0;      ///< Rows not trained for more steps are deleted; 0: never.
  int64_t max_rows = 0;            ///< The longest untrained rows beyond so many, over all ranks, are deleted; 0: no limit.
  int64_t sweep_every_steps = 64;  ///< Rows are deleted after steps that are a multiple of it.
};

/// The rules stand in eviction_policy.h. Passed from Python: never renumber.
enum class EvictionPolicyKind : int32_t { kLru = 0, kLfu = 1, kClock = 2, kFreq = 3, kLookahead = 4 };

constexpr int32_t kMaxWindow = 64;

enum class HostKind : int32_t { kRam = 0, kDisk = 1 };

/// Where the rows of one MixCache live that are not on the device.
struct HostOptions {
  HostKind kind = HostKind::kRam;
  int64_t ram_bytes = 0;  ///< Budget of the host tier's memory: records, index, buffers. 0: no limit (kRam only).
  std::string path;       ///< kDisk: folder for the file of rows, on a local disk.
  bool direct_io = true;  ///< kDisk: bypass the system's page cache where the file system allows it.
};

/// One MixCache: all tables of one dim and dtype, this rank's share of their rows.
struct MixCacheOptions {
  std::string name = "mix_cache";
  int32_t dim = 16;                      ///< D, floats per row.
  int64_t slots = 1 << 16;               ///< S, rows on this rank's device.
  RowType row_type = RowType::kFloat32;  ///< Of the rows on the device; a row is rounded to it whenever it is set.
  EvictionPolicyKind policy = EvictionPolicyKind::kLru;
  int32_t window = 8;  ///< kLookahead: batches that may be announced ahead, 0 .. kMaxWindow.
  int32_t rank = 0;
  int32_t world_size = 1;  ///< W.
  uint64_t seed = 0;       ///< Seeds initial values, together with table name, id and column.
  std::vector<TableOptions> tables;
  std::vector<std::string> features;     ///< Names, for messages.
  std::vector<int32_t> feature_tables;   ///< Table of each feature, non-decreasing.
  double prefetch_wait_seconds = 120.0;  ///< Longest wait for pinned slots to be released.
  HostOptions host;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_OPTIONS_H_
