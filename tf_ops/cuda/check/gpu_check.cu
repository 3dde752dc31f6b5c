// The timings' program on a GPU. Exits with 3 where there is none.
#include <cuda_runtime.h>

#include "tf_ops/cuda/check/check_program.h"
#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/cuda_runtime.h"

namespace hvd_ctr {
namespace {

std::string Version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::unique_ptr<DeviceBackend> MakeBackend() { return MakeCudaBackend(); }

/// Sizes that fit the device's free memory.
Status FitSizes(CheckSizes* sizes) {
  size_t free = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  if (error != cudaSuccess) return MakeStatus(StatusCode::kInternal, "cudaMemGetInfo: ", cudaGetErrorString(error));
  const auto quarter = static_cast<int64_t>(free / 4);
  sizes->arena_bytes = std::min(sizes->arena_bytes, quarter);
  sizes->copy_bytes = std::min(sizes->copy_bytes, quarter / 2);
  const int64_t row_bytes = 3 * int64_t{sizes->dims.back()} * static_cast<int64_t>(sizeof(float));
  while (sizes->ids * row_bytes > quarter && sizes->ids > 1 << 14) sizes->ids /= 2;
  // The arena's records, twice the rows.
  if (sizes->large_rows * LargeSizes<CudaRuntime>::kBytesPerRow > static_cast<int64_t>(free / 10 * 9)) sizes->large_rows = 0;
  return Status::Ok();
}

int Main(int argc, char** argv) {
  CheckFlags flags;
  if (!ReadFlags(argc, argv, &flags)) {
    std::fprintf(stderr, "usage: gpu_check [--json=PATH] [--facts=TEXT] [--compute-ms=N] [--threads=N]\n");
    return kExitUsage;
  }
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: cudaGetDeviceCount: %s, %d devices\n", cudaGetErrorString(error), devices);
    return kExitNoDevice;
  }
  BenchDevice<CudaRuntime> device{CudaRuntime(), nullptr, &MakeBackend, {}};
  Report report;
  std::string name;
  Status status = device.runtime.Bind();
  if (status.ok()) status = device.runtime.Describe(&name);
  if (status.ok()) status = FitSizes(&flags.sizes);
  if (!status.ok()) {
    std::fprintf(stderr, "FAILED: %s\n", status.message().c_str());
    return kExitFailed;
  }
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  report.facts.push_back({"device", name});
  report.facts.push_back({"CUDA", "runtime " + Version(CUDART_VERSION) + ", driver's " + Version(driver)});
  if (!flags.facts.empty()) report.facts.push_back({"nvidia-smi", flags.facts});
  return RunCheck(flags, device, std::move(report));
}

}  // namespace
}  // namespace hvd_ctr

int main(int argc, char** argv) { return hvd_ctr::Main(argc, argv); }
