#!/usr/bin/env bash
# test.sh [stage...]: sets up what is missing and runs all tests, or the given stages. All stages run even when one fails.
#
#   ./launch/test.sh                        everything
#   ./launch/test.sh cpp unit               two stages
#
#   format      clang-format on all C++ files                   ruff       lint and format of the Python files
#   mypy        types of hvd_ctr                                cpp        GoogleTest with AddressSanitizer and UBSan
#   tsan        GoogleTest with ThreadSanitizer                 unit       pytest tests/unit
#   launch      pytest tests/launch (scripts, several ranks)    parallel   pytest tests/parallel on 1, 2 and 4 ranks
#   cuda        the CUDA backend without a GPU: its kernels in loops on a stand-in for a GPU, and compiled where there is nvcc
#
#   TSAN=1                       adds the tsan stage to a full run
#   HVD_CTR_TEST_WORKERS=n       files of the unit and launch stages at once (default: one per core, 4 at most); 0: all in one process
#   HVD_CTR_TEST_RANKS="1 2 4"   the sizes of the parallel stage
#   HVD_CTR_ALL_TESTS=1          all tests also with more ranks than cores
#   HVD_CTR_FULL_MATRIX=1        the exactness matrix as the full product: about 370 runs per number of ranks instead of 5 to 20
#   HVD_CTR_LONG=1               kill -9 at 20 moments instead of 2
#   HVD_CTR_CUDA_ARCHS="90"      the GPUs of the cuda stage instead of "75;90;120", or "75;86;90" where nvcc is older
#   HVD_CTR_NO_SYSTEM_GTEST=1    takes GoogleTest from Debian's package, as on a machine that has none
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

