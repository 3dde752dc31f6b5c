#include "tf_ops/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <vector>

#include "tf_ops/core/row_math.h"
#include "tf_ops/cpu/row_loops.h"
#include "tf_ops/cpu/scatter_add.h"
#include "tf_ops/cpu/target_clones.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;

/// Anonymous zeroed memory, aligned to 2 MB and advised to be huge pages from 4 MB on. Owns the mapping.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    if (mapping_ != nullptr) munmap(mapping_, static_cast<size_t>(mapped_bytes_));
  }

  /// False when the system refuses; errno says why.
  bool Map(int64_t bytes) {
    const bool huge = bytes >= 2 * kHugePage;
    mapped_bytes_ = huge ? bytes + kHugePage : std::max<int64_t>(bytes, 1);
    void* mapping = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return false;
    mapping_ = mapping;
    uintptr_t begin = reinterpret_cast<uintptr_t>(mapping);
    if (huge) {
      begin = (begin + kHugePage - 1) / kHugePage * kHugePage;
      // Advice only: without transparent huge pages the arena works, at about 1.6 times the time per random row.
      (void)madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(bytes), MADV_HUGEPAGE);
    }
    data_ = reinterpret_cast<float*>(begin);
    return true;
  }
  float* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
  float* data_ = nullptr;
};

struct Records {
  float* arena = nullptr;
  int64_t stride = 0;  ///< Floats between records.
  int32_t dim = 0;
  int32_t record_floats = 0;

  float* at(Slot slot) const { return arena + static_cast<int64_t>(slot) * stride; }
};

/// Copies `floats` leading floats of each slot's record to out (n, floats).
template <int32_t kFloats>
inline __attribute__((always_inline)) void ReadRange(const Records& records, const Slot* slots, int64_t n, int64_t floats,
                                                     float* out) {
  if (kFloats > 0) floats = kFloats;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kPrefetchRows < n && slots[i + kPrefetchRows] != kNoSlot)
      PrefetchRecord(records.at(slots[i + kPrefetchRows]), floats);
    if (slots[i] == kNoSlot) {
      ZeroRow(floats, out + i * floats);
    } else {
      CopyRow(records.at(slots[i]), floats, out + i * floats);
    }
  }
}

void ReadRecords(const Records& records, Span<const Slot> slots, int64_t floats, float* out, TaskRunner* runner) {
  ForRows(runner, slots.size(), floats, [&](int64_t begin, int64_t end) {
    WithDim(static_cast<int32_t>(floats), [&](auto constant) {
      ReadRange<constant.value>(records, slots.data() + begin, end - begin, floats, out + begin * floats);
    });
  });
}

/// Rows of one table: slots (n), gradients (n, dim).
struct UpdateRun {
  const Records* records;
  const Slot* slots;
  const float* gradients;
  int64_t n;
  const RowUpdate* update;
};

template <OptimizerKind kKind, int32_t kDim>
inline __attribute__((always_inline)) void UpdateLoop(const UpdateRun& run) {
  const Records records = *run.records;
  const RowUpdate update = *run.update;
  const int32_t dim = kDim > 0 ? kDim : records.dim;
  for (int64_t k = 0; k < run.n; ++k) {
    if (k + kPrefetchRows < run.n && run.slots[k + kPrefetchRows] != kNoSlot) {
      PrefetchRecord(records.at(run.slots[k + kPrefetchRows]), records.record_floats);
    }
    if (run.slots[k] == kNoSlot) continue;
    float* record = records.at(run.slots[k]);
    UpdateRowOf<kKind>(update, run.gradients + k * dim, dim, record, record + dim);
  }
}

template <OptimizerKind kKind>
inline __attribute__((always_inline)) void UpdateLoopOf(const UpdateRun& run) {
  switch (run.records->dim) {
    case 16:
      return UpdateLoop<kKind, 16>(run);
    case 64:
      return UpdateLoop<kKind, 64>(run);
    default:
      return UpdateLoop<kKind, 0>(run);
  }
}

