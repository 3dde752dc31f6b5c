"""Caching never changes the numbers: the matrix of cache slots x pipeline depth x policy x tier x exchange mode x row
dtype, each over 300 steps of adversarial batches.

Everything that shares the number of ranks and the row dtype must agree to the last bit in all rows, their optimizer
state and all dense weights. The plainest member (all rows cached, no pipeline, lru, rows in memory, alltoall, float32)
is compared with the dense reference of one process, which ties the numbers of ranks together; rows of other types are
compared with it in test_row_dtype.py. The tower begins with a FactorizedDense, which factors other features in other
batches; the reference's with a plain Dense.

By default a covering array runs: every pair of levels of any two factors appears in some run; at 4 ranks every level
appears, with float32 rows. HVD_CTR_FULL_MATRIX=1 runs the full product with float32 rows, and the covering array.

Bound against the reference: as derived in test_equivalence.py, where 50 steps with learning rate 0.1 and sums of 60
terms give 2e-6 in the worst case and 1e-7 in practice. Here are 300 steps with learning rate 0.02 and sums of up to
48 terms: the same worst case, and the same tolerances.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from allpairspy import AllPairs

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.id_counts import write_counts
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from tests.support.dense_reference import DenseReference
from tests.support.hybrid import factorized_logits, logits_model, needed_slots, share, train_reference, unique_name

_STEPS, _GB, _DIM, _X, _SEED = 300, 48, 64, 2, 13
_TABLES = {"item": "adagrad", "user": "adam", "place": "ftrl"}
_TOLERANCE = {"adagrad": 1e-6, "adam": 1e-5, "ftrl": 1e-6}


class Setting(NamedTuple):
    """One run."""

    slots: str
    depth: int
    policy: str
    tier: str
    exchange: str
    row_dtype: str


_LEVELS = Setting(
    ("minimum", "1.2 x", "all"),
    (0, 1, 2, 4),
    ("lru", "lfu", "clock", "freq", "lookahead"),
    ("ram", "disk"),
    ("alltoall", "allgather", "allreduce"),
    ("float32", "float16", "bfloat16"),
)
_PLAINEST = Setting("all", 0, "lru", "ram", "alltoall", "float32")


def _settings(ranks: int) -> list[Setting]:
    float32 = _LEVELS._replace(row_dtype=("float32",))
    if ranks > 2:  # Each level once, for the many processes that share few cores.
        settings = [Setting(*levels) for levels in AllPairs([list(levels) for levels in float32], n=1)]
    else:
        settings = [Setting(*levels) for levels in AllPairs([list(levels) for levels in _LEVELS], n=2)]
    if os.environ.get("HVD_CTR_FULL_MATRIX") == "1":
        settings += [Setting(*levels) for levels in itertools.product(*float32)]
    return list(dict.fromkeys(settings))


@functools.cache
def _stream() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids (steps, GB, F), numbers (steps, GB, X), labels (steps, GB, 1): in turn for 60 steps each

    A/B/A/B working sets, so that with the least cache each batch needs exactly what the one before evicted; one hot row
    in every batch; a sliding window; batches without a repeated id, which need every slot of the least cache; a power
    law with ids of all sizes.
    """
    generator = np.random.default_rng(3)
    part, rows = _STEPS // 5, np.arange(_GB)
    features = len(_TABLES)
    alternating = np.stack([np.stack([rows + _GB * (step % 2)] * features, 1) for step in range(part)])
    hot = generator.integers(100, 1500, (part, _GB, features))
    hot[:, ::3] = 7
    sliding = np.stack([np.stack([2000 + rows + 16 * step] * features, 1) for step in range(part)])
    distinct = np.stack(
        [np.stack([generator.permutation(2000)[:_GB] for _ in range(features)], 1) for _ in range(part)]
    )
    power = generator.zipf(1.3, (part, _GB, features)).clip(max=3000)
    power[:, ::5] = 2**63 - 1 - power[:, ::5]
    ids = np.concatenate([alternating, hot, sliding, distinct, power]).astype(np.int64)
    numbers = generator.random((_STEPS, _GB, _X), np.float32)
    return ids, numbers, (generator.random((_STEPS, _GB, 1)) < 0.3).astype(np.float32)


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _counts_file() -> str:
    path = _folder() / "counts.parquet"
    parts = [(t, *np.unique(_stream()[0][:, :, i], return_counts=True)) for i, t in enumerate(_TABLES)]
    write_counts(path, parts, {})
    return str(path)


def _table(name: str) -> TableConfig:
    optimizer = SparseOptimizerConfig(kind=_TABLES[name], learning_rate=0.02)
    return TableConfig(name, dim=_DIM, optimizer=optimizer)


