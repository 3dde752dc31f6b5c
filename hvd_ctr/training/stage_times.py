"""From recorded events to times per stage and step: every moment of a thread belongs to one stage, so that the stages
of a step add up to the step.

The rule, for each moment of a thread and the events that cover it:

1. Work of this library (and reading and waiting) wins; of several the one that began last: calls nest.
2. Else the backward pass, from the loss until the last gradient of a dense weight: what a collective does beside it
   costs nothing.
3. Else collectives; of several the one that began first.
4. Else what TensorFlow runs between the marks: `launch` (Python and TensorFlow, from the end of the step before until
   the first operation of this one), `forward` (from the last rows' arrival until the loss), `dense update` (from the
   dense allreduce until the end of the step: the dense weights' optimizer, and metrics).
5. Else `other`.

In a pipeline the three threads have tables of their own; their moments are those of the GPU-Worker's steps, whatever
batch they work for. Without one, everything runs in the GPU-Worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_ctr.stage_clock import THREADS, Span

#: All stages in the order of a batch's way, as reports list them.
STAGES = (
    "waiting",
    "read",
    "parse",
    "dedupe",
    "partition",
    "key exchange",
    "plan",
    "write-back",
    "host I/O",
    "launch",
    "lookup",
    "row exchange",
    "pool",
    "forward",
    "backward",
    "pool gradient",
    "dense allreduce",
    "gradient exchange",
    "segment sum",
    "update",
    "dense update",
    "other",
)
COLLECTIVES = frozenset({"key exchange", "row exchange", "dense allreduce", "gradient exchange"})
_LOSS = "loss"
_PYTHON = frozenset({"waiting", "read", "parse"})
_FIRST_OF_A_STEP = frozenset({"dedupe", "partition", "key exchange", "plan", "lookup"})
# Where the pipeline runs what C++ times; the GPU-Worker runs the rest.
_PIPELINED = {
    **dict.fromkeys(("dedupe", "partition"), "Data-Loader"),
    **dict.fromkeys(("plan", "write-back", "host I/O", "waiting"), "Host-Manager"),
}
_LEVELS = {"backward": 2, **dict.fromkeys(COLLECTIVES, 1), **dict.fromkeys(("launch", "forward", "dense update"), 0)}
_WORK = 3


class Interval(NamedTuple):
    """A stage from begin to end, ns."""

    stage: str
    begin_ns: int
    end_ns: int


class Window(NamedTuple):
    """One measurement of the GPU-Worker: `steps` steps from begin to end, ns; `step` is the last one's number."""

    step: int
    begin_ns: int
    end_ns: int
    steps: int = 1


class Segment(NamedTuple):
    """A stretch of a window that belongs to one stage; `window` is its index."""

    window: int
    stage: str
    begin_ns: int
    end_ns: int


def by_thread(events: Iterable[Interval], spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """The threads' events. `events` are those of C++, `spans` those of Python; a pipeline runs if one of its threads
    has a span.
    """
    threads: dict[str, list[Interval]] = {thread: [] for thread in THREADS}
    for stage, begin_ns, end_ns, thread in spans:
        threads[thread].append(Interval(stage, begin_ns, end_ns))
    pipelined = any(threads[thread] for thread in THREADS[:-1])
    for event in events:
        threads[_PIPELINED.get(event.stage, THREADS[-1]) if pipelined else THREADS[-1]].append(event)
    return {thread: found for thread, found in threads.items() if found or thread == THREADS[-1]}


def phases(events: Sequence[Interval], windows: Sequence[Window]) -> list[Interval]:
    """What TensorFlow runs between the GPU-Worker's events: launch, forward, backward and dense update."""
    found: list[Interval] = []
    ordered = sorted((e for e in events if e.stage not in _PYTHON), key=lambda event: event.begin_ns)
    position = 0
    for window in windows:
        inside: list[Interval] = []
        while position < len(ordered) and ordered[position].begin_ns < window.end_ns:
            if ordered[position].begin_ns >= window.begin_ns:
                inside.append(ordered[position])
            position += 1
        found += _phases_of_a_window(inside, window)
    return found


def _phases_of_a_window(events: Sequence[Interval], window: Window) -> list[Interval]:
    """Events by their begin."""
    if not events:
        return []
    found = [Interval("launch", window.begin_ns, events[0].begin_ns)]
    losses = [event.begin_ns for event in events if event.stage == _LOSS]
    begin = events[0].begin_ns
    for loss, later_loss in zip(losses, [*losses[1:], window.end_ns], strict=True):
        after = (e.begin_ns for e in events if e.stage in _FIRST_OF_A_STEP and loss < e.begin_ns < later_loss)
        end = next(after, later_loss)
        rows = max((e.end_ns for e in events if e.stage == "row exchange" and begin <= e.end_ns <= loss), default=begin)
        found.append(Interval("forward", rows, loss))
        dense = [e for e in events if e.stage == "dense allreduce" and loss <= e.begin_ns < end]
        if dense:
            found.append(Interval("backward", loss, max(e.begin_ns for e in dense)))
            found.append(Interval("dense update", max(e.end_ns for e in dense), end))
        else:
            last = max(
                (e.end_ns for e in events if e.stage == "pool gradient" and loss <= e.end_ns <= end), default=loss
            )
            found.append(Interval("backward", loss, last))
        begin = end
    return found


def exclusive(events: Iterable[Interval], windows: Sequence[Window]) -> list[Segment]:
    """Cuts the windows into segments of one stage each, by the rule above; they cover the windows without a gap."""
    changes: list[tuple[int, int, Interval | None]] = []  # time, 0: ends or 1: begins, event; None: a window's border
    for event in events:
        if event.begin_ns < event.end_ns:
            changes += [(event.begin_ns, 1, event), (event.end_ns, 0, event)]
    for window in windows:
        changes += [(window.begin_ns, 0, None), (window.end_ns, 0, None)]
    changes.sort(key=lambda change: change[:2])
    segments: list[Segment] = []
    running: list[Interval] = []
    index = 0
    for (now, begins, change), (until, _, _) in itertools.pairwise(changes):
        if change is not None:
            running.append(change) if begins else running.remove(change)
        while index < len(windows) and windows[index].end_ns <= now:
            index += 1
        if index == len(windows):
            break
        if now < until and windows[index].begin_ns <= now:
            _append(segments, Segment(index, max(running, key=_precedence).stage if running else "other", now, until))
    return segments


def _precedence(event: Interval) -> tuple[int, int]:
    level = _LEVELS.get(event.stage, _WORK)
    return level, event.begin_ns if level == _WORK else -event.begin_ns


def _append(segments: list[Segment], new: Segment) -> None:
    """Joins it to the last one where both are of one stage."""
    last = segments[-1] if segments else None
    if last is not None and last[:2] == new[:2] and last.end_ns == new.begin_ns:
        segments[-1] = last._replace(end_ns=new.end_ns)
    else:
        segments.append(new)


def per_step_ns(segments: Iterable[Segment], windows: Sequence[Window]) -> NDArray[np.float64]:
    """(windows, stages) ns of a step, columns as in STAGES."""
    times = np.zeros((len(windows), len(STAGES)))
    for window, stage, begin_ns, end_ns in segments:
        times[window, STAGES.index(stage)] += (end_ns - begin_ns) / windows[window].steps
    return times
