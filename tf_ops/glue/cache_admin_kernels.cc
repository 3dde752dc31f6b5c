// Kernels around a MixCache's batches: creation, flush, export and import, step, statistics.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tf_ops/core/host_store.h"
#include "tf_ops/core/mix_cache_options.h"
#include "tf_ops/glue/cache_op.h"
#include "tf_ops/glue/cache_stats_layout.h"
#include "tf_ops/glue/device_memory.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/mix_cache_resource.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

/// Reads a list attribute of T entries, one per table, and hands each to `set(table, value)`.
template <typename Value, typename Set>
absl::Status ReadTableAttr(OpKernelConstruction* c, const char* attr, std::vector<TableOptions>* tables, const Set& set) {
  std::vector<Value> values;
  TF_RETURN_IF_ERROR(c->GetAttr(attr, &values));
  if (values.size() != tables->size()) {
    return absl::InvalidArgumentError(
        internal::StrCat("HvdCtrMixCache: ", attr, " has ", values.size(), " entries, table_names has ", tables->size()));
  }
  for (size_t t = 0; t < values.size(); ++t) set(&(*tables)[t], values[t]);
  return absl::OkStatus();
}

absl::Status ReadTables(OpKernelConstruction* c, std::vector<TableOptions>* tables) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(c->GetAttr("table_names", &names));
  tables->resize(names.size());
  for (size_t t = 0; t < names.size(); ++t) (*tables)[t].name = names[t];
  const auto floats = [&](const char* attr, float RowOptimizerOptions::* field) {
    return ReadTableAttr<float>(c, attr, tables, [field](TableOptions* t, float v) { t->optimizer.*field = v; });
  };
  TF_RETURN_IF_ERROR(ReadTableAttr<int64_t>(c, "table_rows", tables, [](TableOptions* t, int64_t v) { t->rows = v; }));
  TF_RETURN_IF_ERROR(ReadTableAttr<bool>(c, "table_hash_ids", tables, [](TableOptions* t, bool v) { t->hash_ids = v; }));
  TF_RETURN_IF_ERROR(ReadTableAttr<int32_t>(
      c, "table_invalid_ids", tables, [](TableOptions* t, int32_t v) { t->invalid_ids = static_cast<InvalidIdPolicy>(v); }));
  const auto integers = [&](const char* attr, int64_t TableOptions::* field) {
    return ReadTableAttr<int64_t>(c, attr, tables, [field](TableOptions* t, int64_t v) { t->*field = v; });
  };
  TF_RETURN_IF_ERROR(integers("table_min_counts", &TableOptions::min_count));
  TF_RETURN_IF_ERROR(integers("table_max_idle_steps", &TableOptions::max_idle_steps));
  TF_RETURN_IF_ERROR(integers("table_max_rows", &TableOptions::max_rows));
  TF_RETURN_IF_ERROR(integers("table_sweep_every_steps", &TableOptions::sweep_every_steps));
  TF_RETURN_IF_ERROR(ReadTableAttr<int32_t>(
      c, "optimizer_kinds", tables, [](TableOptions* t, int32_t v) { t->optimizer.kind = static_cast<OptimizerKind>(v); }));
  TF_RETURN_IF_ERROR(floats("learning_rates", &RowOptimizerOptions::learning_rate));
  TF_RETURN_IF_ERROR(floats("initial_accumulators", &RowOptimizerOptions::initial_accumulator));
  TF_RETURN_IF_ERROR(floats("epsilons", &RowOptimizerOptions::epsilon));
  TF_RETURN_IF_ERROR(floats("beta1s", &RowOptimizerOptions::beta1));
  TF_RETURN_IF_ERROR(floats("beta2s", &RowOptimizerOptions::beta2));
  TF_RETURN_IF_ERROR(ReadTableAttr<bool>(c, "row_steps", tables, [](TableOptions* t, bool v) { t->optimizer.row_step = v; }));
  TF_RETURN_IF_ERROR(floats("l1s", &RowOptimizerOptions::l1));
  TF_RETURN_IF_ERROR(floats("l2s", &RowOptimizerOptions::l2));
  TF_RETURN_IF_ERROR(floats("learning_rate_powers", &RowOptimizerOptions::learning_rate_power));
  TF_RETURN_IF_ERROR(ReadTableAttr<int32_t>(
      c, "initializer_kinds", tables, [](TableOptions* t, int32_t v) { t->initializer.kind = static_cast<InitializerKind>(v); }));
  return ReadTableAttr<float>(c, "initializer_scales", tables, [](TableOptions* t, float v) { t->initializer.scale = v; });
}

