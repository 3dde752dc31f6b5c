"""What the scripts of benchmarks/ share: ranks, rounds, medians, tables.

A script is its own worker. Run by a user it calls `launch`, which starts it once more on every rank; there `serve` runs
the measurement and hands what rank 0 returns back to `launch`::

    def measure(settings):                       # on every rank
        rounds = interleaved({"a": run_a, "b": run_b}, settings["rounds"])
        return {name: median(times) for name, times in rounds.items()}

    def main():                                  # in front
        figures = launch(__file__, 2, {"rounds": 5})

    if __name__ == "__main__":
        serve(measure) or main()

Machines drift by a quarter within an hour, so what is compared runs in turn in the same processes, and only ratios of
one run are quoted.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_ctr import comm as comms

_SETTINGS = "HVD_CTR_BENCHMARK"  # of a worker; launch/mpirun.sh passes variables of this prefix on
# Gives each rank a core of its own before Python starts, so that all of its threads inherit it.
_ONE_CORE = (
    'rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${PMI_RANK:-0}}}; cores="$1"; shift; '
    'exec taskset -c "$(echo "$cores" | cut -d, -f"$((rank % $(echo "$cores" | tr , "\\n" | wc -l) + 1))")" "$@"'
)


class Must(NamedTuple):
    """A bound on a figure: value <= bound, or >= where `at_least`."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        """`name: value (must be <= bound): yes`."""
        sign = ">=" if self.at_least else "<="
        return f"{self.name}: {self.value:.3g} (must be {sign} {self.bound:g}): {'yes' if self.holds else 'NO'}"


def median(values: Sequence[float]) -> float:
    """The median; the mean of the middle two of an even number."""
    return float(statistics.median(values))


def interleaved(
    variants: Mapping[str, Callable[[], float]], rounds: int, what: str = "round"
) -> dict[str, list[float]]:
    """Runs every variant once per round, in an order that turns from round to round; rank 0 tells of progress.

    Collective where the variants are: all ranks have the same ones.

    Returns:
        What the calls returned, by variant.
    """
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            comms.current().barrier()
            found[name].append(variants[name]())
        progress(f"{what} {number + 1}/{rounds}: " + ", ".join(f"{name} {found[name][-1]:.3g}" for name in names))
    return found


def progress(line: str) -> None:
    """A line on stderr, of rank 0 only."""
    if comms.current().rank == 0:
        print(f"  {line}", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; the first column is left-aligned, the others right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return f"| {' | '.join([first, *(cell.strip().rjust(len(cell)) for cell in others)])} |"

    rule = "| " + " | ".join(("-" * width)[:-1] + (":" if i else "-") for i, width in enumerate(widths)) + " |"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def with_range(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """`median (least .. greatest)`."""
    low, mid, high = (scale * value for value in (min(values), median(values), max(values)))
    return f"{mid:,.{digits}f} ({low:,.{digits}f} .. {high:,.{digits}f})"


def machine() -> dict[str, Any]:
    """Where and when: processor, cores this process may use, commit, date."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit or None,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def write_json(path: str | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures with `machine()`, where a path is given."""
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


def launch(script: str, ranks: int, settings: Mapping[str, Any], *, one_core_each: bool = False) -> Any:
    """Runs `script` as a worker on `ranks` ranks of this machine and returns what its measurement returned on rank 0.

    Args:
        script: a file of benchmarks/, which calls `serve`.
        ranks: processes, started by launch/mpirun.sh.
        settings: given to the measurement; plain values.
        one_core_each: binds every rank to one core, in turn; with fewer cores than ranks they share.

    Raises:
        subprocess.CalledProcessError: a rank failed; its message is on stderr.
    """
    command = [sys.executable, script]
    if one_core_each:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        command = ["sh", "-c", _ONE_CORE, "one-core", cores, *command]
    with tempfile.TemporaryDirectory(prefix="hvd_ctr_benchmark_") as folder:
        result = Path(folder) / "result.json"
        worker = json.dumps({"settings": settings, "result": str(result)})
        mpirun = Path(script).resolve().parents[1] / "launch" / "mpirun.sh"
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, _SETTINGS: worker}
        subprocess.run([str(mpirun), "-np", str(ranks), *command], check=True, env=environment, stdout=sys.stderr)
        return json.loads(result.read_text())


def serve(measure: Callable[[dict[str, Any]], Any]) -> bool:
    """In a worker: runs the measurement, writes rank 0's result, returns True. Else False."""
    if _SETTINGS not in os.environ:
        return False
    worker = json.loads(os.environ[_SETTINGS])
    comm = comms.init()
    comm.install_excepthook()
    tf.get_logger().setLevel("ERROR")  # it takes the steps of several models for one function traced again and again
    figures = measure(worker["settings"])
    if comm.rank == 0:
        Path(worker["result"]).write_text(json.dumps(figures))
    comm.barrier()
    return True
