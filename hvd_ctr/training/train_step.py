"""The only train step: forward, loss, backward, dense allreduce, row exchange and update. Keras `fit` and a
hand-written loop call it.

Averaging over ranks, written once, here. The loss of a step is the mean over the global batch of all W ranks. A rank's
loss L_r is a mean over its own B_r samples (or over its weights), so the global loss is sum_r s_r L_r with s_r = B_r /
sum B. Each rank scales its loss by s_r before the backward pass; dense gradients and row gradients are then both plain
sums over the ranks, exactly as if one process had seen the concatenated batch. A rank with zero rows has s_r = 0 and
takes part in every exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.embedding import TableGroup, step_context
from hvd_ctr.embedding.sharded_embedding import BatchFacts, Staged
from hvd_ctr.layers.mix_cache_embedding import MixCacheEmbedding
from hvd_ctr.ops import placement, stage_ops

Tensor = Any


class StepResult(NamedTuple):
    """What a step leaves for metrics; may be returned from a tf.function.

    Attributes:
        loss: this rank's unscaled loss, float32 scalar (0 for a zero-row batch).
        predictions: the model's output on the local batch.
        global_rows: samples of all ranks, int64 scalar.
        global_loss_weight: s_r, this rank's share of the global loss, float32 scalar: sum over ranks of s_r * loss =
            global loss.
    """

    loss: Tensor
    predictions: Any
    global_rows: Tensor
    global_loss_weight: Tensor


def loss_share(reduction: str | None, facts: BatchFacts, totals: tuple[Tensor, Tensor]) -> Tensor:
    """s_r, float32 scalar: the factor that makes the sum over ranks of local losses the loss of the global batch.

    Args:
        reduction: the Keras loss reduction: "sum_over_batch_size" (mean over samples), "mean_with_sample_weight" (mean
            over weights) or "sum".
        facts: this rank's rows and weight.
        totals: global rows (int64) and weight (float64).

    Raises:
        ValueError: a reduction that leaves no scalar, or an unknown one.
    """
    rows, weight = totals
    if reduction in ("sum_over_batch_size", "mean"):
        share = tf.math.divide_no_nan(tf.cast(facts.rows, tf.float64), tf.cast(rows, tf.float64))
    elif reduction == "mean_with_sample_weight":
        share = tf.math.divide_no_nan(tf.cast(facts.weight_sum, tf.float64), tf.cast(weight, tf.float64))
    elif reduction == "sum":
        share = tf.constant(1.0, tf.float64)
    else:
        raise ValueError(
            f"loss reduction {reduction!r} cannot be summed over ranks; use 'sum_over_batch_size', "
            "'mean_with_sample_weight' or 'sum'"
        )
    return tf.cast(share, tf.float32)


def penalties_once(model: keras.Model, loss: Tensor, reduction: str | None) -> Tensor:
    """A rank's loss with its part of the penalties on weights (model.losses). Every rank's loss has them in full; under
    "sum", where the losses are added as they are, each is to bring one W-th of them.
    """
    if reduction != "sum" or not model.losses:
        return loss
    return loss - tf.cast(tf.add_n(model.losses), tf.float32) * (1.0 - 1.0 / comms.current().size)


def batch_facts(x: Any, sample_weight: Any, error: Tensor = "") -> BatchFacts:
    """Rows B of the batch and its weight sum: B when there are no weights.

    Several outputs: the sum over all entries of sample_weight, B for an entry that is None. Only the loss reduction
    "mean_with_sample_weight" uses it: the ranks' losses are combined in proportion to these sums, which gives the loss
    of the global batch when the outputs have the same weights up to a factor.
    """
    first = next(leaf for leaf in tf.nest.flatten(x) if leaf is not None)
    rows = tf.cast(first.nrows() if isinstance(first, tf.RaggedTensor) else _rows_of(first), tf.int64)
    if sample_weight is None:
        return BatchFacts(rows, tf.cast(rows, tf.float64), error)
    by_rows = tf.cast(rows, tf.float64)
    sums = [by_rows if w is None else tf.reduce_sum(tf.cast(w, tf.float64)) for w in tf.nest.flatten(sample_weight)]
    return BatchFacts(rows, tf.add_n(sums), error)


def embedding_layers(model: keras.Model) -> list[MixCacheEmbedding]:
    """The model's MixCacheEmbedding layers, nested ones too."""
    return [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, MixCacheEmbedding)]


