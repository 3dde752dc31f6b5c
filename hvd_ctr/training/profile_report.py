"""A profile as a text table, as scalars for TensorBoard and as a trace for Chrome's and Perfetto's viewers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ctr.stage_clock import THREADS
from hvd_ctr.training.stage_times import COLLECTIVES, STAGES, Interval, Segment, Window, per_step_ns

_WORKER = THREADS[-1]
# The critical path first.
_ORDER = tuple(reversed(THREADS))
_OTHER = STAGES.index("other")


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """What one rank recorded, in ns of rank 0's clock.

    Attributes:
        windows: the profiled steps.
        threads: thread -> segments that cover the windows.
        collectives: the collectives as they were in flight, which the segments only show where nothing else ran.
        lost: events that found no room.
    """

    windows: list[Window]
    threads: dict[str, list[Segment]]
    collectives: list[Interval]
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        """Lists and numbers; see `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankProfile:
        """Reads `to_json`."""
        return cls(
            [Window(*window) for window in value["windows"]],
            {thread: [Segment(*s) for s in segments] for thread, segments in value["threads"].items()},
            [Interval(*interval) for interval in value["collectives"]],
            value["lost"],
        )

    def shifted(self, offset_ns: int) -> RankProfile:
        """With all times earlier by `offset_ns`."""
        return RankProfile(
            [w._replace(begin_ns=w.begin_ns - offset_ns, end_ns=w.end_ns - offset_ns) for w in self.windows],
            {
                thread: [s._replace(begin_ns=s.begin_ns - offset_ns, end_ns=s.end_ns - offset_ns) for s in segments]
                for thread, segments in self.threads.items()
            },
            [c._replace(begin_ns=c.begin_ns - offset_ns, end_ns=c.end_ns - offset_ns) for c in self.collectives],
            self.lost,
        )

    def step_ms(self) -> NDArray[np.float64]:
        """(windows) ms per step."""
        return np.array([(w.end_ns - w.begin_ns) / w.steps for w in self.windows]) / 1e6

    def stage_ms(self, thread: str) -> NDArray[np.float64]:
        """(windows, stages) ms per step in a thread, columns as in STAGES."""
        return per_step_ns(self.threads[thread], self.windows) / 1e6


class Profile:
    """The profiles of all ranks, by rank; all of the same steps. At least one, with at least one step."""

    def __init__(self, ranks: Sequence[RankProfile]) -> None:
        self.ranks = list(ranks)
        self.first = ranks[0].windows[0].step - ranks[0].windows[0].steps + 1
        self.last = ranks[0].windows[-1].step
        self.lost = sum(rank.lost for rank in ranks)

    def figures(self) -> dict[str, Any]:
        """Times per step in ms over all ranks and steps: {"steps": [first, last], "ranks": W, "step_ms": {...},
        "threads": {thread: {stage: {"median_ms", "p10_ms", "p90_ms", "share"}}}, "collectives": {stage:
        {"in_flight_ms", "exposed_ms"}}, "named_share", "lost_events"}.

        "share" is of the time of all steps; "named_share" is what all stages of the GPU-Worker but `other` have. Of a
        collective, means per step: how long it took, and how long the GPU-Worker did nothing else meanwhile.
        """
        step_ms = np.concatenate([rank.step_ms() for rank in self.ranks])
        weights = np.concatenate([[window.steps for window in rank.windows] for rank in self.ranks])
        whole = float(weights @ step_ms)
        threads = {}
        for thread in (thread for thread in _ORDER if thread in self.ranks[0].threads):
            times = np.concatenate([rank.stage_ms(thread) for rank in self.ranks if thread in rank.threads])
            threads[thread] = {
                stage: {**_spread(times[:, i]), "share": float(weights @ times[:, i]) / whole}
                for i, stage in enumerate(STAGES)
                if times[:, i].any()
            }
        worker = threads[_WORKER]
        return {
            "steps": [self.first, self.last],
            "ranks": len(self.ranks),
            "step_ms": _spread(step_ms),
            "threads": threads,
            "collectives": self._collectives(),
            "named_share": sum(values["share"] for stage, values in worker.items() if stage != "other"),
            "lost_events": self.lost,
        }

    def _collectives(self) -> dict[str, dict[str, float]]:
        steps = sum(window.steps for rank in self.ranks for window in rank.windows)
        found: dict[str, dict[str, float]] = {}
        for stage in (stage for stage in STAGES if stage in COLLECTIVES):
            in_flight = [c.end_ns - c.begin_ns for rank in self.ranks for c in rank.collectives if c.stage == stage]
            exposed = [
                segment.end_ns - segment.begin_ns
                for rank in self.ranks
                for segment in rank.threads[_WORKER]
                if segment.stage == stage
            ]
            if in_flight:
                found[stage] = {"in_flight_ms": sum(in_flight) / steps / 1e6, "exposed_ms": sum(exposed) / steps / 1e6}
        return found

    def table(self) -> str:
        """The figures as text."""
        figures = self.figures()
        lines = [
            f"Profile of steps {self.first} to {self.last} on {len(self.ranks)} rank(s), ms per step",
            "",
        ]
        for thread, stages in figures["threads"].items():
            title = f"{thread} (the critical path)" if thread == _WORKER else f"{thread} (beside it)"
            lines.append(f"{title:<32}{'median':>10}{'p10':>10}{'p90':>10}{'share':>9}")
            lines += [_row(f"  {stage}", values, values["share"]) for stage, values in stages.items()]
            if thread == _WORKER:
                lines.append(_row("  the whole step", figures["step_ms"], 1.0))
            lines.append("")
        lines.append(f"{'Collectives':<32}{'in flight':>10}{'exposed':>10}   means; exposed: on the critical path")
        lines += [
            f"{f'  {stage}':<32}{values['in_flight_ms']:>10.3f}{values['exposed_ms']:>10.3f}"
            for stage, values in figures["collectives"].items()
        ]
        lines.append("")
        lines.append(f"stages with a name: {100 * figures['named_share']:.1f} % of the step")
        lines += [f"rank {number}: {self._rank_line(rank)}" for number, rank in enumerate(self.ranks)]
        if self.lost:
            lines.append(f"{self.lost:,} events found no room and are missing above: profile fewer steps")
        return "\n".join(lines)

    @staticmethod
    def _rank_line(rank: RankProfile) -> str:
        times, step = rank.stage_ms(_WORKER).sum(axis=0), float(rank.step_ms().sum())
        shares = {
            "collectives (exposed)": sum(times[STAGES.index(stage)] for stage in COLLECTIVES),
            "waiting": times[STAGES.index("waiting")],
            "other": times[_OTHER],
        }
        parts = [f"{name} {100 * value / step:.1f} %" for name, value in shares.items()]
        return f"step {float(np.median(rank.step_ms())):.3f} ms (median); {', '.join(parts)}"

    def scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Per profiled step its number and {"profile_ms/THREAD/STAGE": ms}, means over the ranks, for TensorBoard."""
        by_thread = {
            thread: np.mean([rank.stage_ms(thread) for rank in self.ranks if thread in rank.threads], axis=0)
            for thread in self.ranks[0].threads
        }
        step_ms = np.mean([rank.step_ms() for rank in self.ranks], axis=0)
        for index, window in enumerate(self.ranks[0].windows):
            scalars = {"profile_ms/step": float(step_ms[index])}
            for thread, times in by_thread.items():
                used = times.any(axis=0)
                for i, stage in enumerate(STAGES):
                    if used[i]:
                        tag = stage.lower().replace("/", "").replace(" ", "_")
                        scalars[f"profile_ms/{thread}/{tag}"] = float(times[index, i])
            yield window.step, scalars

    def trace(self) -> dict[str, Any]:
        """A trace in Chrome's JSON format: a process per rank, a track per thread. On the GPU-Worker's track a step
        holds its stages; collectives in flight are asynchronous events beside it.
        """
        zero = min(rank.windows[0].begin_ns for rank in self.ranks)
        events: list[dict[str, Any]] = []
        for number, rank in enumerate(self.ranks):
            events += _trace_of(number, rank, zero)
        return {"displayTimeUnit": "ms", "traceEvents": events}


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90}


def _row(name: str, values: dict[str, float], share: float) -> str:
    times = "".join(f"{values[column]:>10.3f}" for column in ("median_ms", "p10_ms", "p90_ms"))
    return f"{name:<32}{times}{100 * share:>7.1f} %"


def _trace_of(number: int, rank: RankProfile, zero_ns: int) -> Iterator[dict[str, Any]]:
    def times(begin_ns: int, end_ns: int) -> dict[str, float]:
        return {"ts": (begin_ns - zero_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}

    def named(what: str, tid: int, **arguments: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": number, "tid": tid, "args": arguments}

    yield named("process_name", 0, name=f"rank {number}")
    yield named("process_sort_index", 0, sort_index=number)
    for tid, thread in enumerate(_ORDER, start=1):
        if thread not in rank.threads:
            continue
        track = {"pid": number, "tid": tid}
        yield named("thread_name", tid, name=thread)
        yield named("thread_sort_index", tid, sort_index=tid)
        if thread == _WORKER:
            for w in rank.windows:
                title = f"step {w.step}" if w.steps == 1 else f"steps {w.step - w.steps + 1} to {w.step}"
                yield {"name": title, "cat": "step", "ph": "X", **track, **times(w.begin_ns, w.end_ns)}
        for window, stage, begin_ns, end_ns in rank.threads[thread]:
            arguments = {"args": {"step": rank.windows[window].step}}
            yield {"name": stage, "cat": "stage", "ph": "X", **track, **times(begin_ns, end_ns), **arguments}
    for index, (stage, begin_ns, end_ns) in enumerate(rank.collectives):
        common = {"name": stage, "cat": "in flight", "id": f"{number}.{index}", "pid": number, "tid": 1}
        yield {**common, "ph": "b", "ts": (begin_ns - zero_ns) / 1e3}
        yield {**common, "ph": "e", "ts": (end_ns - zero_ns) / 1e3}