absl::Status ReadOptions(OpKernelConstruction* c, MixCacheOptions* options) {
  int32_t policy = 0, row_type = 0;
  int64_t seed = 0;
  float wait_seconds = 0.0f;
  TF_RETURN_IF_ERROR(c->GetAttr("cache_name", &options->name));
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &options->dim));
  TF_RETURN_IF_ERROR(c->GetAttr("slots", &options->slots));
  TF_RETURN_IF_ERROR(c->GetAttr("row_type", &row_type));
  TF_RETURN_IF_ERROR(c->GetAttr("policy", &policy));
  TF_RETURN_IF_ERROR(c->GetAttr("window", &options->window));
  TF_RETURN_IF_ERROR(c->GetAttr("rank", &options->rank));
  TF_RETURN_IF_ERROR(c->GetAttr("world_size", &options->world_size));
  TF_RETURN_IF_ERROR(c->GetAttr("seed", &seed));
  TF_RETURN_IF_ERROR(c->GetAttr("features", &options->features));
  TF_RETURN_IF_ERROR(c->GetAttr("feature_tables", &options->feature_tables));
  TF_RETURN_IF_ERROR(c->GetAttr("prefetch_wait_seconds", &wait_seconds));
  int32_t host_kind = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("host_kind", &host_kind));
  TF_RETURN_IF_ERROR(c->GetAttr("host_path", &options->host.path));
  TF_RETURN_IF_ERROR(c->GetAttr("host_ram_bytes", &options->host.ram_bytes));
  TF_RETURN_IF_ERROR(c->GetAttr("host_direct_io", &options->host.direct_io));
  options->host.kind = static_cast<HostKind>(host_kind);
  options->row_type = static_cast<RowType>(row_type);
  options->policy = static_cast<EvictionPolicyKind>(policy);
  options->seed = static_cast<uint64_t>(seed);
  options->prefetch_wait_seconds = wait_seconds;
  return ReadTables(c, &options->tables);
}

class MixCacheOp final : public OpKernel {
 public:
  explicit MixCacheOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, ReadOptions(c, &options_)); }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckMixCacheOptions(options_)));
    Result<std::unique_ptr<HostStore>> store = MakeHostStore(options_);
    OP_REQUIRES_OK(ctx, ToTensorFlow(store.status()));
    Result<std::unique_ptr<DeviceBackend>> backend = MakeDeviceBackend(ctx);
    OP_REQUIRES_OK(ctx, ToTensorFlow(backend.status()));
    Result<std::unique_ptr<MixCache>> cache = MakeMixCache(options_, std::move(backend.value()), std::move(store.value()));
    OP_REQUIRES_OK(ctx, ToTensorFlow(cache.status()));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() = tensorflow::ResourceHandle::MakeRefCountingHandle(
        new MixCacheResource(std::move(cache.value()), RowsPlaceOf(ctx)), HostNameOf(ctx));
  }

 private:
  MixCacheOptions options_;
};

class FlushOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->Flush(&runner)));
  }
};

/// Table index from input `index`, checked.
Status TableInput(OpKernelContext* ctx, const MixCacheOptions& options, int32_t* table) {
  const int64_t value = ctx->input(1).scalar<int64_t>()();
  const int64_t tables = static_cast<int64_t>(options.tables.size());
  if (value < 0 || value >= tables) {
    return MakeStatus(StatusCode::kInvalidArgument, "MixCache '", options.name, "': table ", value, " does not exist, there are ",
                      tables);
  }
  *table = static_cast<int32_t>(value);
  return Status::Ok();
}

/// A CacheOp whose second input is the index of a table.
class TableOp : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) final {
    int32_t table = 0;
    OP_REQUIRES_OK(ctx, ToTensorFlow(TableInput(ctx, resource->options(), &table)));
    Run(ctx, resource, table);
  }

 protected:
  virtual void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) = 0;
};