def table_groups(model: keras.Model) -> list[TableGroup]:
    """All groups of the model's embedding layers, in a fixed order."""
    return [group for layer in embedding_layers(model) for group in layer.sharded.groups]


def _rows_of(tensor: Any) -> Tensor:
    return tensor.dense_shape[0] if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor, tf.int64)[0]


def global_totals(comm: comms.Comm, facts: BatchFacts) -> tuple[Tensor, Tensor]:
    """Rows (int64) and weight (float64) over all ranks, for a step that called no embedding."""
    sums = comm.allreduce_sum([tf.cast(facts.rows, tf.float64), facts.weight_sum], "hvd_ctr.totals")
    return tf.cast(sums[0], tf.int64), sums[1]


def _dense_gradients(comm: comms.Comm, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Sums over ranks in one grouped allreduce in fixed order. Sparse gradients (a stock keras Embedding) are made
    dense first (FC 5); a variable that no rank's loss depends on keeps None.
    """
    used = [(i, tf.convert_to_tensor(g)) for i, g in enumerate(gradients) if g is not None]
    summed: list[Any] = [None] * len(variables)
    if used:
        reduced = stage_ops.timed(
            "dense allreduce",
            [gradient for _, gradient in used],
            lambda values: comm.allreduce_sum(values, "hvd_ctr.dense_gradients", "dense"),
        )
        for (index, _), value in zip(used, reduced, strict=True):
            summed[index] = value
    return summed


def hybrid_train_step(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss_fn: Callable[[Any], Tensor],
    x: Any,
    facts: BatchFacts,
    reduction: str | None = "sum_over_batch_size",
    staged: Sequence[Staged] = (),
    learning_rate_scale: Tensor | float = 1.0,
) -> StepResult:
    """One hybrid-parallel step: dense weights by allreduce and `optimizer`, rows by exchange and their table's
    optimizer.

    All ranks must call it together, with a zero-row batch where they have no data. Use inside a tf.function (or
    eagerly).

    Args:
        model: calls its MixCacheEmbedding layers on x; built, with equal dense weights on all ranks.
        optimizer: of the dense weights; clipping in it acts on the summed dense gradients, so it is the same on every
            rank; rows are not part of its norm.
        loss_fn: predictions -> scalar local loss.
        x: the model's inputs, first dimension B.
        facts: `batch_facts` of this batch.
        reduction: how loss_fn reduces over samples, see `loss_share`.
        staged: the batch's tickets from a Pipeline, in the order of `table_groups(model)`; empty: the step prepares and
            prefetches itself. The bits are the same.
        learning_rate_scale: multiplies the tables' learning rates, float32 scalar.

    Raises:
        ValueError: the model is not built: its weights would differ between ranks and not be trained.
        tf.errors.OpError: errors of any rank's batch or cache, the same on every rank.
    """
    if not model.built:
        raise ValueError(
            f"model {model.name!r} has no weights yet: call it once on a batch, then synchronise() it, before training"
        )
    comm = comms.current()
    variables = [variable.value for variable in model.trainable_variables]
    by_group = dict(zip(table_groups(model), staged, strict=True)) if staged else {}
    with tf.GradientTape() as tape:
        with step_context.StepContext(tape, facts, by_group) as context:
            predictions = model(x, training=True)
        loss = penalties_once(model, tf.cast(loss_fn(predictions), tf.float32), reduction)
        totals = context.totals or global_totals(comm, facts)
        share = loss_share(reduction, facts, totals)
        # multiply_no_nan: a loss that is 0/0 on a zero-row batch counts as nothing.
        scaled = stage_ops.moment("loss", tf.math.multiply_no_nan(loss, share))
    gradients = tape.gradient(scaled, [*variables, *context.watched_rows])
    dense = _dense_gradients(comm, variables, gradients[: len(variables)])
    with placement.on_host():
        learning_rate_scale = tf.cast(learning_rate_scale, tf.float32)
    context.backward(gradients[len(variables) :], learning_rate_scale)
    pairs = [(g, v) for g, v in zip(dense, model.trainable_variables, strict=True) if g is not None]
    if pairs:
        # The update counter does not depend on the batch by itself: when Keras asks an exhausted iterator once more, it
        # would count a step that never was.
        with tf.control_dependencies([g for g, _ in pairs]):
            optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
    return StepResult(tf.where(share > 0, loss, 0.0), predictions, totals[0], share)
