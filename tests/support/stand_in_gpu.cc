// A device of type GPU whose memory is host memory, for tests on machines without a GPU: TensorFlow places ops on it, copies
// tensors to and from it, and gives kernels the device contexts and allocators that it gives them on a GPU. Kernels that
// TensorFlow itself has for GPUs do not exist here; such ops run on the CPU, with copies in between.
//
// Fresh and freed memory of the device is filled with NaNs, so that what nobody has copied there is noticed.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"

namespace {

using tensorflow::Allocator;
using tensorflow::AllocatorAttributes;
using tensorflow::Device;
using tensorflow::DeviceContext;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

class DeviceAllocator final : public Allocator {
 public:
  std::string Name() override { return "stand_in_gpu"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    void* memory = tensorflow::cpu_allocator()->AllocateRaw(alignment, bytes);
    auto* words = static_cast<float*>(memory);
    for (size_t i = 0; memory != nullptr && i < bytes / sizeof(float); ++i) words[i] = std::numeric_limits<float>::quiet_NaN();
    return memory;
  }
  void DeallocateRaw(void* memory) override { tensorflow::cpu_allocator()->DeallocateRaw(memory); }
};

void CopyBytes(const Tensor& from, const Tensor& to) {
  if (from.TotalBytes() != 0) {
    std::memcpy(const_cast<char*>(to.tensor_data().data()), from.tensor_data().data(), from.TotalBytes());
  }
}

class StandInContext final : public DeviceContext {
 public:
  void CopyCPUTensorToDevice(const Tensor* cpu, Device*, Tensor* device, StatusCallback done, bool) const override {
    CopyBytes(*cpu, *device);
    done(absl::OkStatus());
  }
  void CopyDeviceTensorToCPU(const Tensor* device, absl::string_view, Device*, Tensor* cpu, StatusCallback done) override {
    CopyBytes(*device, *cpu);
    done(absl::OkStatus());
  }
  void CopyTensorInSameDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done) const override {
    CopyBytes(*from, *to);
    done(absl::OkStatus());
  }
};

class StandInGpu final : public tensorflow::LocalDevice {
 public:
  StandInGpu(const tensorflow::SessionOptions& options, const tensorflow::DeviceAttributes& attributes)
      : LocalDevice(options, attributes), context_(new StandInContext) {
    info_.default_context = context_.get();
    info_.gpu_id = 0;
    set_tensorflow_accelerator_device_info(&info_);
  }

  Allocator* GetAllocator(AllocatorAttributes attributes) override {
    if (attributes.on_host()) return tensorflow::cpu_allocator();
    return &allocator_;
  }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status TryGetDeviceContext(DeviceContext** out) override {
    context_->Ref();
    *out = context_.get();
    return absl::OkStatus();
  }
  absl::Status MakeTensorFromProto(const tensorflow::TensorProto& proto, const AllocatorAttributes attributes,
                                   Tensor* tensor) override {
    Tensor parsed(proto.dtype());
    if (!parsed.FromProto(GetAllocator(attributes), proto)) return absl::InvalidArgumentError("cannot parse a tensor");
    *tensor = parsed;
    return absl::OkStatus();
  }
  void CopyTensorInSameDevice(const Tensor* from, Tensor* to, const DeviceContext*, StatusCallback done) override {
    CopyBytes(*from, *to);
    done(absl::OkStatus());
  }

 private:
  DeviceAllocator allocator_;
  tensorflow::core::RefCountPtr<StandInContext> context_;
  AcceleratorDeviceInfo info_;
};

class StandInFactory final : public tensorflow::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->push_back("/physical_device:GPU:0");
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const tensorflow::SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    constexpr int64_t kMemoryBytes = int64_t{1} << 30;
    devices->push_back(std::make_unique<StandInGpu>(
        options, Device::BuildDeviceAttributes(prefix + "/device:GPU:0", tensorflow::DEVICE_GPU, tensorflow::Bytes(kMemoryBytes),
                                               tensorflow::DeviceLocality(), "stand-in")));
    return absl::OkStatus();
  }
};

// The priority of TensorFlow's own GPUs.
REGISTER_LOCAL_DEVICE_FACTORY("GPU", StandInFactory, 210);

}  // namespace
