"""Interaction layers against brute force in NumPy: values, gradients, shapes, saving."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.layers.interactions import CrossNetV2, DotInteraction, FactorizationMachine
from hvd_ctr.ops import interaction_ops


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


FUSED = {
    "dot_pairs": (interaction_ops.dot_pairs, interaction_ops.plain_dot_pairs),
    "pair_sum": (interaction_ops.pair_sum, interaction_ops.plain_pair_sum),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(4096, 26, 16), (7, 2, 1), (3, 17, 15), (5, 33, 40), (2, 3, 64), (0, 26, 16)])
def test_fused_interactions_equal_the_composition(name: str, shape: tuple[int, int, int]) -> None:
    """Within 1e-6 of the largest value, forward and gradient."""
    fused, plain = FUSED[name]
    vectors = tf.constant(_vectors(*shape, seed=3) / np.sqrt(shape[2]), tf.float32)
    results = []
    for function in (fused, plain):
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            outputs = function(vectors)
            upstream = tf.constant(np.random.default_rng(1).normal(size=outputs.shape), tf.float32)
            total = tf.reduce_sum(outputs * upstream)
        results.append((outputs.numpy(), tape.gradient(total, vectors).numpy()))
    for mine, other in zip(*results, strict=True):
        assert mine.shape == other.shape
        # The composition of pair_sum itself cancels: both are compared on the scale of what they subtract.
        scale = max(1.0, np.abs(other).max(initial=0.0), shape[1] if name == "pair_sum" else 0)
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("name", FUSED)
def test_fused_interactions_know_their_shapes_and_have_second_derivatives(name: str) -> None:
    fused, _ = FUSED[name]
    unknown = tf.function(fused, input_signature=[tf.TensorSpec([None, 5, 3])]).get_concrete_function()
    assert unknown.output_shapes.as_list() == [None, 10 if name == "dot_pairs" else 1]
    vectors = tf.constant(_vectors(2, 4, 3))
    weight = tf.constant(np.random.default_rng(4).normal(size=(2, 6 if name == "dot_pairs" else 1)).astype(np.float32))

    def first_gradient(vectors):
        with tf.GradientTape() as tape:
            tape.watch([vectors, weight])
            total = tf.reduce_sum(tf.square(fused(vectors)) * weight)
        return tf.concat([tf.reshape(part, [-1]) for part in tape.gradient(total, [vectors, weight])], 0)

    along = tf.constant(_vectors(2, 4, 3, seed=9))
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        gradient = first_gradient(vectors)
        total = tf.reduce_sum(tf.square(gradient))
    slope = tf.reduce_sum(tape.gradient(total, vectors) * along)
    step = 1e-3
    ends = [tf.reduce_sum(tf.square(first_gradient(vectors + sign * step * along))) for sign in (1, -1)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=2e-2)


@pytest.mark.parametrize("name", FUSED)
def test_fused_interactions_refuse_other_shapes(name: str) -> None:
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        FUSED[name][0](tf.zeros([3, 4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="F at least 1"):
        FUSED[name][0](tf.zeros([3, 0, 4]))


@pytest.mark.parametrize("layer", [DotInteraction, FactorizationMachine])
@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_interactions_of_other_types(layer, dtype: str) -> None:
    vectors = _vectors(features=6)
    result = layer(dtype=dtype)(vectors)
    assert result.dtype == ("bfloat16" if dtype == "mixed_bfloat16" else dtype)
    tolerance = 0.05 if dtype == "mixed_bfloat16" else 1e-5
    np.testing.assert_allclose(tf.cast(result, tf.float32), layer()(vectors), rtol=tolerance, atol=tolerance)


def test_factorization_machine_of_distinct_rows_is_that_of_their_vectors() -> None:
    generator = np.random.default_rng(6)
    rows = tf.constant(generator.normal(size=(9, 5)).astype(np.float32))
    row_of_id = tf.constant(generator.integers(-1, 9, (40, 6)).astype(np.int32))
    upstream = tf.constant(generator.normal(size=(40, 1)).astype(np.float32))
    layer = FactorizationMachine()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(rows)
        ours = layer({"rows": rows, "row_of_id": row_of_id})
        vectors = tf.where(row_of_id[..., None] >= 0, tf.gather(rows, tf.maximum(row_of_id, 0)), 0.0)
        plain = layer(vectors)
    assert ours.shape == (40, 1)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(ours, rows, upstream),
        tf.convert_to_tensor(tape.gradient(plain, rows, upstream)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_factorization_machine_of_distinct_rows_has_second_derivatives() -> None:
    generator = np.random.default_rng(7)
    rows = tf.constant(generator.normal(size=(5, 3)).astype(np.float32))
    row_of_id = tf.constant(generator.integers(0, 5, (8, 4)).astype(np.int32))

    def second_gradient(vectors_of):
        with tf.GradientTape() as outer:
            outer.watch(rows)
            with tf.GradientTape() as inner:
                inner.watch(rows)
                loss = tf.reduce_sum(FactorizationMachine()(vectors_of()) ** 2)
            total = tf.reduce_sum(tf.convert_to_tensor(inner.gradient(loss, rows)) ** 2)
        return tf.convert_to_tensor(outer.gradient(total, rows))

    plain = second_gradient(lambda: tf.gather(rows, row_of_id))
    distinct = second_gradient(lambda: {"rows": rows, "row_of_id": row_of_id})
    np.testing.assert_allclose(distinct, plain, rtol=1e-4, atol=1e-4 * float(tf.reduce_max(tf.abs(plain))))
