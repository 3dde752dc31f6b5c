"""launch/mpirun.sh and launch/horovodrun.sh: the command line they make, and real ranks on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.launch.sandbox import run_here, write_program

MPIRUN = "launch/mpirun.sh"
PRINT_RANK = "import sys; from mpi4py import MPI; w = MPI.COMM_WORLD; sys.stdout.write(f'rank {w.rank} of {w.size}\\n')"


def shown(*arguments: str, **environment: str) -> list[str]:
    """The command line that mpirun.sh would run."""
    done = run_here([MPIRUN, *arguments], HVD_CTR_SHOW="1", **environment)
    assert done.returncode == 0, done.stdout
    return shlex.split(done.stdout)


def exported(command: list[str]) -> set[str]:
    return {command[i + 1] for i, word in enumerate(command) if word == "-x"}


def test_flags_that_every_run_gets() -> None:
    command = shown("-np", "1", "hvd-ctr", "train", "a b.yaml")
    assert command[0] == "mpirun"
    assert command[-5:] == ["-np", "1", "hvd-ctr", "train", "a b.yaml"]
    assert "--bind-to none" in " ".join(command)
    assert "--mca mpi_yield_when_idle 1" in " ".join(command)
    assert {"PATH", "HOROVOD_DISABLE_GROUP_FUSION", "TF_CPP_MIN_LOG_LEVEL"} <= exported(command)
    assert ("--allow-run-as-root" in command) == (os.geteuid() == 0)


def test_user_settings_win_and_travel() -> None:
    settings = {"OMPI_MCA_mpi_yield_when_idle": "0", "HOROVOD_TIMELINE": "t", "OTHER": "o", "HVD_CTR_EXPORT": "OTHER"}
    command = shown("-np", "1", "x", **settings)
    assert "--mca mpi_yield_when_idle 0" in " ".join(command)
    assert {"HOROVOD_TIMELINE", "OTHER"} <= exported(command)


def test_more_ranks_than_cores() -> None:
    assert "--oversubscribe" in shown("-np", "4096", "x")
    assert "--oversubscribe" in shown("--np", "4096", "x")
    assert "--oversubscribe" not in shown("-np", "1", "x")
    # The program's own -n is not ours.
    assert "--oversubscribe" not in shown("-np", "1", "program", "-n", "4096")
    assert "--oversubscribe" not in shown("-np", "1", "--mca", "btl", "self", "program", "-n", "4096")


def test_several_machines_find_the_mpi_of_the_environment() -> None:
    command = shown("-np", "8", "-H", "node1:4,node2:4", "x")
    assert "--oversubscribe" not in command
    if os.environ.get("OPAL_PREFIX"):
        assert command[command.index("--prefix") + 1] == os.environ["OPAL_PREFIX"]
        assert "--prefix" not in shown("-np", "1", "x")


def test_network_interface() -> None:
    text = " ".join(shown("-np", "1", "x", HVD_CTR_INTERFACE="ib0"))
    assert "--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0" in text


def test_mpich_and_its_relatives(tmp_path: Path) -> None:
    write_program(tmp_path / "mpirun", "#!/bin/sh\necho HYDRA build details: Version 4.2\n")
    # The environment's own mpirun comes first on PATH only when env.sh has to activate it.
    command = shown("-np", "2", "x", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "-x" not in command and "--mca" not in command and "--allow-run-as-root" not in command
    assert "HOROVOD_STALL_CHECK_TIME_SECONDS" in command[command.index("-genvlist") + 1].split(",")


@pytest.mark.parametrize("count", ["0", "two", "-1"])
def test_a_wrong_number_of_ranks(count: str) -> None:
    done = run_here([MPIRUN, "-np", count, "x"])
    assert done.returncode == 2
    assert f"the number of ranks is '{count}'" in done.stdout


def test_help_without_arguments() -> None:
    done = run_here([MPIRUN])
    assert done.returncode == 2
    assert "./launch/mpirun.sh -np 2 hvd-ctr train" in done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize(("script", "ranks"), [(MPIRUN, 2), (MPIRUN, 4), ("launch/horovodrun.sh", 2)])
def test_ranks_find_each_other(script: str, ranks: int) -> None:
    done = run_here([script, "-np", str(ranks), "python", "-c", PRINT_RANK])
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert done.stdout.count(f"rank {rank} of {ranks}") == 1, done.stdout


@pytest.mark.ranks
def test_a_list_of_hosts_that_names_this_machine() -> None:
    done = run_here([MPIRUN, "-np", "2", "-H", "localhost:2", "python", "-c", PRINT_RANK])
    assert done.returncode == 0 and "rank 1 of 2" in done.stdout, done.stdout


@pytest.mark.ranks
def test_the_failure_of_one_rank_ends_the_job() -> None:
    code = f"import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os._exit(3)\ntime.sleep(100)\n{PRINT_RANK}"
    done = run_here([MPIRUN, "-np", "2", "python", "-c", code], timeout=60)
    assert done.returncode == 3, done.stdout


@pytest.mark.ranks
def test_gloo_is_refused() -> None:
    done = run_here(["launch/horovodrun.sh", "--gloo", "-np", "2", "x"])
    assert done.returncode == 2
    assert "--gloo is not supported" in done.stdout