all_stages=(format ruff mypy cpp unit launch parallel cuda)
if [[ ${TSAN:-0} == 1 ]]; then all_stages=(format ruff mypy cpp tsan unit launch parallel cuda); fi
stages=("$@")
if (($# == 0)); then stages=("${all_stages[@]}"); fi
for stage in "${stages[@]}"; do
  [[ " format ruff mypy cpp tsan unit launch parallel cuda " == *" $stage "* ]] ||
    fail "there is no stage '$stage'" "choose from: format ruff mypy cpp tsan unit launch parallel cuda"
done

# --- The stages

# The files that git has or would take: build folders stay out. Outside a git checkout, all files.
cpp_files() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files --cached --others --exclude-standard -- 'tf_ops/*.h' 'tf_ops/*.cc' 'tf_ops/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cc' \
      'benchmarks/*.h' 'benchmarks/*.cc'
  else
    find tf_ops tests/cpp benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu'
  fi | sort -u | while IFS= read -r file; do [[ ! -f $file ]] || echo "$file"; done
}

stage_format() {
  local files
  mapfile -t files < <(cpp_files)
  clang-format --dry-run -Werror "${files[@]}" || { echo "repair with: clang-format -i FILE"; return 1; }
  echo "${#files[@]} files keep the style"
}

stage_ruff() {
  ruff check . || return 1
  ruff format --check . || { echo "repair with: ruff format ."; return 1; }
}

stage_mypy() { mypy; }

# GoogleTest in build/NAME with the given sanitizer.
run_cpp() {
  local folder=$root/build/$1 generator=()
  if [[ ! -f $folder/CMakeCache.txt ]]; then generator=(-G Ninja); fi
  cmake -S tf_ops -B "$folder" "${generator[@]}" -DHVD_CTR_TESTS=ON -DHVD_CTR_SANITIZE="$2" >"$log_folder/$1.log" || {
    tail -n 30 "$log_folder/$1.log"
    return 1
  }
  grep -E 'GoogleTest|C\+\+ tests' "$log_folder/$1.log" || true
  if grep -q 'C++ tests are left out' "$log_folder/$1.log"; then return 77; fi
  # Ninja's progress goes to the log; a compiler error is shown.
  cmake --build "$folder" --parallel "${HVD_CTR_JOBS:-$(nproc)}" >>"$log_folder/$1.log" 2>&1 || {
    grep -v '^\[' "$log_folder/$1.log" | tail -n 60
    return 1
  }
  ctest --test-dir "$folder" --parallel "$(nproc)" --output-on-failure --no-tests=error
}

stage_cpp() { run_cpp asan address; }
stage_tsan() { run_cpp tsan thread; }

# Several files of tests at once; the tests of one file stay in order in one process, and share its fixtures. On a GPU one process:
# TensorFlow takes all its memory.
pytest_files() {
  local workers=${HVD_CTR_TEST_WORKERS:-}
  if [[ -z $workers ]]; then
    workers=$(($(nproc) < 4 ? $(nproc) : 4))
    if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then workers=0; fi
  fi
  python -m pytest --numprocesses "$workers" --dist loadfile "$@"
}

stage_unit() { pytest_files tests/unit; }
stage_launch() { pytest_files tests/launch; }

stage_parallel() {
  local ranks failed=0
  for ranks in ${HVD_CTR_TEST_RANKS:-1 2 4}; do
    echo "--- on $ranks rank(s)"
    "$root/launch/run_parallel_tests.sh" "$ranks" || failed=1
  done
  # Ranks of one host meet in shared memory; those of several hosts use Horovod.
  echo "--- on 2 ranks over Horovod"
  HVD_CTR_TRANSPORT=horovod "$root/launch/run_parallel_tests.sh" 2 tests/parallel/test_{comm,equivalence,exchange,lookup_and_update,pipeline}.py ||
    failed=1
  return "$failed"
}

# Without a GPU: what runs here is all but the device itself.
stage_cuda() {
  local failed=0 stand_in=(-p tests.support.stand_in_gpu) nvcc
  if python -c 'import sys, tensorflow; sys.exit(tensorflow.test.is_built_with_cuda())'; then
    echo "--- on a stand-in for a GPU, the kernels of the CUDA backend in loops"
    python -m pytest "${stand_in[@]}" tests/unit/test_gpu_placement.py tests/unit/test_ops_{cache,pooling}.py || failed=1
    "$root/launch/run_parallel_tests.sh" 2 "${stand_in[@]}" tests/parallel/test_{equivalence,lookup_and_update}.py || failed=1
  else
    # A TensorFlow that knows GPUs ends the process when it is given others.
    echo "--- this TensorFlow has CUDA: no stand-in for a GPU, but the GPU where there is one"
    python -m pytest tests/unit/test_gpu_placement.py || failed=1
  fi
  nvcc=$("$root/launch/find_nvcc.sh" 2>&1) || {
    echo "--- the CUDA code is not compiled: $nvcc"
    return "$failed"
  }
  compile_cuda "$nvcc" || failed=1
  return "$failed"
}

# Everything for GPUs, in the folder of the usual build: only the device code and what knows of it is compiled. The library must
# load on a machine without a GPU, and serve its CPUs.
compile_cuda() {
  local library=$root/build/cuda/libhvd_ctr_ops.so archs="75;90;120"
  # CUDA 12 knows sm_120 from 12.8 on.
  [[ $("$1" --list-gpu-code) == *sm_120* ]] || archs="75;86;90"
  echo "--- compiled by $1, without warnings and spilled registers"
  CUDACXX=$1 HVD_CTR_CUDA=1 HVD_CTR_CUDA_ARCHS=${HVD_CTR_CUDA_ARCHS:-$archs} \
    "$root/launch/build_ops.sh" "$venv/bin/python" "$(dirname "$library")" >"$log_folder/cuda.log" 2>&1 || {
    tail -n 60 "$log_folder/cuda.log"
    return 1
  }
  python launch/ptxas_report.py build/release || return 1
  echo "--- that library, on the CPUs of this machine"
  HVD_CTR_LIBRARY=$library python -m pytest tests/unit/test_gpu_kernels.py tests/unit/test_ops_ids.py
}

# --- Main

started=$(date +%s%N)
"$root/launch/setup.sh"
. "$root/launch/env.sh"
mkdir -p "$log_folder"
# What a run of the tests must not take over from the shell that starts it.
unset HVD_CTR_LIBRARY

summary=()
failures=0
for stage in "${stages[@]}"; do
  echo
  echo "=== $stage"
  stage_started=$(date +%s%N)
  status=0
  "stage_$stage" || status=$?
  case $status in
    0) verdict=passed ;;
    77) verdict="left out" ;;
    *)
      verdict=FAILED
      failures=$((failures + 1))
      ;;
  esac
  summary+=("$(printf '%-10s %-8s %8s s' "$stage" "$verdict" "$(seconds_since "$stage_started")")")
done

echo
echo "=== summary"
printf '%s\n' "${summary[@]}"
printf '%-10s %-8s %8s s\n' total "$( ((failures)) && echo FAILED || echo passed)" "$(seconds_since "$started")"
exit $((failures > 0))
