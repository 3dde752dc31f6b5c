"""Parallel tests: every rank of a job runs the same tests in the same order.

    mpirun -np 2 python -m pytest tests/parallel      # on 2 ranks
    python -m pytest tests/parallel                   # on 1, without MPI

With more ranks than cores (four on a small machine) the tests of `_ON_FEW_RANKS` are left out, unless
HVD_CTR_ALL_TESTS=1: what they test does not change between two ranks and more, and processes that share cores are slow.

A test holds for any number of ranks. A failure on one rank prints that rank's report and ends the whole job, since the
other ranks would wait for it in their next collective; so does a test that runs longer than HVD_CTR_TEST_SECONDS
(default 120) seconds. Only rank 0 prints the progress.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator

import pytest

from hvd_ctr import comm as comm_module
from hvd_ctr.comm import Comm

_LIMIT_SECONDS = float(os.environ.get("HVD_CTR_TEST_SECONDS", "120"))

# Modules, and tests of modules whose others stay.
_ON_FEW_RANKS = frozenset(
    {
        "test_callbacks",
        "test_count",
        "test_fit",
        "test_metrics",
        "test_plan",
        "test_pooling",
        "test_profile",
        # Every rank's own arithmetic.
        "test_simd_levels",
        # More of Keras' fit.
        "test_pipeline::test_a_subclassed_model_trains_without_a_pipeline",
        "test_pipeline::test_fit_of_a_mapping_of_features",
        "test_pipeline::test_fit_with_steps_per_epoch_and_early_stop",
        "test_statistics::test_keras_logs_of_an_epoch",
        # Every rank has a file of its own; test_exactness has the disk tier on all numbers of ranks.
        "test_tiers::test_a_budget_in_ram_that_suffices_changes_nothing",
        "test_tiers::test_a_checkpoint_restores_into_the_other_tier",
        "test_tiers::test_disk_tier_equals_ram_tier_bit_for_bit",
    }
)

# The true stderr: while a test runs, pytest collects what is written to descriptor 2, and os._exit would lose it.
_stderr = 2


def _launcher_rank() -> int:
    """This process' rank before the communicator exists, for silence from the start."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Ranks other than 0 write nothing: their terminal reporter gets the null device."""
    global _stderr
    _stderr = os.dup(2)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _launcher_rank() != 0:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The same choice on every rank."""
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if ranks <= max(2, len(os.sched_getaffinity(0))) or os.environ.get("HVD_CTR_ALL_TESTS") == "1":
        return

    def is_left_out(item: pytest.Item) -> bool:
        function = getattr(item, "originalname", item.name)
        return not _ON_FEW_RANKS.isdisjoint({item.path.stem, f"{item.path.stem}::{function}"})

    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def comm() -> Comm:
    """The communicator of the job; one rank without a launcher."""
    return comm_module.init()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the job when a test of this folder takes too long: a hang is a failure."""

    def end_job() -> None:
        text = f"rank {_launcher_rank()}: {item.nodeid} ran longer than {_LIMIT_SECONDS:g} s; stacks:\n"
        os.write(_stderr, text.encode())
        faulthandler.dump_traceback(file=_stderr, all_threads=True)
        os._exit(124)

    timer = threading.Timer(_LIMIT_SECONDS, end_job)
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and comm_module.current().size > 1:
        rank = comm_module.current().rank
        sections = "\n".join(f"--- {name} ---\n{text}" for name, text in report.sections)
        text = f"\nrank {rank}: {report.nodeid} failed in {report.when}\n{report.longreprtext}\n{sections}\n"
        os.write(2, text.encode(errors="replace"))
        comm_module.current().abort(1, f"{report.nodeid} failed, the job ends")