/// Outputs `index` (counts) and `index + 1` (last steps).
absl::Status SetLifeOutputs(OpKernelContext* ctx, int index, const std::vector<RowLife::Id>& life) {
  std::vector<int64_t> counts, last_steps;
  for (const RowLife::Id& id : life) {
    counts.push_back(id.count);
    last_steps.push_back(id.last_step);
  }
  TF_RETURN_IF_ERROR(SetVectorOutput(ctx, index, counts));
  return SetVectorOutput(ctx, index + 1, last_steps);
}

class ExportWaitingOp final : public TableOp {
 public:
  using TableOp::TableOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) override {
    int64_t cursor = ctx->input(2).scalar<int64_t>()();
    const int64_t max_ids = ctx->input(3).scalar<int64_t>()();
    std::vector<int64_t> ids;
    std::vector<RowLife::Id> life;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->ExportWaiting(table, &cursor, max_ids, &ids, &life)));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, ids));
    OP_REQUIRES_OK(ctx, SetLifeOutputs(ctx, 1, life));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 3, cursor));
  }
};

class ImportLifeOp final : public TableOp {
 public:
  using TableOp::TableOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) override {
    const Span<const int64_t> counts = ConstSpan<int64_t>(ctx->input(3));
    const Span<const int64_t> last_steps = ConstSpan<int64_t>(ctx->input(4));
    OP_REQUIRES(ctx, counts.size() == last_steps.size(),
                absl::InvalidArgumentError(
                    internal::StrCat("HvdCtrImportLife: ", counts.size(), " counts but ", last_steps.size(), " last_steps")));
    std::vector<RowLife::Id> life;
    for (int64_t i = 0; i < counts.size(); ++i) life.push_back({counts[i], last_steps[i]});
    int64_t foreign = 0;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->ImportLife(table, ConstSpan<int64_t>(ctx->input(2)), life, &foreign)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, foreign));
  }
};

class ExportOp final : public TableOp {
 public:
  using TableOp::TableOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) override {
    int64_t cursor = ctx->input(2).scalar<int64_t>()();
    const int64_t max_rows = ctx->input(3).scalar<int64_t>()();
    OP_REQUIRES(ctx, max_rows > 0,
                absl::InvalidArgumentError(internal::StrCat("HvdCtrExport: max_rows must be > 0, received ", max_rows)));
    ExportChunk chunk;
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->Export(table, &cursor, max_rows, &chunk, &runner)));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 0, chunk.ids));
    OP_REQUIRES_OK(ctx, SetMatrix(ctx, 1, chunk.ids.size(), resource->options().dim, chunk.rows));
    OP_REQUIRES_OK(ctx, SetMatrix(ctx, 2, chunk.ids.size(), resource->cache()->state_floats(table), chunk.state));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 3, cursor));
    OP_REQUIRES_OK(ctx, SetLifeOutputs(ctx, 4, chunk.life));
  }

 private:
  static absl::Status SetMatrix(OpKernelContext* ctx, int index, int64_t rows, int64_t columns,
                                const std::vector<float>& values) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(index, TensorShape({rows, columns}), &output));
    std::copy(values.begin(), values.end(), MutableSpan<float>(output).begin());
    return absl::OkStatus();
  }
};

class ImportOp final : public TableOp {
 public:
  using TableOp::TableOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) override {
    const Tensor& ids = ctx->input(2);
    const Tensor& rows = ctx->input(3);
    const Tensor& state = ctx->input(4);
    const int64_t n = ids.NumElements();
    OP_REQUIRES_OK(ctx, ToTensorFlow(CheckShape("rows", rows, n, resource->options().dim)));
    const bool has_state = state.dim_size(0) != 0 || state.dim_size(1) != 0;
    if (has_state) OP_REQUIRES_OK(ctx, ToTensorFlow(CheckShape("state", state, n, resource->cache()->state_floats(table))));
    int64_t foreign = 0;
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(
        ctx, ToTensorFlow(resource->cache()->Import(table, ConstSpan<int64_t>(ids), ConstSpan<float>(rows).data(),
                                                    has_state ? ConstSpan<float>(state).data() : nullptr, &foreign, &runner)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, foreign));
  }

 private:
  static Status CheckShape(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
    if (tensor.shape() == TensorShape({rows, columns})) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "HvdCtrImport: ", name, " has shape ", tensor.shape().DebugString(),
                      ", expected [", rows, ",", columns, "]");
  }
};

