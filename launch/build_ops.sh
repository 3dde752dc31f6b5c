#!/usr/bin/env bash
# build_ops.sh PYTHON FOLDER [BUILD_FOLDER]: builds libhvd_ctr_ops.so for the TensorFlow of PYTHON and puts it into FOLDER.
#
#   launch/build_ops.sh .venv/bin/python hvd_ctr/ops          after a change in tf_ops/
#
# setup.sh and setup.py call this; it is the only place that knows how the library is built.
#   HVD_CTR_JOBS    compilations at a time                    (default: the number of processors)
#   HVD_CTR_MARCH   -march of the library, e.g. native        (default: runs on every processor of the family)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$2
build=${3:-$root/build/release}

# CMake and Ninja stand beside the Python of a virtual environment; elsewhere they are on PATH.
PATH=$(dirname "$python"):$PATH
generator=()
# An existing build folder keeps its generator.
if [[ ! -f $build/CMakeCache.txt ]] && command -v ninja >/dev/null; then generator=(-G Ninja); fi

cmake -S "$root/tf_ops" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHVD_CTR_OPS=ON -DHVD_CTR_TESTS=OFF \
  -DHVD_CTR_PYTHON="$python" -DHVD_CTR_MARCH="${HVD_CTR_MARCH:-}"
cmake --build "$build" --parallel "${HVD_CTR_JOBS:-$(nproc)}" --target hvd_ctr_ops

# Renamed into place: a process that has the old library mapped keeps it, and nobody ever sees half a file.
mkdir -p "$folder"
temporary=$(mktemp "$folder/.libhvd_ctr_ops.XXXXXX")
cp "$build/libhvd_ctr_ops.so" "$temporary"
chmod 755 "$temporary"
mv "$temporary" "$folder/libhvd_ctr_ops.so"
