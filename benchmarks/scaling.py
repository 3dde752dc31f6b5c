"""How well do more ranks help? The step on the workload that other trainers are compared on, one core for each rank.

    python benchmarks/scaling.py                   # 1 and 2 ranks
    python benchmarks/scaling.py --ranks 1 2 4     # 4 ranks share the cores of a machine that has fewer

Growing work: every rank has B samples per step. Efficiency is the step's time on 1 rank divided by that on W. Fixed
work: B samples over all ranks; efficiency is the same, divided by W. Each rank is bound to one core, also a single one,
which would otherwise use all of them. Jobs of 1 and of W ranks cannot run in one process, so they are started in turn,
`--launches` times; efficiencies are medians over the turns.

All batches are trained once before they are timed, so steps find their rows, as all but the first minutes of a job do.
`--first-pass` times the first steps instead, which create most of their rows. The system then gives memory that nobody
has touched, on virtual machines in a time that depends on what ran there before: jobs of one rank differed by 3 ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import Must, median
from hvd_ctr.bench.train_step import Workload, embedding_steps

EFFICIENCY = {(256, 128): 0.9, (32,): 0.75}  # that must be reached with 2 ranks and growing work


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=4096, help="B")
    parser.add_argument("--mlp", nargs="+", default=["32", "256,128"], help="widths of the hidden layers, by tower")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.25, help="of the tables' cardinalities")
    parser.add_argument("--depth", type=int, default=0, help="of the pipeline; 0: none")
    parser.add_argument("--launches", type=int, default=5, help="of each number of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="of a launch")
    parser.add_argument("--steps", type=int, default=15, help="timed steps per round and workload")
    parser.add_argument("--first-pass", action="store_true", help="time steps that create rows")
    parser.add_argument("--warm", type=int, default=15, help="steps before the first round")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args()
    if 1 not in options.ranks:
        parser.error("--ranks needs 1, which the others are compared with")
    return options


# ---- on every rank ----


def measure_job(settings: dict[str, Any]) -> dict[str, float]:
    """Median ms per step, by workload."""
    variants, depth = {}, settings["depth"]
    for name, fields in settings["workloads"].items():
        workload = Workload(**{**fields, "mlp": tuple(fields["mlp"])})
        steps = embedding_steps(workload, depth)
        steps.run(workload.warm + (0 if settings["first_pass"] else workload.steps))
        variants[name] = steps.timed(settings["steps"], depth + 1)
    found = measure.interleaved(variants, settings["rounds"])
    return {name: median(times) for name, times in found.items()}


# ---- in front ----


def workloads(options: argparse.Namespace, ranks: int) -> dict[str, Workload]:
    """By `tower kind`."""
    steps = options.rounds * (options.steps + options.depth + 1)
    found = {}
    for mlp in options.mlp:
        widths = tuple(int(width) for width in mlp.split(","))
        for kind, batch in (("growing", options.batch), ("fixed", max(1, options.batch // ranks))):
            if ranks > 1 or kind == "growing":  # on one rank they are the same
                found[f"{mlp} {kind}"] = Workload(options.scale, options.dim, batch, steps, options.warm, widths)
    return found


def summary(options: argparse.Namespace, found: dict[int, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One entry per tower, kind of work and number of ranks."""
    entries = []
    for mlp in options.mlp:
        for kind in ("growing", "fixed"):
            for ranks in options.ranks:
                times = [job[f"{mlp} {kind if ranks > 1 else 'growing'}"] for job in found[ranks]]
                alone = [job[f"{mlp} growing"] for job in found[1]]
                share = 1 if kind == "growing" else ranks
                efficiency = median([a / (share * b) for a, b in zip(alone, times, strict=True)])
                entries.append({"mlp": mlp, "work": kind, "ranks": ranks, "ms": times, "efficiency": efficiency})
    return entries


def show(options: argparse.Namespace, entries: list[dict[str, Any]]) -> list[str]:
    cores, musts = len(os.sched_getaffinity(0)), []
    rows = []
    for entry in entries:
        ranks, step = entry["ranks"], median(entry["ms"])
        batch = options.batch if entry["work"] == "growing" else options.batch // ranks
        rows.append(
            [
                f"{entry['mlp']}, {entry['work']}",
                f"{ranks}{' (sharing cores)' if ranks > cores else ''}",
                batch,
                measure.with_range(entry["ms"]),
                f"{batch * ranks / step:,.0f}k",
                f"{entry['efficiency']:.2f}",
            ]
        )
        bound = EFFICIENCY.get(tuple(int(width) for width in entry["mlp"].split(",")))
        if bound and ranks == 2 and entry["work"] == "growing":
            musts.append(
                str(Must(f"MLP={entry['mlp']}, efficiency of 2 ranks", entry["efficiency"], bound, at_least=True))
            )
    print(f"\nD={options.dim}, B={options.batch}, pipeline depth {options.depth}, one of {cores} cores for each rank")
    head = ["MLP, work", "ranks", "B per rank", "ms per step (range of the launches)", "samples/s", "efficiency"]
    print(measure.table(head, rows))
    print("\n".join(musts))
    return musts


def main() -> None:
    options = parse()
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.ranks}
    for number in range(options.launches):
        for ranks in options.ranks:
            print(f"launch {number + 1}/{options.launches} of {ranks} rank(s)", file=sys.stderr, flush=True)
            settings = {
                "workloads": {name: dataclasses.asdict(load) for name, load in workloads(options, ranks).items()},
                "rounds": options.rounds,
                "steps": options.steps,
                "depth": options.depth,
                "first_pass": options.first_pass,
            }
            found[ranks].append(measure.launch(__file__, ranks, settings, one_core_each=True))
    entries = summary(options, found)
    musts = show(options, entries)
    measure.write_json(options.json, {"entries": entries, "musts": musts})


if __name__ == "__main__":
    measure.serve(measure_job) or main()
