#!/usr/bin/env bash
# Builds the CUDA backend for the GPU of this machine, runs its tests on it and measures it. Needs nvcc and g++, nothing else;
# GoogleTest is used where it is installed. Takes less than 4 minutes; the tables come last.
#
#   tf_ops/cuda/check/run.sh [--json PATH] [--build DIR] [--jobs N] [--compute-ms N] [--threads N]
#   tf_ops/cuda/check/run.sh --host        the same flow on the host runtime with tiny sizes: needs g++ only, measures nothing
#
#   --build DIR     objects and programs go there and are used again (default: a folder below $TMPDIR, removed at the end)
#   --jobs N        parallel compilations (default: one per processor)
#   --compute-ms N  length of the training loop's stand-in for a model (default 10)
#   --threads N     host threads that gather rows (default 8)
#   --subset        the check's own part of GoogleTest, also where GoogleTest is installed
#   --no-suites     only the measurements
#   --compile ARCH  only build, for a GPU that this machine need not have, e.g. sm_90
#
# Exit status: 0 all well; 1 a mismatch, a failed test, a build or CUDA error; 2 wrong arguments; 3 no GPU, no nvcc or no g++.
set -u -o pipefail

script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
started=$PWD
cd "$(dirname "$script")/../../.." || exit 1
here=tf_ops/cuda/check
host="" subset="" suites=1 build="" json="" arch=native jobs=$(nproc 2>/dev/null || echo 2)
arguments=()

usage() { sed -n '5,17s/^# \{0,1\}//p' "$script" >&2; exit 2; }
fail() { echo "FAILED: $*" >&2; exit 1; }
absent() { echo "$*" >&2; exit 3; }
say() { echo "[$SECONDS s] $*" >&2; }

while [ $# -gt 0 ]; do
  case $1 in
    --host) host=1 ;;
    --subset) subset=1 ;;
    --no-suites) suites="" ;;
    --json | --build | --jobs | --compile | --compute-ms | --threads)
      [ $# -ge 2 ] || usage
      case $1 in
        --json) json=$(cd "$started" && realpath -m "$2") ;;
        --build) build=$(cd "$started" && realpath -m "$2") ;;
        --compile) arch=$2 ;;
        --jobs) jobs=$2 ;;
        *) arguments+=("$1=$2") ;;
      esac
      shift ;;
    *) usage ;;
  esac
  shift
done
if [ -n "$host" ] && [ "$arch" != native ]; then usage; fi
case $jobs in '' | *[!0-9]* | 0) usage ;; esac
[ -z "$json" ] || arguments+=("--json=$json")

command -v "${CXX:-g++}" >/dev/null || absent "no C++ compiler: ${CXX:-g++} is not on PATH (CXX names another)"
cxx=${CXX:-g++}
if [ -z "$host" ]; then
  nvcc=${NVCC:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)}
  [ -n "$nvcc" ] || absent "no nvcc: it is neither on PATH nor in /usr/local/cuda/bin (NVCC names another); --host needs none"
  [ "$arch" != native ] || nvidia-smi -L >/dev/null 2>&1 || ls /dev/nvidia[0-9]* >/dev/null 2>&1 ||
    absent "no GPU: nvidia-smi lists none and there is no /dev/nvidia0; --host needs none"
fi
if [ -z "$build" ]; then
  build=$(mktemp -d "${TMPDIR:-/tmp}/hvd_ctr_check_XXXXXX") || fail "no temporary folder"
  trap 'rm -rf "$build"' EXIT
fi

# GoogleTest, or the part of it that is here.
mkdir -p "$build" || fail "cannot make $build"
gtest="the part of GoogleTest in $here/gtest_subset"
gtest_include="-isystem $here/gtest_subset" gtest_library=""
if [ -z "$subset" ] && echo '#include <gtest/gtest.h>
int main(int argc, char** argv) { testing::InitGoogleTest(&argc, argv); return RUN_ALL_TESTS(); }' |
  $cxx -std=c++17 -x c++ - -lgtest -lpthread -o "$build/probe" 2>/dev/null; then
  gtest="the installed GoogleTest"
  gtest_include="" gtest_library="-lgtest"
