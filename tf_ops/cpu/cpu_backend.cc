#include "tf_ops/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <vector>

#include "tf_ops/core/backend_checks.h"
#include "tf_ops/core/row_math.h"
#include "tf_ops/cpu/record_kernels.h"
#include "tf_ops/cpu/row_loops.h"
#include "tf_ops/cpu/scatter_add.h"

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
    data_ = reinterpret_cast<uint8_t*>(begin);
    return true;
  }
  uint8_t* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

/// A row (dim) of floats in the running thread, where rows that are stored narrower are computed on.
class ScratchRow {
 public:
  explicit ScratchRow(const Records& records) {
    if (records.row_type != RowType::kFloat32 && records.dim > kShort) long_.resize(static_cast<size_t>(records.dim));
  }
  float* data() { return long_.empty() ? short_ : long_.data(); }

 private:
  static constexpr int32_t kShort = 2048;
  alignas(64) float short_[kShort];
  std::vector<float> long_;
};

class CpuBackend final : public DeviceBackend {
 public:
  Status Allocate(int64_t slots, int32_t dim, int32_t state_floats, RowType row_type) override {
    HVD_CTR_RETURN_IF_ERROR(checks_.Allocate(slots, dim, state_floats));
    records_.dim = dim;
    records_.record_floats = dim + state_floats;
    records_.row_type = row_type;
    const CpuRecordLayout layout = LayOutCpuRecords(row_type, dim, state_floats);
    records_.stride = layout.stride_bytes;
    records_.state_offset = layout.state_offset_bytes;
    int64_t bytes = 0;
    const bool fits = !__builtin_mul_overflow(slots, records_.stride, &bytes);
    if (!fits || bytes > std::numeric_limits<int64_t>::max() - kHugePage || !arena_.Map(bytes)) {
      return MakeStatus(StatusCode::kResourceExhausted, "CpuBackend::Allocate: no memory for ", slots, " slots of ",
                        records_.stride, " bytes (", fits ? bytes : std::numeric_limits<int64_t>::max(), fits ? "" : " or more",
                        " bytes in all): ", fits ? std::strerror(errno) : "address space exceeded", "; lower cache.slots");
    }
    records_.arena = arena_.data();
    bytes_ = bytes;
    checks_.Allocated(slots, dim, state_floats);
    return Status::Ok();
  }

  int64_t allocated_bytes() const override { return bytes_; }

  Status StoreRecords(Span<const Slot> slots, const float* records, TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(checks_.Slots("StoreRecords", slots));
    const int64_t floats = records_.record_floats;
    ForRows(runner, slots.size(), floats, [&](int64_t begin, int64_t end) {
      WriteRecords(records_, slots.subspan(begin, end - begin), records + begin * floats);
    });
    return Status::Ok();
  }

  Status StoreFirstRecords(Span<const Slot> slots, Span<const Key> keys, const RecordInit& init, TaskRunner* runner) override {
    HVD_CTR_RETURN_IF_ERROR(checks_.FirstRecords(slots, keys, init.tables.size(), init.dim, init.record_floats));
    ForRows(runner, slots.size(), records_.record_floats, [&](int64_t begin, int64_t end) {
      ScratchRow row(records_);
      WriteFirstRecords({&records_, slots.subspan(begin, end - begin), keys.data() + begin, init.tables.data(), row.data()});
    });
    return Status::Ok();
  }

  Status FetchRecords(Span<const Slot> slots, float* records, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(checks_.Slots("FetchRecords", slots));
    Read(slots, records_.record_floats, records, runner);
    return Status::Ok();
  }

  Status GatherRows(Span<const Slot> slots, float* rows, TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(checks_.Slots("GatherRows", slots));
    Read(slots, records_.dim, rows, runner);
    return Status::Ok();
  }

  Status SegmentSum(const float* gradients, Span<const int32_t> inverse, int64_t unique, float* sums,
                    TaskRunner* runner) const override {
    HVD_CTR_RETURN_IF_ERROR(checks_.Inverse(inverse, unique));
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
    HVD_CTR_RETURN_IF_ERROR(checks_.Update(slots, tables, optimizers));
    ForRows(runner, slots.size(), records_.record_floats, [&](int64_t begin, int64_t end) {
      ScratchRow row(records_);
      // One call per run of equal table: keys come grouped by table, so runs are long.
      for (int64_t k = begin; k < end;) {
        int64_t stop = k + 1;
        while (stop < end && tables[stop] == tables[k]) ++stop;
        const RowOptimizerOptions& options = optimizers[tables[k]];
        const RowUpdate update = MakeRowUpdate(options, step, options.learning_rate * learning_rate_scale);
        UpdateRecords(options.kind, {&records_, slots.data() + k, gradients + k * records_.dim, stop - k, &update, row.data()});
        k = stop;
      }
    });
    return Status::Ok();
  }

 private:
  void Read(Span<const Slot> slots, int64_t floats, float* out, TaskRunner* runner) const {
    ForRows(runner, slots.size(), floats, [&](int64_t begin, int64_t end) {
      ReadRecords(records_, slots.subspan(begin, end - begin), floats, out + begin * floats);
    });
  }

  BackendChecks checks_{"CpuBackend"};
  Arena arena_;
  Records records_;
  int64_t bytes_ = 0;
};

}  // namespace

CpuRecordLayout LayOutCpuRecords(RowType row_type, int32_t dim, int64_t state_floats) {
  constexpr int64_t kFloat = sizeof(float), kLine = kLineFloats * kFloat;
  CpuRecordLayout layout;
  layout.state_offset_bytes = (int64_t{dim} * RowElementBytes(row_type) + kFloat - 1) / kFloat * kFloat;
  const int64_t bytes = layout.state_offset_bytes + state_floats * kFloat;
  const int64_t lines = (bytes + kLine - 1) / kLine * kLine;
  if (4 * (lines - bytes) <= bytes) {
    layout.stride_bytes = lines;
  } else {
    layout.stride_bytes = bytes <= 2 * kFloat ? bytes : (bytes + 4 * kFloat - 1) / (4 * kFloat) * (4 * kFloat);
  }
  return layout;
}

std::unique_ptr<DeviceBackend> MakeCpuBackend() { return std::make_unique<CpuBackend>(); }

}  // namespace hvd_ctr
