"""Interaction layers against brute force in NumPy: values, gradients, shapes, saving."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.layers.interactions import CrossNetV2, DotInteraction, FactorizationMachine


def _vectors(batch: int = 5, features: int = 4, dim: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, features, dim)).astype(np.float32)


def _pairs(vectors: np.ndarray) -> np.ndarray:
    """Dot products of all pairs, one by one, in the documented order."""
    features = vectors.shape[1]
    return np.stack(
        [(vectors[:, f] * vectors[:, g]).sum(1) for f in range(features) for g in range(f)],
        axis=1,
    )


def test_factorization_machine_is_the_sum_over_pairs() -> None:
    vectors = _vectors()
    result = FactorizationMachine()(vectors)
    assert result.shape == (5, 1)
    np.testing.assert_allclose(result[:, 0], _pairs(vectors).sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("features", [2, 3, 7])
def test_dot_interaction_is_every_pair_in_order(features: int) -> None:
    vectors = _vectors(features=features)
    result = DotInteraction()(vectors)
    assert result.shape == (5, features * (features - 1) // 2)
    np.testing.assert_allclose(result, _pairs(vectors), rtol=1e-5, atol=1e-6)


def test_dot_interaction_gradient_is_that_of_the_plain_formula() -> None:
    vectors = tf.constant(_vectors(features=5))
    upstream = tf.constant(np.random.default_rng(1).normal(size=(5, 10)).astype(np.float32))
    layer = DotInteraction()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(vectors)
        ours = tf.reduce_sum(layer(vectors) * upstream)
        columns = [tf.reduce_sum(vectors[:, f] * vectors[:, g], 1) for f in range(5) for g in range(f)]
        plain = tf.reduce_sum(tf.stack(columns, 1) * upstream)
    np.testing.assert_allclose(tape.gradient(ours, vectors), tape.gradient(plain, vectors), rtol=1e-5, atol=1e-6)


def test_cross_network_follows_the_formula() -> None:
    x0 = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    layer = CrossNetV2(layers=3)
    layer(x0)
    for index, bias in enumerate(layer.biases):
        bias.assign(np.full(4, 0.1 * (index + 1), np.float32))
    expected = x0
    for kernel, bias in zip(layer.kernels, layer.biases, strict=True):
        expected = x0 * (expected @ kernel.numpy() + bias.numpy()) + expected
    np.testing.assert_allclose(layer(x0), expected, rtol=1e-5, atol=1e-6)
    assert len(layer.trainable_weights) == 6


def test_cross_network_needs_a_layer() -> None:
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        CrossNetV2(layers=0)


@pytest.mark.parametrize("layer", [FactorizationMachine(), DotInteraction()])
def test_wrong_shapes_are_named(layer: keras.layers.Layer) -> None:
    with pytest.raises(ValueError, match=r"must be \(B, F, D\)"):
        layer(np.ones((3, 4), np.float32))


def test_one_vector_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        DotInteraction()(np.ones((3, 1, 4), np.float32))


@pytest.mark.parametrize("make", [FactorizationMachine, DotInteraction])
def test_zero_rows(make: type) -> None:
    layer = make()
    vectors = tf.zeros([0, 4, 3])
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        result = layer(vectors)
        total = tf.reduce_sum(result)
    assert result.shape[0] == 0
    assert tape.gradient(total, vectors).shape == (0, 4, 3)


def test_layers_survive_saving(tmp_path) -> None:
    vectors = keras.Input((4, 3))
    pairs = DotInteraction()(vectors)
    crossed = CrossNetV2(layers=2, kernel_regularizer=keras.regularizers.L2(0.01))(pairs)
    model = keras.Model(vectors, [FactorizationMachine()(vectors), crossed])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    data = _vectors()
    for ours, theirs in zip(model(data), loaded(data), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(loaded.losses) == 2
    np.testing.assert_allclose(loaded.losses[0], model.losses[0])


def test_symbolic_shapes_match_the_values() -> None:
    vectors = keras.Input((6, 3))
    assert FactorizationMachine()(vectors).shape == (None, 1)
    assert DotInteraction()(vectors).shape == (None, 15)
    assert CrossNetV2()(keras.Input((9,))).shape == (None, 9)
