"""What happens when a rank fails: the whole job ends within seconds, with the first error in its output and no hang."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.support.run_ranks import REPOSITORY, RanksResult, run_ranks

pytestmark = pytest.mark.ranks
pytest.importorskip("horovod.tensorflow", reason="several ranks need Horovod")

_STEPS = """
import logging, os, signal, sys, threading, time
import tensorflow as tf
from hvd_ctr import comm as comm_module

logging.basicConfig(level=logging.INFO, format="%(message)s")
comm = comm_module.init()
comm.install_excepthook()

@tf.function
def step(rows):
    received, _ = comm.alltoall(rows, tf.ones([comm.size], tf.int32), name="rows")
    return comm.allreduce_sum([tf.reduce_sum(received)], "sum")[0]

def event(number):
    {event}

for number in range(200):
    event(number)
    step(tf.ones([comm.size, 2])).numpy()
    time.sleep(0.01)
print("all steps done")
"""


def _run(event: str, ranks: int = 2, **options) -> RanksResult:
    return run_ranks(["-c", _STEPS.replace("{event}", event)], ranks, **options)


def _check_ended(result: RanksResult, within_seconds: float = 30.0) -> None:
    assert not result.timed_out, result.report()
    assert result.exit_code != 0, result.report()
    assert result.seconds < within_seconds, result.report()
    assert "all steps done" not in result.all_output()


def test_steps_without_an_event_succeed() -> None:
    """Also: the start line appears once, and every rank knows its place."""
    result = _run("if number == 0: print('rank', comm.rank, 'of', comm.size, 'local', comm.local_rank)")
    assert result.exit_code == 0, result.report()
    assert "2 rank(s) on 1 host(s), 2 on this host; shared memory" in result.outputs[0]
    assert "rank(s) on" not in result.outputs[1]
    for rank, output in enumerate(result.outputs):
        assert f"rank {rank} of 2 local {rank}" in output
        assert "all steps done" in output


def test_exception_on_one_rank() -> None:
    result = _run("if comm.rank == 1 and number == 5: raise ValueError('row 17 is broken')")
    _check_ended(result)
    assert result.outputs[1].count("ValueError: row 17 is broken") == 2  # the traceback and the closing line
    assert "Traceback" in result.outputs[1]
    assert "hvd_ctr: rank 1 of 2: stopped by ValueError: row 17 is broken" in result.outputs[1]
    assert "Traceback" not in result.outputs[0], result.report()


def test_exception_in_a_thread() -> None:
    event = (
        "if comm.rank == 1 and number == 5:\n"
        "        def read(): raise OSError('the reader failed')\n"
        "        threading.Thread(target=read).start()"
    )
    result = _run(event)
    _check_ended(result)
    assert "hvd_ctr: rank 1 of 2: stopped by OSError: the reader failed" in result.outputs[1]


def test_same_exception_on_all_ranks_is_printed_once() -> None:
    result = _run("if number == 5: raise ValueError('cache too small: need 10, have 5')", ranks=3)
    _check_ended(result)
    assert result.all_output().count("Traceback") == 1, result.report()
    assert "rank 0 of 3: stopped by ValueError: cache too small: need 10, have 5" in result.outputs[0]


def test_killed_rank() -> None:
    result = _run("if comm.rank == 1 and number == 5: os.kill(os.getpid(), signal.SIGKILL)")
    _check_ended(result)
    assert "signal 9" in result.launcher_output, result.report()


def test_rank_that_leaves_early() -> None:
    """sys.exit on one rank: the others stop with a message that points there."""
    result = _run("if comm.rank == 1 and number == 5: sys.exit(0)")
    _check_ended(result)
    assert "another rank ended first" in result.outputs[0], result.report()


@pytest.mark.parametrize(
    "transport, hint",
    [("horovod", "Missing ranks"), ("shared_memory", "rank 0 waited 2 s for rank 1 in collective")],
)
def test_collective_on_one_rank_only(transport: str, hint: str) -> None:
    """The classical 'if rank == 0: evaluate()': within the stall limit the job ends and the lonely call is named."""
    limits = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
        "HVD_CTR_TRANSPORT": transport,
    }
    event = "if comm.rank == 0 and number == 5: comm.allreduce_sum([tf.ones([])], 'evaluate_on_rank_0')"
    result = _run(event, environment=limits)
    _check_ended(result)
    assert "evaluate_on_rank_0" in result.all_output(), result.report()
    assert hint in result.all_output(), result.report()


def test_transport_that_is_none() -> None:
    result = _run("pass", environment={"HVD_CTR_TRANSPORT": "pigeons"})
    _check_ended(result)
    assert "must be one of auto, horovod, shared_memory, got 'pigeons'" in result.all_output(), result.report()


def test_a_gpu_that_only_one_rank_sees() -> None:
    """Its rows would travel over NCCL, and the other rank would wait for them until the stall limit."""
    code = (
        "import os\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': import tests.support.stand_in_gpu\n"
        "from hvd_ctr import comm\n"
        "comm.init()\n"
        "print('all steps done')\n"
    )
    result = run_ranks(["-c", code], 2)
    _check_ended(result)
    assert "some ranks see a GPU and some none" in result.outputs[0], result.report()
    assert "no GPU on" in result.outputs[0] and "a GPU on" in result.outputs[0]
    # mpirun may have ended the other rank before it could say the same.
    assert "Traceback" not in result.outputs[1] or "some ranks see a GPU" in result.outputs[1], result.report()


def test_time_limit_kills_every_process(tmp_path: Path) -> None:
    """run_ranks itself: a hanging job is killed, ranks included, and what they had written is kept."""
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid.' + os.environ['OMPI_COMM_WORLD_RANK']).write_text(str(os.getpid()))\n"
        "print('waiting'); time.sleep(600)"
    )
    result = run_ranks(["-c", code], 2, timeout_seconds=5)
    assert result.timed_out
    assert result.exit_code != 0
    assert [output.strip() for output in result.outputs] == ["waiting"] * 2
    assert "killed: time limit" in result.report()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _parallel_tests(folder: Path, body: str, **environment: str) -> RanksResult:
    """Runs a test file beside a copy of the parallel tests' conftest on two ranks."""
    shutil.copy(REPOSITORY / "tests" / "parallel" / "conftest.py", folder / "conftest.py")
    (folder / "test_it.py").write_text(body)
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return run_ranks(arguments, 2, environment=environment, working_directory=folder)


