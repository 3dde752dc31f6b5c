"""How fast does a table train that does not fit in memory? One model, twice: rows on disk under a small memory budget,
and everything in RAM.

    python benchmarks/beyond_memory.py               # about 6 minutes, 11 GB of disk, 14 GB of RAM
    python benchmarks/beyond_memory.py --size 0.1    # a tenth of table, budget and run

The table has 200 million rows of 64 floats with Adagrad state, 102.4 GB in all, created on first use. 26 features look
up the one table; ids follow a power law of exponent 1.1, spread over the table by a bijection. Memory for rows, state
and index is 3 GB over all ranks: device slots for 10 % of the rows that the run touches, the rest for the disk tier's
index and its cache of rows. The run goes on until the touched rows come to three times that budget.

Both runs are cut into windows of equal numbers of steps. Reported: samples/s over the whole run and as the median of
the last five windows, their ratio disk / RAM, the time that training waited for the Host-Manager, hit rate of the
device cache, rows and bytes per tier, beside what `hvd-ctr plan` computes, and the peak memory of each process beyond
what it had before the table was made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench.train_step import power_law_ids
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.group_plan import GroupDemand, GroupPlan, plan_group
from hvd_ctr.embedding.id_stream import IdCounts
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.embedding.sharding import group_by_dim
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.training.hybrid_model import HybridModel
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs

ROOT = Path(__file__).resolve().parents[1]
ROWS, DIM, FEATURES, DENSE = 200_000_000, 64, 26, 13
RECORD_BYTES = 2 * 4 * DIM  # a row and its Adagrad state
BUDGET_BYTES = 3_000_000_000
SLOT_SHARE = 0.10  # of the touched rows
WINDOWS = 20


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0, help="scales table, budget and number of touched rows")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048, help="samples per rank and step")
    parser.add_argument("--mlp", default="256,128", help="widths of the hidden layers")
    parser.add_argument("--depth", type=int, default=2, help="train.pipeline_depth")
    parser.add_argument("--policy", default="lookahead")
    parser.add_argument("--path", default=None, help="folder for the disk tier (default: a temporary one)")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    parser.add_argument("--tier", choices=["ram", "disk"], default=None, help="(internal) run one of the two")
    return parser.parse_args(arguments)


# ---- one run, on every rank ----


class PowerLaw:
    """How often ids occur in draws from x^-1.1 over `rows` popularity ranks, in expectation: by logarithmic bins."""

    def __init__(self, rows: int) -> None:
        edges = np.unique(np.geomspace(1, rows + 1, 4000).astype(np.int64))
        weight = -np.diff(edges.astype(np.float64) ** -0.1)
        self.ids = np.diff(edges)
        self.chance = weight / weight.sum() / self.ids

    def distinct(self, draws: float) -> float:
        return float((-self.ids * np.expm1(draws * np.log1p(-np.minimum(self.chance, 1 - 1e-12)))).sum())

    def draws_for(self, distinct: int) -> int:
        """Draws after which that many distinct ids are expected."""
        low, high = float(distinct), 1000.0 * distinct
        while high / low > 1.0001:
            draws = (low * high) ** 0.5
            low, high = (draws, high) if self.distinct(draws) < distinct else (low, draws)
        return int(high)

    def counts(self, draws: float) -> IdCounts:
        """What counting the ids of the draws would give: how many ids occur how often. Rare ids by Poisson's law."""
        mean = draws * self.chance
        rare = mean < 40
        log_factorial = np.cumsum(np.log(np.arange(1, 121)))
        often = np.arange(1, 121)
        logs = often * np.log(mean[rare])[:, None] - mean[rare][:, None] - log_factorial
        ids = (self.ids[rare][:, None] * np.exp(logs)).sum(0)
        return IdCounts(np.concatenate([often, mean[~rare]]), np.concatenate([ids, self.ids[~rare]]))


