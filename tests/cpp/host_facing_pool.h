// HostFacingPool: a DevicePool whose arguments are all in host memory, for tests. Each call copies its operands to the device of
// a runtime, calls the pool, waits, and copies the result back. Operands keep their address modulo 16 bytes, so that what is not
// aligned in the test is not aligned on the device.
#ifndef HVD_CTR_TESTS_CPP_HOST_FACING_POOL_H_
#define HVD_CTR_TESTS_CPP_HOST_FACING_POOL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "tf_ops/cuda/device_pool.h"

namespace hvd_ctr {

/// A copy on the device of n floats of the host.
template <typename Runtime>
class DeviceCopy {
 public:
  DeviceCopy(const Runtime& runtime, const float* host, int64_t n) : runtime_(runtime), n_(host == nullptr ? 0 : n) {
    const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(host) % 16 / sizeof(float));
    if (n_ == 0) return;
    status_ = runtime_.Allocate((n_ + misplaced) * kFloatBytes, &memory_);
    if (!status_.ok()) return;
    data_ = static_cast<float*>(memory_) + misplaced;
    status_ = runtime_.CopyToDevice(data_, host, n_ * kFloatBytes, nullptr);
  }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  ~DeviceCopy() { runtime_.Free(memory_); }

  const Status& status() const { return status_; }
  float* data() const { return data_; }
  Status Read(float* host) const {
    if (n_ > 0) HVD_CTR_RETURN_IF_ERROR(runtime_.CopyToHost(host, data_, n_ * kFloatBytes, nullptr));
    return runtime_.Synchronize(Stream{nullptr});
  }

 private:
  static constexpr int64_t kFloatBytes = sizeof(float);

  const Runtime runtime_;
  const int64_t n_;
  void* memory_ = nullptr;
  float* data_ = nullptr;
  Status status_;
};

template <typename Runtime>
class HostFacingPool final : public DevicePool {
 public:
  HostFacingPool(std::unique_ptr<DevicePool> pool, const Runtime& runtime) : pool_(std::move(pool)), runtime_(runtime) {}

  Status PoolRows(const Bags& bags, const float* rows, int64_t unique, int32_t dim, float* out, const BagPlaces& places,
                  Stream stream) override {
    const Copy weights(runtime_, bags.weights.data(), bags.weights.size()), source(runtime_, rows, unique * dim);
    Copy target(runtime_, out, Extent(bags, dim, places));
    HVD_CTR_RETURN_IF_ERROR(weights.status());
    HVD_CTR_RETURN_IF_ERROR(source.status());
    HVD_CTR_RETURN_IF_ERROR(target.status());
    HVD_CTR_RETURN_IF_ERROR(pool_->PoolRows(OnDevice(bags, weights), source.data(), unique, dim, target.data(), places, stream));
    return target.Read(out);
  }

  Status PoolRowsGrad(const Bags& bags, const float* d_out, const BagPlaces& places, int64_t unique, int32_t dim, float* d_rows,
                      Stream stream) override {
    const Copy weights(runtime_, bags.weights.data(), bags.weights.size()), source(runtime_, d_out, Extent(bags, dim, places));
    Copy target(runtime_, d_rows, unique * dim);
    HVD_CTR_RETURN_IF_ERROR(weights.status());
    HVD_CTR_RETURN_IF_ERROR(source.status());
    HVD_CTR_RETURN_IF_ERROR(target.status());
    HVD_CTR_RETURN_IF_ERROR(
        pool_->PoolRowsGrad(OnDevice(bags, weights), source.data(), places, unique, dim, target.data(), stream));
    return target.Read(d_rows);
  }

  Status PoolRowsWeightGrad(const Bags& bags, const float* rows, const float* d_out, const BagPlaces& places, int64_t unique,
                            int32_t dim, float* d_weights, Stream stream) override {
    const Copy weights(runtime_, bags.weights.data(), bags.weights.size()), row_copy(runtime_, rows, unique * dim);
    const Copy source(runtime_, d_out, Extent(bags, dim, places));
    Copy target(runtime_, d_weights, bags.virtual_ids.size());
    HVD_CTR_RETURN_IF_ERROR(weights.status());
    HVD_CTR_RETURN_IF_ERROR(row_copy.status());
    HVD_CTR_RETURN_IF_ERROR(source.status());
    HVD_CTR_RETURN_IF_ERROR(target.status());
    HVD_CTR_RETURN_IF_ERROR(pool_->PoolRowsWeightGrad(OnDevice(bags, weights), row_copy.data(), source.data(), places, unique,
                                                      dim, target.data(), stream));
    return target.Read(d_weights);
  }