def test_failing_parallel_test_ends_the_job(tmp_path: Path) -> None:
    body = "def test_it(comm):\n    assert comm.rank != 1, 'only here'\n    comm.barrier()\n    comm.barrier()\n"
    result = _parallel_tests(tmp_path, body)
    assert not result.timed_out, result.report()
    assert result.exit_code != 0
    assert "test_it.py::test_it failed in call" in result.outputs[1]
    assert "only here" in result.outputs[1]


def test_hanging_parallel_test_ends_the_job(tmp_path: Path) -> None:
    body = "import time\n\ndef test_it(comm):\n    if comm.rank == 0:\n        comm.barrier()\n    time.sleep(100)\n"
    result = _parallel_tests(tmp_path, body, HVD_CTR_TEST_SECONDS="4")
    assert not result.timed_out, result.report()
    assert result.exit_code != 0
    assert "ran longer than 4 s" in result.all_output()
    assert "in test_it" in result.all_output()


def test_passing_parallel_tests_are_reported_by_rank_0_only(tmp_path: Path) -> None:
    result = _parallel_tests(tmp_path, "def test_it(comm):\n    assert comm.size == 2\n")
    assert result.exit_code == 0, result.report()
    assert "1 passed" in result.outputs[0]
    assert result.outputs[1].strip() == ""
