"""A stream of batches for tables with min_count, max_idle_steps and max_rows, its training and its dense reference.

The gradients are integers and the rule is plain SGD, so every sum is exact and the bits are equal for any W.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts, Staged
from hvd_ctr.embedding.step_context import StepContext
from hvd_ctr.training.pipeline import Inputs, Pipeline
from hvd_ctr.training.train_step import batch_facts
from tests.support.dense_reference import DenseReference
from tests.support.hybrid import exported, share, unique_name

STEPS, _GB, _DIM, _SEED = 60, 24, 2, 5
_SGD = SparseOptimizerConfig(kind="sgd", learning_rate=0.5)
TABLES = [
    TableConfig("late", dim=_DIM, optimizer=_SGD, min_count=4),
    TableConfig("idle", dim=_DIM, optimizer=_SGD, max_idle_steps=9, min_count=2, sweep_every_steps=5),
    TableConfig("few", dim=_DIM, optimizer=_SGD, max_rows=90, sweep_every_steps=4),
    TableConfig("both", dim=_DIM, optimizer=_SGD, max_rows=70, max_idle_steps=14, min_count=2, sweep_every_steps=3),
    TableConfig("plain", dim=_DIM, optimizer=_SGD),
]
FEATURES = [FeatureConfig(table.name, table=table) for table in TABLES] + [FeatureConfig("late2", table=TABLES[0])]


@functools.cache
def global_ids() -> np.ndarray:
    """(steps, GB, F): hot ids, and a window of cold ones that moves on and comes back, so deleted ids start anew."""
    generator = np.random.default_rng(3)
    cold = generator.integers(0, 60, (STEPS, _GB, len(FEATURES))) + 25 * (np.arange(STEPS) % 20)[:, None, None]
    hot = generator.integers(1000, 1008, cold.shape)
    return np.where(generator.random(cold.shape) < 0.3, hot, cold).astype(np.int64)


def _gradient(ids: np.ndarray, step: int) -> np.ndarray:
    """(n, D) integers."""
    return np.stack([ids % 5 - 2, (ids + step) % 3 - 1], axis=-1).astype(np.float32)


@functools.cache
def reference(steps: int = STEPS) -> DenseReference:
    result = DenseReference(TABLES, seed=_SEED)
    for step, ids in enumerate(global_ids()[:steps]):
        result.next_step()
        for table in TABLES:
            mine = ids[:, [i for i, feature in enumerate(FEATURES) if feature.table is table]].ravel()
            result.apply(table.name, mine, _gradient(mine, step))
        result.sweep()
    return result


def make_layer(slots: int, host: HostConfig | None = None, tables: list[TableConfig] | None = None):
    by_name = {table.name: table for table in tables or TABLES}
    features = [FeatureConfig(feature.name, table=by_name[feature.table.name]) for feature in FEATURES]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=slots), _SEED, name=unique_name("life"), host=host)
    layer.build(None)
    return layer


def train_step(layer: hvd_ctr.MixCacheEmbedding, ids: np.ndarray, step: int, staged: list[Staged]) -> None:
    """Trains this rank's ids (B, F): the loss is chosen so that _gradient is the gradient of every looked-up vector."""
    inputs = tf.constant(ids)
    with tf.GradientTape() as tape:
        with StepContext(
            tape, batch_facts(inputs, None), dict(zip(layer.sharded.groups, staged, strict=False))
        ) as context:
            vectors = layer(inputs)
        value = tf.reduce_sum(vectors * _gradient(ids, step))
    context.backward(tape.gradient(value, context.watched_rows), tf.constant(1.0))


def train(comm: Comm, layer: hvd_ctr.MixCacheEmbedding, steps: range, depth: int = 0) -> None:
    mine = [share(comm, global_ids()[step]) for step in steps]

    def inputs_of(batch: np.ndarray) -> Inputs:
        return Inputs([batch], BatchFacts(np.int64(len(batch)), np.float64(len(batch))))

    if depth == 0:
        for step, ids in zip(steps, mine, strict=True):
            train_step(layer, ids, step, [])
        return
    empty = np.zeros((0, len(FEATURES)), np.int64)
    with Pipeline(comm, [layer], iter(mine), inputs_of, lambda: empty, depth) as pipeline:
        for step, (ids, staged) in zip(steps, pipeline, strict=False):
            train_step(layer, ids, step, staged)


def known(layer: hvd_ctr.MixCacheEmbedding, comm: Comm, table: str) -> dict[int, tuple[int, int, bool]]:
    """All ranks' ids of a table that tracks its rows: id -> (count, last step, whether it is a row)."""
    sharded = layer.sharded
    mine = [
        [*map(int, entry), row]
        for row, chunks in ((True, sharded.export_rows(table, 50)), (False, sharded.export_waiting(table, 50)))
        for chunk in chunks
        for entry in zip(chunk.ids, chunk.counts, chunk.last_steps, strict=True)
    ]
    everything = [entry for part in comm.allgather_object(mine) for entry in part]
    assert len({entry[0] for entry in everything}) == len(everything)
    return {i: (count, last, row) for i, count, last, row in everything}


def assert_equals(layer: hvd_ctr.MixCacheEmbedding, comm: Comm, reference: DenseReference) -> None:
    for table in TABLES:
        rows = exported(layer.sharded, comm, table.name)
        wanted = {i: record.row for (name, i), record in reference.records.items() if name == table.name}
        assert rows.keys() == wanted.keys(), table.name
        for i, row in wanted.items():
            np.testing.assert_array_equal(rows[i][0], row)
        if not table.tracks_rows:
            continue
        ids = known(layer, comm, table.name)
        assert {i for i, (_, _, row) in ids.items() if row} == wanted.keys()
        last = {i: step for (name, i), step in reference.last_steps.items() if name == table.name}
        assert {i: step for i, (_, step, _) in ids.items()} == last
        if table.min_count > 1:
            counts = {i: count for (name, i), count in reference.counts.items() if name == table.name}
            assert {i: count for i, (count, _, _) in ids.items()} == counts