  Status CopyBeside(const BesideColumns& beside, Stream stream) override {
    const int64_t extent = beside.samples == 0 ? 0 : (beside.samples - 1) * beside.stride + beside.columns;
    const Copy source(runtime_, beside.from, beside.samples * beside.columns);
    Copy target(runtime_, beside.to, extent);
    HVD_CTR_RETURN_IF_ERROR(source.status());
    HVD_CTR_RETURN_IF_ERROR(target.status());
    BesideColumns device = beside;
    device.from = source.data();
    device.to = target.data();
    HVD_CTR_RETURN_IF_ERROR(pool_->CopyBeside(device, stream));
    return target.Read(beside.to);
  }

  Status DotPairs(const DeviceVectors& v, float* out, Stream stream) override {
    return Interact(v, nullptr, 0, out, Pairs(v),
                    [&](const DeviceVectors& device, const float*, float* to) { return pool_->DotPairs(device, to, stream); });
  }
  Status DotPairsGrad(const DeviceVectors& v, const float* d_out, float* d_vectors, Stream stream) override {
    return Interact(v, d_out, Pairs(v), d_vectors, Floats(v), [&](const DeviceVectors& device, const float* from, float* to) {
      return pool_->DotPairsGrad(device, from, to, stream);
    });
  }
  Status PairSum(const DeviceVectors& v, float* out, Stream stream) override {
    return Interact(v, nullptr, 0, out, v.samples,
                    [&](const DeviceVectors& device, const float*, float* to) { return pool_->PairSum(device, to, stream); });
  }
  Status PairSumGrad(const DeviceVectors& v, const float* d_out, float* d_vectors, Stream stream) override {
    return Interact(v, d_out, v.samples, d_vectors, Floats(v), [&](const DeviceVectors& device, const float* from, float* to) {
      return pool_->PairSumGrad(device, from, to, stream);
    });
  }

 private:
  using Copy = DeviceCopy<Runtime>;

  static int64_t Floats(const DeviceVectors& v) { return std::max<int64_t>(0, v.samples * v.features * v.dim); }
  static int64_t Pairs(const DeviceVectors& v) { return std::max<int64_t>(0, v.samples * v.features * (v.features - 1) / 2); }

  /// Floats from the first to the last of the bags; 0 where the arguments are wrong, which the pool is to say.
  static int64_t Extent(const Bags& bags, int32_t dim, const BagPlaces& places) {
    int64_t extent = 0;
    for (int64_t i = 0; places.inner >= 1 && i < bags.bags(); ++i) extent = std::max(extent, places.at(i) + dim);
    return extent;
  }
  static Bags OnDevice(const Bags& bags, const Copy& weights) {
    Bags device = bags;
    device.weights = Span<const float>(weights.data(), bags.weights.size());
    return device;
  }

  template <typename Function>
  Status Interact(const DeviceVectors& v, const float* d_out, int64_t d_floats, float* out, int64_t floats,
                  const Function& call) const {
    const Copy vectors(runtime_, v.data, Floats(v)), source(runtime_, d_out, d_floats);
    Copy target(runtime_, out, floats);
    HVD_CTR_RETURN_IF_ERROR(vectors.status());
    HVD_CTR_RETURN_IF_ERROR(source.status());
    HVD_CTR_RETURN_IF_ERROR(target.status());
    DeviceVectors device = v;
    device.data = vectors.data();
    HVD_CTR_RETURN_IF_ERROR(call(device, source.data(), target.data()));
    return target.Read(out);
  }

  const std::unique_ptr<DevicePool> pool_;
  const Runtime runtime_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_HOST_FACING_POOL_H_
