"""Expand and pool, in one op with its gradient: unique rows (U, D) + virtual ids (N) -> one vector per bag.

A bag is the ids of one feature in one sample. Virtual id -1 (a dropped id) contributes nothing and does not count in a
mean.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ctr.ops import native

Tensor = Any

COMBINERS = ("sum", "mean", "sqrtn")


def pool_rows(
    rows: Tensor,
    virtual_ids: Tensor,
    bag_splits: Tensor | None = None,
    weights: Tensor | None = None,
    combiner: str = "sum",
) -> Tensor:
    """Pools the rows of each bag. Differentiable with respect to rows and weights.

    Example: rows [[1], [10]], virtual_ids [0, 1, 0, -1], bag_splits [0, 3, 4] -> [[12], [0]].

    Args:
        rows: (U, D) float32.
        virtual_ids: int32, any shape, N elements in [-1, U).
        bag_splits: (bags+1) int64, bag i is virtual_ids[bag_splits[i]:bag_splits[i+1]] of the flattened ids; None:
            every id is a bag.
        weights: (N) float32, one per id; None: all 1.
        combiner: "sum"; "mean": divided by the bag's sum of weights; "sqrtn": by the root of the sum of their squares.
            A bag whose divisor is 0 pools to zeros and passes no gradient.

    Returns:
        (bags, D) float32.

    Raises:
        ValueError: no such combiner.
        tf.errors.InvalidArgumentError: a virtual id outside [-1, U), splits that do not ascend from 0 to N, or another
            number of weights than ids.
    """
    if combiner not in COMBINERS:
        raise ValueError(f"combiner: received {combiner!r}; allowed: {', '.join(COMBINERS)}")
    return native.ops().hvd_ctr_pool_rows(
        rows=rows,
        virtual_ids=virtual_ids,
        bag_splits=tf.constant([], tf.int64) if bag_splits is None else bag_splits,
        weights=tf.constant([], tf.float32) if weights is None else weights,
        combiner=combiner,
    )


def _pool_rows_grad(op: Any, d_pooled: Tensor) -> list[Tensor | None]:
    """Gradients for the inputs of HvdCtrPoolRows: rows, virtual_ids, bag_splits, weights."""
    rows, virtual_ids, bag_splits, weights = op.inputs
    d_rows, d_weights = native.ops().hvd_ctr_pool_rows_grad(
        d_pooled=d_pooled,
        rows=rows,
        virtual_ids=virtual_ids,
        bag_splits=bag_splits,
        weights=weights,
        combiner=op.get_attr("combiner"),
    )
    return [d_rows, None, None, d_weights]


tf.RegisterGradient("HvdCtrPoolRows")(_pool_rows_grad)
tf.no_gradient("HvdCtrPoolRowsGrad")
