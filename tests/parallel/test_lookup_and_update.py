"""Lookups and updates over any number of ranks on integer-valued data, where equality is exact. FC n: field cases."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import FeatureConfig
from tests.support.hybrid import embedding, exported, share, step, zero_table


def _total(outputs):
    return tf.add_n([tf.reduce_sum(vectors) for vectors in tf.nest.flatten(outputs)])


def test_an_id_asked_for_by_several_ranks_gets_every_gradient(comm: Comm) -> None:
    """FC 1: the sum convention, equal to one process on the concatenated batch."""
    layer = embedding([FeatureConfig("f", table=zero_table("shared_id"))])
    ids = [[4, 4, 7], [4, 9]]
    mine = np.array(ids[comm.rank] if comm.rank < 2 else [], np.int64) if comm.size > 1 else np.array([4, 4, 7, 4, 9])
    step(layer, {"f": mine}, _total)
    rows = layer.get_rows("shared_id", [4, 7, 9, 5])
    np.testing.assert_array_equal(rows[:, 0], [-3, -1, -1, 0])


def test_features_that_share_a_table_add_up(comm: Comm) -> None:
    """FC 9, with the lookups on one rank and on different ranks."""
    table = zero_table("shared_table")
    layer = embedding([FeatureConfig("item", table=table), FeatureConfig("history", table=table, length=2)])
    mine = comm.rank == 0
    inputs = {
        "item": np.array([3] if mine else [], np.int64),
        "history": np.array([[3, 5]] if mine else np.zeros((0, 2)), np.int64),
    }
    step(layer, inputs, _total)
    np.testing.assert_array_equal(layer.get_rows("shared_table", [3, 5])[:, 0], [-2, -1])


def test_duplicates_are_summed_before_a_nonlinear_optimizer(comm: Comm) -> None:
    """FC 8: Adagrad on ids [5, 5] with gradient 1 each moves the row by 2 / sqrt(4.1), also when each comes from
    another rank.
    """
    layer = embedding([FeatureConfig("f", table=zero_table("merged", dim=1, kind="adagrad"))])
    mine = share(comm, np.array([5, 5]))
    step(layer, {"f": mine.astype(np.int64)}, _total)
    np.testing.assert_allclose(layer.get_rows("merged", [5]), [[-0.98773]], atol=1e-5)


def test_all_63_bits_of_an_id_count(comm: Comm) -> None:
    """FC 41: no narrowing anywhere on the path; int32 and int64 inputs name the same row."""
    ids = np.array([0, 5, 2**31, 2**31 + 5, 2**32 + 5, 2**53, 2**53 + 1, 2**63 - 1])
    layer = embedding([FeatureConfig("f", table=zero_table("wide_ids", dim=3))])
    for repeat, value in enumerate(ids):
        mine = np.array([value] * (repeat + 1) if comm.rank == 0 else [], np.int64)
        step(layer, {"f": mine}, _total)
    np.testing.assert_array_equal(layer.get_rows("wide_ids", ids)[:, 2], -np.arange(1, len(ids) + 1))
    assert sorted(exported(layer.sharded, comm, "wide_ids")) == sorted(ids.tolist())
    step(layer, {"f": np.array([5] if comm.rank == 0 else [], np.int32)}, _total)
    np.testing.assert_array_equal(layer.get_rows("wide_ids", [5])[:, 0], [-3])


def test_same_id_in_two_tables_is_two_rows(comm: Comm) -> None:
    layer = embedding(
        [FeatureConfig("a", table=zero_table("table_a")), FeatureConfig("b", table=zero_table("table_b"))]
    )
    step(layer, share(comm, np.array([[7, 8], [7, 7]])).astype(np.int64), _total)
    np.testing.assert_array_equal(layer.get_rows("table_a", [7, 8])[:, 0], [-2, 0])
    np.testing.assert_array_equal(layer.get_rows("table_b", [7, 8])[:, 0], [-1, -1])


@pytest.mark.parametrize("slots", [8, 16, 1000])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_integer_sgd_is_exact_for_any_cache(comm: Comm, slots: int, policy: str) -> None:
    """FC 50, 55: A/B/A/B working sets, each batch needs what the last one evicted; rows equal counts exactly."""
    layer = embedding([FeatureConfig("f", table=zero_table(f"exact_{slots}_{policy}"))], slots=slots, policy=policy)
    expected = np.zeros(16)
    for number in range(50):
        ids = np.arange(8) + 8 * (number % 2)
        ids = np.repeat(ids, 1 + number % 3)
        np.subtract.at(expected, ids, 1)
        step(layer, {"f": share(comm, ids).astype(np.int64)}, _total)
    np.testing.assert_array_equal(layer.get_rows(f"exact_{slots}_{policy}", np.arange(16))[:, 0], expected)
    total = layer.cache_stats()["total"]
    assert total["hits"] + total["misses"] == total["unique"] and total["foreign_keys"] == 0
    if slots == 8 and comm.size == 1:
        assert total["evictions"] == 8 * 49


def test_rows_of_absent_ids_do_not_move(comm: Comm) -> None:
    """Foreign keys and neighbours stay as they are under Adam with non-zero moments (papers S0, FC 19)."""
    table = zero_table("absent", kind="adam", learning_rate=0.1)
    layer = embedding([FeatureConfig("f", table=table)], slots=64)
    everything = np.arange(40)
    step(layer, {"f": share(comm, everything).astype(np.int64)}, _total)
    before = layer.get_rows("absent", everything)
    touched = np.array([3, 17, 29])
    step(layer, {"f": share(comm, touched).astype(np.int64)}, _total)
    after = layer.get_rows("absent", everything)
    moved = np.flatnonzero((before != after).any(axis=1))
    np.testing.assert_array_equal(moved, touched)


@pytest.mark.parametrize("tables", [1, 4, 26])
def test_many_tables_of_several_dims_never_dead_lock(comm: Comm, tables: int) -> None:
    """FC 69."""
    features = [FeatureConfig(f"f{i}", table=zero_table(f"many_{tables}_{i}", dim=1 + i % 3)) for i in range(tables)]
    layer = embedding(features, slots=4096)
    generator = np.random.default_rng(comm.rank)

    @tf.function(input_signature=[{f.name: tf.TensorSpec([None], tf.int64) for f in features}])
    def run(inputs):
        return step(layer, inputs, _total)

    for _ in range(50):
        run({f.name: generator.integers(0, 100, generator.integers(0, 1) + 5) for f in features})
    assert layer.cache_stats()["total"]["steps"] == 50


def test_traffic_grows_with_unique_ids_only(comm: Comm) -> None:
    """FC 7: 90 % of the batch is one id; what is sent is one row per unique id."""
    layer = embedding([FeatureConfig("f", table=zero_table("hot", dim=64))], slots=4096)
    ids = np.where(np.arange(4096) % 10 == 0, np.arange(4096), 5).astype(np.int64)
    unique = len(np.unique(ids))
    step(layer, {"f": ids}, _total)
    stats = layer.cache_stats()["total"]
    requested = sum(comm.allgather_object(int(stats["requested"])))
    assert requested == unique * comm.size
    np.testing.assert_array_equal(layer.get_rows("hot", [5])[0], np.full(64, -np.sum(ids == 5) * comm.size))
