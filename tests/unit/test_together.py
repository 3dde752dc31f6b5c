"""Long work on all ranks: signs of life, and errors that reach everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hvd_ctr.comm import LocalComm
from hvd_ctr.training import together
from hvd_ctr.training.together import work_together


class _Others(LocalComm):
    """A job in which the other rank says what it is told to, one word per exchange."""

    def __init__(self, words: list[Any]) -> None:
        super().__init__()
        self.said: list[Any] = []
        self._words = iter(words)

    def allgather_object(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, next(self._words)]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(together.time, "monotonic", lambda: now[0])
    return now


def test_a_word_every_few_seconds_until_all_are_done(seconds: list[float]) -> None:
    def pieces() -> Iterator[None]:
        for _ in range(10):
            seconds[0] += 2.0
            yield

    comm = _Others([[True, None]] * 10)
    assert work_together(comm, pieces(), str) == ([None, None], None)
    assert comm.said == [[False, None]] * 3 + [[True, None]]
    comm = _Others([[False, None]] * 7 + [[True, None]])
    assert work_together(comm, iter(()), str) == ([None, None], None)
    assert len(comm.said) == 8


def test_an_error_ends_the_work_of_all(seconds: list[float]) -> None:
    def fails() -> Iterator[None]:
        yield
        raise OSError("full")

    reports, error = work_together(_Others([[False, None]]), fails(), str)
    assert reports == ["full", None] and isinstance(error, OSError)

    worked = []

    def endless() -> Iterator[None]:
        while True:
            seconds[0] += 1.0
            worked.append(1)
            yield

    assert work_together(_Others([[False, None], [True, "torn"]]), endless(), str) == ([None, "torn"], None)
    assert len(worked) == 10
