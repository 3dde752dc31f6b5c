#!/usr/bin/env bash
# run_parallel_tests.sh RANKS [pytest arguments]: runs tests/parallel on RANKS ranks at once, all ranks the same tests.
#
#   ./launch/run_parallel_tests.sh 2
#   ./launch/run_parallel_tests.sh 4 tests/parallel/test_comm.py -k alltoall
#
# Each rank writes to build/logs/parallel_RANKS/rank.N. You see rank 0's report as it grows; when the job fails or hangs, the ends of
# all of them. The job is killed after HVD_CTR_JOB_SECONDS (default 600).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ranks=${1:?usage: run_parallel_tests.sh RANKS [pytest arguments]}
shift
limit_seconds=${HVD_CTR_JOB_SECONDS:-600}
folder=$root/build/logs/parallel_$ranks
rm -rf "$folder"
mkdir -p "$folder"
cd "$root"

arguments=("$@")
# Without a file, folder or file::test among them, all.
chosen=0
for argument in "$@"; do
  if [[ -e ${argument%%::*} ]]; then chosen=1; fi
done
if ((!chosen)); then arguments=(tests/parallel "$@"); fi

# Ranks that share cores and use Horovod: rounds of 0.1 ms would leave little of them for the tests.
if ((ranks > $(nproc))) && [[ ${HVD_CTR_TRANSPORT:-} == horovod ]]; then export HOROVOD_CYCLE_TIME=1; fi

# The shell gives every rank its file and notes its process id, then becomes that process.
in_rank='rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}; echo $$ >"$1/pid.$rank"; exec >"$1/rank.$rank" 2>&1; shift; exec "$@"'

# -x: after a failed test the ranks are no longer in step, so there is no next test.
PYTHONUNBUFFERED=1 timeout --kill-after=10 "$limit_seconds" "$root/launch/mpirun.sh" -np "$ranks" \
  bash -c "$in_rank" rank "$folder" python -m pytest -x -p no:cacheprovider "${arguments[@]}" >"$folder/mpirun" 2>&1 &
job=$!
tail --pid="$job" --sleep-interval=0.2 -n +1 -F "$folder/rank.0" 2>/dev/null &
reader=$!
trap 'kill -TERM "$job" 2>/dev/null || true' INT TERM
status=0
wait "$job" || status=$?
wait "$reader" 2>/dev/null || true

if ((status != 0)); then
  if ((status == 124 || status == 137)); then echo "the job on $ranks ranks was killed after $limit_seconds s"; fi
  # A rank that mpirun could not end (a hang in the kernel or in a debugger) must not outlive the tests.
  for file in "$folder"/pid.*; do
    if [[ -f $file ]] && pid=$(<"$file") && grep -qa pytest "/proc/$pid/cmdline" 2>/dev/null; then kill -KILL "$pid" 2>/dev/null || true; fi
  done
  for file in "$folder"/rank.* "$folder"/mpirun; do
    [[ -f $file && $file != */rank.0 ]] || continue
    echo "--- the end of $file"
    tail -n 40 "$file"
  done
fi
exit "$status"
