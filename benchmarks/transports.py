"""Shared memory or Horovod between the ranks of one host? The step on the workload that other trainers are compared on.

    python benchmarks/transports.py                # 2 ranks

A job has one transport, and Horovod's rounds are set to what suits it, so jobs are started in turn, `--launches` times
each; ratios are medians over the turns. Without a pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import median
from hvd_ctr.bench.train_step import Workload, embedding_steps
from hvd_ctr.transports import TRANSPORT_VARIABLE

_TRANSPORTS = ("horovod", "shared_memory")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 4096, 16384], help="B")
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--mlp", default="32", help="widths of the hidden layers")
    parser.add_argument("--scale", type=float, default=0.25, help="of the tables' cardinalities")
    parser.add_argument("--launches", type=int, default=5, help="of each transport")
    parser.add_argument("--milliseconds", type=float, default=400, help="of timed steps per round, roughly")
    parser.add_argument("--rounds", type=int, default=3, help="of a launch")
    parser.add_argument("--warm", type=int, default=15, help="steps before the first round")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args()


def measure_job(settings: dict[str, Any]) -> dict[str, float]:
    """Median ms per step, by workload. On every rank."""
    variants = {}
    for name, fields in settings["workloads"].items():
        workload = Workload(**{**fields, "mlp": tuple(fields["mlp"])})
        steps = embedding_steps(workload, 0)
        once = comms.current().broadcast_object(steps.run(workload.warm))
        variants[name] = steps.timed(max(5, round(settings["milliseconds"] / once)), 1)
    found = measure.interleaved(variants, settings["rounds"])
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    options = parse()
    mlp = tuple(int(width) for width in options.mlp.split(","))
    loads = {
        f"D={dim}, B={batch}": dataclasses.asdict(Workload(options.scale, dim, batch, 20, options.warm, mlp))
        for dim in options.dim
        for batch in options.batch
    }
    settings = {"workloads": loads, "rounds": options.rounds, "milliseconds": options.milliseconds}
    found: dict[str, list[dict[str, float]]] = {transport: [] for transport in _TRANSPORTS}
    os.environ.pop("HOROVOD_CYCLE_TIME", None)  # each transport has its own
    for number in range(options.launches):
        for transport in _TRANSPORTS:
            print(f"launch {number + 1}/{options.launches} over {transport}", file=sys.stderr, flush=True)
            os.environ[TRANSPORT_VARIABLE] = transport
            found[transport].append(measure.launch(__file__, options.ranks, settings))
    rows, ratios = [], {}
    for name in loads:
        horovod, shared = ([job[name] for job in found[transport]] for transport in _TRANSPORTS)
        ratios[name] = median([a / b for a, b in zip(horovod, shared, strict=True)])
        rows.append([name, measure.with_range(horovod), measure.with_range(shared), f"{ratios[name]:.2f}"])
    print(f"\n{options.ranks} ranks on {len(os.sched_getaffinity(0))} cores, MLP={options.mlp}, ms per step")
    print(measure.table(["workload", "Horovod", "shared memory", "Horovod / shared memory"], rows))
    measure.write_json(options.json, {"ms": found, "ratios": ratios})


if __name__ == "__main__":
    measure.serve(measure_job) or main()
