"""Runs that are interrupted and go on: at other numbers of ranks, and after kill -9 at random moments.

HVD_CTR_LONG=1 kills at 20 moments instead of 2 (about four minutes).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ctr.training.checkpoint_folder import complete_in, latest
from tests.support.checkpoints import assert_same_bits, read_checkpoint
from tests.support.resume_program import configuration, job, run, write_data
from tests.support.run_ranks import RanksResult, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200 if os.environ.get("HVD_CTR_LONG") == "1" else 300)]
pytest.importorskip("horovod.tensorflow", reason="several ranks need Horovod")

_KILLS = 20 if os.environ.get("HVD_CTR_LONG") == "1" else 2
_MAX_STEPS = 70 if _KILLS == 2 else 300
_ADAM: dict[str, Any] = {"dense_optimizer": {"kind": "adam", "learning_rate": 0.002}}


def _run_jobs(folder: Path, ranks: int, jobs: list[dict[str, Any]]) -> RanksResult:
    with contextlib.suppress(FileExistsError):
        (folder / f"jobs_{ranks}").mkdir()
    path = folder / f"jobs_{ranks}" / "jobs.json"
    path.write_text(json.dumps(jobs))
    return run_ranks(["-m", "tests.support.resume_program", str(path)], ranks, timeout_seconds=180)


def _resumed(folder: Path, run_name: str, name: str) -> dict[str, Any]:
    """A job that goes on from step 20 of another run, under another name."""
    step_20 = folder / "runs" / run_name / "checkpoints/step-00000020"
    return job(configuration(folder, name, train=_ADAM), "RESUME", folder / f"{name}.json", step_20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 70 steps: "one" and "four" on 1 and 4 ranks, and, from their checkpoints of step 20, "four_on_1" and so
    on. Each has the losses of its steps beside it. One process per rank for all runs of a number of ranks.
    """
    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder)
    run([job(configuration(folder, "one", train=_ADAM), losses=folder / "one.json")])
    four = job(configuration(folder, "four", train=_ADAM), losses=folder / "four.json")
    result = _run_jobs(folder, 4, [four, _resumed(folder, "one", "one_on_4")])
    assert result.exit_code == 0, result.report()
    run([_resumed(folder, "four", "four_on_1")])
    result = _run_jobs(folder, 3, [_resumed(folder, "four", "four_on_3")])
    assert result.exit_code == 0, result.report()
    return folder


# The model of the kill tests: what it draws and counts makes any slip of the position visible.
_KILLED: dict[str, Any] = {
    "model": {"dropout": 0.2},
    "train": _ADAM,
    "checkpoint": {"every_steps": 4, "keep": 3},
}


