"""The central test: W ranks with any cache equal one process with dense tables (DESIGN invariant 7).

Every rank runs the slow reference on the global batches: rows by tests/support/dense_reference.py, the dense tower as a
plain Keras model. Compared after 50 steps: every row and its optimizer state, every dense weight.

How the bounds were chosen: runs differ from the reference in the order of float32 sums (over a batch's duplicates, over
ranks). One sum of n terms of size g rounds by at most n * 2^-24 * g. Gradients here are below 0.1, sums have at most 60
terms and each of 50 steps moves a row by learning_rate * gradient: 50 * 0.1 * 60 * 6e-8 * 0.1 is about 2e-6 in the
worst case and 1e-7 in practice, so 1e-6 holds with room. Adam divides by the root of the second moment, which magnifies
relative errors of small gradients: 1e-5.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.id_counts import write_counts
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from tests.support.dense_reference import DenseReference
from tests.support.hybrid import (
    exported,
    factorized_logits,
    logits_model,
    needed_slots,
    share,
    train_reference,
    unique_name,
)

_STEPS, _GB, _DIM, _X, _SEED = 50, 40, 4, 3, 11
_TOLERANCE = {"sgd": 1e-6, "adagrad": 1e-6, "rowwise_adagrad": 1e-6, "ftrl": 1e-6, "adam": 1e-5}
_KINDS = tuple(_TOLERANCE)
_SIZES = ("just enough", "twice", "all rows")
_POLICIES = ("lru", "lfu", "clock", "freq", "lookahead")
# Every optimizer with both policies, and every cache size with every optimizer; the rest of the product adds nothing
# new. The other policies with the cache that evicts most.
_CASES = [(kind, _SIZES[(i + j) % 3], ("lru", "lfu")[(i + j) % 2]) for i, kind in enumerate(_KINDS) for j in range(3)]
_CASES += [("adagrad", _SIZES[0], "clock"), ("adam", _SIZES[0], "freq"), ("ftrl", _SIZES[0], "lookahead")]
_CASES = [(*case, "plain") for case in _CASES]
_CASES += [(kind, size, "lru", "factorized") for kind, size in zip(("adagrad", "adam", "ftrl"), _SIZES, strict=True)]


def _features(kind: str) -> list[FeatureConfig]:
    """Four features, two of which share a table."""
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.1, l1=0.001 if kind == "ftrl" else 0.0)
    item, user, place = (TableConfig(name, dim=_DIM, optimizer=optimizer) for name in ("item", "user", "place"))
    return [
        FeatureConfig("item", table=item),
        FeatureConfig("user", table=user),
        FeatureConfig("other_item", table=item),
        FeatureConfig("place", table=place),
    ]


@functools.cache
def _stream() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids (steps, GB, F) with heavy duplicates and a moving working set, dense (steps, GB, X), labels (steps, GB,
    1).
    """
    generator = np.random.default_rng(5)
    ids = generator.zipf(1.4, (_STEPS, _GB, 4)).clip(max=40) + 20 * (np.arange(_STEPS) % 4)[:, None, None]
    ids[:, ::7, 1] = 2**63 - 1 - ids[:, ::7, 1]
    dense = generator.random((_STEPS, _GB, _X), np.float32)
    return ids.astype(np.int64), dense, (generator.random((_STEPS, _GB, 1)) < 0.3).astype(np.float32)


