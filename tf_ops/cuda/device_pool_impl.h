// DevicePool over a runtime. Included by the two files that make one: cuda_pool.cu and cuda_pool_on_cpu.cc.
//
// Ids and splits go to the device on a stream of their own, ahead of what the caller's stream is busy with.
#ifndef HVD_CTR_CUDA_DEVICE_POOL_IMPL_H_
#define HVD_CTR_CUDA_DEVICE_POOL_IMPL_H_

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "tf_ops/cuda/bag_segments.h"
#include "tf_ops/cuda/call_areas.h"
#include "tf_ops/cuda/device_pool.h"
#include "tf_ops/cuda/interaction_kernels.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/pool_kernels.h"
#include "tf_ops/cuda/staging.h"

namespace hvd_ctr {

/// Whether rows from `rows` on and bags at `places` from `bags` on can both be moved in wide pieces.
inline bool TakesWidePieces(const float* rows, const float* bags, const BagPlaces& places, int64_t dim) {
  return TakesWidePieces(rows, dim, dim) && TakesWidePieces(bags, dim, places.inner_stride) &&
         TakesWidePieces(bags, dim, places.outer_stride);
}

template <typename Runtime>
class RuntimePool final : public DevicePool {
 public:
  explicit RuntimePool(const Runtime& runtime) : runtime_(runtime) {}
  RuntimePool(const RuntimePool&) = delete;
  RuntimePool& operator=(const RuntimePool&) = delete;
  ~RuntimePool() override {
    if (!has_uploads_) return;
    (void)runtime_.Use().ok();
    staging_.Destroy(runtime_);
    runtime_.DestroyStream(uploads_);
  }

  Status PoolRows(const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out, const BagPlaces& places,
                  Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(Check("PoolRows", bags, unique, dim, places));
    CallAreas areas;
    const StagedBags staged = Plan(bags, &areas);
    const auto fill = [&](const CallMemory& memory) { Fill(bags, staged, memory); };
    return Call(areas, stream, fill, [&](const CallMemory& memory) {
      const DeviceBags device = OnDevice(bags, staged, memory);
      const Columns columns{rows, dim, out, places};
      const bool wide = TakesWidePieces(rows, out, places, dim);
      if (bags.is_copy())
        return wide ? Copy<kPieceFloats>(bags, device, columns, stream) : Copy<1>(bags, device, columns, stream);
      if (wide) return Sum<kPieceFloats>(bags, device, columns, stream);
      return Sum<1>(bags, device, columns, stream);
    });
  }

  Status PoolRowsGrad(const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim, float* d_rows,
                      Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(Check("PoolRowsGrad", bags, unique, dim, places));
    const bool divided = bags.combiner != Combiner::kSum && !bags.is_copy();
    CallAreas areas;
    const int64_t n = bags.virtual_ids.size();
    const auto starts = areas.Staged<int32_t>(unique + 1);
    const auto bag_of = areas.Staged<int32_t>(n);
    const auto positions = areas.Staged<int32_t>(bags.weights.empty() || bags.splits.empty() ? 0 : n);
    const StagedBags staged = divided ? Plan(bags, &areas) : StagedBags();
    const auto divisors = areas.Scratch<float>(divided ? bags.bags() : 0);
    const auto fill = [&](const CallMemory& memory) {
      SortByVirtualId(bags, unique, {memory.host(starts), memory.host(bag_of), memory.host(positions)});
      if (divided) Fill(bags, staged, memory);
    };
    return Call(areas, stream, fill, [&](const CallMemory& memory) {
      if (divided) {
        const DeviceBags device = OnDevice(bags, staged, memory);
        HVD_CTR_RETURN_IF_ERROR(runtime_.Launch("pool divisors", OverItems(bags.bags()),
                                                DivisorsKernel{bags.bags(), device, memory.device(divisors)}, stream));
      }
      const DeviceSegments segments{memory.device(starts), memory.device(bag_of), memory.device(positions)};
      const float* const weights = bags.weights.data();
      const Gradient gradient{segments, weights, memory.device(divisors), d_out, places, unique, dim, d_rows};
      const bool scaled = divided || !bags.weights.empty();
      if (TakesWidePieces(d_rows, d_out, places, dim)) {
        return scaled ? Grad<kPieceFloats, true>(gradient, stream) : Grad<kPieceFloats, false>(gradient, stream);
      }
      return scaled ? Grad<1, true>(gradient, stream) : Grad<1, false>(gradient, stream);
    });
  }

