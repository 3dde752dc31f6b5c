"""Interactions of the vectors of a sample, (B, F, D) float32, fused with their gradients: one pass over the vectors
instead of one per TensorFlow operation.

`plain_dot_pairs` and `plain_pair_sum` are the same in TensorFlow's operations, for other types and as what the fused
ones are measured against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ctr.ops import native, pooling_ops

Tensor = Any


def dot_pairs(vectors: Tensor) -> Tensor:
    """The scalar product of every pair of vectors. Differentiable, twice.

    Example, F = 3, D = 1: [[[2], [3], [5]]] -> [[6, 10, 15]], the pairs (1,0), (2,0), (2,1).

    Args:
        vectors: (B, F, D) float32.

    Returns:
        (B, F (F - 1) / 2) float32.
    """
    return native.ops().hvd_ctr_dot_pairs(vectors=vectors)


def pair_sum(vectors: Tensor) -> Tensor:
    """The sum of the scalar products of all pairs. Differentiable, twice.

    Example, F = 3, D = 1: [[[2], [3], [5]]] -> [[31]].

    Args:
        vectors: (B, F, D) float32.

    Returns:
        (B, 1) float32.
    """
    return native.ops().hvd_ctr_pair_sum(vectors=vectors)


def pair_sum_of_rows(rows: Tensor, row_of_id: Tensor) -> Tensor:
    """`pair_sum` of the vectors rows[row_of_id], which are not made: half of (|sum of the vectors|^2 - sum of their
    squares), and the squares are those of distinct rows.

    Args:
        rows: (U, D) float32.
        row_of_id: (B, F) int32 in [-1, U), F known; -1 is a vector of zeros.

    Returns:
        (B, 1) float32.
    """
    sums = pooling_ops.sum_rows(rows, row_of_id)
    squares = pooling_ops.sum_rows(tf.reduce_sum(tf.square(rows), axis=1, keepdims=True), row_of_id)
    return 0.5 * (tf.reduce_sum(tf.square(sums), axis=1, keepdims=True) - squares)


def plain_dot_pairs(vectors: Tensor) -> Tensor:
    """`dot_pairs` of any floating-point type, differentiable once; F is known."""
    features = int(vectors.shape[1])
    rows, columns = np.tril_indices(features, -1)
    # For each cell (f, g) the pair it belongs to; the diagonal points to a column of zeros behind the pairs.
    cell_pairs = np.full((features, features), len(rows), np.int32)
    cell_pairs[rows, columns] = cell_pairs[columns, rows] = np.arange(len(rows))

    # TensorFlow's gradient of the gather scatters; a gather through the inverse map and one product do the same.
    @tf.custom_gradient
    def pairs(inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        products = tf.reshape(tf.matmul(inputs, inputs, transpose_b=True), [-1, features * features])

        def gradient(upstream: Tensor) -> Tensor:
            padded = tf.pad(upstream, [[0, 0], [0, 1]])
            cells = tf.gather(padded, cell_pairs.reshape(-1), axis=1)
            return tf.matmul(tf.reshape(cells, [-1, features, features]), inputs)

        return tf.gather(products, rows * features + columns, axis=1), gradient

    return pairs(vectors)


def plain_pair_sum(vectors: Tensor) -> Tensor:
    """`pair_sum` of any floating-point type."""
    of_sum = tf.square(tf.reduce_sum(vectors, axis=1))
    of_each = tf.reduce_sum(tf.square(vectors), axis=1)
    return 0.5 * tf.reduce_sum(of_sum - of_each, axis=1, keepdims=True)


def _dot_pairs_grad(op: Any, d_pairs: Tensor) -> Tensor:
    return native.ops().hvd_ctr_dot_pairs_grad(vectors=op.inputs[0], d_pairs=d_pairs)


def _pair_sum_grad(op: Any, d_sums: Tensor) -> Tensor:
    return native.ops().hvd_ctr_pair_sum_grad(vectors=op.inputs[0], d_sums=d_sums)


def _dot_pairs_grad_grad(op: Any, upstream: Tensor) -> list[Tensor]:
    """d_vectors[f] = sum over g of d_pairs[f, g] vectors[g] is linear in both inputs."""
    vectors, d_pairs = op.inputs
    both = dot_pairs(vectors + upstream) - dot_pairs(vectors) - dot_pairs(upstream)
    return [native.ops().hvd_ctr_dot_pairs_grad(vectors=upstream, d_pairs=d_pairs), both]


def _pair_sum_grad_grad(op: Any, upstream: Tensor) -> list[Tensor]:
    """d_vectors[f] = d_sums (sum over all g of vectors[g] - vectors[f])."""
    vectors, d_sums = op.inputs
    others = tf.reduce_sum(vectors, axis=1, keepdims=True) - vectors
    by_sums = tf.reduce_sum(upstream * others, axis=[1, 2])[:, None]
    return [native.ops().hvd_ctr_pair_sum_grad(vectors=upstream, d_sums=d_sums), by_sums]


tf.RegisterGradient("HvdCtrDotPairs")(_dot_pairs_grad)
tf.RegisterGradient("HvdCtrPairSum")(_pair_sum_grad)
tf.RegisterGradient("HvdCtrDotPairsGrad")(_dot_pairs_grad_grad)
tf.RegisterGradient("HvdCtrPairSumGrad")(_pair_sum_grad_grad)
