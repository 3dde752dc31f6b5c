"""Calls and bytes between the ranks are counted exactly, inside and outside of tf.functions (hvd_ctr/traffic.py)."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.traffic import COUNTERS, KINDS
from tests.support.hybrid import unique_name, zero_table

_DIM, _WORD, _FLOAT = 4, 8, 4
_HEADER_WORDS = 8 + 2  # of a key message, and two counts for the one table
Counts = dict[str, tuple[int, int, int]]


def _since(comm: Comm, before: dict[str, dict[str, int]]) -> Counts:
    after = comm.traffic()
    return {kind: tuple(after[kind][name] - before[kind][name] for name in COUNTERS) for kind in KINDS}


@pytest.fixture
def splits(comm: Comm) -> np.ndarray:
    """(W, W) keys that rank r asks rank p for, out of `_ids`."""
    layer = hvd_ctr.MixCacheEmbedding([FeatureConfig("f", table=zero_table("f"))], name=unique_name("splits"))
    (prepared,) = layer.prepare({"f": _ids(comm)}, BatchFacts(np.int64(1), np.float64(1)))
    return np.array(comm.allgather_object(np.asarray(prepared.row_splits).tolist()))


def _ids(comm: Comm) -> np.ndarray:
    """Three keys, one of them twice; the last rank has none."""
    return np.array([1, 2, 2, 3 + comm.rank] if comm.rank == 0 or comm.rank < comm.size - 1 else [], np.int64)


def _model(mode: str) -> tuple[hvd_ctr.HybridModel, int]:
    """A model of one table and one Dense layer, and the bytes of its dense weights."""
    features = [FeatureConfig("f", table=zero_table(unique_name("counted"), dim=_DIM))]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=64), name=unique_name("traffic"), exchange=mode)
    ids = keras.Input((), dtype="int64", name="f")
    model = hvd_ctr.HybridModel({"f": ids}, keras.layers.Dense(1)(layer({"f": ids})["f"]))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.synchronise()
    return model, (_DIM + 1) * _FLOAT


def _expected(comm: Comm, mode: str, n: np.ndarray, dense_bytes: int) -> Counts:
    """Of one step, by hand. n: keys from rank to rank."""
    size, me, row = comm.size, comm.rank, _DIM * _FLOAT
    others = [rank for rank in range(size) if rank != me]
    words = (n + _HEADER_WORDS) * _WORD
    reduced = 2 * (size - 1) * dense_bytes // size
    counts = dict.fromkeys(KINDS, (0, 0, 0))
    if size == 1:
        return counts
    counts["dense"] = (1, reduced, reduced)
    if mode == "alltoall":
        counts["keys"] = (1, words[me, others].sum(), words[others, me].sum())
        counts["rows"] = (1, n[others, me].sum() * row, n[me, others].sum() * row)
        counts["gradients"] = (1, n[me, others].sum() * row, n[others, me].sum() * row)
        return counts
    sizes = 4 * size * (size - 1)  # W int32 from every rank to every other
    asked, answered = n.sum(axis=1), n.sum(axis=0)
    counts["keys"] = (2, sizes + words[me].sum() * (size - 1), sizes + words[others].sum())
    if mode == "allgather":
        counts["rows"] = (2, sizes + answered[me] * row * (size - 1), sizes + answered[others].sum() * row)
        counts["gradients"] = (2, sizes + asked[me] * row * (size - 1), sizes + asked[others].sum() * row)
    else:
        summed = 2 * (size - 1) * n.sum() * row // size
        counts["rows"] = counts["gradients"] = (2, sizes + summed, sizes + summed)
    return counts


@pytest.mark.parametrize("mode", ["alltoall", "allgather", "allreduce"])
def test_every_step_counts_what_it_moves(comm: Comm, mode: str, splits: np.ndarray) -> None:
    model, dense_bytes = _model(mode)
    ids = _ids(comm)
    x, y = {"f": tf.constant(ids)}, tf.zeros([len(ids), 1])
    expected = _expected(comm, mode, splits, dense_bytes)
    step = tf.function(lambda x, y: model.hybrid_step(x, y).loss, reduce_retracing=True, autograph=False)
    before = comm.traffic()
    for _ in range(3):
        step(x, y)
    assert _since(comm, before) == {kind: tuple(3 * value for value in counts) for kind, counts in expected.items()}
    before = comm.traffic()
    model.hybrid_step(x, y)
    assert _since(comm, before) == expected
    before = comm.traffic()
    model(x)
    read = _since(comm, before)
    assert read["read"] == tuple(np.add(expected["keys"], expected["rows"]))
    assert all(read[kind] == (0, 0, 0) for kind in KINDS if kind != "read")


def test_every_byte_sent_is_received(comm: Comm) -> None:
    before = comm.traffic()
    comm.allgather_object("x" * (10 + comm.rank))
    comm.broadcast_variables([tf.Variable(tf.zeros([3, 5]))], root=comm.size - 1)
    comm.barrier()
    comm.alltoall(tf.ones([comm.size, 2]), tf.ones([comm.size], tf.int32), "evenly")
    mine = _since(comm, before)["other"]
    parts = (comm.size - 1) * (8 + 12 + comm.rank) + (comm.rank == comm.size - 1) * (comm.size - 1) * 60
    assert mine[1] == (parts + 2 * (comm.size - 1) * 4 // comm.size + (comm.size - 1) * 8 if comm.size > 1 else 0)
    everyone = np.array(comm.allgather_object([int(value) for value in mine]))
    assert everyone[:, 1].sum() == everyone[:, 2].sum()
    assert (everyone[:, 0] == (5 if comm.size > 1 else 0)).all()


def test_an_unknown_kind_is_refused(comm: Comm) -> None:
    if comm.size > 1:
        with pytest.raises(ValueError, match="no kind of traffic is called 'letters'; allowed: keys, rows, gradients"):
            comm.allgather(tf.ones([1]), "letters", kind="letters")
