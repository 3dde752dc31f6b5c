// The timings' program on the host runtime with tiny sizes: shows that all of it runs and finds no mismatch. Measures nothing.
#include "tf_ops/cuda/check/check_program.h"
#include "tf_ops/cuda/cuda_backend.h"
#include "tf_ops/cuda/host_runtime.h"

int main(int argc, char** argv) {
  using namespace hvd_ctr;  // NOLINT(build/namespaces)
  CheckFlags flags;
  flags.sizes = HostSizes();
  if (!ReadFlags(argc, argv, &flags)) {
    std::fprintf(stderr, "usage: host_check [--json=PATH] [--compute-ms=N] [--threads=N]\n");
    return kExitUsage;
  }
  BenchDevice<HostRuntime> device{HostRuntime(), nullptr, &MakeCudaOnCpuBackend, {}};
  Report report;
  report.facts.push_back({"device", "none: the kernels run in loops on this machine, with tiny sizes and without times"});
  return RunCheck(flags, device, std::move(report));
}
