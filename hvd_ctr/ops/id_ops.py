"""Ops on ids: a batch's ids -> virtual ids and key messages; hashing and initial rows.

Shapes: B local batch, F features, N ids and U unique keys of the local batch, W ranks, D embedding dim, T tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_ctr.config import FeatureConfig, TableConfig
from hvd_ctr.ops import native
from hvd_ctr.ops.mix_cache_ops import INITIALIZERS

Tensor = Any

tf.no_gradient("HvdCtrPrepareBatch")
tf.no_gradient("HvdCtrHashToRange")
tf.no_gradient("HvdCtrInitialRows")


class PreparedIds(NamedTuple):
    """Result of `prepare_batch`.

    Attributes:
        virtual_ids: int32, shape of the ids: index into the rows (U, D) in owner order; -1 where the id was dropped.
        send: int64, the key messages of all peers one after another.
        send_splits: (W) int32, words per peer.
        row_splits: (W) int32, keys per owner; they sum to U.
        counts: (U) int32, occurrences of each key, in owner order.
    """

    virtual_ids: Tensor
    send: Tensor
    send_splits: Tensor
    row_splits: Tensor
    counts: Tensor


def table_rows(table: TableConfig) -> int:
    """`rows` of a table as the ops take it: -1 for no limit."""
    return -1 if table.rows is None else table.rows


def prepare_batch(
    ids: Tensor,
    *,
    feature_splits: Tensor | None,
    batch_rows: Tensor,
    weight_sum: Tensor,
    error_text: Tensor = "",
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    feature_tables: Sequence[int],
    world_size: int,
) -> PreparedIds:
    """De-duplicates the ids of one batch and packs the unique keys for their owners.

    Example, W = 1, F = 1: ids [[7], [3], [7], [9]] -> virtual_ids [[0], [1], [0], [2]], row_splits [3],
    counts [2, 1, 1].

    Errors of the data (an invalid id, a bad split, `error_text`) do not raise here: they travel in the messages, so
    that all ranks raise them together in `mix_cache_ops.prefetch` or `read`.

    Args:
        ids: int64; (B, F), column f is feature f; or flat (N) with feature_splits.
        feature_splits: (F+1) int64, feature f is ids[feature_splits[f]:feature_splits[f+1]]; None for (B, F).
        batch_rows: scalar, B; -1: this rank's data has ended (pass no ids).
        weight_sum: scalar, sum of the sample weights; B when there are none.
        error_text: string scalar; not empty: this rank cannot go on. No key is sent, and all ranks fail with this text.
        tables: T tables of one dim.
        features: F features; only their padding_id is used.
        feature_tables: (F) index into tables, non-decreasing.
        world_size: W.

    Raises:
        tf.errors.InvalidArgumentError: ids do not have the shape above, or feature_tables decreases or names no table.
    """
    padding_ids = [feature.padding_id for feature in features]
    result = native.ops().hvd_ctr_prepare_batch(
        ids=ids,
        feature_splits=tf.constant([], tf.int64) if feature_splits is None else feature_splits,
        batch_rows=_scalar(batch_rows, tf.int64),
        weight_sum=_scalar(weight_sum, tf.float64),
        error_text=error_text,
        row_major=feature_splits is None,
        feature_tables=list(feature_tables),
        table_rows=[table_rows(table) for table in tables],
        table_hash_ids=[table.hash_ids for table in tables],
        table_counts_ids=[table.min_count > 1 for table in tables],
        feature_has_padding=[padding_id is not None for padding_id in padding_ids],
        feature_padding_ids=[-1 if padding_id is None else padding_id for padding_id in padding_ids],
        world_size=world_size,
    )
    return PreparedIds(*result)


class BatchPreparer:
    """`prepare_batch` for one set of tables and features.

    Outside of a tf.function it runs through one of its own: an eager call would turn the lists of tables and features
    into attributes again for every batch, which takes as long as the op itself with 26 tables and hundreds of times as
    long with 1,000. May be called from any thread.

    Args:
        tables, features, feature_tables, world_size: as for `prepare_batch`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        feature_tables: Sequence[int],
        world_size: int,
    ) -> None:
        self._tables, self._features, self._feature_tables = tables, features, feature_tables
        self._world_size = world_size
        facts = [tf.TensorSpec([], dtype) for dtype in (tf.int64, tf.float64, tf.string)]
        matrix, flat = tf.TensorSpec([None, len(features)], tf.int64), tf.TensorSpec([None], tf.int64)
        self._of_matrix = tf.function(
            lambda ids, *facts: self._prepare(ids, None, *facts), input_signature=[matrix, *facts], autograph=False
        )
        self._of_flat = tf.function(self._prepare, input_signature=[flat, flat, *facts], autograph=False)

    def __call__(
        self, ids: Tensor, feature_splits: Tensor | None, batch_rows: Tensor, weight_sum: Tensor, error_text: Tensor
    ) -> PreparedIds:
        """As `prepare_batch`."""
        if not tf.executing_eagerly():
            return self._prepare(ids, feature_splits, batch_rows, weight_sum, error_text)
        facts = (_scalar(batch_rows, tf.int64), _scalar(weight_sum, tf.float64), tf.convert_to_tensor(error_text))
        # The one trace directly: to search for one that fits takes 0.2 ms.
        if feature_splits is None:
            return PreparedIds(*self._matrix_trace(tf.convert_to_tensor(ids), *facts))
        return PreparedIds(*self._flat_trace(tf.convert_to_tensor(ids), tf.convert_to_tensor(feature_splits), *facts))

    @functools.cached_property
    def _matrix_trace(self) -> Any:
        return self._of_matrix.get_concrete_function()

    @functools.cached_property
    def _flat_trace(self) -> Any:
        return self._of_flat.get_concrete_function()

    def _prepare(
        self, ids: Tensor, feature_splits: Tensor | None, batch_rows: Tensor, weight_sum: Tensor, error_text: Tensor
    ) -> PreparedIds:
        return prepare_batch(
            ids,
            feature_splits=feature_splits,
            batch_rows=batch_rows,
            weight_sum=weight_sum,
            error_text=error_text,
            tables=self._tables,
            features=self._features,
            feature_tables=self._feature_tables,
            world_size=self._world_size,
        )


def _scalar(value: Tensor, dtype: Any) -> Tensor:
    """`value` as a scalar tensor; other numeric dtypes are cast."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


def hash_to_range(ids: Tensor, rows: int) -> Tensor:
    """Maps any int64 ids, negative ones too, evenly to [0, rows), as a table with `hash_ids` does (hash.h HashToRange).

    Args:
        ids: int64, any shape.
        rows: number of buckets, >= 1.

    Returns:
        int64, shape of ids.
    """
    return native.ops().hvd_ctr_hash_to_range(ids=ids, rows=rows)


def initial_rows(ids: Tensor, table: TableConfig, seed: int) -> Tensor:
    """The first values of rows: a function of seed, table name, id and column only. For references and tests.

    Args:
        ids: (n) int64.
        table: name, dim, initializer and init_scale are used.
        seed: the run's seed, -2^63 .. 2^63-1.

    Returns:
        (n, D) float32.
    """
    return native.ops().hvd_ctr_initial_rows(
        ids=ids,
        table=table.name,
        seed=seed,
        dim=table.dim,
        initializer=INITIALIZERS[table.initializer],
        scale=table.init_scale,
    )
