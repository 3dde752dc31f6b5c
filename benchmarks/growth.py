"""What does a step's time grow with? It must grow with the work done, not with the size or the number of the tables.

    python benchmarks/growth.py                              # all axes
    python benchmarks/growth.py --axes rows tables --depth 2

One thing grows at a time: the rows that the table can address (1e5 .. 1e9, created on first use), columns of a row, the
batch, the number of tables (as one id matrix, and as a mapping of features) and ids per feature and sample. Everything
else is equal: where the batch is not what grows, a step looks up the same number of ids N, drawn evenly from the same
number of ids, 100,000, over all tables together, so that there are as many distinct keys U and, after the untimed
steps, nothing but hits. The head is the mean of all vectors, which costs as much for any shape of (B, F, D): no tower
hides what the embedding costs. Cases of an axis run in turn in the same processes; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import Must, median
from hvd_ctr.bench.stepper import Stepper
from hvd_ctr.bench.train_step import stride_over
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.training.hybrid_model import HybridModel

POOL = 100_000  # ids in use, over all tables
IDS = 4096 * 26  # per step
BATCHES = 4  # made beforehand, used in turn


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batches. `tables`: features with a table each, or, `shared`, one table for all features."""

    batch: int = 4096
    features: int = 26
    rows: int = 1_000_000
    dim: int = 16
    hotness: int = 1
    shared: bool = False
    mapping: bool = False


