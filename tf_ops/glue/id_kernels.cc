// Kernels on ids: PrepareBatch, HashToRange, InitialRows.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/id_dedupe.h"
#include "tf_ops/core/key_exchange.h"
#include "tf_ops/core/rank_partition.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/core/stage_clock.h"
#include "tf_ops/glue/kernel_registration.h"
#include "tf_ops/glue/tf_convert.h"

namespace hvd_ctr {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

/// Ids per task of the loops that touch 4 or 8 bytes per id.
constexpr int64_t kIdGrain = 1 << 14;

/// Buffers of one call, kept for the next.
struct Scratch {
  IdDedupe dedupe;
  DedupeResult unique;
  PartitionResult partition;
  std::vector<IdColumn> columns;
  std::vector<int64_t> words;
  std::vector<int32_t> splits;
};

/// Lends out Scratch objects, so that calls of one kernel may overlap (a parallel tf.data map) and still reuse memory.
class ScratchPool {
 public:
  std::unique_ptr<Scratch> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Scratch>();
    std::unique_ptr<Scratch> scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }
  void GiveBack(std::unique_ptr<Scratch> scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

class PrepareBatchOp final : public OpKernel {
 public:
  explicit PrepareBatchOp(OpKernelConstruction* c) : OpKernel(c) {
    std::vector<int64_t> rows;
    std::vector<bool> hash_ids;
    OP_REQUIRES_OK(c, c->GetAttr("row_major", &row_major_));
    OP_REQUIRES_OK(c, c->GetAttr("world_size", &world_size_));
    OP_REQUIRES_OK(c, c->GetAttr("table_rows", &rows));
    OP_REQUIRES_OK(c, c->GetAttr("table_hash_ids", &hash_ids));
    OP_REQUIRES(c, rows.size() == hash_ids.size(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPrepareBatch: table_rows has ", rows.size(),
                                                            " entries, table_hash_ids has ", hash_ids.size())));
    for (size_t t = 0; t < rows.size(); ++t) rules_.push_back(IdRule{rows[t], hash_ids[t]});
    std::vector<bool> counts_ids;
    OP_REQUIRES_OK(c, c->GetAttr("table_counts_ids", &counts_ids));
    OP_REQUIRES(c, rows.size() == counts_ids.size(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPrepareBatch: table_rows has ", rows.size(),
                                                            " entries, table_counts_ids has ", counts_ids.size())));
    if (std::count(counts_ids.begin(), counts_ids.end(), true) > 0) counted_.assign(counts_ids.begin(), counts_ids.end());
    OP_REQUIRES_OK(c, ReadFeatures(c));
  }

