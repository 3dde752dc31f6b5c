"""factorized_dense against the plain composition: expand, multiply, add the bias."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.ops import factorized_ops, native, placement, pooling_ops

# B, F, D, H, X, U
_SIZES = [
    (64, 5, 16, 32, 3, 40),
    (50, 4, 7, 19, 0, 30),
    (300, 26, 16, 256, 13, 700),
    (40, 3, 33, 130, 2, 9),
    (1, 2, 3, 1, 1, 2),
    (0, 3, 4, 5, 2, 0),
]


def _case(sizes, dtype=np.float32):
    samples, features, dim, units, columns, unique = sizes
    generator = np.random.default_rng(sum(sizes))
    # Feature f has about U / (1 + f^2) distinct rows; rows are shared between the features; some ids are dropped.
    ids = generator.integers(0, 1 + unique, (samples, features)) // (1 + np.arange(features) ** 2)
    ids = np.minimum(ids, unique - 1)
    ids[generator.random(ids.shape) < 0.1] = -1
    shapes = [(unique, dim), (samples, columns), (columns + features * dim, units), (units,), (samples, units)]
    tensors = [tf.constant(generator.normal(size=shape).astype(dtype)) for shape in shapes]
    return tf.constant(ids.astype(np.int32)), tensors[:-1], tensors[-1]


def _plain(ids, rows, beside, kernel, bias, relu):
    features = ids.shape[1]
    x = pooling_ops.pool_rows(rows, tf.reshape(ids, [-1]), beside=pooling_ops.Beside(beside, features))
    outputs = tf.matmul(x, kernel) if bias is None else tf.matmul(x, kernel) + bias
    return tf.nn.relu(outputs) if relu else outputs


def _with_gradients(function, variables, upstream):
    with tf.GradientTape() as tape:
        tape.watch(variables)
        outputs = function()
    return [outputs, *tape.gradient(outputs, variables, upstream)]


@pytest.mark.parametrize("sizes", _SIZES)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("relu", [False, True])
def test_values_and_gradients_are_those_of_the_plain_layer(sizes, share, relu):
    ids, (rows, beside, kernel, bias), upstream = _case(sizes)
    variables = [rows, beside, kernel, bias]
    found = _with_gradients(
        lambda: factorized_ops.factorized_dense(rows, ids, beside, kernel, bias, relu, share), variables, upstream
    )
    expected = _with_gradients(lambda: _plain(ids, rows, beside, kernel, bias, relu), variables, upstream)
    factored = int(tf.size(factorized_ops.factor_plan(ids, rows, share).factored))
    assert (factored == sizes[1]) if share == 1 else (factored > 0) == (share > 0) or sizes[0] < 2
    for left, right in zip(found, expected, strict=True):
        assert left.shape == right.shape
        scale = float(tf.reduce_max(tf.abs(right))) if tf.size(right) else 1.0
        np.testing.assert_allclose(left, right, rtol=0, atol=3e-6 * scale)


def test_whole_numbers_are_exact_without_a_bias_inside_of_a_graph():
    generator = np.random.default_rng(4)
    ids = tf.constant(generator.integers(-1, 12, (30, 6)).astype(np.int32))
    rows, kernel = (tf.constant(generator.integers(-8, 9, s).astype(np.float32)) for s in ((12, 5), (33, 7)))
    beside, upstream = (tf.constant(generator.integers(-8, 9, s).astype(np.float32)) for s in ((30, 3), (30, 7)))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 5]),
            tf.TensorSpec([None, 6], tf.int32),
            tf.TensorSpec([None, 3]),
            tf.TensorSpec([33, 7]),
        ]
    )
    def in_graph(rows, ids, beside, kernel):
        with tf.GradientTape() as tape:
            tape.watch([rows, beside, kernel])
            outputs = factorized_ops.factorized_dense(rows, ids, beside, kernel, max_share=0.5)
            assert outputs.shape.as_list() == [None, 7]
        return [outputs, *tape.gradient(outputs, [rows, beside, kernel], upstream)]

    expected = _with_gradients(lambda: _plain(ids, rows, beside, kernel, None, False), [rows, beside, kernel], upstream)
    for left, right in zip(in_graph(rows, ids, beside, kernel), expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_example_of_the_docstring():
    outputs = factorized_ops.factorized_dense(
        tf.constant([[2.0], [3.0]]),
        tf.constant([[0, 1], [1, -1]]),
        tf.zeros([2, 0]),
        tf.constant([[1.0], [10.0]]),
        max_share=1.0,
    )
    np.testing.assert_array_equal(outputs, [[32], [3]])


def test_features_are_factored_up_to_a_number_of_rows():
    """Those with the fewest first."""
    ids = tf.constant(np.stack([np.arange(500) % 40, np.arange(500) % 3], 1).astype(np.int32))
    rows = tf.zeros([40, 1])
    np.testing.assert_array_equal(factorized_ops.factor_plan(ids, rows, 0.1, 42).factored, [1])
    np.testing.assert_array_equal(factorized_ops.factor_plan(ids, rows, 0.1, 43).factored, [0, 1])
    np.testing.assert_array_equal(factorized_ops.factor_plan(ids, rows, 0.07, 43).factored, [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": tf.zeros([6, 2])}, r"kernel has shape \[6,2\]; expected \(X \+ F \* D, H\)"),
        ({"kernel": tf.zeros([10, 2])}, r"beside has shape \[3,1\]; expected \[3,2\]"),
        ({"beside": tf.zeros([2, 1])}, r"beside has 2 samples, and the ids have shape \[3,"),
        ({"bias": tf.zeros([3])}, r"bias has shape \[3\]; expected \[2\]"),
        ({"row_of_id": tf.constant([[0, 5], [1, 1], [0, 0]])}, r"row 5 of sample 0, feature 1, is outside \[0, 5\)"),
        ({"row_of_id": tf.constant([[0, -2], [1, 1], [0, 0]])}, r"row -2 of sample 0, feature 1, is outside \[0, 5\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "rows": tf.zeros([5, 4]),
        "row_of_id": tf.constant([[0, 1], [1, 1], [0, 0]]),
        "beside": tf.zeros([3, 1]),
        "kernel": tf.zeros([9, 2]),
        "bias": tf.zeros([2]),
        "max_share": 1.0,
    }
    factorized_ops.factorized_dense(**arguments)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        factorized_ops.factorized_dense(**{**arguments, **change})


def test_a_row_beyond_the_rows_is_refused_in_a_direct_feature_too():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row 5 of sample 0, feature 1, is outside \[0, 5\)"):
        factorized_ops.factorized_dense(
            tf.zeros([5, 4]), tf.constant([[0, 5]]), tf.zeros([1, 0]), tf.zeros([8, 2]), max_share=0.0
        )


def _ints(*values):
    return tf.constant(values, tf.int32)


# B = 3, F = 2, D = 4, X = 1, H = 2, U = 5; feature 0 is direct, feature 1 has two distinct rows.
_FACTORED = {"factored": _ints(1), "begins": _ints(0, 2), "distinct": _ints(0, 1), "slots": _ints([0], [1], [2])}
_LAYER = {"rows": tf.ones([5, 4]), "kernel": tf.ones([9, 2])}
_CALLS = {
    "input": {**_LAYER, "direct_ids": _ints([0], [1], [-1]), "direct": _ints(0), "beside": tf.ones([3, 1])},
    "sum": {**_LAYER, **_FACTORED, "products": tf.ones([3, 2]), "bias": tf.ones([2])},
    "grad": {
        **_LAYER,
        **_FACTORED,
        "d_outputs": tf.ones([3, 2]),
        "d_inputs": tf.ones([3, 5]),
        "d_direct_kernel": tf.ones([5, 2]),
        "direct_ids": _ints([0], [1], [-1]),
        "direct": _ints(0),
    },
}


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("grad", {"direct": _ints(1)}, "1 direct and 1 factored features are not the 2 features"),
        ("grad", {"factored": _ints(0)}, "1 direct and 1 factored features are not the 2 features"),
        (
            "grad",
            {
                "direct": _ints(),
                "direct_ids": tf.zeros([3, 0], tf.int32),
                "d_inputs": tf.ones([3, 1]),
                "d_direct_kernel": tf.ones([1, 2]),
                "factored": _ints(1, 1),
                "begins": _ints(0, 1, 2),
                "slots": _ints([0, 1], [0, 1], [0, 1]),
            },
            "does not belong",
        ),
        ("grad", {"slots": _ints([0, 1, 2])}, r"slots has shape \[1,3\]; expected \[3,1\]"),
        ("sum", {"slots": _ints([0, 1, 2])}, r"slots has shape \[1,3\]; expected \[3,1\]"),
        (
            "sum",
            {"features": 2**62, "factored": _ints(2**31 - 1)},
            "expected .X . F . D, H. with F = 4611686018427387904",
        ),
        (
            "input",
            {"features": 2**62, "direct": _ints(2**31 - 1)},
            "expected .X . F . D, H. with F = 4611686018427387904",
        ),
        ("input", {"direct": _ints(2)}, "direct feature 2 is outside"),
    ],
)
def test_the_ops_refuse_what_is_no_plan(op, change, message):
    """Else parts of the kernel's gradient would be left unwritten, or memory of others would be read."""
    run = getattr(native.ops(), f"hvd_ctr_factorized_{op}")
    attributes = {} if op == "grad" else {"features": 2}
    run(**_CALLS[op], **attributes)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run(**{**_CALLS[op], **attributes, **change})