class Worker:
    """The model, its data and the timed loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.comm = options, comms.init()
        self.table_rows = int(ROWS * options.size)
        self.touched = int(3 * BUDGET_BYTES * options.size / RECORD_BYTES)
        self.law = PowerLaw(self.table_rows)
        self.global_batch = options.batch * self.comm.size
        self.steps = WINDOWS * -(-self.law.draws_for(self.touched) // (self.global_batch * FEATURES * WINDOWS))
        self.table = TableConfig("item", dim=DIM, rows=self.table_rows, optimizer=SparseOptimizerConfig(kind="adagrad"))
        self.features = [FeatureConfig(f"C{i + 1}", table=self.table) for i in range(FEATURES)]
        slots = int(SLOT_SHARE * self.touched / self.comm.size)
        self.cache = CacheConfig(slots=slots, policy=options.policy)
        self.host = HostConfig()
        if options.tier == "disk":
            share = int(BUDGET_BYTES * options.size / self.comm.size)
            self.host = HostConfig(kind="disk", path=options.path, ram_bytes=share - slots * RECORD_BYTES)
            # Device rows, the slots' index and the batches in flight are part of the budget too.
            memory = self.plan().memory
            left = share - memory.device_bytes - memory.slot_bytes - memory.batch_bytes
            self.host = HostConfig(kind="disk", path=options.path, ram_bytes=left)

    def plan(self) -> GroupPlan:
        """What `hvd-ctr plan` computes, of one rank."""
        (layout,) = group_by_dim(self.features)
        samples = self.steps * self.global_batch
        demand = GroupDemand(
            ranks=self.comm.size,
            global_batch=self.global_batch,
            depth=self.options.depth,
            steps=self.steps,
            lines=samples,
            counts={"item": self.law.counts(samples * FEATURES)},
        )
        return plan_group(layout, demand, self.cache, self.host)

    def model(self) -> HybridModel:
        dense, ids = keras.Input((DENSE,), name="dense_features"), keras.Input((FEATURES,), dtype="int64", name="ids")
        vectors = MixCacheEmbedding(self.features, self.cache, host=self.host, name="embedding")(ids)
        x = keras.layers.Concatenate()([dense, keras.layers.Reshape((FEATURES * DIM,))(vectors)])
        for width in map(int, self.options.mlp.split(",")):
            x = keras.layers.Dense(width, activation="relu")(x)
        model = HybridModel({"dense_features": dense, "ids": ids}, keras.layers.Dense(1)(x))
        model.compile(keras.optimizers.Adagrad(0.05), keras.losses.BinaryCrossentropy(from_logits=True))
        model.synchronise()
        return model

    def batches(self) -> Iterator[Any]:
        rng = np.random.default_rng([7, self.comm.rank])
        batch = self.options.batch
        for _ in range(self.steps):
            ids = power_law_ids(rng, batch * FEATURES, self.table_rows).reshape(batch, FEATURES)
            yield ids, rng.random((batch, DENSE), np.float32), (rng.random((batch, 1)) < 0.25).astype(np.float32)

    def run(self) -> dict[str, Any]:
        keras.utils.set_random_seed(7)
        before = memory("VmRSS")
        model = self.model()
        batch = self.options.batch

        def empty() -> Any:
            return np.zeros((0, FEATURES), np.int64), np.zeros((0, DENSE), np.float32), np.zeros((0, 1), np.float32)

        def inputs_of(item: Any) -> Inputs:
            return Inputs([item[0]], BatchFacts(np.int64(len(item[0])), np.float64(len(item[0]))))

        step, loss, times, waits = None, 0.0, [time.perf_counter()], [0.0]
        with Pipeline(
            self.comm, model.embeddings, self.batches(), inputs_of, empty, max(1, self.options.depth)
        ) as pipeline:
            for number, (item, staged) in enumerate(pipeline, start=1):
                if step is None:
                    specs = tensor_specs(tf.nest.map_structure(tf.convert_to_tensor, (*item, tuple(staged))))

                    @tf.function(input_signature=list(specs), autograph=False)
                    def step(ids: Any, dense: Any, labels: Any, staged: Any) -> Any:
                        return model.hybrid_step({"dense_features": dense, "ids": ids}, labels, staged=staged).loss

                loss = step(*item, tuple(staged))
                if number % (self.steps // WINDOWS) == 0:
                    float(loss)
                    times.append(time.perf_counter())
                    waits.append(pipeline.waited_seconds["GPU-Worker"])
                    if self.comm.rank == 0:
                        show(self.options.tier, times, batch * self.comm.size * self.steps // WINDOWS)
        return self.figures(model, times, waits, float(loss), memory("VmHWM") - before)

    def figures(self, model: Any, times: list[float], waits: list[float], loss: float, peak: int) -> dict[str, Any]:
        model.embeddings[0].sharded.flush()
        summed = model.embeddings[0].cache_stats(all_ranks=True)["total"]
        plan = self.plan()
        samples = self.global_batch * self.steps
        windows = [samples / WINDOWS / (b - a) for a, b in itertools.pairwise(times)]
        last = WINDOWS - 5
        return {
            "tier": self.options.tier,
            "steps": self.steps,
            "samples_per_second": samples / (times[-1] - times[0]),
            "last_windows": windows[last:],
            "wait_share": max(self.comm.allgather_object((waits[-1] - waits[last]) / (times[-1] - times[last]))),
            "hit_rate": summed["hit_rate"],
            "table_bytes": self.table_rows * RECORD_BYTES,
            "slots": self.cache.slots * self.comm.size,
            "planned": {
                "hit_rate": plan.hit_rate,
                "device_bytes": self.comm.size * plan.memory.device_bytes,
                "host_bytes": self.comm.size * plan.memory.host_bytes,
                "disk_bytes": self.comm.size * plan.memory.disk_bytes,
            },
            "created": summed["created"],
            "device_bytes": summed["device_bytes"],
            "host_bytes": summed["host_bytes"],
            "disk_bytes": summed["disk_bytes"],
            "disk_rows_read": summed["disk_rows_read"],
            "disk_rows_written": summed["disk_rows_written"],
            "peak_bytes": self.comm.allgather_object(peak),
            "loss": loss,
        }


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def show(tier: str, times: list[float], samples: int) -> None:
    rate = samples / (times[-1] - times[-2])
    line = f"  {tier}: {len(times) - 1}/{WINDOWS}, {rate:,.0f} samples/s, {times[-1] - times[0]:.0f} s"
    print(line, file=sys.stderr, flush=True)


# ---- both ----


def launch(options: argparse.Namespace, arguments: list[str], tier: str, folder: str) -> dict[str, Any]:
    result = Path(folder) / f"{tier}.json"
    command = [str(ROOT / "launch/mpirun.sh"), "-np", str(options.ranks), sys.executable, __file__, *arguments]
    command += ["--tier", tier, "--path", folder, "--json", str(result)]
    subprocess.run(command, check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    return json.loads(result.read_text())


def table(disk: dict[str, Any], ram: dict[str, Any]) -> str:
    median = {run["tier"]: statistics.median(run["last_windows"]) for run in (disk, ram)}
    lines = [
        f"table of {disk['table_bytes'] / 1e9:.1f} GB; {disk['created']:,} rows touched "
        f"({disk['created'] * RECORD_BYTES / 1e9:.2f} GB), {disk['slots']:,} device slots, {disk['steps']:,} steps",
        f"{'':26}{'disk':>14}{'ram':>14}{'disk/ram':>10}  disk as planned",
    ]
    for name, key in (("samples/s, whole run", "samples_per_second"), ("samples/s, last windows", None)):
        a, b = (run[key] if key else median[run["tier"]] for run in (disk, ram))
        lines.append(f"{name:26}{a:14,.0f}{b:14,.0f}{a / b:10.3f}")
    for name, key, unit in (
        ("wait for Host-Manager", "wait_share", "%"),
        ("hit rate of the slots", "hit_rate", "%"),
        ("device tier", "device_bytes", "GB"),
        ("host tier in memory", "host_bytes", "GB"),
        ("file", "disk_bytes", "GB"),
        ("rows read from disk", "disk_rows_read", "M"),
        ("rows written to disk", "disk_rows_written", "M"),
        ("loss at the end", "loss", ""),
    ):
        scale = {"%": 100, "GB": 1e-9, "M": 1e-6, "": 1}[unit]
        planned = f"{disk['planned'][key] * scale:22.4g} {unit}" if key in disk["planned"] else ""
        lines.append(f"{name:26}{disk[key] * scale:11.4g} {unit:2}{ram[key] * scale:11.4g} {unit:2}{planned}")
    peaks = [" + ".join(f"{peak / 1e9:.2f}" for peak in run["peak_bytes"]) for run in (disk, ram)]
    lines.append(f"{'peak beyond the start, GB':26}{peaks[0]:>14}{peaks[1]:>14}")
    lines.append(f"same loss bits: {disk['loss'] == ram['loss']}")
    return "\n".join(lines)


def main() -> None:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.tier is not None:
        worker = Worker(options)
        figures = worker.run()
        if worker.comm.rank == 0:
            Path(options.json).write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        disk, ram = (launch(options, arguments, tier, folder) for tier in ("disk", "ram"))
    print(table(disk, ram))
    if options.json:
        Path(options.json).write_text(json.dumps({"disk": disk, "ram": ram}, indent=1))


if __name__ == "__main__":
    main()
