"""Checkpoints by wall clock: how often the ranks talk about it, and when it is due."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_ctr.comm import LocalComm
from hvd_ctr.training.save_timer import SaveTimer


class _Counting(LocalComm):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def allgather_object(self, value: Any) -> list[Any]:
        self.asked += 1
        return super().allgather_object(value)


def _run(seconds: float, step_seconds: list[float]) -> tuple[list[float], int]:
    """Times of the saves, and the number of exchanges."""
    comm, now, saves = _Counting(), [100.0], []
    timer = SaveTimer(comm, seconds, lambda: now[0])
    for step in step_seconds:
        now[0] += step
        if timer.due():
            saves.append(now[0] - 100.0)
            now[0] += 5.0  # the save itself
            timer.restart()
    return saves, comm.asked


def test_saves_come_on_time_and_the_ranks_rarely_talk() -> None:
    saves, asked = _run(60.0, [0.01] * 100_000)  # 1000 s
    periods = [later - before for before, later in zip([0.0, *saves], saves, strict=False)]
    assert len(saves) == 16 and all(60.0 <= period < 66.0 for period in periods), periods
    assert asked < 600  # in 100,000 steps


def test_a_changing_step_time_delays_a_save_by_little() -> None:
    saves, _ = _run(60.0, [0.02] * 2500 + [0.4] * 1000)  # 20 times slower after 50 s
    assert saves and 60.0 <= saves[0] < 60.0 + 20 * 2.0
    saves, asked = _run(60.0, [70.0] * 10)
    assert len(saves) == 10 and asked <= 11


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_a_period_shorter_than_the_questions(seconds: float) -> None:
    saves, _ = _run(seconds, [0.1] * 1000)
    periods = [later - before for before, later in zip(saves, saves[1:], strict=False)]
    assert all(seconds <= period - 5.0 < seconds + 0.3 for period in periods), periods[:5]
