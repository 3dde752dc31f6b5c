"""A profile's table, figures, scalars and trace, from records made by hand; and the options."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from hvd_ctr import cli
from hvd_ctr.config.profile import MAX_STEPS, ProfileOptions, parse_steps
from hvd_ctr.training.profile_report import Profile, RankProfile
from hvd_ctr.training.stage_times import Interval, Segment, Window

_MS = 1_000_000


def _rank(slow: int = 1, lost: int = 0) -> RankProfile:
    """Two steps of 10 and 20 ms, `slow` times as long, beginning at 5 ms."""
    begins = [5 * _MS, (5 + 10 * slow) * _MS]
    windows = [Window(7, begins[0], begins[1]), Window(8, begins[1], begins[1] + 20 * slow * _MS)]
    worker, loader = [], []
    for index, window in enumerate(windows):
        begin, end = window.begin_ns, window.end_ns
        half, most = (begin + end) // 2, begin + (end - begin) * 9 // 10
        worker += [Segment(index, "lookup", begin, half), Segment(index, "row exchange", half, most)]
        worker.append(Segment(index, "other", most, end))
        loader.append(Segment(index, "waiting", begin, end))
    threads = {"Data-Loader": loader, "GPU-Worker": worker}
    return RankProfile(windows, threads, [Interval("row exchange", begins[0], begins[1])], lost)


def test_figures() -> None:
    figures = Profile([_rank(), _rank(slow=2)]).figures()
    assert (figures["steps"], figures["ranks"], figures["lost_events"]) == ([7, 8], 2, 0)
    assert figures["step_ms"] == pytest.approx({"p10_ms": 13, "median_ms": 20, "p90_ms": 34})
    lookup = figures["threads"]["GPU-Worker"]["lookup"]
    assert lookup == pytest.approx({"p10_ms": 6.5, "median_ms": 10, "p90_ms": 17, "share": 0.5})
    assert list(figures["threads"]) == ["GPU-Worker", "Data-Loader"]
    for stages in figures["threads"].values():
        assert sum(values["share"] for values in stages.values()) == pytest.approx(1)
    assert figures["named_share"] == pytest.approx(0.9)
    # In flight the first steps of 10 and 20 ms, exposed in 40 % of all: 30 and 60 ms.
    assert figures["collectives"] == {"row exchange": pytest.approx({"in_flight_ms": 7.5, "exposed_ms": 9})}


def test_steps_of_an_execution_share_its_time() -> None:
    rank = RankProfile([Window(4, 0, 8 * _MS, steps=4)], {"GPU-Worker": [Segment(0, "lookup", 0, 8 * _MS)]}, [])
    profile = Profile([rank])
    assert (profile.first, profile.last) == (1, 4)
    assert profile.figures()["step_ms"]["median_ms"] == 2
    assert profile.figures()["threads"]["GPU-Worker"]["lookup"] == pytest.approx(
        {"p10_ms": 2, "median_ms": 2, "p90_ms": 2, "share": 1}
    )


def test_table() -> None:
    table = Profile([_rank(), _rank(slow=2)]).table()
    assert "Profile of steps 7 to 8 on 2 rank(s), ms per step" in table
    lines = {line[2:30].strip(): line.split() for line in reversed(table.splitlines()) if line.startswith("  ")}
    assert lines["lookup"] == ["lookup", "10.000", "6.500", "17.000", "50.0", "%"]
    assert lines["the whole step"][-5:] == ["20.000", "13.000", "34.000", "100.0", "%"]
    assert "stages with a name: 90.0 % of the step" in table
    assert "rank 1: step 30.000 ms (median); collectives (exposed) 40.0 %, waiting 0.0 %, other 10.0 %" in table
    assert "no room" not in table
    assert "5 events found no room" in Profile([_rank(lost=2), _rank(lost=3)]).table()


def test_scalars_are_means_over_the_ranks() -> None:
    (number, first), (_, second) = Profile([_rank(), _rank(slow=2)]).scalars()
    assert number == 7 and second["profile_ms/step"] == pytest.approx(30)
    assert first == pytest.approx(
        {
            "profile_ms/step": 15,
            "profile_ms/GPU-Worker/lookup": 7.5,
            "profile_ms/GPU-Worker/row_exchange": 6,
            "profile_ms/GPU-Worker/other": 1.5,
            "profile_ms/Data-Loader/waiting": 15,
        }
    )


def _tracks(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if all(event.get(key) == value for key, value in wanted.items())]


def test_trace() -> None:
    trace = json.loads(json.dumps(Profile([_rank(), _rank()]).trace()))
    assert {(e["pid"], e["tid"]): e["args"]["name"] for e in _tracks(trace, name="thread_name")} == {
        (rank, tid): thread for rank in (0, 1) for tid, thread in ((1, "GPU-Worker"), (3, "Data-Loader"))
    }
    assert [e["args"]["name"] for e in _tracks(trace, name="process_name")] == ["rank 0", "rank 1"]
    steps = _tracks(trace, cat="step", pid=1)
    assert [(e["name"], e["ts"], e["dur"]) for e in steps] == [("step 7", 0, 10_000), ("step 8", 10_000, 20_000)]
    (first, _) = _tracks(trace, name="row exchange", ph="X", pid=0)
    assert (first["ts"], first["dur"], first["args"]) == (5000, 4000, {"step": 7})
    begin, end = _tracks(trace, cat="in flight", pid=1)
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 0, "e", 10_000) and begin["id"] == end["id"]
    assert begin["id"] != _tracks(trace, cat="in flight", pid=0)[0]["id"]


def test_a_rank_travels_as_json_and_is_shifted() -> None:
    rank = _rank(lost=1)
    assert RankProfile.from_json(json.loads(json.dumps(rank.to_json()))) == rank
    shifted = rank.shifted(5 * _MS)
    assert shifted.windows[0] == Window(7, 0, 10 * _MS) and shifted.lost == 1
    assert shifted.collectives == [Interval("row exchange", 0, 10 * _MS)]
    assert shifted.threads["GPU-Worker"][0] == Segment(0, "lookup", 0, 5 * _MS)
    assert shifted.shifted(-5 * _MS) == rank


# ---- options ----


def test_steps_are_parsed() -> None:
    assert parse_steps("100:150") == (100, 150) and parse_steps("1:1") == (1, 1)
    assert parse_steps(f"1:{MAX_STEPS}") == (1, MAX_STEPS)


@pytest.mark.parametrize("text", ["", "5", "5:4", "0:4", "-1:4", "1:2:3", "a:b", "1: 2", f"1:{MAX_STEPS + 1}"])
def test_steps_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"profiled steps: received .*FIRST:LAST"):
        parse_steps(text)


def _options(*arguments: str) -> ProfileOptions | None:
    parsed: argparse.Namespace = cli._parser().parse_args(["train", "config.yaml", *arguments])
    return cli._profile_options(parsed, (21, 70))


def test_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _options() is None
    assert _options("--profile") == ProfileOptions(21, 70, True, False)
    assert _options("--profile-steps", "3:5") == ProfileOptions(3, 5, True, False)
    assert _options("--profile-tensorflow") == ProfileOptions(21, 70, False, True)
    assert _options("--profile", "--profile-tensorflow", "--profile-steps=3:5") == ProfileOptions(3, 5, True, True)
    with pytest.raises(SystemExit) as refused:
        _options("--profile-steps", "9:3")
    assert refused.value.code == 2 and "received 9:3" in capsys.readouterr().err
