#!/usr/bin/env bash
# horovodrun.sh: horovodrun with the settings of launch/mpirun.sh, for those who are used to it.
#
#   ./launch/horovodrun.sh -np 2 hvd-ctr train configs/quickstart.yaml
#   ./launch/horovodrun.sh -np 8 -H node1:4,node2:4 hvd-ctr train configs/quickstart.yaml
#
# The job runs on MPI (--mpi): with --gloo a rank that hangs is not noticed, and MPI's small exchanges are not there.
# horovodrun hands on the whole environment by itself.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/env.sh"

if (($# == 0)); then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
for argument in "$@"; do
  case $argument in
    --gloo)
      echo "horovodrun.sh: error: --gloo is not supported; leave it out, the job then runs on MPI" >&2
      exit 2
      ;;
    -*) ;;
    # Flags come before the program; the values between them do no harm here.
    hvd-ctr | python*) break ;;
  esac
done

mpi_arguments="--mca mpi_yield_when_idle $OMPI_MCA_mpi_yield_when_idle --oversubscribe"
if [[ -n ${HVD_CTR_INTERFACE:-} ]]; then
  mpi_arguments+=" --mca btl_tcp_if_include $HVD_CTR_INTERFACE --mca oob_tcp_if_include $HVD_CTR_INTERFACE"
fi
exec horovodrun --mpi --mpi-args="$mpi_arguments" "$@"