fi
made=$build/${host:+host_}$arch suite_objects=suites${gtest_library:+_gtest}
mkdir -p "$build/library" "$made/$suite_objects" || fail "cannot make $made"

common="-std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -I."
device_code="-std=c++17 -O3 -arch=$arch -fmad=false -prec-div=true -prec-sqrt=true -ftz=false -I."
device_code+=" -Xcompiler -Wall,-Wextra,-ffp-contract=off"
tested="-DHVD_CTR_DEVICE_UNDER_TEST ${host:+-DHVD_CTR_CHECK_HOST} $gtest_include"

# One line per object: its name, and the command that makes it. Longest first.
object() { echo "$1.o $2 -c $3 -o $1.o"; }
objects() {
  if [ -n "$suites" ]; then
    object "$made/$suite_objects/main" "$cxx $common $tested" "$here/suites_main.cc"
    for name in mix_cache_random mix_cache cuda_on_cpu mix_cache_threads; do
      object "$made/$suite_objects/$name" "$cxx $common $tested" "tests/cpp/${name}_test.cc"
    done
  fi
  if [ -z "$host" ]; then
    for name in check/gpu_check cuda_backend cuda_pool cuda_runtime; do
      object "$made/$(basename "$name")_cu" "$nvcc $device_code" "tf_ops/cuda/$name.cu"
    done
  else
    object "$made/host_check" "$cxx $common" "$here/host_check.cc"
  fi
  for source in $here/{training_loop,bench_device,report}.cc tf_ops/{cpu,core,cuda}/*.cc; do
    case $source in */criteo_parser.cc | */usual_criteo_line.cc | */shared_*.cc) continue ;; esac
    object "$build/library/$(basename "$source" .cc)" "$cxx $common" "$source"
  done
}

newest=$(find tf_ops tests/cpp -name '*.h' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)
say "building with $jobs jobs in $made"
objects | while read -r target command; do
  source=${command##* -c } source=${source%% *}
  [ "$target" -nt "$newest" ] && [ "$target" -nt "$source" ] || echo "$command"
done | tr '\n' '\0' | xargs -0 -r -n 1 -P "$jobs" bash -c 'bash -c "$0" || exit 255' || fail "the build; see above"

# Not by name patterns: a build folder that is used again may hold objects whose sources are gone.
made_here() { objects | cut -d ' ' -f 1 | grep "^$1"; }
mapfile -t library < <(made_here "$build/library/"; made_here "$made/cuda_")
program=host_check link="$cxx"
if [ -z "$host" ]; then link="$nvcc -arch=$arch" program=gpu_check_cu; fi
$link "$made/$program.o" "${library[@]}" -lpthread -o "$made/check" || fail "linking the measurements"
if [ -n "$suites" ]; then
  mapfile -t suite < <(made_here "$made/$suite_objects/")
  $link "${suite[@]}" "${library[@]}" $gtest_library -lpthread -o "$made/$suite_objects/suites" ||
    fail "linking the suites"
fi
if [ "$arch" != native ]; then
  say "built for $arch; nothing was run"
  exit 0
fi
if [ -n "$suites" ]; then
  say "suites, with $gtest"
  # The others are backends on the host.
  "$made/$suite_objects/suites" --gtest_brief=1 --gtest_filter='-*CudaOnCpu*:*Queued*:*Strict*' || fail "a suite on the device; see above"
fi
if [ -z "$host" ] && command -v nvidia-smi >/dev/null; then
  fields=name,driver_version,clocks.current.sm,clocks.max.sm,clocks.current.memory,power.limit
  facts=$(nvidia-smi --query-gpu=$fields --format=csv,noheader 2>/dev/null | head -1) &&
    arguments+=("--facts=$facts ($fields)")
fi
say "measuring"
"$made/check" "${arguments[@]+"${arguments[@]}"}"
status=$?
say "done, exit status $status"
exit $status