  Status PoolRowsWeightGrad(const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places, int64_t unique,
                            int32_t dim, float* d_weights, Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(Check("PoolRowsWeightGrad", bags, unique, dim, places));
    CallAreas areas;
    const int64_t n = bags.virtual_ids.size();
    const StagedBags staged = Plan(bags, &areas);
    const auto bag_of = areas.Staged<int32_t>(bags.splits.empty() ? 0 : n);
    const auto lanes = areas.Scratch<float>(n * kPoolDotLanes);
    const auto fill = [&](const CallMemory& memory) {
      Fill(bags, staged, memory);
      if (!bags.splits.empty()) FillBagOfPosition(bags, memory.host(bag_of));
    };
    return Call(areas, stream, fill, [&](const CallMemory& memory) {
      const DeviceBags device = OnDevice(bags, staged, memory);
      const RowLayout layout = MakeRowLayout(n, kPoolDotLanes);
      HVD_CTR_RETURN_IF_ERROR(runtime_.Launch(
          "pool weight gradient, dots", layout.geometry(),
          DotLanesKernel{layout, device.virtual_ids, memory.device(bag_of), rows, d_out, places, dim, memory.device(lanes)},
          stream));
      HVD_CTR_RETURN_IF_ERROR(runtime_.Launch("pool weight gradient, sums", OverItems(n),
                                              SumLanesKernel{n, memory.device(lanes), d_weights}, stream));
      if (bags.combiner == Combiner::kSum) return Status::Ok();
      return runtime_.Launch("pool weight gradient", OverItems(bags.bags()), WeightGradKernel{bags.bags(), device, d_weights},
                             stream);
    });
  }

  Status CopyBeside(const BesideColumns& beside, Stream stream) override {
    if (beside.samples < 0 || beside.columns < 0 || beside.columns > beside.stride || beside.columns > kMostColumns) {
      return MakeStatus(StatusCode::kInvalidArgument, "CopyBeside: ", beside.samples, " samples (allowed >= 0) of ",
                        beside.columns, " columns, ", beside.stride, " floats apart (allowed: at least the columns)");
    }
    HVD_CTR_RETURN_IF_ERROR(Prepare());
    const RowLayout layout = MakeRowLayout(beside.samples, static_cast<int32_t>(beside.columns));
    return runtime_.Launch("columns beside the pooled vectors", layout.geometry(),
                           CopyColumnsKernel{layout, beside.from, beside.to, beside.stride}, stream);
  }

  Status DotPairs(const DeviceVectors& v, float* out, Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(CheckVectors("DotPairs", v));
    const RowLayout layout = MakeRowLayout(v.samples * (v.features - 1), static_cast<int32_t>(v.features - 1));
    return runtime_.Launch("dot pairs", layout.geometry(), DotPairsKernel{layout, v.data, v.features, v.dim, out}, stream);
  }

  Status DotPairsGrad(const DeviceVectors& v, const float* d_out, float* d_vectors, Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(CheckVectors("DotPairsGrad", v));
    const RowLayout layout = MakeRowLayout(v.samples * v.features, static_cast<int32_t>(v.dim));
    return runtime_.Launch("dot pairs gradient", layout.geometry(),
                           DotPairsGradKernel{layout, v.data, d_out, v.features, v.dim, d_vectors}, stream);
  }

  Status PairSum(const DeviceVectors& v, float* out, Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(CheckVectors("PairSum", v));
    CallAreas areas;
    const auto lanes = areas.Scratch<float>(v.samples * kPairSumLanes);
    const auto fill = [](const CallMemory&) {};
    return Call(areas, stream, fill, [&](const CallMemory& memory) {
      const RowLayout layout = MakeRowLayout(v.samples, kPairSumLanes);
      HVD_CTR_RETURN_IF_ERROR(runtime_.Launch("pair sum, lanes", layout.geometry(),
                                              PairSumLanesKernel{layout, v.data, v.features, v.dim, memory.device(lanes)},
                                              stream));
      return runtime_.Launch("pair sum", OverItems(v.samples), PairSumKernel{v.samples, memory.device(lanes), out}, stream);
    });
  }

  Status PairSumGrad(const DeviceVectors& v, const float* d_out, float* d_vectors, Stream stream) override {
    HVD_CTR_RETURN_IF_ERROR(CheckVectors("PairSumGrad", v));
    const RowLayout layout = MakeRowLayout(v.samples, static_cast<int32_t>(v.dim));
    return runtime_.Launch("pair sum gradient", layout.geometry(),
                           PairSumGradKernel{layout, v.data, d_out, v.features, v.dim, d_vectors}, stream);
  }

 private:
  static constexpr int64_t kMostColumns = 1 << 30;

  struct StagedBags {
    CallArea<int32_t> virtual_ids;
    CallArea<int64_t> splits;
  };
  struct Columns {
    const float* rows;
    int64_t dim;
    float* out;
    BagPlaces places;
  };
  struct Gradient {
    DeviceSegments segments;
    const float* weights;
    const float* divisors;
    const float* d_out;
    BagPlaces places;
    int64_t unique;
    int64_t dim;
    float* d_rows;
  };

  static Status Check(const char* call, const Bags& bags, int64_t unique, int32_t dim, const BagPlaces& places) {
    HVD_CTR_RETURN_IF_ERROR(CheckBags(call, bags, unique, dim, places));
    return CheckBagCounts(call, bags);
  }

