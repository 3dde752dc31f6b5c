"""The one-rank communicator, what is read from launchers, and the threads that follow."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr import comm as comm_module
from hvd_ctr.comm import LocalComm
from hvd_ctr.launcher import LauncherInfo, read_launcher, threads_per_rank
from tests.support.run_ranks import clean_environment


def _python(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(environment), capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("graph", [False, True])
def test_alltoall_returns_its_input(graph: bool) -> None:
    comm = LocalComm()

    def exchange(rows, splits):
        received, received_splits = comm.alltoall(rows, splits, name="rows")
        assert received.shape[1:] == (3,)
        return received, received_splits

    run = tf.function(exchange, reduce_retracing=True) if graph else exchange
    for count in (4, 0, 2):
        rows = np.arange(count * 3, dtype=np.int64).reshape(count, 3)
        received, splits = run(tf.constant(rows), tf.constant([count]))
        np.testing.assert_array_equal(received, rows)
        np.testing.assert_array_equal(splits, [count])


def test_alltoall_refuses_splits_that_leave_rows_behind() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        LocalComm().alltoall(tf.ones([3, 2]), tf.constant([2]), name="rows")
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        LocalComm().alltoall(tf.ones([3, 2]), tf.constant([2, 1]), name="rows")


def test_alltoall_passes_gradients() -> None:
    rows = tf.ones([3, 2])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        total = tf.reduce_sum(LocalComm().alltoall(rows, tf.constant([3]), name="rows")[0] * 5.0)
    np.testing.assert_array_equal(tape.gradient(total, rows), np.full((3, 2), 5.0))


def test_other_collectives() -> None:
    comm = LocalComm()
    first, second = comm.allreduce_sum([tf.constant([1.0]), tf.constant(2, tf.int64)], "sums")
    np.testing.assert_array_equal(first, [1.0])
    assert second == 2
    assert comm.allgather_object({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert comm.broadcast_object("x") == "x"
    with pytest.raises(ValueError, match=r"root must be in 0\.\.0, got 1"):
        comm.broadcast_object("x", root=1)
    with pytest.raises(TypeError):
        comm.allgather_object(object())
    variable = tf.Variable(3.0)
    comm.broadcast_variables([variable])
    comm.barrier()
    assert variable.numpy() == 3.0
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.hosts) == (0, 1, 0, 1, 1)


def test_hook_leaves_a_single_process_alone() -> None:
    hook = sys.excepthook
    LocalComm().install_excepthook()
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, LauncherInfo("", 1, 1)),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            LauncherInfo("OMPI_COMM_WORLD_SIZE", 4, 2),
        ),
        ({"HOROVOD_SIZE": "3", "HOROVOD_LOCAL_SIZE": "3"}, LauncherInfo("HOROVOD_SIZE", 3, 3)),
        ({"PMI_SIZE": "2"}, LauncherInfo("PMI_SIZE", 2, 2)),
        # mpirun inside a Slurm allocation: the inner launcher counts.
        ({"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "2"}, LauncherInfo("OMPI_COMM_WORLD_SIZE", 2, 2)),
        # One task started by srun in a larger allocation.
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, LauncherInfo("SLURM_STEP_NUM_TASKS", 1, 1)),
        ({"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"}, LauncherInfo("SLURM_NTASKS", 7, 2)),
    ],
)
def test_launcher_variables(environment: dict[str, str], expected: LauncherInfo) -> None:
    assert read_launcher(environment) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_unreadable_launcher_variable(text: str) -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE must be a positive number"):
        read_launcher({"OMPI_COMM_WORLD_SIZE": text})


def test_threads_per_rank() -> None:
    assert threads_per_rank({}, affinity_cores=8, machine_cores=8, local_size=4) == 2
    assert threads_per_rank({}, affinity_cores=2, machine_cores=64, local_size=4) == 1
    assert threads_per_rank({}, affinity_cores=8, machine_cores=8, local_size=3) == 2
    # Bound by the launcher: the mask is this rank's own share.
    bound = {"OMPI_MCA_orte_bound_at_launch": "1"}
    assert threads_per_rank(bound, affinity_cores=2, machine_cores=8, local_size=4) == 2
    assert threads_per_rank(bound, affinity_cores=1, machine_cores=8, local_size=4) == 1
    # Bound to a socket that two ranks share.
    assert threads_per_rank(bound, affinity_cores=4, machine_cores=8, local_size=4) == 2


def test_init_needs_neither_horovod_nor_mpi() -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\n"
        "sys.modules['horovod'] = None; sys.modules['mpi4py'] = None\n"
        "from hvd_ctr import comm\n"
        "first = comm.init()\n"
        "assert comm.init() is first and comm.current() is first and first.size == 1\n"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("1 rank(s) on 1 host(s)") == 1


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        ("", {"TF_NUM_INTRAOP_THREADS": "3", "TF_NUM_INTEROP_THREADS": "5"}, "0 0"),  # TensorFlow reads them itself
        ("intra_op_threads=3", {"TF_NUM_INTRAOP_THREADS": "5"}, "3 3"),
        ("intra_op_threads=1", {}, "1 2"),
    ],
)
def test_threads_chosen_by_the_user_count(argument: str, environment: dict[str, str], expected: str) -> None:
    code = (
        "import tensorflow as tf\n"
        "from hvd_ctr import comm\n"
        f"comm.init({argument})\n"
        "t = tf.config.threading\n"
        "print(t.get_intra_op_parallelism_threads(), t.get_inter_op_parallelism_threads())\n"
    )
    result = _python(code, environment)
    assert result.stdout.strip() == expected, result.stderr


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        comm_module.init(intra_op_threads=0)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"])
def test_launcher_and_library_that_do_not_match(variable: str) -> None:
    """A process that believes to be alone although its launcher started two would train its own model."""
    pytest.importorskip("horovod.tensorflow")
    result = _python("from hvd_ctr import comm; comm.init()", {variable: "2"})
    assert result.returncode != 0
    message = result.stderr.splitlines()[-1]
    assert "RuntimeError" in message
    assert f"{variable}=2" in message
    assert "Horovod came up with 1" in message
    assert "What to do" in message


def test_abort_flushes_and_exits_at_once() -> None:
    code = (
        "import atexit\n"
        "from hvd_ctr.comm import LocalComm\n"
        "atexit.register(lambda: print('atexit ran'))\n"
        "print('before', end='')\n"
        "try:\n"
        "    LocalComm().abort(7, 'bad luck')\n"
        "finally:\n"
        "    print('finally ran')\n"
    )
    result = _python(code)
    assert (result.returncode, result.stdout) == (7, "before")
    assert result.stderr.splitlines()[-1] == "hvd_ctr: rank 0 of 1: bad luck"


def test_fatal_error_shows_its_traceback_unless_told_otherwise() -> None:
    code = (
        "from hvd_ctr.comm import LocalComm\n"
        "try:\n"
        "    raise ValueError('no such file: x.tsv')\n"
        "except ValueError as error:\n"
        "    LocalComm().report_fatal(error, show_traceback=%s)\n"
    )
    result = _python(code % True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("stopped by ValueError: no such file: x.tsv")
    result = _python(code % False)
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "hvd_ctr: rank 0 of 1: no such file: x.tsv"
