#include "tests/cpp/backend_conformance.h"
#include "tf_ops/cuda/cuda_backend.h"

namespace hvd_ctr {

INSTANTIATE_TEST_SUITE_P(CudaOnCpu, BackendConformance, OfAllRowTypes(&MakeCudaOnCpuBackend), BackendCaseName);

}  // namespace hvd_ctr
