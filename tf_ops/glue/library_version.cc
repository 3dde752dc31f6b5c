// What hvd_ctr/ops/native.py asks before and after it loads the library. The marker is found by reading the file: a library built
// for another TensorFlow release often cannot be loaded at all (missing symbols), so its version must be readable without loading
// it.
#include "tensorflow/core/public/version.h"
#include "tf_ops/core/simd_level.h"
#include "tf_ops/glue/device_memory.h"

// TF_VERSION_STRING is in parentheses and so cannot be joined to a literal: the same parts are joined here.
#define HVD_CTR_TF_VERSION TF_STR(TF_MAJOR_VERSION) "." TF_STR(TF_MINOR_VERSION) "." TF_STR(TF_PATCH_VERSION) TF_VERSION_SUFFIX

namespace {
constexpr char kMarkerName[] = "hvd_ctr_built_for_tensorflow=";
}  // namespace

/// Whole marker, NUL-terminated: "hvd_ctr_built_for_tensorflow=2.18.1".
extern "C" __attribute__((used, visibility("default"))) const char hvd_ctr_build_marker[] =
    "hvd_ctr_built_for_tensorflow=" HVD_CTR_TF_VERSION;

/// TensorFlow release of the headers the library was compiled with, such as "2.18.1".
extern "C" const char* hvd_ctr_built_for_tensorflow() { return hvd_ctr_build_marker + sizeof(kMarkerName) - 1; }

// The level of vector instructions (simd_level.h), for hvd_ctr/ops/native.py.

/// "baseline", "avx2" or "avx512": what the loops use.
extern "C" const char* hvd_ctr_simd_level() { return hvd_ctr::SimdLevelName(hvd_ctr::ActiveSimdLevel()); }

/// The highest level that this processor has.
extern "C" const char* hvd_ctr_best_simd_level() { return hvd_ctr::SimdLevelName(hvd_ctr::BestSimdLevel()); }

/// Empty, or why the environment variable HVD_CTR_SIMD was not followed.
extern "C" const char* hvd_ctr_simd_warning() { return hvd_ctr::ProcessSimdChoice().warning.c_str(); }

/// For tests: 0 baseline, 1 avx2, 2 avx512; at most the best.
extern "C" void hvd_ctr_force_simd_level(int level) { hvd_ctr::ForceSimdLevel(static_cast<hvd_ctr::SimdLevel>(level)); }

/// 1 where the library was built with CUDA (HVD_CTR_GPU=1).
extern "C" int hvd_ctr_built_with_cuda() { return hvd_ctr::BuiltWithCuda() ? 1 : 0; }

/// 1 where the ops have kernels for GPUs.
extern "C" int hvd_ctr_has_gpu_kernels() { return hvd_ctr::HasGpuKernels() ? 1 : 0; }
