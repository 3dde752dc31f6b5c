// The timings' program over a runtime: the main functions of gpu_check.cu and host_check.cc.
#ifndef HVD_CTR_CUDA_CHECK_CHECK_PROGRAM_H_
#define HVD_CTR_CUDA_CHECK_CHECK_PROGRAM_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tf_ops/cuda/check/kernel_timings.h"
#include "tf_ops/cuda/check/large_sizes.h"
#include "tf_ops/cuda/check/move_timings.h"
#include "tf_ops/cuda/check/training_loop.h"

namespace hvd_ctr {

constexpr int kExitOk = 0;
constexpr int kExitFailed = 1;  ///< A mismatch or an error.
constexpr int kExitUsage = 2;
constexpr int kExitNoDevice = 3;

struct CheckFlags {
  std::string json;   ///< --json=PATH
  std::string facts;  ///< --facts=TEXT: what the script knows about the device.
  CheckSizes sizes;   ///< --compute-ms=N, --threads=N change them.
};

/// false: an argument that is not known, or has a wrong value.
inline bool ReadFlags(int argc, char** argv, CheckFlags* flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = argument.substr(0, equals), value = argument.substr(equals + 1);
    if (name == "--json") {
      flags->json = value;
    } else if (name == "--facts") {
      flags->facts = value;
    } else if (name == "--compute-ms") {
      flags->sizes.compute_ms = std::atof(value.c_str());
      if (!(flags->sizes.compute_ms > 0.0)) return false;
    } else if (name == "--threads") {
      flags->sizes.threads = std::atoi(value.c_str());
      if (flags->sizes.threads < 1) return false;
    } else {
      return false;
    }
  }
  return true;
}

template <typename Runtime>
Status MeasureAll(const BenchDevice<Runtime>& device, Report* report) {
  std::fprintf(stderr, "large sizes ...\n");
  HVD_CTR_RETURN_IF_ERROR(LargeSizes<Runtime>(device).Run(report));
  std::fprintf(stderr, "kernels ...\n");
  HVD_CTR_RETURN_IF_ERROR(TimeKernels(device, report));
  std::fprintf(stderr, "loads and write-backs ...\n");
  HVD_CTR_RETURN_IF_ERROR(TimeMoves(device, report));
  std::fprintf(stderr, "training loop ...\n");
  return TimeTraining(device, report);
}

template <typename Runtime>
int RunCheck(const CheckFlags& flags, BenchDevice<Runtime> device, Report report) {
  device.sizes = flags.sizes;
  Status status = device.runtime.NewStream(&device.stream);
  if (status.ok()) status = MeasureAll(device, &report);
  device.runtime.DestroyStream(device.stream);
  if (status.ok() && !flags.json.empty()) status = WriteText(flags.json, AsJson(report));
  std::fputs(AsMarkdown(report).c_str(), stdout);
  if (status.ok()) return kExitOk;
  std::fflush(stdout);
  std::fprintf(stderr, "FAILED: %s\n", status.message().c_str());
  return kExitFailed;
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_CHECK_PROGRAM_H_
