"""Every moment of a step belongs to one stage."""

from __future__ import annotations

import pytest

from hvd_ctr.ops import stage_ops
from hvd_ctr.stage_clock import Span
from hvd_ctr.training import stage_times
from hvd_ctr.training.stage_times import STAGES, Interval, Segment, Window


def _totals(events: list[Interval], *windows: Window) -> list[dict[str, float]]:
    """Per window the stages' ns of a step."""
    rows = stage_times.per_step_ns(stage_times.exclusive(events, windows), windows)
    return [{stage: ns for stage, ns in zip(STAGES, row, strict=True) if ns} for row in rows]


def test_all_that_is_recorded_has_a_place_in_reports() -> None:
    assert set(stage_ops.stage_names()) - {"loss"} <= set(STAGES)
    assert set(stage_ops.stage_names()) >= stage_times.COLLECTIVES


def test_nested_work_is_counted_once() -> None:
    events = [Interval("plan", 10, 100), Interval("host I/O", 30, 80), Interval("write-back", 40, 50)]
    assert _totals(events, Window(1, 0, 120)) == [{"plan": 40, "write-back": 10, "host I/O": 40, "other": 30}]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Work before the backward pass before collectives before what TensorFlow does otherwise.
        (
            [Interval("backward", 0, 60), Interval("gradient exchange", 40, 100)],
            {"backward": 60, "gradient exchange": 40},
        ),
        (
            [Interval("gradient exchange", 0, 100), Interval("segment sum", 20, 50)],
            {"gradient exchange": 70, "segment sum": 30},
        ),
        ([Interval("forward", 0, 100), Interval("row exchange", 20, 50)], {"forward": 70, "row exchange": 30}),
        ([Interval("backward", 0, 100), Interval("pool gradient", 20, 50)], {"backward": 70, "pool gradient": 30}),
        ([Interval("launch", 0, 100), Interval("waiting", 20, 50)], {"launch": 70, "waiting": 30}),
        # Of two collectives the one that began first.
        (
            [Interval("dense allreduce", 0, 60), Interval("gradient exchange", 20, 100)],
            {"dense allreduce": 60, "gradient exchange": 40},
        ),
        ([], {"other": 100}),
    ],
)
def test_who_owns_a_moment(events: list[Interval], expected: dict[str, float]) -> None:
    for order in (events, events[::-1]):
        assert _totals(order, Window(1, 0, 100)) == [expected]


def test_events_are_cut_at_windows_and_what_lies_between_belongs_to_none() -> None:
    events = [Interval("lookup", 5, 35), Interval("update", 90, 200)]
    windows = (Window(1, 10, 20), Window(2, 20, 40), Window(4, 100, 140, steps=2))
    assert _totals(events, *windows) == [{"lookup": 10}, {"lookup": 15, "other": 5}, {"update": 20}]
    assert stage_times.exclusive(events, windows) == [
        Segment(0, "lookup", 10, 20),
        Segment(1, "lookup", 20, 35),
        Segment(1, "other", 35, 40),
        Segment(2, "update", 100, 140),
    ]


def _step(begin: int) -> list[Interval]:
    """100 ns: launch 10, lookup 10, rows 20, pool 5, forward 15, backward 10 (with the gradient of pool inside), dense
    allreduce 10, sum and update 10, dense update 10."""
    parts = {
        "lookup": (10, 20),
        "row exchange": (20, 40),
        "pool": (40, 45),
        "loss": (60, 60),
        "pool gradient": (62, 66),
        "gradient exchange": (66, 80),
        "dense allreduce": (70, 80),
        "segment sum": (80, 84),
        "update": (80, 90),
    }
    return [Interval(stage, begin + first, begin + last) for stage, (first, last) in parts.items()]


_EXPECTED = {
    "launch": 10,
    "lookup": 10,
    "row exchange": 20,
    "pool": 5,
    "forward": 15,
    "backward": 6,
    "pool gradient": 4,
    "gradient exchange": 10,
    "segment sum": 4,
    "update": 6,
    "dense update": 10,
}


def test_phases_of_a_step() -> None:
    events, window = _step(1000), Window(1, 1000, 1100)
    phases = stage_times.phases(events, [window])
    assert phases == [
        Interval("launch", 1000, 1010),
        Interval("forward", 1040, 1060),
        Interval("backward", 1060, 1070),
        Interval("dense update", 1080, 1100),
    ]
    assert _totals([*events, *phases], window) == [_EXPECTED]


def test_a_window_of_several_steps_and_events_outside() -> None:
    """Three steps in one execution: only the first has a launch that shows; the others' gap is the dense update's."""
    events = [e for begin in (0, 100, 200, 300, 400) for e in _step(begin)]
    window = Window(4, 100, 400, steps=3)
    (total,) = _totals([*events, *stage_times.phases(events, [window])], window)
    assert total == pytest.approx({**_EXPECTED, "launch": 10 / 3, "dense update": 10 + 2 * 10 / 3})


def test_two_row_exchanges_and_no_dense_weights() -> None:
    events = [
        Interval("lookup", 10, 20),
        Interval("lookup", 20, 25),
        Interval("row exchange", 20, 30),
        Interval("row exchange", 25, 40),
        Interval("loss", 50, 50),
        Interval("pool gradient", 55, 70),
        Interval("update", 80, 90),
    ]
    window = Window(1, 0, 100)
    phases = stage_times.phases(events, [window])
    assert phases == [Interval("launch", 0, 10), Interval("forward", 40, 50), Interval("backward", 50, 70)]
    assert _totals([*events, *phases], window) == [
        {
            "launch": 10,
            "lookup": 15,
            "row exchange": 15,
            "forward": 10,
            "backward": 5,
            "pool gradient": 15,
            "update": 10,
            "other": 20,
        }
    ]


def test_threads() -> None:
    events = [Interval(stage, 1, 2) for stage in ("dedupe", "plan", "lookup", "waiting")]
    waiting = Span("waiting", 3, 4, "GPU-Worker")
    assert stage_times.by_thread(events, [waiting]) == {"GPU-Worker": [Interval("waiting", 3, 4), *events]}
    piped = stage_times.by_thread(events, [waiting, Span("read", 5, 6, "Data-Loader")])
    assert piped == {
        "Data-Loader": [Interval("read", 5, 6), Interval("dedupe", 1, 2)],
        "Host-Manager": [Interval("plan", 1, 2), Interval("waiting", 1, 2)],
        "GPU-Worker": [Interval("waiting", 3, 4), Interval("lookup", 1, 2)],
    }
