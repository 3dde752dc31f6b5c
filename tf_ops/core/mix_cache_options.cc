#include "tf_ops/core/mix_cache_options.h"

#include <cmath>
#include <unordered_set>

#include "tf_ops/core/slot_directory.h"

namespace hvd_ctr {
namespace {

constexpr int32_t kMaxDim = 65536;
constexpr double kMaxWaitSeconds = 7.0 * 86400.0;

template <typename Value>
Status Refuse(const std::string& owner, const char* field, const Value& value, const char* allowed) {
  return MakeStatus(StatusCode::kInvalidArgument, owner, ": ", field, " is ", value, "; allowed: ", allowed);
}

bool FiniteFrom0(float value) { return std::isfinite(value) && value >= 0.0f; }

Status CheckOptimizer(const std::string& owner, const RowOptimizerOptions& options) {
  const auto kind = static_cast<int32_t>(options.kind);
  if (kind < 0 || kind > static_cast<int32_t>(OptimizerKind::kFtrl)) return Refuse(owner, "optimizer.kind", kind, "0 .. 4");
  const struct {
    const char* field;
    float value;
  } from_0[] = {{"optimizer.learning_rate", options.learning_rate},
                {"optimizer.initial_accumulator", options.initial_accumulator},
                {"optimizer.epsilon", options.epsilon},
                {"optimizer.l1", options.l1},
                {"optimizer.l2", options.l2}};
  for (const auto& item : from_0) {
    if (!FiniteFrom0(item.value)) return Refuse(owner, item.field, item.value, "finite values >= 0");
  }
  if (!(options.beta1 >= 0.0f && options.beta1 < 1.0f)) return Refuse(owner, "optimizer.beta1", options.beta1, "0 <= beta1 < 1");
  if (!(options.beta2 >= 0.0f && options.beta2 < 1.0f)) return Refuse(owner, "optimizer.beta2", options.beta2, "0 <= beta2 < 1");
  if (!FiniteFrom0(-options.learning_rate_power)) {
    return Refuse(owner, "optimizer.learning_rate_power", options.learning_rate_power, "finite values <= 0");
  }
  return Status::Ok();
}

Status CheckTable(const std::string& owner, const TableOptions& table) {
  if (table.rows != -1 && table.rows < 1) return Refuse(owner, "rows", table.rows, "-1 (any id) or at least 1");
  if (table.hash_ids && table.rows < 1) return Refuse(owner, "rows", table.rows, "at least 1, because hash_ids is set");
  const auto invalid_ids = static_cast<int32_t>(table.invalid_ids);
  if (invalid_ids < 0 || invalid_ids > 1) return Refuse(owner, "invalid_ids", invalid_ids, "0 (error) and 1 (skip)");
  if (table.min_count < 1 || table.min_count > kMostMinCount) return Refuse(owner, "min_count", table.min_count, "1 .. 2^24-1");
  if (table.max_idle_steps < 0) return Refuse(owner, "max_idle_steps", table.max_idle_steps, "at least 1, or 0 (never)");
  if (table.max_rows < 0) return Refuse(owner, "max_rows", table.max_rows, "at least 1, or 0 (no limit)");
  if (table.sweep_every_steps < 1) return Refuse(owner, "sweep_every_steps", table.sweep_every_steps, "at least 1");
  const auto initializer = static_cast<int32_t>(table.initializer.kind);
  if (initializer < 0 || initializer > 2) return Refuse(owner, "initializer.kind", initializer, "0 .. 2");
  const float scale = table.initializer.scale;
  const bool scale_ok = table.initializer.kind == InitializerKind::kConstant ? std::isfinite(scale) : FiniteFrom0(scale);
  if (!scale_ok) return Refuse(owner, "initializer.scale", scale, "finite values, >= 0 unless constant");
  return CheckOptimizer(owner, table.optimizer);
}

Status CheckFeatures(const std::string& owner, const MixCacheOptions& options) {
  if (options.features.size() != options.feature_tables.size()) {
    return MakeStatus(StatusCode::kInvalidArgument, owner, ": ", options.features.size(), " features but ",
                      options.feature_tables.size(), " feature_tables; needed is one table per feature");
  }
  const auto tables = static_cast<int32_t>(options.tables.size());
  int32_t previous = 0;
  for (size_t f = 0; f < options.features.size(); ++f) {
    const int32_t table = options.feature_tables[f];
    if (table < previous || table >= tables) {
      return MakeStatus(StatusCode::kInvalidArgument, owner, ": feature '", options.features[f], "' has table ", table,
                        "; allowed are ", previous, " .. ", tables - 1, " (features are ordered by table)");
    }
    previous = table;
  }
  return Status::Ok();
}

Status CheckHost(const std::string& owner, const HostOptions& host) {
  const auto kind = static_cast<int32_t>(host.kind);
  if (kind < 0 || kind > 1) return Refuse(owner, "host.kind", kind, "0 (ram) and 1 (disk)");
  const bool disk = host.kind == HostKind::kDisk;
  if (host.ram_bytes < (disk ? 1 : 0)) {
    return Refuse(owner, "host.ram_bytes", host.ram_bytes, disk ? "at least 1 byte" : "at least 1 byte, or 0 (no limit)");
  }
  if (disk && host.path.empty()) return Refuse(owner, "host.path", "''", "a folder on a local disk");
  return Status::Ok();
}

}  // namespace

Status CheckMixCacheOptions(const MixCacheOptions& options) {
  const std::string owner = internal::StrCat("mix_cache '", options.name, "'");
  if (options.dim < 1 || options.dim > kMaxDim) return Refuse(owner, "dim", options.dim, "1 .. 65536");
  if (options.slots < 1 || options.slots > SlotDirectory::kMaxSlots) return Refuse(owner, "slots", options.slots, "1 .. 2^28");
  const auto row_type = static_cast<int32_t>(options.row_type);
  if (row_type < 0 || row_type > static_cast<int32_t>(RowType::kBfloat16)) {
    return Refuse(owner, "row_type", row_type, "0 (float32), 1 (float16) and 2 (bfloat16)");
  }
  const auto policy = static_cast<int32_t>(options.policy);
  if (policy < 0 || policy > static_cast<int32_t>(EvictionPolicyKind::kLookahead)) {
    return Refuse(owner, "policy", policy, "0 (lru), 1 (lfu), 2 (clock), 3 (freq) and 4 (lookahead)");
  }
  if (options.window < 0 || options.window > kMaxWindow) return Refuse(owner, "window", options.window, "0 .. 64 batches");
  if (options.world_size < 1) return Refuse(owner, "world_size", options.world_size, "at least 1");
  if (options.rank < 0 || options.rank >= options.world_size) return Refuse(owner, "rank", options.rank, "0 .. world_size - 1");
  if (!(options.prefetch_wait_seconds >= 0.0 && options.prefetch_wait_seconds <= kMaxWaitSeconds)) {
    return Refuse(owner, "prefetch_wait_seconds", options.prefetch_wait_seconds, "0 .. 604800 seconds");
  }
  HVD_CTR_RETURN_IF_ERROR(CheckHost(owner, options.host));
  if (options.tables.empty()) return Refuse(owner, "number of tables", 0, "at least 1");
  std::unordered_set<std::string> names;
  for (const TableOptions& table : options.tables) {
    if (table.name.empty()) return Refuse(owner, "name of a table", "''", "any text but the empty one");
    if (!names.insert(table.name).second) return Refuse(owner, "name of a table", table.name, "names that differ");
    HVD_CTR_RETURN_IF_ERROR(CheckTable(internal::StrCat(owner, ", table '", table.name, "'"), table));
  }
  return CheckFeatures(owner, options);
}

}  // namespace hvd_ctr
