# Source this file to work in the project's environment:   . launch/env.sh
#
# It activates .venv and sets what a multi-rank run needs to be fast. A variable that you have set already keeps your value.
# Works in bash and zsh; the other scripts of this folder source it themselves.
hvd_ctr_root=$(cd "$(dirname "${BASH_SOURCE[0]:-${(%):-%x}}")/.." && pwd)

if [ ! -f "$hvd_ctr_root/.venv/bin/activate" ]; then
  echo "env.sh: error: there is no $hvd_ctr_root/.venv; run ./launch/setup.sh" >&2
  unset hvd_ctr_root
  return 1
fi
if [ "${VIRTUAL_ENV:-}" != "$hvd_ctr_root/.venv" ]; then
  . "$hvd_ctr_root/.venv/bin/activate"
fi

# Open MPI from a wheel has no fixed place: without OPAL_PREFIX a process that mpirun did not start fails in MPI_Init.
# A cluster's own MPI knows its place, and a prefix of another installation would break it.
if [ -x "$VIRTUAL_ENV/bin/mpirun" ]; then
  export OPAL_PREFIX="$VIRTUAL_ENV"
fi

# A rank that waits gives its core away instead of spinning. The most effective setting where ranks share cores with TensorFlow.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
# Keeps one grouped allreduce one group: its members are never fused with tensors of another step.
export HOROVOD_DISABLE_GROUP_FUSION="${HOROVOD_DISABLE_GROUP_FUSION:-1}"
# Ranks that wait for a live rank that does not come to an exchange: a warning after 30 s, the end of the job after 60 s. A rank that
# dies ends the job at once; one that is stopped as a whole (SIGSTOP, a frozen host) is noticed by nobody but the batch system.
export HOROVOD_STALL_CHECK_TIME_SECONDS="${HOROVOD_STALL_CHECK_TIME_SECONDS:-30}"
export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-60}"
# TensorFlow's start-up notices, times the number of ranks, hide the lines that matter. 0 shows them.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

unset hvd_ctr_root