def cases(axis: str, ids: int) -> dict[str, Case]:
    """The cases of an axis, by what grows."""
    batch = ids // 26
    if axis == "rows":
        return {f"1e{n}": Case(batch, rows=10**n, shared=True) for n in range(5, 10)}
    if axis == "dim":
        return {str(dim): Case(batch, dim=dim) for dim in (8, 16, 32, 64, 128, 256)}
    if axis == "batch":
        return {str(size): Case(max(1, size * ids // IDS)) for size in (256, 1024, 4096, 16384, 65536)}
    if axis in ("tables", "mapping"):
        counts = (1, 10, 26, 100, 300, 1000)
        return {str(n): Case(max(1, ids // n), features=n, mapping=axis == "mapping") for n in counts}
    return {str(n): Case(max(1, batch // n), hotness=n, mapping=True) for n in (1, 3, 10, 30, 100)}


AXES = {
    "rows": ("addressable rows of the table", "1e6", "1e9", 1.1),
    "dim": ("columns of a row", "16", None, None),
    "batch": ("samples per rank", "4096", None, None),
    "tables": ("tables, ids as a matrix", "26", "1000", 1.3),
    "mapping": ("tables, ids as a mapping of features", "26", "1000", 1.3),
    "hotness": ("ids per feature and sample", "1", None, None),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depth", type=int, default=0, help="of the pipeline; 0: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round and case")
    parser.add_argument("--ids", type=int, default=IDS, help="ids per rank and step, where they do not grow")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args()


# ---- on every rank ----


class MeanOfVectors(keras.layers.Layer):
    """(B, F, D), or a mapping of features to (B, D), to (B, 1): a head that costs the same for any shape."""

    def call(self, vectors: Any) -> Any:
        if isinstance(vectors, dict):
            vectors = tf.concat(list(vectors.values()), axis=1)
        flat = tf.reshape(vectors, [-1, np.prod(vectors.shape[1:])])
        return tf.reduce_mean(flat, axis=1, keepdims=True)

    def compute_output_shape(self, shape: Any) -> Any:
        first = next(iter(shape.values())) if isinstance(shape, dict) else shape
        return first[0], 1


def build(case: Case, name: str) -> HybridModel:
    optimizer = SparseOptimizerConfig(kind="adagrad")
    tables = [
        TableConfig(f"t{i}", dim=case.dim, rows=case.rows, optimizer=optimizer)
        for i in range(1 if case.shared else case.features)
    ]
    features = [
        FeatureConfig(f"f{i}", table=tables[i % len(tables)], length=case.hotness) for i in range(case.features)
    ]
    if case.mapping:
        ids = {feature.name: keras.Input((case.hotness,), dtype="int64", name=feature.name) for feature in features}
    else:
        ids = keras.Input((case.features,), dtype="int64", name="ids")
    embedding = MixCacheEmbedding(features, CacheConfig(slots=1 << 17), name=name)
    model = HybridModel({"ids": ids}, MeanOfVectors()(embedding(ids)))
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def batches(case: Case, rank: int) -> list[Any]:
    """ids spread over their tables: place k of a table's part of the pool is id k * stride % rows."""
    rng = np.random.default_rng([7, rank])
    pool = POOL if case.shared else max(1, POOL // case.features)
    stride = stride_over(case.rows)
    made = []
    for _ in range(BATCHES):
        places = rng.integers(0, min(pool, case.rows), (case.features, case.batch, case.hotness))
        ids = places * stride % case.rows
        labels = (rng.random((case.batch, 1)) < 0.25).astype(np.float32)
        columns: Any = {f"f{i}": ids[i] for i in range(case.features)}
        x = columns if case.mapping else np.ascontiguousarray(ids[:, :, 0].T)
        made.append(tf.nest.map_structure(tf.convert_to_tensor, ({"ids": x}, labels)))
    return made


def endless(made: list[Any]) -> Any:
    """The batches again and again; where x is a mapping as a dataset, see Stepper."""
    if not isinstance(made[0][0]["ids"], dict):
        return itertools.cycle(made)
    datasets = [tf.data.Dataset.from_tensors(batch) for batch in made]
    return functools.reduce(lambda a, b: a.concatenate(b), datasets).cache().repeat()


def measure_axis(settings: dict[str, Any]) -> dict[str, Any]:
    """ms per step of each round, and distinct keys per step at an owner, by case."""
    rank, depth = comms.current().rank, settings["depth"]
    steppers = {
        name: Stepper(
            lambda case=Case(**fields), name=name: build(case, f"embedding_{name}"),
            endless(batches(Case(**fields), rank)),
            depth,
        )
        for name, fields in settings["cases"].items()
    }
    for name, stepper in steppers.items():
        stepper.run(2 * BATCHES)
        measure.progress(f"ready: {name}")
    found = measure.interleaved(
        {name: stepper.timed(settings["steps"], depth + 1) for name, stepper in steppers.items()}, settings["rounds"]
    )
    keys = {}
    for name, stepper in steppers.items():
        total = stepper.model.embeddings[0].cache_stats()["total"]
        keys[name] = total["unique"] // total["steps"]
        stepper.close()
    return {"ms_per_step": found, "keys_per_step": keys}


# ---- in front ----


def show(axis: str, options: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    what, reference, last, bound = AXES[axis]
    times, rows, ratios = figures["ms_per_step"], [], {}
    for name, case in cases(axis, options.ids).items():
        ratios[name] = median([a / b for a, b in zip(times[name], times[reference], strict=True)])
        ids = case.batch * case.features * case.hotness
        rows.append(
            [
                name,
                f"{ids:,}",
                f"{figures['keys_per_step'][name]:,}",
                measure.with_range(times[name]),
                f"{ratios[name]:.2f}",
                f"{1e6 * median(times[name]) / ids:,.0f}",
            ]
        )
    print(f"\n{options.ranks} rank(s), pipeline depth {options.depth}; ratio to {reference}")
    print(measure.table([what, "ids", "keys", "ms per step (range)", "ratio", "ns per id"], rows))
    musts = [str(Must(f"{last} / {reference}", ratios[last], bound))] if last and bound else []
    for line in musts:
        print(line)
    return {**figures, "ratios": ratios, "musts": musts}


def main() -> None:
    options = parse()
    found = {}
    for axis in options.axes:
        settings = {
            "cases": {name: dataclasses.asdict(case) for name, case in cases(axis, options.ids).items()},
            "rounds": options.rounds,
            "steps": options.steps,
            "depth": options.depth,
        }
        found[axis] = show(axis, options, measure.launch(__file__, options.ranks, settings))
    measure.write_json(options.json, {"ranks": options.ranks, "depth": options.depth, "axes": found})


if __name__ == "__main__":
    measure.serve(measure_axis) or main()
