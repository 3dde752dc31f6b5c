"""Bags over any number of ranks: pooling happens after the exchange, so owners never pool parts (FC 27, 28, 42, 43,
45).
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import FeatureConfig
from tests.support.hybrid import embedding, step, zero_table


def _filled(comm: Comm, feature: FeatureConfig, values: dict[int, float]):
    layer = embedding([feature])
    dim = feature.table.dim
    ids = np.array(list(values), np.int64)
    rows = np.repeat(np.array(list(values.values()), np.float32)[:, None], dim, axis=1)
    layer.sharded.import_rows(feature.table.name, ids, rows)
    return layer


def test_mean_of_a_bag_spread_over_owners(comm: Comm) -> None:
    feature = FeatureConfig("f", table=zero_table("spread"), combiner="mean", length=3)
    layer = _filled(comm, feature, {0: 2.0, 1: 2.0, 2: 2.0})
    np.testing.assert_array_equal(layer({"f": np.array([[0, 1, 2]])})["f"], [[2, 2]])


@pytest.mark.parametrize("combiner, first, third", [("mean", 3.0, 4.0), ("sqrtn", 12 / np.sqrt(10), 4.0)])
def test_weighted_bags(comm: Comm, combiner: str, first: float, third: float) -> None:
    feature = FeatureConfig("f", table=zero_table(f"weighted_{combiner}"), combiner=combiner, length=None, weights="w")
    layer = _filled(comm, feature, {1: 0.0, 2: 4.0})
    ids = tf.ragged.constant([[1, 2], [1, 2], [2], []], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 3.0], [0.0, 0.0], [2.0], []])
    out = layer({"f": ids, "w": weights})["f"].numpy()
    np.testing.assert_allclose(out[:, 0], [first, 0, third, 0], rtol=1e-6)
    assert np.isfinite(out).all()


def test_weights_get_their_gradient(comm: Comm) -> None:
    feature = FeatureConfig("f", table=zero_table("weight_gradient", dim=1), combiner="mean", length=2, weights="w")
    layer = _filled(comm, feature, {1: 1.0, 2: 4.0})
    ids = tf.constant([[1, 2]], tf.int64)

    def value(weights):
        return tf.reduce_sum(layer({"f": ids, "w": weights})["f"])

    weights = tf.Variable([[1.0, 3.0]])
    with tf.GradientTape() as tape:
        loss = value(weights)
    numeric = [(value(weights + delta) - value(weights - delta)) / 0.02 for delta in ([[0.01, 0.0]], [[0.0, 0.01]])]
    np.testing.assert_allclose(tape.gradient(loss, weights)[0], [float(n) for n in numeric], rtol=1e-2)


@pytest.mark.parametrize("sparse", [False, True])
def test_trailing_empty_bags_stay(comm: Comm, sparse: bool) -> None:
    layer = _filled(comm, FeatureConfig("f", table=zero_table(f"trailing_{sparse}"), length=None), {3: 1.0})
    for rows, expected in ([[], [3], [], []], [0, 1, 0, 0]), ([[], [], [], []], [0, 0, 0, 0]):
        ids = tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)
        out = layer({"f": ids.to_sparse() if sparse else ids})["f"]
        np.testing.assert_array_equal(out, np.repeat(np.array(expected)[:, None], 2, axis=1))


def test_padding_takes_no_part(comm: Comm) -> None:
    layer = _filled(
        comm, FeatureConfig("f", table=zero_table("padded"), combiner="mean", length=3, padding_id=-1), {7: 6.0}
    )
    ids = np.array([[7, -1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(layer({"f": ids})["f"], [[6, 6], [0, 0]])
    step(layer, {"f": ids}, lambda out: tf.reduce_sum(out["f"]))
    assert layer.cache_stats()["total"]["invalid_ids"] == 0
    np.testing.assert_array_equal(layer.get_rows("padded", [7])[0], [6 - comm.size, 6 - comm.size])


def test_sequences_keep_their_shape(comm: Comm) -> None:
    table = zero_table("sequence")
    fixed = _filled(comm, FeatureConfig("f", table=table, combiner=None, length=2), {1: 1.0, 2: 2.0})
    np.testing.assert_array_equal(fixed({"f": np.array([[1, 2], [2, 2]])})["f"][:, :, 0], [[1, 2], [2, 2]])
    ragged = _filled(comm, FeatureConfig("f", table=zero_table("ragged"), combiner=None, length=None), {1: 1.0, 2: 2.0})
    out = ragged({"f": tf.ragged.constant([[1, 2, 1], [], [2]], dtype=tf.int64)})["f"]
    assert out.row_lengths().numpy().tolist() == [3, 0, 1]
    np.testing.assert_array_equal(out.flat_values[:, 0], [1, 2, 1, 2])


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 100, 1024, 1280, 2049])
def test_any_width(comm: Comm, dim: int) -> None:
    """FC 47."""
    layer = embedding([FeatureConfig("f", table=zero_table(f"width_{dim}", dim=dim))], slots=8)
    step(
        layer, {"f": np.array([1, 2], np.int64)}, lambda out: tf.reduce_sum(out["f"] * tf.range(dim, dtype=tf.float32))
    )
    np.testing.assert_array_equal(layer.get_rows(f"width_{dim}", [1])[0], -np.arange(dim) * comm.size)