  void Compute(OpKernelContext* ctx) override {
    const StageTimer timer(Stage::kPartition);
    for (int i = 2; i < 5; ++i) OP_REQUIRES_OK(ctx, CheckRank(ctx, i, 0, "batch_rows, weight_sum or error_text"));
    const Tensor& ids = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, row_major_ ? 2 : 1, "ids"));
    OP_REQUIRES(ctx, !row_major_ || ids.dim_size(1) == features(),
                absl::InvalidArgumentError(internal::StrCat("HvdCtrPrepareBatch: ids has shape ", ids.shape().DebugString(),
                                                            ", expected (B, ", features(), "): one column per feature")));
    Tensor* virtual_ids = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ids.shape(), &virtual_ids));

    std::unique_ptr<Scratch> scratch = scratch_.Take();
    BatchInfo info;
    info.batch_rows = ctx->input(2).scalar<int64_t>()();
    info.weight_sum = ctx->input(3).scalar<double>()();
    info.status = Dedupe(ctx, MutableSpan<int32_t>(virtual_ids), scratch.get());
    if (info.status.ok()) {
      OP_REQUIRES_OK(ctx, GroupByOwner(ctx, MutableSpan<int32_t>(virtual_ids), scratch.get(), &info));
    } else {
      OP_REQUIRES_OK(ctx, SendNoKeys(ctx, MutableSpan<int32_t>(virtual_ids), scratch.get(), &info));
    }
    const KeyCounts counts{ConstSpan<int32_t>(*ctx->mutable_output(4)), counted_};
    PackKeys(info, scratch->partition, counts, world_size_, &scratch->words, &scratch->splits);
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 1, scratch->words));
    OP_REQUIRES_OK(ctx, SetVectorOutput(ctx, 2, scratch->splits));
    OP_REQUIRES_OK(ctx, SetRowSplits(ctx, scratch->partition));
    scratch_.GiveBack(std::move(scratch));
  }

 private:
  int64_t features() const { return static_cast<int64_t>(columns_.size()); }

  absl::Status ReadFeatures(OpKernelConstruction* c) {
    std::vector<int32_t> tables;
    std::vector<bool> has_padding;
    std::vector<int64_t> padding_ids;
    TF_RETURN_IF_ERROR(c->GetAttr("feature_tables", &tables));
    TF_RETURN_IF_ERROR(c->GetAttr("feature_has_padding", &has_padding));
    TF_RETURN_IF_ERROR(c->GetAttr("feature_padding_ids", &padding_ids));
    if (tables.size() != has_padding.size() || tables.size() != padding_ids.size()) {
      return absl::InvalidArgumentError(internal::StrCat("HvdCtrPrepareBatch: feature_tables has ", tables.size(),
                                                         " entries, feature_has_padding ", has_padding.size(),
                                                         ", feature_padding_ids ", padding_ids.size()));
    }
    columns_.resize(tables.size());
    for (size_t f = 0; f < tables.size(); ++f) {
      columns_[f].table = tables[f];
      columns_[f].has_padding = has_padding[f];
      columns_[f].padding_id = padding_ids[f];
    }
    // Found here rather than with the first batch: what does not depend on data fails when the graph is built.
    DedupeResult unused;
    return ToTensorFlow(IdDedupe().Run(columns_, rules_, &unused));
  }

  /// Fills scratch->unique and the virtual ids (indices of scratch->unique.keys). Not OK: an error of this rank's data.
  Status Dedupe(OpKernelContext* ctx, Span<int32_t> virtual_ids, Scratch* scratch) const {
    const StageTimer timer(Stage::kDedupe);
    const tensorflow::tstring& error_text = ctx->input(4).scalar<tensorflow::tstring>()();
    if (!error_text.empty()) return Status(StatusCode::kInternal, std::string(error_text.data(), error_text.size()));
    const Span<const int64_t> ids = ConstSpan<int64_t>(ctx->input(0));
    const Span<const int64_t> splits = ConstSpan<int64_t>(ctx->input(1));
    if (!row_major_) HVD_CTR_RETURN_IF_ERROR(CheckSplits(splits, ids.size()));
    scratch->columns = columns_;
    for (int64_t f = 0; f < features(); ++f) {
      IdColumn& column = scratch->columns[f];
      const int64_t offset = row_major_ ? f : splits[f];
      column.ids = ids.data() + offset;
      column.virtual_ids = virtual_ids.data() + offset;
      column.stride = row_major_ ? features() : 1;
      column.count = row_major_ ? ids.size() / features() : splits[f + 1] - offset;
    }
    return scratch->dedupe.Run(scratch->columns, rules_, &scratch->unique);
  }

  Status CheckSplits(Span<const int64_t> splits, int64_t ids) const {
    bool valid = splits.size() == features() + 1 && splits[0] == 0 && splits[features()] == ids;
    for (int64_t f = 0; valid && f < features(); ++f) valid = splits[f] <= splits[f + 1];
    if (valid) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "HvdCtrPrepareBatch: feature_splits (", splits.size(), " entries) must hold ",
                      features() + 1, " ascending offsets from 0 to ", ids, ", the number of ids");
  }

  /// Partitions the keys, turns virtual ids into positions in owner order, and sets output counts (4).
  absl::Status GroupByOwner(OpKernelContext* ctx, Span<int32_t> virtual_ids, Scratch* scratch, BatchInfo* info) const {
    const DedupeResult& unique = scratch->unique;
    info->first_invalid_feature = unique.first_invalid.feature;
    info->first_invalid_id = unique.first_invalid.id;
    info->invalid_counts = unique.invalid_counts;
    PartitionByOwner(unique.keys, unique.table_offsets, world_size_, &scratch->partition);
    if (world_size_ == 1) return SetVectorOutput(ctx, 4, unique.counts);  // One owner: the order is the same.

    const std::vector<int32_t>& restore = scratch->partition.restore;
    WorkerRunner(ctx).ParallelFor(virtual_ids.size(), kIdGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (virtual_ids[i] != kNoVirtualId) virtual_ids[i] = restore[virtual_ids[i]];
      }
    });
    Tensor* counts = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, tensorflow::TensorShape({static_cast<int64_t>(unique.counts.size())}), &counts));
    const Span<int32_t> grouped = MutableSpan<int32_t>(counts);
    for (int64_t i = 0; i < grouped.size(); ++i) grouped[restore[i]] = unique.counts[i];
    return absl::OkStatus();
  }

  /// The outputs of a rank that failed: its header says so, and it asks for no row.
  absl::Status SendNoKeys(OpKernelContext* ctx, Span<int32_t> virtual_ids, Scratch* scratch, BatchInfo* info) const {
    std::fill(virtual_ids.begin(), virtual_ids.end(), kNoVirtualId);
    info->invalid_counts.assign(rules_.size(), 0);
    scratch->partition = PartitionResult();
    scratch->partition.splits.assign(world_size_, 0);
    scratch->partition.owner_table_counts.assign(world_size_ * rules_.size(), 0);
    return SetVectorOutput(ctx, 4, std::vector<int32_t>());
  }

  absl::Status SetRowSplits(OpKernelContext* ctx, const PartitionResult& partition) const {
    Tensor* row_splits = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, tensorflow::TensorShape({world_size_}), &row_splits));
    const Span<int32_t> out = MutableSpan<int32_t>(row_splits);
    for (int64_t w = 0; w < world_size_; ++w) out[w] = static_cast<int32_t>(partition.splits[w]);
    return absl::OkStatus();
  }

  bool row_major_ = false;
  int32_t world_size_ = 1;
  std::vector<IdRule> rules_;
  std::vector<uint8_t> counted_;   ///< KeyCounts::counted.
  std::vector<IdColumn> columns_;  ///< Table and padding of each feature; without ids.
  ScratchPool scratch_;
};

