"""launch/run_parallel_tests.sh, launch/test.sh and .ci/run: failures and hangs are shown, and end."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.launch.sandbox import ROOT, run_here

RUNNER = "launch/run_parallel_tests.sh"


@pytest.mark.ranks
def test_a_passing_job_shows_the_report_of_rank_0(tmp_path: Path) -> None:
    test = tmp_path / "test_rank.py"
    test.write_text(
        "import os\n"
        "def test_rank(capsys):\n"
        "    with capsys.disabled():\n"
        "        print('I am', os.environ['OMPI_COMM_WORLD_RANK'])\n"
    )
    done = run_here([RUNNER, "2", str(test)])
    assert done.returncode == 0, done.stdout
    assert "I am 0" in done.stdout and "I am 1" not in done.stdout
    assert done.stdout.count("1 passed") == 1


@pytest.mark.ranks
def test_a_failure_on_another_rank_is_shown(tmp_path: Path) -> None:
    test = tmp_path / "test_rank.py"
    test.write_text(
        "import os\ndef test_rank():\n    assert os.environ['OMPI_COMM_WORLD_RANK'] == '0', 'broken here'\n"
    )
    done = run_here([RUNNER, "2", str(test)])
    assert done.returncode != 0
    assert "parallel_2/rank.1" in done.stdout and "broken here" in done.stdout


@pytest.mark.ranks
def test_a_hang_is_killed_at_the_limit(tmp_path: Path) -> None:
    test = tmp_path / "test_rank.py"
    test.write_text(
        "import os, time\n"
        "def test_rank():\n"
        "    open(f\"{os.path.dirname(__file__)}/{os.environ['OMPI_COMM_WORLD_RANK']}.{os.getpid()}\", 'w').close()\n"
        "    time.sleep(600)\n"
    )
    begin = time.monotonic()
    done = run_here([RUNNER, "2", str(test)], HVD_CTR_JOB_SECONDS="6")
    assert time.monotonic() - begin < 30
    assert done.returncode != 0
    assert "the job on 2 ranks was killed after 6 s" in done.stdout
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("[01].*")]
    assert len(pids) == 2
    time.sleep(1)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")], "ranks outlive the job"


def test_an_unknown_stage() -> None:
    done = run_here(["launch/test.sh", "unit", "nonsense"])
    assert done.returncode == 1
    assert (
        "there is no stage 'nonsense'; choose from: format ruff mypy cpp tsan unit launch parallel cuda" in done.stdout
    )


def test_ci_runs_test_sh_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == 1
    assert lines[0].startswith("exec ") and lines[0].endswith('launch/test.sh"')


def test_what_is_left_out_with_more_ranks_than_cores_exists() -> None:
    """A renamed test would run on four ranks again, and nobody would see why it takes longer."""
    folder = ROOT / "tests" / "parallel"
    (names,) = re.findall(r"^_ON_FEW_RANKS = frozenset\(\n(.*?)^\)", (folder / "conftest.py").read_text(), re.M | re.S)
    entries = re.findall(r'"(test_\w+)(?:::(test_\w+))?"', names)
    assert len(entries) == names.count('"') // 2 > 7
    for module, function in entries:
        text = (folder / f"{module}.py").read_text()
        assert not function or f"\ndef {function}(" in text, (module, function)
