"""Expand and pool, in one op with its gradient: unique rows (U, D) + virtual ids (N) -> one vector per bag, or one row
per sample with the vectors of all its features.

A bag is the ids of one feature in one sample. Virtual id -1 (a dropped id) contributes nothing and does not count in a
mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from hvd_ctr.ops import native, placement

Tensor = Any

COMBINERS = ("sum", "mean", "sqrtn")


class Beside(NamedTuple):
    """Asks for one row per sample: columns that stand there already, then the vectors of the sample's bags. It saves
    the copy of a concatenation, and in the gradient that of a slice.

    Attributes:
        columns: (B, X) float32; X may be 0.
        features: F, bags per sample, at least 1.
        feature_major: whether the bags come feature by feature, each with all samples; else sample by sample.
    """

    columns: Tensor
    features: int
    feature_major: bool = False


def pool_rows(
    rows: Tensor,
    virtual_ids: Tensor,
    bag_splits: Tensor | None = None,
    weights: Tensor | None = None,
    combiner: str = "sum",
    beside: Beside | None = None,
) -> Tensor:
    """Pools the rows of each bag. Differentiable with respect to rows, weights and the columns of `beside`; without
    weights twice.

    Example: rows [[1], [10]], virtual_ids [0, 1, 0, -1], bag_splits [0, 3, 4] -> [[12], [0]].

    Args:
        rows: (U, D) float32.
        virtual_ids: int32, any shape, N elements in [-1, U).
        bag_splits: (bags+1) int64, bag i is virtual_ids[bag_splits[i]:bag_splits[i+1]] of the flattened ids; None:
            every id is a bag.
        weights: (N) float32, one per id; None: all 1.
        combiner: "sum"; "mean": divided by the bag's sum of weights; "sqrtn": by the root of the sum of their squares.
            A bag whose divisor is 0 pools to zeros and passes no gradient.
        beside: None: one row per bag.

    Returns:
        (bags, D) float32; with `beside` (B, X + F * D).

    Raises:
        ValueError: no such combiner.
        tf.errors.InvalidArgumentError: a virtual id outside [-1, U), splits that do not ascend from 0 to N,
            another number of weights than ids, or of bags than B * F.
    """
    if combiner not in COMBINERS:
        raise ValueError(f"combiner: received {combiner!r}; allowed: {', '.join(COMBINERS)}")
    with placement.on_host():
        virtual_ids = tf.convert_to_tensor(virtual_ids)
        bag_splits = tf.constant([], tf.int64) if bag_splits is None else tf.convert_to_tensor(bag_splits)
    with placement.on_rows_device():
        return native.ops().hvd_ctr_pool_rows(
            rows=rows,
            virtual_ids=virtual_ids,
            bag_splits=bag_splits,
            weights=tf.constant([], tf.float32) if weights is None else weights,
            beside=tf.zeros([0, 0], tf.float32) if beside is None else beside.columns,
            combiner=combiner,
            features=0 if beside is None else beside.features,
            feature_major=beside is not None and beside.feature_major,
        )


def sum_rows(rows: Tensor, row_of_id: Tensor) -> Tensor:
    """The sum of the rows of each sample's ids. Differentiable with respect to rows.

    Args:
        rows: (U, D) float32.
        row_of_id: (B, F) int32 in [-1, U), F known.

    Returns:
        (B, D) float32.
    """
    with placement.on_host():
        features = int(row_of_id.shape[1])
        splits = tf.range(tf.shape(row_of_id, tf.int64)[0] + 1) * features
        ids = tf.reshape(row_of_id, [-1])
    return pool_rows(rows, ids, bag_splits=splits)


def _pool_rows_grad(op: Any, d_pooled: Tensor) -> list[Tensor | None]:
    """Gradients for the inputs of HvdCtrPoolRows: rows, virtual_ids, bag_splits, weights, beside."""
    rows, virtual_ids, bag_splits, weights, beside = op.inputs
    features = op.get_attr("features")
    with placement.on_rows_device():
        d_rows, d_weights = native.ops().hvd_ctr_pool_rows_grad(
            d_pooled=d_pooled,
            rows=rows,
            virtual_ids=virtual_ids,
            bag_splits=bag_splits,
            weights=weights,
            combiner=op.get_attr("combiner"),
            features=features,
            feature_major=op.get_attr("feature_major"),
        )
    d_beside = tf.slice(d_pooled, [0, 0], tf.shape(beside)) if features else tf.zeros_like(beside)
    return [d_rows, None, None, d_weights, d_beside]


def _pool_rows_grad_grad(op: Any, upstream: Tensor, _: Tensor) -> list[Tensor | None]:
    """Without weights d_rows is linear in d_pooled, and the transpose of that pools.

    Raises:
        NotImplementedError: with weights; else TensorFlow would take the derivative for zero.
    """
    d_pooled, rows, virtual_ids, bag_splits, weights = op.inputs
    if weights.shape.num_elements() != 0:
        raise NotImplementedError("pool_rows has no second derivatives with weights")
    features = op.get_attr("features")
    with placement.on_rows_device():
        columns = tf.shape(d_pooled)[1] - features * tf.shape(rows)[1]
        pooled = native.ops().hvd_ctr_pool_rows(
            rows=upstream,
            virtual_ids=virtual_ids,
            bag_splits=bag_splits,
            weights=weights,
            beside=tf.zeros([tf.shape(d_pooled)[0], columns] if features else [0, 0]),
            combiner=op.get_attr("combiner"),
            features=features,
            feature_major=op.get_attr("feature_major"),
        )
    return [pooled, None, None, None, None]


tf.RegisterGradient("HvdCtrPoolRows")(_pool_rows_grad)
tf.RegisterGradient("HvdCtrPoolRowsGrad")(_pool_rows_grad_grad)