def test_the_gradient_is_on_the_host_too(monkeypatch):
    """Whatever device the gradient's caller has chosen: on a GPU TensorFlow would take its kernel there."""
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    ids, (rows, beside, kernel, bias), _ = _case(_SIZES[0])

    @tf.function
    def gradients(rows, beside, kernel):
        with tf.GradientTape() as tape:
            tape.watch([rows, beside, kernel])
            outputs = factorized_ops.factorized_dense(rows, ids, beside, kernel, bias, True)
        return tape.gradient(outputs, [rows, beside, kernel])

    operations = gradients.get_concrete_function(rows, beside, kernel).graph.get_operations()
    devices = {op.type: op.device for op in operations if "HvdCtr" in op.type or op.type == "MatMul"}
    assert len(devices) == 5 and set(devices.values()) == {"/device:CPU:0"}, devices


@pytest.mark.parametrize("wrapped", [lambda function: function, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_second_derivatives_are_refused(wrapped, share):
    """A gradient penalty: without a word its part of the kernel's gradient would be missing."""
    ids, (rows, beside, kernel, bias), _ = _case(_SIZES[0])

    def penalty(rows, beside, kernel):
        with tf.GradientTape() as outer:
            outer.watch(kernel)
            with tf.GradientTape() as inner:
                inner.watch(beside)
                outputs = factorized_ops.factorized_dense(rows, ids, beside, kernel, bias, True, share)
            total = tf.reduce_sum(tf.square(inner.gradient(outputs, beside)))
        return outer.gradient(total, kernel)

    with pytest.raises(NotImplementedError, match="factorized_dense has no second derivatives"):
        wrapped(penalty)(rows, beside, kernel)
