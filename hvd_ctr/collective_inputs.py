"""What tensors need before a collective takes them: checks and guards inside the graph, without copies."""

from __future__ import annotations

import contextlib

import tensorflow as tf


def match_rows(tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
    """`tensor` unchanged, or an InvalidArgumentError if the splits do not sum to its rows.

    Horovod would drop the rest without a word. A reshape needs no copy and, unlike an assertion, does not order the
    exchange after earlier stateful operations.
    """
    shape = tf.concat([tf.reduce_sum(splits)[tf.newaxis], tf.shape(tensor)[1:]], 0)
    return tf.ensure_shape(
        tf.reshape(tensor, shape, name=f"{name}_splits_must_sum_to_the_rows"), [None, *tensor.shape[1:]]
    )


def row_bytes(rows: tf.Tensor) -> tf.Tensor:
    """Bytes of one row of `(n, ...)`, int64 scalar."""
    if rows.shape[1:].is_fully_defined():
        return tf.constant(rows.shape[1:].num_elements() * rows.dtype.size, tf.int64)
    return tf.reduce_prod(tf.shape(rows, tf.int64)[1:]) * rows.dtype.size


def opaque_zeros(count: int, dtype: tf.DType) -> tf.Tensor:
    """`(count,)` zeros that the graph optimizers take for random numbers.

    Horovod's operations are not registered as stateful. On constant inputs TensorFlow would run them once and keep the
    answer, and it would merge two of them on equal inputs; an input made with these zeros prevents both. Unlike other
    stateful operations the random ones are not ordered among each other, so the collectives stay free to overlap.
    """
    # Integers go with splits and shapes, which are in host memory also where the rows are on a GPU.
    with tf.device("CPU:0") if dtype.is_integer else contextlib.nullcontext():
        return tf.cast(tf.raw_ops.RandomUniformInt(shape=[count], minval=0, maxval=1, seed=1, seed2=1), dtype)
