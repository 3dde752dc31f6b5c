"""Rows stored as float16 or bfloat16: any number of ranks and any cache equal the dense reference of one process bit
for bit, in rows, optimizer state and what a reader sees.

Gradients are small whole numbers: their sums are exact in any order, so that what each row's update sees does not
depend on the ranks. Updates are fractions, which do not fit the row's type, so that each is rounded.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.layers import MixCacheEmbedding
from tests.support.dense_reference import DenseReference
from tests.support.hybrid import exported, needed_slots, share, step, unique_name

_STEPS, _GB, _DIM, _SEED = 20, 24, 5, 17
_KINDS = {"item": "adagrad", "user": "adam", "place": "rowwise_adagrad", "city": "ftrl", "day": "sgd"}
_FEATURES = ("item", "user", "place", "city", "day", "item")


def _table(name: str) -> TableConfig:
    optimizer = SparseOptimizerConfig(kind=_KINDS[name], learning_rate=0.03)
    return TableConfig(name, dim=_DIM, initializer="normal", init_scale=0.2, optimizer=optimizer)


def _layer(row_dtype: str, slots: int, host: HostConfig) -> MixCacheEmbedding:
    features = [FeatureConfig(f"{i}_{name}", table=_table(name)) for i, name in enumerate(_FEATURES)]
    cache = CacheConfig(slots=slots, policy="lru", row_dtype=row_dtype)
    layer = MixCacheEmbedding(features, cache, seed=_SEED, name=unique_name("narrow"), host=host)
    layer.build(None)
    return layer


@functools.cache
def _stream() -> tuple[np.ndarray, np.ndarray]:
    """ids (steps, GB, F) with duplicates and a working set that moves, gradients (steps, GB, F, D) of whole numbers."""
    generator = np.random.default_rng(8)
    ids = generator.integers(0, 30, (_STEPS, _GB, len(_FEATURES))) + 15 * (np.arange(_STEPS) % 3)[:, None, None]
    ids[:, ::5, 2] = 2**63 - 1 - ids[:, ::5, 2]
    return ids, generator.integers(-3, 4, (*ids.shape, _DIM)).astype(np.float32)


@functools.cache
def _reference(row_dtype: str) -> tuple[DenseReference, list[np.ndarray]]:
    """The tables after all steps, and what each step looked up: (GB, F, D)."""
    reference, seen = DenseReference([_table(name) for name in _KINDS], seed=_SEED, row_dtype=row_dtype), []
    for ids, gradients in zip(*_stream(), strict=True):
        seen.append(np.stack([reference.lookup(name, ids[:, i]) for i, name in enumerate(_FEATURES)], axis=1))
        reference.next_step()
        for name in _KINDS:
            columns = [i for i, feature in enumerate(_FEATURES) if feature == name]
            reference.apply(name, ids[:, columns].ravel(), gradients[:, columns].reshape(-1, _DIM))
    return reference, seen


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this rank."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("size", ["just enough", "all rows"])
@pytest.mark.parametrize("row_dtype", ["float16", "bfloat16"])
def test_any_ranks_and_cache_equal_the_dense_reference(
    comm: Comm, folder: Path, row_dtype: str, size: str, tier: str
) -> None:
    reference, seen = _reference(row_dtype)
    ids, gradients = _stream()
    host = HostConfig()
    if tier == "disk":
        host = HostConfig(kind="disk", path=str(folder), ram_bytes=1 << 20)
    needed = max(comm.allgather_object(needed_slots(_layer(row_dtype, 1, HostConfig()).sharded, ids)))
    layer = _layer(row_dtype, needed if size == "just enough" else 4096, host)
    for number in range(_STEPS):
        mine = share(comm, np.arange(_GB))
        if number == 7:  # One rank has everything, the others idle.
            mine = np.arange(_GB if comm.rank == 0 else 0)
        outputs = step(layer, tf.constant(ids[number][mine]), lambda x, g=gradients[number][mine]: tf.reduce_sum(x * g))
        np.testing.assert_array_equal(np.reshape(outputs, seen[number][mine].shape), seen[number][mine])
    unseen = np.concatenate([ids[-1], 500 + np.arange(_GB)[:, None] + np.arange(len(_FEATURES))])
    expected = np.stack([reference.lookup(name, unseen[:, i]) for i, name in enumerate(_FEATURES)], axis=1)
    np.testing.assert_array_equal(np.reshape(layer(tf.constant(unseen)), expected.shape), expected)
    for name in _KINDS:
        rows = exported(layer.sharded, comm, name)
        records = {i: record for (table, i), record in reference.records.items() if table == name}
        assert sorted(rows) == sorted(records)
        for i, (row, state) in rows.items():
            np.testing.assert_array_equal(row, records[i].row)
            np.testing.assert_array_equal(state, np.concatenate([np.zeros(0), *records[i].state.values()]))
    total = layer.cache_stats()["total"]
    assert comm.size > 1 or (total["evictions"] > 0) == (size != "all rows")
