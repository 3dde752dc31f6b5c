"""From what a user passes to an embedding layer to the ids of one group in exchange order.

Three forms: a matrix of ids (B, F); a mapping whose features all have one id per sample, which is stacked to a matrix;
and the general mapping with bags of any length, sequences, weights, ragged and sparse inputs, which is laid out feature
by feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_ctr.config import FeatureConfig
from hvd_ctr.embedding.sharding import GroupLayout

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Bags:
    """One feature's bags of a batch.

    Attributes:
        values: (n) int64 ids.
        splits: (B+1) int64, bag i is values[splits[i]:splits[i+1]].
        weights: (n) float32, or None.
        length: ids per sample, int64 scalar; None where they came from a ragged or sparse input.
    """

    values: Tensor
    splits: Tensor
    weights: Tensor | None
    length: Tensor | None


@dataclasses.dataclass(frozen=True)
class GroupIds:
    """The ids of one group in exchange order.

    Attributes:
        ids: int64, (B, F) with a column per feature, or flat (N).
        feature_splits: (F+1) int64 borders of the features in flat ids; None for (B, F).
        bags: per feature, in the group's order; empty for (B, F).
    """

    ids: Tensor
    feature_splits: Tensor | None
    bags: tuple[Bags, ...] = ()

    @property
    def batch_rows(self) -> Tensor:
        """B, integer scalar."""
        return tf.shape(self.bags[0].splits)[0] - 1 if self.bags else tf.shape(self.ids)[0]


def is_single(feature: FeatureConfig) -> bool:
    """One unweighted id per sample: can be a column of a matrix."""
    return feature.length == 1 and feature.combiner is not None and feature.weights is None


def check_integer(layer: str, what: str, dtype: Any) -> None:
    """Raises ValueError for ids that are no integers: a float cannot hold every id, so different ids would become
    one.
    """
    if not tf.as_dtype(dtype).is_integer:
        raise ValueError(
            f"{layer}: {what} needs integer ids, received {tf.as_dtype(dtype).name}; give its keras.Input dtype='int64'"
        )


def get_input(layer: str, inputs: Mapping[str, Any], name: str) -> Any:
    """inputs[name].

    Raises:
        ValueError: it is missing; names the layer and what there is.
    """
    if name not in inputs:
        raise ValueError(f"{layer}: input {name!r} is missing; received {', '.join(sorted(inputs))}")
    return inputs[name]


def group_ids(layer: str, features: Sequence[FeatureConfig], layout: GroupLayout, inputs: Any) -> GroupIds:
    """The ids of one group from the layer's inputs.

    Args:
        layer: name of the layer, for messages.
        features: the layer's features, in the order of a matrix' columns.
        layout: the group.
        inputs: matrix (B, F) or mapping.

    Raises:
        ValueError: an input is missing or does not fit its feature.
    """
    if not isinstance(inputs, Mapping):
        check_integer(layer, "the id matrix", inputs.dtype)
        # By name: to compare configurations would take longer than the lookup itself with hundreds of features.
        columns = {feature.name: column for column, feature in enumerate(features)}
        order = [columns[feature.name] for feature in layout.features]
        ids = tf.cast(inputs, tf.int64)
        ids = ids if order == list(range(len(order))) else tf.gather(ids, order, axis=1)
        return GroupIds(ids, None)
    if all(is_single(feature) for feature in features):
        ids = _matrix([_dense_ids(layer, feature, inputs) for feature in layout.features])
        return GroupIds(ids, None)
    bags = tuple(_bags(layer, feature, inputs) for feature in layout.features)
    sizes = [tf.shape(bag.values, tf.int64)[0] for bag in bags]
    feature_splits = tf.cumsum(tf.stack([tf.constant(0, tf.int64), *sizes]))
    return GroupIds(tf.concat([bag.values for bag in bags], axis=0), feature_splits, bags)


def _matrix(columns: Sequence[Tensor]) -> Tensor:
    """Ids of F features, each (B,) or (B, 1), to (B, F) int64; in one operation where all of them are alike, since with
    hundreds of features an operation for each would take longer than the lookup.
    """
    if any(column.shape.rank != columns[0].shape.rank for column in columns):
        columns = [tf.reshape(column, [-1]) for column in columns]
    if any(column.dtype != columns[0].dtype for column in columns):
        columns = [tf.cast(column, tf.int64) for column in columns]
    matrix = tf.stack(columns, axis=1) if columns[0].shape.rank == 1 else tf.concat(columns, axis=1)
    return tf.cast(matrix, tf.int64)


def _dense_ids(layer: str, feature: FeatureConfig, inputs: Mapping[str, Any]) -> Tensor:
    ids = get_input(layer, inputs, feature.name)
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"{layer}: feature {feature.name!r} has length {feature.length}, received a {type(ids).__name__}; "
            "set length=None for ragged or sparse ids"
        )
    ids = tf.convert_to_tensor(ids)
    check_integer(layer, f"feature {feature.name!r}", ids.dtype)
    one_id = ids.shape.rank == 1 and feature.length in (None, 1)
    fits = ids.shape.rank == 2 and (feature.length is None or ids.shape[1] in (None, feature.length))
    if not (one_id or fits):
        allowed = "(B,) or (B, 1)" if feature.length == 1 else f"(B, {feature.length or 'any'})"
        raise ValueError(f"{layer}: feature {feature.name!r} needs ids of shape {allowed}, received {tuple(ids.shape)}")
    return ids


def _bags(layer: str, feature: FeatureConfig, inputs: Mapping[str, Any]) -> Bags:
    ids = get_input(layer, inputs, feature.name)
    weights = None if feature.weights is None else get_input(layer, inputs, feature.weights)
    if feature.length is None and isinstance(ids, tf.SparseTensor):
        # from_sparse keeps trailing empty rows: the row count comes from dense_shape (FC 28).
        ids = tf.RaggedTensor.from_sparse(ids)
    if isinstance(weights, tf.SparseTensor):
        weights = tf.RaggedTensor.from_sparse(weights)
    length: Tensor | None = None
    if feature.length is None and isinstance(ids, tf.RaggedTensor):
        if ids.ragged_rank != 1:
            raise ValueError(f"{layer}: feature {feature.name!r} needs one ragged dimension, received {ids.shape}")
        check_integer(layer, f"feature {feature.name!r}", ids.dtype)
        values, splits = tf.cast(ids.flat_values, tf.int64), tf.cast(ids.row_splits, tf.int64)
    else:
        dense = _dense_ids(layer, feature, inputs)
        length = tf.shape(dense, tf.int64)[1] if dense.shape.rank == 2 else tf.constant(1, tf.int64)
        values = tf.cast(tf.reshape(dense, [-1]), tf.int64)
        splits = tf.range(tf.shape(dense, tf.int64)[0] + 1) * length
    if weights is not None:
        flat = weights.flat_values if isinstance(weights, tf.RaggedTensor) else tf.reshape(weights, [-1])
        weights = tf.cast(flat, tf.float32)
    return Bags(values, splits, weights, length)