HVD_CTR_CLONES void UpdateSgd(const UpdateRun& run) { UpdateLoopOf<OptimizerKind::kSgd>(run); }
HVD_CTR_CLONES void UpdateAdagrad(const UpdateRun& run) { UpdateLoopOf<OptimizerKind::kAdagrad>(run); }
HVD_CTR_CLONES void UpdateRowWiseAdagrad(const UpdateRun& run) { UpdateLoopOf<OptimizerKind::kRowWiseAdagrad>(run); }
HVD_CTR_CLONES void UpdateAdam(const UpdateRun& run) { UpdateLoopOf<OptimizerKind::kAdam>(run); }
HVD_CTR_CLONES void UpdateFtrl(const UpdateRun& run) { UpdateLoopOf<OptimizerKind::kFtrl>(run); }

void UpdateOneTable(OptimizerKind kind, const UpdateRun& run) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return UpdateSgd(run);
    case OptimizerKind::kAdagrad:
      return UpdateAdagrad(run);
    case OptimizerKind::kRowWiseAdagrad:
      return UpdateRowWiseAdagrad(run);
    case OptimizerKind::kAdam:
      return UpdateAdam(run);
    case OptimizerKind::kFtrl:
      return UpdateFtrl(run);
  }
}

class CpuBackend final : public DeviceBackend {
 public:
  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats) override {
    if (allocated_) return MakeStatus(StatusCode::kFailedPrecondition, "CpuBackend::Allocate was called twice");
    if (slots < 0 || slots > std::numeric_limits<Slot>::max() || dim < 1 || state_floats < 0 ||
        int64_t{dim} + state_floats > std::numeric_limits<int32_t>::max()) {
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::Allocate: slots ", slots, " (allowed 0 .. 2^31-1), dim ", dim,
                        " (allowed >= 1), state_floats ", state_floats, " (allowed >= 0; dim + state_floats < 2^31)");
    }
    records_.dim = dim;
    records_.record_floats = dim + state_floats;
    records_.stride = CpuRecordStride(records_.record_floats);
    int64_t bytes = 0;
    const bool fits = !__builtin_mul_overflow(slots, records_.stride * int64_t{sizeof(float)}, &bytes);
    if (!fits || bytes > std::numeric_limits<int64_t>::max() - kHugePage || !arena_.Map(bytes)) {
      return MakeStatus(StatusCode::kResourceExhausted, "CpuBackend::Allocate: no memory for ", slots, " slots of ",
                        records_.stride * int64_t{sizeof(float)}, " bytes (", fits ? bytes : std::numeric_limits<int64_t>::max(),
                        fits ? "" : " or more", " bytes in all): ", fits ? std::strerror(errno) : "address space exceeded",
                        "; lower cache.slots");
    }
    records_.arena = arena_.data();
    slots_ = slots;
    bytes_ = bytes;
    allocated_ = true;
    return Status::Ok();
  }

  int64_t allocated_bytes() const override { return bytes_; }

  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(CheckSlots("StoreRecords", slots));
    const int64_t floats = records_.record_floats;
    ForRows(runner, slots.size(), floats, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kPrefetchRows < end && slots[i + kPrefetchRows] != kNoSlot) {
          PrefetchRecord(records_.at(slots[i + kPrefetchRows]), floats);
        }
        if (slots[i] != kNoSlot) CopyRow(records + i * floats, floats, records_.at(slots[i]));
      }
    });
    return Status::Ok();
  }

  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(CheckSlots("FetchRecords", slots));
    ReadRecords(records_, slots, records_.record_floats, records, runner);
    return Status::Ok();
  }

  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(CheckSlots("GatherRows", slots));
    ReadRecords(records_, slots, records_.dim, rows, runner);
    return Status::Ok();
  }

  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(CheckAllocated("SegmentSum"));
    if (unique < 0)
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::SegmentSum: unique is ", unique, ", allowed >= 0");
    const int64_t bad = FirstOutside(inverse, unique);
    if (bad >= 0) {
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::SegmentSum: inverse[", bad, "] = ", inverse[bad],
                        " is outside [-1, ", unique, ")");
    }
    ScatterArgs args;
    args.source = gradients;
    args.places = records_.dim;
    args.dim = records_.dim;
    args.targets = inverse;
    args.unique = unique;
    args.sums = sums;
    ScatterAdd(args, runner);
    return Status::Ok();
  }

  Status UpdateRows(Span<const Slot> slots, Span<const int32_t> tables, const float* gradients,
                    Span<const RowOptimizerOptions> optimizers, int64_t step, float learning_rate_scale,
                    TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(CheckSlots("UpdateRows", slots));
    HVD_CTR_RETURN_IF_ERROR(CheckTables(slots, tables, optimizers));
    std::vector<RowUpdate> updates;
    for (const RowOptimizerOptions& options : optimizers) {
      updates.push_back(MakeRowUpdate(options, step, options.learning_rate * learning_rate_scale));
    }
    ForRows(runner, slots.size(), records_.record_floats, [&](int64_t begin, int64_t end) {
      // One call per run of equal table: keys come grouped by table, so runs are long.
      for (int64_t k = begin; k < end;) {
        int64_t stop = k + 1;
        while (stop < end && tables[stop] == tables[k]) ++stop;
        const UpdateRun run{&records_, slots.data() + k, gradients + k * records_.dim, stop - k, &updates[tables[k]]};
        UpdateOneTable(optimizers[tables[k]].kind, run);
        k = stop;
      }
    });
    return Status::Ok();
  }

 private:
  Status CheckAllocated(const char* call) const {
    if (allocated_) return Status::Ok();
    return MakeStatus(StatusCode::kFailedPrecondition, "CpuBackend::", call, " was called before Allocate");
  }

  Status CheckSlots(const char* call, Span<const Slot> slots) const {
    HVD_CTR_RETURN_IF_ERROR(CheckAllocated(call));
    const int64_t bad = FirstOutside(slots, slots_);
    if (bad < 0) return Status::Ok();
    return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::", call, ": slots[", bad, "] = ", slots[bad], " is outside [0, ",
                      slots_, ") and is not kNoSlot (-1)");
  }

  Status CheckTables(Span<const Slot> slots, Span<const int32_t> tables, Span<const RowOptimizerOptions> optimizers) const {
    if (slots.size() != tables.size()) {
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::UpdateRows: ", slots.size(), " slots but ", tables.size(),
                        " tables");
    }
    for (int64_t k = 0; k < tables.size(); ++k) {
      if (tables[k] >= 0 && tables[k] < optimizers.size()) continue;
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::UpdateRows: tables[", k, "] = ", tables[k], " is outside [0, ",
                        optimizers.size(), ")");
    }
    for (int64_t t = 0; t < optimizers.size(); ++t) {
      const int32_t needed = StateFloats(optimizers[t], records_.dim);
      if (records_.dim + int64_t{needed} <= records_.record_floats) continue;
      return MakeStatus(StatusCode::kInvalidArgument, "CpuBackend::UpdateRows: the optimizer of table ", t, " needs ", needed,
                        " state floats per row, but records were allocated with ", records_.record_floats - records_.dim);
    }
    return Status::Ok();
  }

  Arena arena_;
  Records records_;
  int64_t slots_ = 0;
  int64_t bytes_ = 0;
  bool allocated_ = false;
};

}  // namespace

int64_t CpuRecordStride(int64_t record_floats) {
  const int64_t lines = (record_floats + kLineFloats - 1) / kLineFloats * kLineFloats;
  if (4 * (lines - record_floats) <= record_floats) return lines;
  return record_floats <= 2 ? record_floats : (record_floats + 3) / 4 * 4;
}

std::unique_ptr<DeviceBackend> MakeCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace hvd_ctr
