"""What all ranks use together is closed at its end, and abandoned after an error; both users end so."""

from __future__ import annotations

import pytest

from hvd_ctr.training.collective_end import CollectiveEnd
from hvd_ctr.training.pipeline import Pipeline
from hvd_ctr.training.profiler import Profiler


class _Recorder(CollectiveEnd):
    def __init__(self) -> None:
        self.ends: list[str] = []

    def close(self) -> None:
        self.ends.append("closed")

    def abandon(self) -> None:
        self.ends.append("abandoned")


def test_the_end_of_the_block_closes() -> None:
    with _Recorder() as recorder:
        assert recorder.ends == []
    assert recorder.ends == ["closed"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_abandons_and_goes_on(error: type[BaseException]) -> None:
    recorder = _Recorder()
    with pytest.raises(error), recorder:
        raise error
    assert recorder.ends == ["abandoned"]


@pytest.mark.parametrize("user", [Pipeline, Profiler])
def test_there_is_one_way_to_end(user: type[CollectiveEnd]) -> None:
    assert user.__exit__ is CollectiveEnd.__exit__ and user.__enter__ is CollectiveEnd.__enter__
