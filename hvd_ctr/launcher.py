"""What mpirun, horovodrun or srun tell a process by environment variables, and the number of threads that follows.

launcher = read_launcher(os.environ)  # LauncherInfo("OMPI_COMM_WORLD_SIZE", size=4, local_size=2)
threads = set_threads(None, launcher.local_size)
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

logger = logging.getLogger(__name__)

# (size, local size) variables of the launchers, the innermost launcher first.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),  # horovodrun --gloo
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
    ("PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),  # inside srun
    ("SLURM_NTASKS", "SLURM_TASKS_PER_NODE"),  # inside sbatch
)


@dataclass(frozen=True)
class LauncherInfo:
    """What the launcher says: `size` was read from `variable`. Without a launcher 1 and an empty name."""

    variable: str
    size: int
    local_size: int


def read_launcher(environment: Mapping[str, str]) -> LauncherInfo:
    """Reads the launcher's variables from a mapping such as os.environ.

    Raises:
        ValueError: a size variable is not a positive number.
    """
    for size_name, local_name in _LAUNCHERS:
        if size_name not in environment:
            continue
        text = environment[size_name]
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"environment variable {size_name} must be a positive number, got {text!r}")
        size = int(text)
        # Slurm writes "2(x3),1" for three hosts with 2 tasks and one with 1.
        local_text = environment.get(local_name, "").split("(")[0].split(",")[0]
        local_size = int(local_text) if local_text.isdigit() and int(local_text) > 0 else size
        return LauncherInfo(size_name, size, min(size, local_size))
    return LauncherInfo("", 1, 1)


def size_mismatch(launcher: LauncherInfo, size: int, transports: Sequence[str]) -> str:
    """The message when Horovod, built with these transports, came up with another size than the launcher's."""
    remedy = (
        "start with `srun --mpi=pmix`, or with mpirun inside the allocation; for one process only use `srun --ntasks=1`"
        if launcher.variable.startswith("SLURM")
        else "start with the mpirun of the MPI that Horovod was built with, or with horovodrun"
    )
    return (
        f"the launcher says {launcher.size} ranks ({launcher.variable}={launcher.size}), but Horovod came up with "
        f"{size}: each process would train alone on the same data. Launcher and library do not match: Horovod was "
        f"built with {' and '.join(transports) or 'no transport'}, the first mpirun on PATH is "
        f"{shutil.which('mpirun') or 'missing'}. "
        f"What to do: {remedy}. If one process is what you want, unset {launcher.variable}."
    )


def threads_per_rank(environment: Mapping[str, str], affinity_cores: int, machine_cores: int, local_size: int) -> int:
    """The cores that one of `local_size` ranks on this machine may use, at least 1.

    `affinity_cores` is the size of this process' affinity mask. Where the launcher has bound each rank to cores of its
    own the mask is the rank's share already, else the mask is shared by all ranks of the machine.
    """
    by_mpi = environment.get("OMPI_MCA_orte_bound_at_launch") == "1"
    by_slurm = environment.get("SLURM_CPU_BIND_TYPE", "").startswith("mask")
    share = machine_cores // local_size if by_mpi or by_slurm else affinity_cores // local_size
    return max(1, min(share, affinity_cores))


def set_threads(requested: int | None, local_size: int) -> int:
    """Sets TensorFlow's thread pools and returns the threads of one operation, 0 for TensorFlow's own choice."""
    affinity = len(os.sched_getaffinity(0))
    default = threads_per_rank(os.environ, affinity, os.cpu_count() or affinity, local_size)
    threading_config = tf.config.threading
    wanted = requested if requested is not None else default
    try:
        if requested is not None or not (
            _is_set("TF_NUM_INTRAOP_THREADS") or threading_config.get_intra_op_parallelism_threads()
        ):
            threading_config.set_intra_op_parallelism_threads(wanted)
        if not (_is_set("TF_NUM_INTEROP_THREADS") or threading_config.get_inter_op_parallelism_threads()):
            # Not below 2: an operation that waits (a prefetch for free slots) must not hold up the one it waits for.
            threading_config.set_inter_op_parallelism_threads(max(2, wanted))
    except RuntimeError:
        if local_size > 1 or requested is not None:
            logger.warning(
                "TensorFlow ran before hvd_ctr.init(), so its thread pools cannot be set to %d thread(s) per rank any "
                "more; call hvd_ctr.init() first",
                wanted,
            )
    threads = int(threading_config.get_intra_op_parallelism_threads())
    text = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return threads or (int(text) if text.isdigit() else 0)


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable))
