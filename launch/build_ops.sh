#!/usr/bin/env bash
# build_ops.sh PYTHON FOLDER [BUILD_FOLDER]: builds libhvd_ctr_ops.so for the TensorFlow of PYTHON and puts it into FOLDER.
#
#   launch/build_ops.sh .venv/bin/python hvd_ctr/ops          after a change in tf_ops/
#
# setup.sh and setup.py call this; it is the only place that knows how the library is built.
#   HVD_CTR_JOBS    compilations at a time                    (default: the number of processors)
#   HVD_CTR_MARCH   -march of the library, e.g. native        (default: runs on every processor of the family)
#   HVD_CTR_CUDA    1: with the CUDA backend, which takes longer and needs nvcc; 0: without
#                                                             (default: HVD_CTR_GPU, and without that 0)
#   HVD_CTR_CUDA_ARCHS   GPUs to compile for, e.g. "80;90"    (default: all that nvcc knows from Volta or Turing on)
#   CUDACXX         the nvcc                                  (default: nvcc on PATH, then /usr/local/cuda/bin/nvcc)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$2
build=${3:-$root/build/release}

# CMake and Ninja stand beside the Python of a virtual environment; elsewhere they are on PATH.
PATH=$(dirname "$python"):$PATH

cuda=${HVD_CTR_CUDA:-${HVD_CTR_GPU:-0}}
if [[ $cuda == 1 ]]; then
  CUDACXX=$("$root/launch/find_nvcc.sh" 2>&1) || {
    echo "build_ops: error: the CUDA backend is asked for, and $CUDACXX; install the CUDA toolkit or set CUDACXX to its nvcc" >&2
    exit 1
  }
  export CUDACXX
  # CMake takes the first nvcc of a build folder for good.
  nvcc="$CUDACXX: $("$CUDACXX" --version | tr '\n' ' ')"
  if grep -qs '^CMAKE_CUDA_COMPILER:' "$build/CMakeCache.txt" && [[ $(cat "$build/nvcc" 2>/dev/null) != "$nvcc" ]]; then
    echo "build_ops: another nvcc than before: $build is made anew"
    rm -rf "$build/CMakeCache.txt" "$build/CMakeFiles"
  fi
  mkdir -p "$build"
  echo "$nvcc" >"$build/nvcc"
elif [[ $cuda != 0 ]]; then
  echo "build_ops: error: HVD_CTR_CUDA is '$cuda', allowed: 0, 1; set it to 1 for rows on GPUs" >&2
  exit 1
elif command -v nvcc >/dev/null; then
  echo "build_ops: without the CUDA backend; HVD_CTR_GPU=1 builds it too"
fi

generator=()
# An existing build folder keeps its generator.
if [[ ! -f $build/CMakeCache.txt ]] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S "$root/tf_ops" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHVD_CTR_OPS=ON -DHVD_CTR_TESTS=OFF \
  -DHVD_CTR_PYTHON="$python" -DHVD_CTR_MARCH="${HVD_CTR_MARCH:-}" -DHVD_CTR_CUDA="$cuda" \
  -DHVD_CTR_CUDA_ARCHS="${HVD_CTR_CUDA_ARCHS:-}"
cmake --build "$build" --parallel "${HVD_CTR_JOBS:-$(nproc)}" --target hvd_ctr_ops

# Renamed into place: a process that has the old library mapped keeps it, and nobody ever sees half a file.
mkdir -p "$folder"
temporary=$(mktemp "$folder/.libhvd_ctr_ops.XXXXXX")
cp "$build/libhvd_ctr_ops.so" "$temporary"
chmod 755 "$temporary"
mv "$temporary" "$folder/libhvd_ctr_ops.so"