class HashToRangeOp final : public OpKernel {
 public:
  explicit HashToRangeOp(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("rows", &rows_)); }

  void Compute(OpKernelContext* ctx) override {
    const Span<const int64_t> ids = ConstSpan<int64_t>(ctx->input(0));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, ctx->input(0).shape(), &output));
    const Span<int64_t> hashed = MutableSpan<int64_t>(output);
    WorkerRunner(ctx).ParallelFor(ids.size(), kIdGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) hashed[i] = HashToRange(ids[i], rows_);
    });
  }

 private:
  int64_t rows_ = 1;
};

class InitialRowsOp final : public OpKernel {
 public:
  explicit InitialRowsOp(OpKernelConstruction* c) : OpKernel(c) {
    std::string table;
    int64_t seed = 0;
    int32_t kind = 0;
    OP_REQUIRES_OK(c, c->GetAttr("table", &table));
    OP_REQUIRES_OK(c, c->GetAttr("seed", &seed));
    OP_REQUIRES_OK(c, c->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(c, c->GetAttr("initializer", &kind));
    OP_REQUIRES_OK(c, c->GetAttr("scale", &initializer_.scale));
    initializer_.kind = static_cast<InitializerKind>(kind);
    seed_ = static_cast<uint64_t>(seed);
    table_hash_ = HashBytes(table.data(), static_cast<int64_t>(table.size()));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRank(ctx, 0, 1, "ids"));
    const Span<const int64_t> ids = ConstSpan<int64_t>(ctx->input(0));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({ids.size(), int64_t{dim_}}), &output));
    float* rows = MutableSpan<float>(output).data();
    for (int64_t i = 0; i < ids.size(); ++i) InitialRow(initializer_, seed_, table_hash_, ids[i], dim_, rows + i * dim_);
  }

 private:
  InitializerOptions initializer_;
  uint64_t seed_ = 0;
  uint64_t table_hash_ = 0;
  int32_t dim_ = 1;
};

HVD_CTR_REGISTER_KERNEL("HvdCtrPrepareBatch", PrepareBatchOp, "ids", "feature_splits", "batch_rows", "weight_sum", "error_text",
                        "virtual_ids", "send", "send_splits", "row_splits", "counts");
HVD_CTR_REGISTER_KERNEL("HvdCtrHashToRange", HashToRangeOp, "ids", "hashed");
HVD_CTR_REGISTER_KERNEL("HvdCtrInitialRows", InitialRowsOp, "ids", "rows");

}  // namespace
}  // namespace hvd_ctr