class SetFrequenciesOp final : public TableOp {
 public:
  using TableOp::TableOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource, int32_t table) override {
    int64_t foreign = 0;
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->SetFrequencies(table, ConstSpan<int64_t>(ctx->input(2)),
                                                                       ConstSpan<int64_t>(ctx->input(3)), &foreign)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, foreign));
  }
};

class WarmStartOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    int64_t rows = 0;
    WorkerRunner runner(ctx);
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->WarmStart(&rows, &runner)));
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, rows));
  }
};

class StepOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    OP_REQUIRES_OK(ctx, SetScalarOutput<int64_t>(ctx, 0, resource->cache()->step()));
  }
};

class SetStepOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    OP_REQUIRES_OK(ctx, ToTensorFlow(resource->cache()->SetStep(ctx->input(1).scalar<int64_t>()())));
  }
};

class StatsOp final : public CacheOp {
 public:
  using CacheOp::CacheOp;

  void Run(OpKernelContext* ctx, MixCacheResource* resource) override {
    const MixCacheStats stats = resource->cache()->Stats();
    Tensor* tables = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({static_cast<int64_t>(stats.tables.size()), kTableStats}), &tables));
    int64_t* out = MutableSpan<int64_t>(tables).data();
    const std::vector<int64_t> skipped = resource->skipped_in_reads();
    for (size_t i = 0; i < stats.tables.size(); ++i) {
      const MixCacheTableStats& t = stats.tables[i];
      for (const int64_t value :
           {t.requested, t.unique, t.hits, t.misses, t.created, t.evictions, t.write_backs, t.invalid_ids + skipped[i],
            t.host_rows, t.cached_rows, t.loads, t.not_admitted, t.waiting_ids, t.deleted_idle, t.deleted_max_rows}) {
        *out++ = value;
      }
    }
    const std::vector<int64_t> totals = {
        stats.steps,      stats.foreign_keys, stats.pinned_slots,   stats.pinned_peak,       stats.device_bytes,
        stats.host_bytes, stats.disk_bytes,   stats.disk_rows_read, stats.disk_rows_written, stats.record_bytes};
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 1, totals));
  }
};

HVD_CTR_REGISTER_KERNEL("HvdCtrMixCache", MixCacheOp, "handle");
HVD_CTR_REGISTER_KERNEL("HvdCtrFlush", FlushOp, "handle");
HVD_CTR_REGISTER_KERNEL("HvdCtrExport", ExportOp, "handle", "table", "cursor", "max_rows", "ids", "rows", "state", "next_cursor",
                        "counts", "last_steps");
HVD_CTR_REGISTER_KERNEL("HvdCtrImport", ImportOp, "handle", "table", "ids", "rows", "state", "foreign");
HVD_CTR_REGISTER_KERNEL("HvdCtrExportWaiting", ExportWaitingOp, "handle", "table", "cursor", "max_ids", "ids", "counts",
                        "last_steps", "next_cursor");
HVD_CTR_REGISTER_KERNEL("HvdCtrImportLife", ImportLifeOp, "handle", "table", "ids", "counts", "last_steps", "foreign");
HVD_CTR_REGISTER_KERNEL("HvdCtrSetFrequencies", SetFrequenciesOp, "handle", "table", "ids", "counts", "foreign");
HVD_CTR_REGISTER_KERNEL("HvdCtrWarmStart", WarmStartOp, "handle", "rows");
HVD_CTR_REGISTER_KERNEL("HvdCtrStep", StepOp, "handle", "step");
HVD_CTR_REGISTER_KERNEL("HvdCtrSetStep", SetStepOp, "handle", "step");
HVD_CTR_REGISTER_KERNEL("HvdCtrStats", StatsOp, "handle", "tables", "totals");

}  // namespace
}  // namespace hvd_ctr
