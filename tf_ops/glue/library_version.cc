// What hvd_ctr/ops/native.py asks before it loads the library. The marker is found by reading the file: a library built for
// another TensorFlow release often cannot be loaded at all (missing symbols), so its version must be readable without loading it.
#include "tensorflow/core/public/version.h"

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
