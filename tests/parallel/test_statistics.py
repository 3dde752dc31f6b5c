"""Counters of the cache are exact, per rank and over the ranks, and show up in Keras' logs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from tests.support.hybrid import logits_model, share, step, unique_name

_NONE = np.zeros(0, np.int64)


def _layer(slots: int, *dims: int) -> hvd_ctr.MixCacheEmbedding:
    """A table t0, t1, .. per dim, with Adagrad: a row takes 2 x dim x 4 bytes with its state."""
    features = [
        FeatureConfig(f"t{i}", table=TableConfig(f"t{i}", dim=dim, optimizer=SparseOptimizerConfig(kind="adagrad")))
        for i, dim in enumerate(dims)
    ]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=slots, policy="lru"), name=unique_name("counted"))
    layer.build(None)
    return layer


def _step(layer: hvd_ctr.MixCacheEmbedding, inputs: dict[str, np.ndarray]) -> None:
    step(layer, inputs, lambda outputs: tf.add_n([tf.reduce_sum(rows) for rows in outputs.values()]))


def _owner(layer: hvd_ctr.MixCacheEmbedding, row_id: int) -> int:
    facts = BatchFacts(np.int64(1), np.float64(1))
    return int(np.argmax(layer.prepare({"t0": np.array([row_id])}, facts)[0].row_splits))


def test_counters_of_a_stream_by_hand(comm: Comm) -> None:
    """Every rank asks for 1, 1, 2, then for 2 and an id of its own; then rank 0 alone for 1. The second table gets one
    id from each rank in the first step."""
    layer, ranks = _layer(64, 2, 3), comm.size
    first = comm.rank == 0
    _step(layer, {"t0": np.array([1, 1, 2]), "t1": np.array([9, 9, 9])})
    _step(layer, {"t0": np.array([2, 3 + comm.rank]), "t1": _NONE})
    _step(layer, {"t0": np.array([1]) if first else _NONE, "t1": _NONE})
    layer.sharded.flush()
    stats = layer.cache_stats(all_ranks=True)
    rows = 2 + ranks
    life = dict.fromkeys(("not_admitted", "waiting_ids", "deleted_idle", "deleted_max_rows"), 0)
    common = {**life, "created": rows, "loads": rows, "evictions": 0, "write_backs": rows, "host_rows": rows}
    expected = {"requested": 4 * ranks + 1, "unique": 4 + ranks, "hits": 2, "misses": rows, "cached_rows": rows}
    expected |= {**common, "invalid_ids": 0, "device_host_bytes": 2 * rows * 16}
    assert stats["tables"]["t0"] == expected
    other = {**life, "requested": ranks, "hits": 0, "device_host_bytes": 2 * 24, "evictions": 0, "invalid_ids": 0}
    other |= dict.fromkeys(("unique", "misses", "created", "loads", "write_backs", "host_rows", "cached_rows"), 1)
    assert stats["tables"]["t1"] == other
    total = stats["total"]
    assert all(total[counter] == expected[counter] + other[counter] for counter in expected)
    assert total["hit_rate"] == 2 / (5 + ranks)
    assert (total["steps"], total["foreign_keys"], total["pinned_slots"], total["host_disk_bytes"]) == (3, 0, 0, 0)
    everyone = comm.allgather_object(layer.cache_stats())
    for counter in ("requested", "hits", "loads", "device_host_bytes", "cached_rows", "device_bytes"):
        assert total[counter] == sum(mine["total"][counter] for mine in everyone), counter
    assert total["pinned_peak"] == max(mine["total"]["pinned_peak"] for mine in everyone)


def test_evictions_of_a_stream_by_hand(comm: Comm) -> None:
    """One slot per rank, one id per step, asked for by the last rank: an owner's slot changes hands with every other id
    of its own."""
    layer = _layer(1, 4)
    held: dict[int, int] = {}
    expected = [dict.fromkeys(("unique", "hits", "misses", "created", "evictions"), 0) for _ in range(comm.size)]
    seen = set()
    for row_id in [1, 2, 1, 3, 3, 2, 4, 1, 5, 6, 6, 1]:
        _step(layer, {"t0": np.array([row_id]) if comm.rank == comm.size - 1 else _NONE})
        owner = _owner(layer, row_id)
        counts, hit = expected[owner], held.get(owner) == row_id
        counts["unique"] += 1
        counts["hits" if hit else "misses"] += 1
        counts["created"] += row_id not in seen
        counts["evictions"] += not hit and owner in held
        held[owner] = row_id
        seen.add(row_id)
    mine = layer.cache_stats()["tables"]["t0"]
    assert {counter: mine[counter] for counter in expected[0]} == expected[comm.rank]
    # Every row in a slot was updated, so its eviction is a write-back.
    assert mine["write_backs"] == mine["evictions"]
    assert mine["device_host_bytes"] == (mine["misses"] + mine["evictions"]) * 2 * 4 * 4
    total = layer.cache_stats(all_ranks=True)["total"]
    assert total["pinned_peak"] == 1
    for counter in expected[0]:
        assert total[counter] == sum(counts[counter] for counts in expected), counter


def test_ids_that_are_skipped_count_once_over_the_ranks(comm: Comm) -> None:
    table = TableConfig("t0", dim=2, rows=10, invalid_ids="skip")
    layer = hvd_ctr.MixCacheEmbedding([FeatureConfig("t0", table=table)], name=unique_name("skipping"))
    _step(layer, {"t0": np.array([3, 10, 11])})
    assert layer.cache_stats(all_ranks=True)["tables"]["t0"]["invalid_ids"] == 2 * comm.size


@pytest.mark.parametrize("depth", [0, 2])
def test_keras_logs_of_an_epoch(comm: Comm, depth: int) -> None:
    batches, rows = 5, 16
    ids = np.random.default_rng(3).integers(0, 40, (batches * rows, 1))
    features = [FeatureConfig("f", table=TableConfig(unique_name("logged"), dim=4))]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=64), name=unique_name("logs"))
    inputs = {"ids": keras.Input((1,), dtype="int64", name="ids"), "numbers": keras.Input((2,), name="numbers")}
    model = hvd_ctr.HybridModel(inputs, logits_model(layer(inputs["ids"]), inputs["numbers"]))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    mine = np.concatenate([share(comm, np.arange(b, b + rows)) for b in range(0, len(ids), rows)])
    x = {"ids": ids[mine], "numbers": np.zeros((len(mine), 2), np.float32)}
    y = np.zeros((len(mine), 1), np.float32)
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows // comm.size)
    first = model.fit(train, epochs=2, verbose=0, pipeline_depth=depth).history
    second = model.fit(train, validation_data=train, verbose=0, pipeline_depth=depth).history
    unique = sum(len(np.unique(ids[b : b + rows])) for b in range(0, len(ids), rows))
    assert first["cache_hit_rate"] == [1 - len(np.unique(ids)) / unique, 1.0]
    assert first["cache_evictions"] == [0.0, 0.0]
    # Each row is loaded once, in the first epoch, and none is written back.
    assert first["device_host_bytes"] == [len(np.unique(ids)) * 2 * 4 * 4.0, 0.0]
    moved = first["exchange_bytes"]
    assert (moved[1] > 1000) == (comm.size > 1)
    # Validation is not training. A pipeline exchanges one header more, to learn that all ranks are at the end; whether
    # that comes before or after the end of the epoch is open.
    header = 10 * 8 * comm.size * (comm.size - 1) if depth else 0
    assert all(abs(value - moved[0]) <= header for value in (moved[1], second["exchange_bytes"][0]))
    waited = [*first["gpu_worker_wait_seconds"], *second["gpu_worker_wait_seconds"]]
    assert all(0 < seconds < 60 for seconds in waited) if depth else waited == [0.0, 0.0, 0.0]
    ranks, everyone = comm.allgather_object(model.statistics()), model.statistics(all_ranks=True)
    for kind in ("rows", "gradients", "dense"):
        for counter, value in everyone["exchange"][kind].items():
            assert value == sum(rank["exchange"][kind][counter] for rank in ranks), (kind, counter)
    assert everyone["total"]["unique"] == 3 * unique and everyone["ranks"] == comm.size
    mine = {name: first[name] for name in sorted(first) if name != "loss"}
    assert all(other == mine for other in comm.allgather_object(mine))