class _Killer(threading.Thread):
    """Kills ranks of a run: some time after its start, or, when it has written a few new checkpoints, in its next save
    or some time later.
    """

    def __init__(self, folder: Path, name: str, ranks: list[int], seed: int) -> None:
        super().__init__(daemon=True)
        self._random = random.Random(seed)
        self._checkpoints = folder / "runs" / name / "checkpoints"
        self._pids = [folder / "jobs_2" / f"pid.{rank}" for rank in ranks]
        self._before = latest(self._checkpoints)
        for path in self._pids:
            path.unlink(missing_ok=True)
        self.in_a_save = False
        self.ended = threading.Event()

    def run(self) -> None:
        def is_saving() -> bool:
            return self._checkpoints.is_dir() and any(p.suffix == ".incomplete" for p in self._checkpoints.iterdir())

        def has_new() -> bool:
            before, self._before = self._before, latest(self._checkpoints)
            return self._before != before

        self._wait_for(lambda: all(path.exists() for path in self._pids))
        moment = self._random.random() if _KILLS > 2 else 0.0
        if moment > 0.85:
            time.sleep(self._random.uniform(2.0, 8.0))  # start, load, first steps
        else:
            for _ in range(self._random.randint(1, 3)):
                self._wait_for(has_new)
            if moment < 0.6:
                self._wait_for(is_saving)
            time.sleep(self._random.uniform(0.0, (0.03 if moment < 0.6 else 0.2) if _KILLS > 2 else 0.005))
        self.in_a_save = is_saving()
        for path in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    def _wait_for(self, condition: Any) -> None:
        while not self.ended.is_set():
            with contextlib.suppress(FileNotFoundError):  # it moves while we look
                if condition():
                    return
            time.sleep(0.0005)


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """On 2 ranks: "killed", ended by SIGKILL again and again, always resumed; "whole", its uninterrupted double; runs
    that go on from step 20 of "whole" in either tier; and "four_on_2".
    """
    config = configuration(folder, "killed", _MAX_STEPS, **_KILLED)
    checkpoints, moments = folder / "runs/killed/checkpoints", []
    for number in range(_KILLS):
        ranks = ([1], [0], [0, 1])[number % 3]
        killer = _Killer(folder, "killed", ranks, seed=number)
        killer.start()
        result = _run_jobs(folder, 2, [job(config, "RESUME")])
        killer.ended.set()
        killer.join()
        assert result.exit_code != 0 and not result.timed_out, result.report()
        newest = latest(checkpoints)
        if newest is not None:
            read_checkpoint(newest)
        torn = sorted(path.name for path in checkpoints.glob("*.*"))
        name = "none" if newest is None else newest.name
        moments.append(
            (f"kill {number + 1} of rank(s) {ranks}", name, killer.in_a_save, torn, f"{result.seconds:.1f} s")
        )
    print(*moments, sep="\n")
    assert newest is not None and any(in_a_save for _, _, in_a_save, _, _ in moments), moments
    (folder / "disk").mkdir()
    disk = {**_KILLED, "embedding": {"host": {"kind": "disk", "path": str(folder / "disk"), "ram_bytes": 2e6}}}
    depth = {**_KILLED, "train": {**_ADAM, "pipeline_depth": 0}}
    whole = configuration(folder, "whole", _MAX_STEPS, **{**_KILLED, "checkpoint": {"every_steps": 10}})
    step_20 = folder / "runs/whole/checkpoints/step-00000020"
    again = [configuration(folder, name, 70, **sections) for name, sections in (("on_disk", disk), ("depth_0", depth))]
    jobs = [job(config, "RESUME"), job(whole), *(job(settings, "RESUME", copy=step_20) for settings in again)]
    refused = job(config, refused=True)
    result = _run_jobs(folder, 2, [*jobs, _resumed(folder, "four", "four_on_2"), refused])
    assert result.exit_code == 0, result.report()
    for output in result.outputs:  # every rank says why, none trains over an older run
        assert "refused: " in output and "--overwrite removes them" in output, result.report()
    assert f"resumed from {newest}" in result.all_output(), result.report()
    return folder


@pytest.mark.parametrize(("whole", "resumed"), [("four", (1, 2, 3)), ("one", (4,))])
def test_any_number_of_ranks_goes_on_alike(two: Path, whole: str, resumed: tuple[int, ...]) -> None:
    """Saved at 4, loaded at 1, 2, 3; saved at 1, loaded at 4: the next 50 losses, across the end of an epoch."""
    expected = json.loads((two / f"{whole}.json").read_text())
    assert len(expected) == 70
    for ranks in resumed:
        losses = json.loads((two / f"{whole}_on_{ranks}.json").read_text())
        assert len(losses) == 50
        difference = float(np.max(np.abs(np.subtract(losses, expected[20:]))))
        print(f"saved by {whole}, loaded on {ranks} ranks: losses differ by {difference:.2g}")
        assert difference < 1e-6


def test_one_and_four_ranks_differ_in_the_losses_by_rounding_only(folder: Path) -> None:
    """So that the test above compares what it means to."""
    one, four = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", "four"))
    assert 0 < np.max(np.abs(np.subtract(one, four))) < 1e-5
    assert max(one) - min(one) > 0.01


@pytest.mark.parametrize("name", ["on_disk", "depth_0"])
def test_the_same_ranks_go_on_with_the_same_bits(two: Path, name: str) -> None:
    last = "checkpoints/step-00000070"
    assert_same_bits(two / "runs" / name / last, two / "runs/whole" / last)


def test_killed_runs_end_with_the_bits_of_a_run_that_was_not(two: Path) -> None:
    """FC 98: after each kill the newest checkpoint was whole; at the end nothing is left of the torn ones."""
    last = f"checkpoints/step-{_MAX_STEPS:08d}"
    assert_same_bits(two / "runs/killed" / last, two / "runs/whole" / last)
    names = [path.name for path in (two / "runs/killed/checkpoints").iterdir()]
    assert len(names) == 3 and all("." not in name for name in names), names
    assert complete_in(two / "runs/killed/checkpoints")[0].name == f"step-{_MAX_STEPS:08d}"
