"""Expand and pool: values and gradients against a composition of stock ops, gradients against finite differences."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ctr.ops import pooling_ops


def reference(rows, virtual_ids, splits, weights, combiner):
    """Slow composition of stock ops, differentiable."""
    flat = tf.reshape(virtual_ids, [-1])
    kept = tf.cast(flat >= 0, tf.float32)
    scale = kept if weights is None else kept * weights
    expanded = tf.gather(rows, tf.maximum(flat, 0)) * scale[:, None]
    bags = tf.constant(np.repeat(np.arange(len(splits) - 1), np.diff(splits)), tf.int32)
    total = tf.math.unsorted_segment_sum(expanded, bags, len(splits) - 1)
    if combiner == "sum":
        return total
    divisor = tf.math.unsorted_segment_sum(scale if combiner == "mean" else scale**2, bags, len(splits) - 1)
    if combiner == "sqrtn":
        divisor = tf.sqrt(tf.where(divisor > 0, divisor, 1.0)) * tf.cast(divisor > 0, tf.float32)
    return tf.math.divide_no_nan(total, divisor[:, None])


@st.composite
def bags(draw):
    unique = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    splits = np.cumsum([0, *sizes])
    virtual_ids = draw(st.lists(st.integers(-1, unique - 1), min_size=int(splits[-1]), max_size=int(splits[-1])))
    dim = draw(st.sampled_from([1, 3, 16]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = generator.integers(-8, 8, (unique, dim)).astype(np.float32)
    weights = generator.integers(1, 5, int(splits[-1])).astype(np.float32) if draw(st.booleans()) else None
    return rows, np.array(virtual_ids, np.int32), splits, weights


@settings(max_examples=60, deadline=None)
@given(bags(), st.sampled_from(pooling_ops.COMBINERS))
def test_values_and_gradients_equal_the_composition(case, combiner):
    rows, virtual_ids, splits, weights = case
    rows = tf.constant(rows)
    weights = None if weights is None else tf.constant(weights)
    sources = [rows] if weights is None else [rows, weights]
    upstream = tf.constant(
        np.arange((len(splits) - 1) * rows.shape[1]).reshape(len(splits) - 1, -1) % 7 - 3, tf.float32
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        pooled = pooling_ops.pool_rows(rows, virtual_ids, splits, weights, combiner)
        wanted = reference(rows, virtual_ids, splits, weights, combiner)
        loss, wanted_loss = tf.reduce_sum(pooled * upstream), tf.reduce_sum(wanted * upstream)
    np.testing.assert_allclose(pooled, wanted, rtol=2e-6, atol=1e-6)
    for got, expected in zip(tape.gradient(loss, sources), tape.gradient(wanted_loss, sources), strict=True):
        np.testing.assert_allclose(got, tf.convert_to_tensor(expected), rtol=1e-5, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(bags(), st.sampled_from(pooling_ops.COMBINERS), st.integers(0, 3), st.booleans())
def test_one_row_per_sample_is_a_concatenation_bit_for_bit(case, combiner, columns, feature_major):
    rows, virtual_ids, splits, weights = case
    bag_count, dim = len(splits) - 1, rows.shape[1]
    features = max(f for f in (1, 2, 3) if bag_count % f == 0)
    samples = bag_count // features
    rows, weights = tf.constant(rows), None if weights is None else tf.constant(weights)
    beside = tf.random.stateless_normal([samples, columns], [1, bag_count])
    sources = [rows, beside] if weights is None else [rows, beside, weights]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        asked = pooling_ops.Beside(beside, features, feature_major)
        got = pooling_ops.pool_rows(rows, virtual_ids, splits, weights, combiner, asked)
        pooled = pooling_ops.pool_rows(rows, virtual_ids, splits, weights, combiner)
        by_sample = (
            tf.transpose(tf.reshape(pooled, [features, samples, dim]), [1, 0, 2])
            if feature_major
            else tf.reshape(pooled, [samples, features, dim])
        )
        wanted = tf.concat([beside, tf.reshape(by_sample, [samples, features * dim])], axis=1)
        upstream = tf.reshape(tf.range(tf.size(wanted), dtype=tf.float32) % 7 - 3, tf.shape(wanted))
        losses = [tf.reduce_sum(value * upstream) for value in (got, wanted)]
    np.testing.assert_array_equal(got, wanted)
    for mine, composed in zip(*(tape.gradient(loss, sources) for loss in losses), strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(mine), tf.convert_to_tensor(composed))


@pytest.mark.parametrize("feature_major", [False, True])
def test_a_batch_without_samples_has_its_width(feature_major):
    rows, beside = tf.ones([2, 4]), pooling_ops.Beside(tf.zeros([0, 3]), 2, feature_major)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        pooled = pooling_ops.pool_rows(rows, tf.zeros([0, 2], tf.int32), beside=beside)
    assert pooled.shape == (0, 11)
    np.testing.assert_array_equal(tape.gradient(pooled, rows), np.zeros([2, 4]))


def test_bags_that_do_not_fill_the_rows_are_refused():
    beside = pooling_ops.Beside(tf.zeros([2, 1]), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="6 bags are expected; received 4"):
        pooling_ops.pool_rows(tf.ones([2, 4]), tf.zeros([2, 2], tf.int32), beside=beside)


@pytest.mark.parametrize("combiner", pooling_ops.COMBINERS)
def test_gradients_against_finite_differences(combiner):
    rows = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    weights = np.array([0.5, 2.0, 1.5, 1.0, 3.0], np.float32)
    virtual_ids, splits = np.array([0, 2, 0, -1, 3], np.int32), np.array([0, 3, 3, 4, 5], np.int64)

    def pool(rows, weights):
        return pooling_ops.pool_rows(rows, virtual_ids, splits, weights, combiner)

    analytic, numeric = tf.test.compute_gradient(pool, [rows, weights], delta=2.0**-7)
    for got, expected in zip(analytic, numeric, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize("combiner", pooling_ops.COMBINERS)
@pytest.mark.parametrize("columns", [None, 0, 2])
def test_second_derivatives_against_finite_differences(combiner, columns):
    rows = tf.constant(np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32))
    virtual_ids, splits = np.array([0, 2, 0, -1, 3], np.int32), np.array([0, 3, 3, 4, 5], np.int64)
    beside = None if columns is None else pooling_ops.Beside(tf.ones([2, columns]), 2)

    def first_gradient(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = tf.reduce_sum(pooling_ops.pool_rows(rows, virtual_ids, splits, None, combiner, beside) ** 3)
        return tape.gradient(loss, rows)

    (analytic,), (numeric,) = tf.test.compute_gradient(first_gradient, [rows], delta=2.0**-7)
    assert np.abs(numeric).max() > 1
    np.testing.assert_allclose(analytic, numeric, atol=1e-2)


def test_second_derivatives_with_weights_are_refused():
    rows, weights = tf.ones([2, 3]), tf.ones([2])
    with tf.GradientTape() as outer:
        outer.watch(rows)
        with tf.GradientTape() as inner:
            inner.watch(rows)
            loss = tf.reduce_sum(pooling_ops.pool_rows(rows, [0, 1], weights=weights) ** 2)
        total = tf.reduce_sum(inner.gradient(loss, rows))
    with pytest.raises(NotImplementedError, match="no second derivatives with weights"):
        outer.gradient(total, rows)


def test_every_id_a_bag_is_gather():
    """The fast path: virtual ids of any shape, dropped ones give zeros."""
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    ids = tf.constant([[1, -1], [0, 1]])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        pooled = pooling_ops.pool_rows(rows, ids)
        loss = tf.reduce_sum(pooled * [[1.0], [10.0], [100.0], [1000.0]])
    np.testing.assert_array_equal(pooled, [[3, 4], [0, 0], [1, 2], [3, 4]])
    np.testing.assert_array_equal(tape.gradient(loss, rows), [[100, 100], [1001, 1001]])


def test_empty_batch_and_no_rows():
    rows = tf.zeros((0, 4))
    assert pooling_ops.pool_rows(rows, tf.zeros((0,), tf.int32)).shape == (0, 4)
    pooled = pooling_ops.pool_rows(rows, tf.constant([-1, -1]), tf.constant([0, 2, 2], tf.int64), combiner="mean")
    np.testing.assert_array_equal(pooled, np.zeros((2, 4)))


def test_static_shapes_in_a_graph():
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 8)), tf.TensorSpec((None, 3), tf.int32)])
    def trace(rows, virtual_ids):
        shapes.append(pooling_ops.pool_rows(rows, virtual_ids).shape.as_list())
        shapes.append(pooling_ops.pool_rows(rows, virtual_ids, tf.constant([0, 1, 6], tf.int64)).shape.as_list())
        pooled = pooling_ops.pool_rows(rows, virtual_ids)
        return tf.gradients(pooled, rows)[0]

    gradient = trace(tf.ones((2, 8)), tf.constant([[0, 0, 1], [-1, 0, 0]]))
    np.testing.assert_array_equal(gradient[:, 0], [4, 1])
    assert shapes == [[None, 8], [2, 8]]


@pytest.mark.parametrize(
    ("virtual_ids", "splits", "weights", "message"),
    [
        ([0, 2], [0, 2], None, "virtual id 2"),
        ([0, -2], [0, 2], None, "virtual id -2"),
        ([0, 1], [0, 1], None, "bag splits run from 0 to 1"),
        ([0, 1], [0, 3, 2], None, "decrease"),
        ([0, 1], [0, 2], [1.0], "weights has 1 entries"),
    ],
)
def test_bad_bags_are_refused(virtual_ids, splits, weights, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        pooling_ops.pool_rows(
            tf.zeros((2, 3)),
            tf.constant(virtual_ids),
            tf.constant(splits, tf.int64),
            None if weights is None else tf.constant(weights),
        )


def test_unknown_combiner_is_refused():
    with pytest.raises(ValueError, match=r"'max'.*sum, mean, sqrtn"):
        pooling_ops.pool_rows(tf.zeros((1, 1)), tf.constant([0]), combiner="max")


def test_sums_of_rows_by_sample():
    rows = tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        sums = pooling_ops.sum_rows(rows, tf.constant([[0, 1, 1], [2, -1, 0]]))
    np.testing.assert_array_equal(sums, [[21, 42], [101, 202]])
    gradient = tape.gradient(sums, rows, tf.constant([[1.0, 1.0], [0.0, 5.0]]))
    np.testing.assert_array_equal(gradient, [[1, 6], [2, 2], [0, 5]])
    assert pooling_ops.sum_rows(rows, tf.zeros([0, 3], tf.int32)).shape == (0, 2)