def _model(slots: int, setting: Setting) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    counts = _counts_file() if setting.policy == "freq" else None
    cache = CacheConfig(slots=slots, policy=setting.policy, counts=counts, row_dtype=setting.row_dtype)
    host = HostConfig()
    if setting.tier == "disk":
        host = HostConfig(kind="disk", path=str(_folder()), ram_bytes=640 << 10)
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig(name, table=_table(name)) for name in _TABLES],
        cache,
        seed=_SEED,
        name=unique_name("exact"),
        host=host,
        exchange=setting.exchange,
    )
    ids, numbers = keras.Input((len(_TABLES),), dtype="int64", name="ids"), keras.Input((_X,), name="numbers")
    model = hvd_ctr.HybridModel(
        {"ids": ids, "numbers": numbers}, factorized_logits(layer(ids, factored=True), numbers, 0.5)
    )
    model.compile(keras.optimizers.Adam(0.002), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


@functools.cache
def _needed(comm: Comm) -> int:
    """The least slots that hold every batch."""
    layer = _model(1, _PLAINEST)[1]
    return max(comm.allgather_object(needed_slots(layer.sharded, _stream()[0])))


def _train(comm: Comm, setting: Setting) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    needed = _needed(comm)
    model, layer = _model({"minimum": needed, "1.2 x": needed + needed // 5, "all": 16384}[setting.slots], setting)
    mine = share(comm, np.arange(_GB))
    batches = [tuple(part[mine] for part in batch) for batch in zip(*_stream(), strict=True)]

    def inputs_of(batch) -> Inputs:
        return Inputs([batch[0]], BatchFacts(np.int64(len(batch[0])), np.float64(len(batch[0]))))

    def empty():
        return tuple(np.zeros_like(part[:0]) for part in batches[0])

    stream = ((batch, ()) for batch in batches)
    if setting.depth:
        stream = Pipeline(comm, [layer], iter(batches), inputs_of, empty, setting.depth)
    run = None
    for (ids, numbers, labels), staged in stream:
        if run is None:
            specs = tensor_specs(tf.nest.map_structure(tf.convert_to_tensor, (ids, numbers, labels, tuple(staged))))
            run = tf.function(
                lambda i, n, y, s: model.hybrid_step({"ids": i, "numbers": n}, y, staged=s).loss,
                input_signature=list(specs),
                autograph=False,
            )
        run(ids, numbers, labels, tuple(staged))
    return model, layer


def _rows(layer: hvd_ctr.MixCacheEmbedding, table: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """This rank's rows: id -> (row, state). Ownership is a function of the id, so runs can be compared rank by rank."""
    return {
        int(i): (row, state)
        for chunk in layer.sharded.export_rows(table)
        for i, row, state in zip(chunk.ids, chunk.rows, chunk.state, strict=True)
    }


def _digest(model: hvd_ctr.HybridModel, layer: hvd_ctr.MixCacheEmbedding) -> dict[str, str]:
    """SHA-256 of the bits of each table's rows and state, and of all dense variables."""
    parts = {"dense": [np.asarray(w).tobytes() for w in [*model.weights, *model.optimizer.variables]]}
    for table in _TABLES:
        rows = sorted(_rows(layer, table).items())
        parts[table] = [i.to_bytes(8, "big") + row.tobytes() + state.tobytes() for i, (row, state) in rows]
    return {name: hashlib.sha256(b"".join(bits)).hexdigest() for name, bits in parts.items()}


@functools.cache
def _expected(comm: Comm, row_dtype: str) -> dict[str, str]:
    return _digest(*_train(comm, _PLAINEST._replace(row_dtype=row_dtype)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The number of ranks decides which settings there are."""
    if "setting" in metafunc.fixturenames:
        ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        settings = _settings(ranks)
        metafunc.parametrize("setting", settings, ids=["-".join(map(str, setting)) for setting in settings])


def test_every_setting_gives_the_same_bits(comm: Comm, setting: Setting) -> None:
    expected = _expected(comm, setting.row_dtype)
    model, layer = _train(comm, setting)
    total = layer.cache_stats()["total"]
    assert _digest(model, layer) == expected
    assert total["steps"] == _STEPS and total["pinned_slots"] == 0 and total["foreign_keys"] == 0
    # The setting was what it says: rows left the cache, and the file was used.
    assert (total["evictions"] > 0) == (setting.slots != "all")
    if setting.tier == "disk" and setting.slots != "all":
        assert total["disk_rows_read"] > 0, total


@functools.cache
def _reference() -> tuple[DenseReference, list[np.ndarray]]:
    """Tables and dense weights of one process after all steps."""
    reference = DenseReference([_table(name) for name in _TABLES], seed=_SEED)
    vectors, numbers = keras.Input((len(_TABLES), _DIM)), keras.Input((_X,))
    tower = keras.Model([vectors, numbers], logits_model(vectors, numbers))
    optimizer, loss = keras.optimizers.Adam(0.002), keras.losses.BinaryCrossentropy(from_logits=True)
    train_reference(reference, list(_TABLES), tower, optimizer, loss, _stream())
    return reference, [np.asarray(w) for w in tower.weights]


def test_the_plainest_setting_equals_the_dense_reference(comm: Comm) -> None:
    """Rank 0 compares for all: the slow reference once, and not on every core at a time."""
    model, layer = _train(comm, _PLAINEST)
    folder = Path(comm.broadcast_object(str(_folder())))
    for name in _TABLES:
        rows = _rows(layer, name)
        values = np.stack([row for row, _ in rows.values()]) if rows else np.zeros((0, _DIM), np.float32)
        np.savez(folder / f"{name}.{comm.rank}.npz", ids=np.array(list(rows), np.int64), rows=values)
    comm.barrier()
    if comm.rank == 0:
        reference, weights = _reference()
        for left, right in zip(model.weights, weights, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
        for name, kind in _TABLES.items():
            parts = [np.load(folder / f"{name}.{rank}.npz") for rank in range(comm.size)]
            ids = np.concatenate([part["ids"] for part in parts])
            records = {i: record for (table, i), record in reference.records.items() if table == name}
            assert sorted(ids.tolist()) == sorted(records)
            expected = np.stack([records[i].row for i in ids.tolist()])
            rows = np.concatenate([part["rows"] for part in parts])
            np.testing.assert_allclose(rows, expected, rtol=0, atol=_TOLERANCE[kind], err_msg=name)
    comm.barrier()
