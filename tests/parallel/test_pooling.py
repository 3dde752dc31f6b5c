"""Bags over any number of ranks: pooling happens after the exchange, so owners never pool parts (FC 27, 28, 42, 43,
45).
"""

from __future__ import annotations

import keras
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


def _tower_case(kind: str) -> tuple[list[FeatureConfig], object]:
    """Features and inputs of three samples that a tower's input is made of by one op, or by several."""
    first, second = zero_table(f"tower_{kind}_a", dim=3), zero_table(f"tower_{kind}_b", dim=2 if kind == "dims" else 3)
    if kind == "bags":
        features = [
            FeatureConfig(name, table=table, combiner="mean", length=2)
            for name, table in zip("fg", (first, second), strict=True)
        ]
        return features, {"f": np.array([[1, 2], [2, 3], [1, 1]]), "g": np.array([[4, 1], [5, 2], [4, 4]])}
    if kind == "order":  # tables come in another order than their features: several ops
        return [FeatureConfig(n, table=t) for n, t in (("f", first), ("g", second), ("h", first))], np.array(
            [[1, 4, 3], [2, 5, 1], [1, 4, 1]]
        )
    features = [FeatureConfig("f", table=first), FeatureConfig("g", table=second)]
    if kind == "matrix":
        return features, np.array([[1, 4], [2, 5], [1, 4]])
    return features, {"f": np.array([1, 2, 1]), "g": np.array([4, 5, 4])}


@pytest.mark.parametrize("kind", ["matrix", "singles", "bags", "order", "dims"])
def test_the_input_of_a_tower_is_dense_columns_and_vectors(comm: Comm, kind: str) -> None:
    """dense=...: the same bits as a concatenation, forward and in what training makes of the rows."""
    dense = tf.constant([[0.5, -1.0], [2.0, 3.0], [0.25, 8.0]])
    results = []
    for together in (True, False):
        features, inputs = _tower_case(kind)
        layer = embedding(features)

        def tower(outputs, layer=layer, features=features):
            if not isinstance(outputs, dict):
                return tf.concat([dense, tf.reshape(outputs, [3, -1])], axis=1)
            return tf.concat([dense, *(outputs[feature.name] for feature in features)], axis=1)

        def call(values, layer=layer, together=together, tower=tower):
            return layer(values, dense=dense) if together else tower(layer(values))

        before = call(inputs)
        weights = tf.reshape(tf.range(tf.size(before), dtype=tf.float32), tf.shape(before))
        step(call, inputs, lambda out, weights=weights: tf.reduce_sum(out * weights))
        results.append((before.numpy(), call(inputs).numpy()))
        assert (
            call(inputs).shape
            == layer.compute_output_spec(
                {name: keras.KerasTensor(ids.shape, "int64") for name, ids in inputs.items()}
                if isinstance(inputs, dict)
                else keras.KerasTensor(inputs.shape, "int64"),
                dense=keras.KerasTensor((3, 2)),
            ).shape
        )
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert not np.array_equal(results[0][0], results[0][1])


def test_a_tower_has_no_place_for_sequences(comm: Comm) -> None:
    layer = embedding([FeatureConfig("f", table=zero_table("no_tower"), combiner=None, length=2)])
    with pytest.raises(ValueError, match="without a combiner are f"):
        layer({"f": np.array([[1, 2]])}, dense=tf.zeros([1, 1]))