  Status CheckVectors(const char* call, const DeviceVectors& v) {
    if (v.samples < 0 || v.features < 1 || v.dim < 1 || v.features > kMostColumns || v.dim > kMostColumns) {
      return MakeStatus(StatusCode::kInvalidArgument, call, ": vectors of shape (", v.samples, ", ", v.features, ", ", v.dim,
                        "), allowed: samples >= 0, features and dim 1 .. ", kMostColumns);
    }
    return Prepare();
  }

  static StagedBags Plan(const Bags& bags, CallAreas* areas) {
    StagedBags staged;
    staged.virtual_ids = areas->Staged<int32_t>(bags.virtual_ids.size());
    staged.splits = areas->Staged<int64_t>(bags.splits.size());
    return staged;
  }

  static void Fill(const Bags& bags, const StagedBags& staged, const CallMemory& memory) {
    std::copy(bags.virtual_ids.begin(), bags.virtual_ids.end(), memory.host(staged.virtual_ids));
    std::copy(bags.splits.begin(), bags.splits.end(), memory.host(staged.splits));
  }

  static DeviceBags OnDevice(const Bags& bags, const StagedBags& staged, const CallMemory& memory) {
    DeviceBags device;
    device.virtual_ids = memory.device(staged.virtual_ids);
    device.splits = memory.device(staged.splits);
    device.weights = bags.weights.data();
    device.combiner = bags.combiner;
    return device;
  }

  /// fill(memory) writes the staged areas, which come to the device; launch(memory) -> Status launches on the stream.
  template <typename FillStaged, typename Launches>
  Status Call(const CallAreas& areas, Stream stream, const FillStaged& fill, const Launches& launch) {
    HVD_CTR_RETURN_IF_ERROR(Prepare());
    StagingBlock* block = nullptr;
    HVD_CTR_RETURN_IF_ERROR(staging_.Take(runtime_, areas.staged_bytes(), areas.bytes(), &block));
    const CallMemory memory(block);
    fill(memory);
    Status status = Upload(block, areas.staged_bytes(), stream);
    if (status.ok()) status = launch(memory);
    return staging_.GiveBack(runtime_, block, stream, status);
  }

  /// First of every call: the first call's current device stays the pool's.
  Status Prepare() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_uploads_) {
      HVD_CTR_RETURN_IF_ERROR(runtime_.Bind());
      HVD_CTR_RETURN_IF_ERROR(runtime_.NewStream(&uploads_));
    }
    has_uploads_ = true;
    return runtime_.Use();
  }

  Status Upload(StagingBlock* block, int64_t bytes, Stream stream) const {
    if (bytes == 0) return Status::Ok();
    HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToDevice(block->device.data, block->pinned.data, bytes, uploads_));
    Status status = runtime_.Record(block->uploaded, uploads_);
    if (status.ok()) status = runtime_.Wait(stream, block->uploaded);
    if (!status.ok()) (void)runtime_.Synchronize(uploads_).ok();
    return status;
  }

  template <int32_t kFloats>
  Status Copy(const Bags& bags, const DeviceBags& device, const Columns& c, Stream stream) const {
    const RowLayout layout = MakeRowLayout(bags.bags(), static_cast<int32_t>(c.dim / kFloats), kCopyBags);
    return runtime_.Launch("pool, one id per bag", layout.geometry(),
                           CopyBagsKernel<kFloats>{layout, device.virtual_ids, c.rows, c.dim, c.out, c.places}, stream);
  }

  template <int32_t kFloats>
  Status Sum(const Bags& bags, const DeviceBags& device, const Columns& c, Stream stream) const {
    const RowLayout layout = MakeRowLayout(bags.bags(), static_cast<int32_t>(c.dim / kFloats));
    if (bags.weights.empty()) {
      return runtime_.Launch("pool", layout.geometry(),
                             SumBagsKernel<kFloats, false>{layout, device, c.rows, c.dim, c.out, c.places}, stream);
    }
    return runtime_.Launch("pool with weights", layout.geometry(),
                           SumBagsKernel<kFloats, true>{layout, device, c.rows, c.dim, c.out, c.places}, stream);
  }

  template <int32_t kFloats, bool kScaled>
  Status Grad(const Gradient& g, Stream stream) const {
    const RowLayout layout = MakeRowLayout(g.unique, static_cast<int32_t>(g.dim / kFloats));
    return runtime_.Launch(
        "pool gradient", layout.geometry(),
        RowGradKernel<kFloats, kScaled>{layout, g.segments, g.weights, g.divisors, g.d_out, g.places, g.dim, g.d_rows}, stream);
  }

  /// So many calls may be on their way before the caller waits for the first.
  static constexpr int kBlocks = 4;

  Runtime runtime_;
  StagingPool<Runtime> staging_{kBlocks};
  std::mutex mutex_;  // Over Prepare.
  bool has_uploads_ = false;
  Stream uploads_ = nullptr;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_DEVICE_POOL_IMPL_H_
