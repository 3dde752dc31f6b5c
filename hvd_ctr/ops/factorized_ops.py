"""The first dense layer of a tower on the distinct rows of a batch, in one function with its gradient.

The layer's input is [beside, rows[row_of_id]], (B, X + F * D), and most of its time is the product with the kernel,
forward and twice backward. Where a feature has few distinct rows in a batch, the product of each distinct row with the
feature's part of the kernel is computed once, and added up per sample: the same numbers but for the order of sums
(Chen et al., "Towards Linear Algebra over Normalized Data", PVLDB 10(11), 2017, sections 3.3 and 3.5: the input is a
join of samples and rows). tf_ops/core/factor_plan.h chooses the features, batch by batch; those with many distinct rows
are expanded and multiplied by TensorFlow as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_ctr.ops import native, placement

Tensor = Any

#: Distinct rows per sample of a factored feature; benchmarks/first_layer.py looks for the best.
MAX_SHARE = 0.35
#: Distinct rows of all factored features: products of 64 units for more of them would wait for memory.
MAX_DISTINCT = 1 << 15


class FactorPlan(NamedTuple):
    """What is done once per distinct row, see HvdCtrFactorPlan; P direct features, T distinct rows of the others.

    Attributes:
        direct: (P) int32, features that are multiplied sample by sample.
        factored: (F - P) int32.
        begins: (F - P + 1) int32, in distinct.
        distinct: (T) int32, rows of the batch.
        slots: (B, F - P) int32, positions in distinct; T for a dropped id.
        direct_ids: (B, P) int32.
    """

    direct: Tensor
    factored: Tensor
    begins: Tensor
    distinct: Tensor
    slots: Tensor
    direct_ids: Tensor


def factor_plan(
    row_of_id: Tensor, rows: Tensor, max_share: float = MAX_SHARE, max_distinct: int = MAX_DISTINCT
) -> FactorPlan:
    """The features of a batch with few distinct rows. A function of the ids alone.

    Args:
        row_of_id: (B, F) int32 in [-1, U), -1 for a dropped id.
        rows: (U, D) float32; only U is used.
        max_share: distinct rows per sample that a factored feature may have; 0: none is factored, 1: all may be.
        max_distinct: distinct rows that the factored features may have together; those with the fewest come first.

    Raises:
        tf.errors.InvalidArgumentError: a row outside [-1, U), or max_share outside 0 .. 1.
    """
    return FactorPlan(
        *native.ops().hvd_ctr_factor_plan(
            row_of_id=row_of_id, rows=rows, max_share=max_share, max_distinct=max_distinct
        )
    )


def factorized_dense(
    rows: Tensor,
    row_of_id: Tensor,
    beside: Tensor,
    kernel: Tensor,
    bias: Tensor | None = None,
    relu: bool = False,
    max_share: float = MAX_SHARE,
) -> Tensor:
    """[beside, rows[row_of_id]] kernel + bias, and its positive part with `relu`. Runs on the CPU. Differentiable,
    once, with respect to rows, beside, kernel and bias.

    Example, D = 1: rows [[2], [3]], row_of_id [[0, 1], [1, -1]], kernel [[1], [10]] -> [[32], [3]].

    Args:
        rows: (U, D) float32.
        row_of_id: (B, F) int32 in [-1, U), F known; -1 contributes nothing.
        beside: (B, X) float32; X may be 0.
        kernel: (X + F * D, H) float32, H known.
        bias: (H) float32, or None.
        relu: zero instead of what is below.
        max_share: see `factor_plan`.

    Returns:
        (B, H) float32.

    Raises:
        tf.errors.InvalidArgumentError: shapes that do not fit each other, or a row outside [-1, U).
    """
    features, units = int(row_of_id.shape[1]), int(kernel.shape[1])
    ops = native.ops()

    @tf.custom_gradient
    def layer(
        rows: Tensor, beside: Tensor, kernel: Tensor, bias: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        plan = factor_plan(row_of_id, rows, max_share)
        inputs, direct_kernel = ops.hvd_ctr_factorized_input(
            rows=rows,
            direct_ids=plan.direct_ids,
            beside=beside,
            kernel=kernel,
            direct=plan.direct,
            features=features,
        )
        factored = {"factored": plan.factored, "begins": plan.begins, "distinct": plan.distinct, "slots": plan.slots}
        products = tf.matmul(inputs, direct_kernel)
        outputs = ops.hvd_ctr_factorized_sum(
            products=products, bias=bias, rows=rows, kernel=kernel, features=features, relu=relu, **factored
        )

        def gradient(upstream: Tensor) -> list[Tensor]:
            with placement.on_host():
                if relu:
                    upstream = tf.raw_ops.ReluGrad(gradients=upstream, features=outputs)
                d_inputs = tf.matmul(upstream, direct_kernel, transpose_b=True)
                d_rows, d_kernel = ops.hvd_ctr_factorized_grad(
                    d_outputs=upstream,
                    d_inputs=d_inputs,
                    d_direct_kernel=tf.matmul(inputs, upstream, transpose_a=True),
                    rows=rows,
                    kernel=kernel,
                    direct_ids=plan.direct_ids,
                    direct=plan.direct,
                    **factored,
                )
                d_bias = tf.zeros_like(bias) if bias.shape[0] == 0 else tf.reduce_sum(upstream, axis=0)
                return [d_rows, tf.slice(d_inputs, [0, 0], tf.shape(beside)), d_kernel, d_bias]

        return outputs, gradient

    with placement.on_host():
        result = layer(rows, beside, kernel, tf.zeros([0]) if bias is None else bias)
    return tf.ensure_shape(result, [None, units])


def _no_second_derivative(op: Any, *upstream: Tensor) -> list[Tensor]:
    """Without it TensorFlow would take the derivative for zero.

    Raises:
        NotImplementedError: always.
    """
    del upstream
    raise NotImplementedError(
        f"{op.type}: factorized_dense has no second derivatives; take FactorizedDense(max_share=0), or "
        "stop the gradient of what needs none"
    )


tf.no_gradient("HvdCtrFactorPlan")
for _op in ("FactorizedInput", "FactorizedSum", "FactorizedGrad"):
    tf.RegisterGradient(f"HvdCtr{_op}")(_no_second_derivative)