@functools.cache
def _counts_file() -> str:
    """Counts of the stream's ids, and of ids that it does not have: a warm start must not create their rows."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ids = {"item": _stream()[0][:, :, [0, 2]], "user": _stream()[0][:, :, 1], "place": _stream()[0][:, :, 3]}
    parts = [(table, *np.unique(column, return_counts=True)) for table, column in ids.items()]
    parts += [(table, np.arange(10**6, 10**6 + 20), np.full(20, 10**6)) for table in ids]
    write_counts(Path(folder) / "counts.parquet", parts, {})
    return f"{folder}/counts.parquet"


def _hybrid(kind: str, slots: int, policy: str, tower: str) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    cache = CacheConfig(slots=slots, policy=policy, counts=_counts_file() if policy == "freq" else None)
    layer = hvd_ctr.MixCacheEmbedding(_features(kind), cache, seed=_SEED, name=unique_name("equal"))
    ids, numbers = keras.Input((4,), dtype="int64", name="ids"), keras.Input((_X,), name="numbers")
    if tower == "plain":
        logits = logits_model(layer(ids), numbers)
    else:
        logits = factorized_logits(layer(ids, factored=True), numbers, 0.6)
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


def _announce(comm: Comm, layer: hvd_ctr.MixCacheEmbedding, ids: np.ndarray) -> None:
    """What a pipeline does: the key exchange of a batch ahead of its turn."""
    mine = ids[share(comm, np.arange(_GB))]
    facts = BatchFacts(np.int64(len(mine)), np.float64(len(mine)))
    for group, prepared in zip(layer.sharded.groups, layer.prepare(tf.constant(mine), facts), strict=True):
        group.announce(group.input_dist(prepared))


@functools.cache
def _reference(kind: str) -> tuple[DenseReference, list[np.ndarray]]:
    """The tables and dense weights of one process after all steps."""
    features = _features(kind)
    reference = DenseReference(list({f.table.name: f.table for f in features}.values()), seed=_SEED)
    vectors, numbers = keras.Input((4, _DIM)), keras.Input((_X,))
    tower = keras.Model([vectors, numbers], logits_model(vectors, numbers))
    optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True)
    train_reference(reference, [f.table.name for f in features], tower, optimizer, loss, _stream())
    return reference, [np.asarray(w) for w in tower.weights]


@pytest.mark.parametrize(("kind", "size", "policy", "tower"), _CASES)
def test_any_ranks_and_cache_equal_the_dense_reference(
    comm: Comm, kind: str, size: str, policy: str, tower: str
) -> None:
    reference, weights = _reference(kind)
    ids, dense, labels = _stream()
    probe = _hybrid(kind, 1, "lru", tower)[1].sharded
    needed = max(comm.allgather_object(needed_slots(probe, ids)))
    slots = {"just enough": needed, "twice": 2 * needed, "all rows": 4096}[size]
    model, layer = _hybrid(kind, slots, policy, tower)
    run = tf.function(lambda x, y: model.hybrid_step(x, y).loss, reduce_retracing=True, autograph=False)
    for step, (step_ids, step_dense, step_labels) in enumerate(zip(ids, dense, labels, strict=True)):
        if policy == "lookahead":
            for ahead in range(0 if step == 0 else step + 3, min(step + 4, _STEPS)):
                _announce(comm, layer, ids[ahead])
        mine = share(comm, np.arange(_GB))
        run(
            {"ids": tf.constant(step_ids[mine]), "numbers": tf.constant(step_dense[mine])},
            tf.constant(step_labels[mine]),
        )
    for left, right in zip(model.weights, weights, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=_TOLERANCE[kind])
    for table in ("item", "user", "place"):
        rows = exported(layer.sharded, comm, table)
        records = {row_id: record for (name, row_id), record in reference.records.items() if name == table}
        assert sorted(rows) == sorted(records)
        for row_id, (row, state) in rows.items():
            expected = np.concatenate([np.zeros(0), *records[row_id].state.values()])
            np.testing.assert_allclose(row, records[row_id].row, rtol=0, atol=_TOLERANCE[kind])
            np.testing.assert_allclose(state, expected, rtol=1e-5, atol=_TOLERANCE[kind])
    total = layer.cache_stats()["total"]
    assert (total["evictions"] > 0) == (size != "all rows") or comm.size > 1
    assert total["foreign_keys"] == 0 and total["pinned_slots"] == 0
