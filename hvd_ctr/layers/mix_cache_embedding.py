"""MixCacheEmbedding: the Keras face of ShardedEmbedding.

    item = TableConfig("item", dim=16)
    emb = MixCacheEmbedding(
        features=[FeatureConfig("item", table=item), FeatureConfig("history", table=item, combiner="mean",
        length=None)], cache=CacheConfig(slots=1_000_000),
    )
    vectors = emb({"item": item_ids, "history": ragged_history})      # {"item": (B, 16), "history": (B, 16)}

Rows are trained by their table's own optimizer inside HybridModel's train step; the layer has no Keras weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr import comm
from hvd_ctr.config import CacheConfig, FeatureConfig
from hvd_ctr.embedding import ShardedEmbedding, TableGroup, step_context
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.ops import pooling_ops
from hvd_ctr.ops.id_ops import PreparedIds

Tensor = Any


@dataclasses.dataclass(frozen=True)
class _FeatureIds:
    """One feature's ids of a batch: values (n) int64, bag_splits (B+1) int64, weights (n) float32 or None, length:
    ids per sample (int64 scalar), or None where they came from a ragged or sparse input.
    """

    values: Tensor
    bag_splits: Tensor
    weights: Tensor | None
    length: Tensor | None


class MixCacheEmbedding(keras.layers.Layer):
    """Looks up, expands and pools the vectors of sparse features.

    Call with
      * a mapping of feature name to ids: (B,), (B, 1) for `length` 1; (B, L) for `length` L; RaggedTensor or
        SparseTensor (B, None) for `length` None; any integer dtype. Features with `weights` also read the input of that
        name, shaped like the ids. Returns a dict: (B, D) per pooled feature; (B, L, D), or ragged (B, None, D), for
        `combiner=None`.
      * or one integer tensor (B, F) with a column per feature, all of `length` 1 and one dim. Returns (B, F, D). The
        fast path.

    Args:
        features: the features, which name their tables.
        cache: slots per rank and dim, eviction policy.
        seed: with table name, id and column it determines every row's initial value.
        trainable: False: rows are looked up and never updated.
        name: layer name; also names the collectives.

    Raises:
        ValueError: contradictory configuration (at construction), or inputs that do not fit a feature (at the call),
            named.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        cache: CacheConfig | None = None,
        seed: int = 0,
        trainable: bool = True,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, name=name, **kwargs)
        self.supports_jit = False  # Horovod's collectives and our ops have no XLA kernels.
        self.features = tuple(features)
        self.cache = cache or CacheConfig()
        self.seed = seed
        self._sharded: ShardedEmbedding | None = None
        self._dims = {feature.name: feature.table.dim for feature in self.features}

    @property
    def sharded(self) -> ShardedEmbedding:
        """The tables; made at first use, after `hvd_ctr.init()`."""
        if self._sharded is None:
            self._sharded = ShardedEmbedding(self.features, self.cache, comm.current(), self.seed, self.name)
        return self._sharded

    def build(self, input_shape: Any) -> None:
        """Makes the tables (no Keras weights)."""
        del input_shape
        _ = self.sharded
        self.built = True

    def get_config(self) -> dict[str, Any]:
        """Configuration as plain values."""
        return {
            **super().get_config(),
            "features": [feature.model_dump() for feature in self.features],
            "cache": self.cache.model_dump(),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MixCacheEmbedding:
        """Rebuilds the layer from `get_config`."""
        config = dict(config)
        config["features"] = [FeatureConfig.model_validate(feature) for feature in config["features"]]
        config["cache"] = CacheConfig.model_validate(config["cache"])
        return cls(**config)

    # ---- shapes ----

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Symbolic outputs; see the class docstring for shapes."""
        if not isinstance(inputs, Mapping):
            self._check_matrix(inputs.shape)
            return keras.KerasTensor(
                (inputs.shape[0], len(self.features), self.features[0].table.dim), dtype=self.compute_dtype
            )
        outputs = {}
        for feature in self.features:
            batch = self._input(inputs, feature.name).shape[0]
            bag = () if feature.combiner is not None else (feature.length,)
            ragged = feature.combiner is None and feature.length is None
            outputs[feature.name] = keras.KerasTensor(
                (batch, *bag, feature.table.dim), dtype=self.compute_dtype, ragged=ragged
            )
        return outputs

    def _input(self, inputs: Mapping[str, Any], name: str) -> Any:
        if name not in inputs:
            raise ValueError(f"{self.name}: input {name!r} is missing; received {', '.join(sorted(inputs))}")
        return inputs[name]

    def _check_matrix(self, shape: Sequence[int | None]) -> None:
        if len(shape) != 2 or shape[1] not in (None, len(self.features)):
            raise ValueError(
                f"{self.name}: an id matrix must have shape (B, {len(self.features)}), one column per "
                f"feature; received {tuple(shape)}"
            )
        if any(feature.length != 1 or feature.combiner is None for feature in self.features):
            raise ValueError(
                f"{self.name}: an id matrix needs features of length 1 with a combiner; pass a dict instead"
            )
        if len(set(self._dims.values())) > 1:
            raise ValueError(
                f"{self.name}: an id matrix needs tables of one dim, received {self._dims}; pass a dict instead"
            )

    # ---- lookup ----

    def call(self, inputs: Any) -> Any:
        """See the class docstring. Inside a train step the rows are watched for gradients; elsewhere they are only
        read.
        """
        if not isinstance(inputs, Mapping):
            return self._call_matrix(inputs)
        if all(
            feature.length == 1 and feature.combiner is not None and feature.weights is None
            for feature in self.features
        ):
            return self._call_columns(inputs)
        parsed = {feature.name: self._parse(feature, inputs) for feature in self.features}
        outputs: dict[str, Any] = {}
        for group in self.sharded.groups:
            self._call_group(group, parsed, outputs)
        return {feature.name: tf.cast(outputs[feature.name], self.compute_dtype) for feature in self.features}

    def _facts(self, batch_rows: Tensor) -> BatchFacts:
        context = step_context.current()
        if context is not None:
            return context.facts
        return BatchFacts(tf.cast(batch_rows, tf.int64), tf.cast(batch_rows, tf.float64))

    def _rows(self, group: TableGroup, prepared: PreparedIds) -> Tensor:
        context = step_context.current()
        if context is None:
            return group.read(prepared).rows
        return context.lookup(group, prepared, self.trainable).rows

    def _matrix_vectors(self, group: TableGroup, ids: Tensor) -> Tensor:
        """ids (B, F) with columns in the group's feature order -> (B, F, D)."""
        prepared = group.prepare(ids, None, self._facts(tf.shape(ids)[0]))
        vectors = pooling_ops.pool_rows(self._rows(group, prepared), prepared.virtual_ids)
        return tf.reshape(vectors, [-1, len(group.layout.features), group.layout.dim])

    def _call_matrix(self, ids: Tensor) -> Tensor:
        self._check_matrix(ids.shape)
        (group,) = self.sharded.groups
        order = [self.features.index(feature) for feature in group.layout.features]
        ids = tf.cast(ids, tf.int64)
        if order == list(range(len(order))):
            vectors = self._matrix_vectors(group, ids)
        else:
            vectors = tf.gather(self._matrix_vectors(group, tf.gather(ids, order, axis=1)), np.argsort(order), axis=1)
        return tf.cast(vectors, self.compute_dtype)

    def _call_columns(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for group in self.sharded.groups:
            columns = [tf.cast(tf.reshape(self._dense_ids(f, inputs), [-1]), tf.int64) for f in group.layout.features]
            vectors = self._matrix_vectors(group, tf.stack(columns, axis=1))
            for feature, vector in zip(group.layout.features, tf.unstack(vectors, axis=1), strict=True):
                outputs[feature.name] = tf.cast(vector, self.compute_dtype)
        return {feature.name: outputs[feature.name] for feature in self.features}

    def _dense_ids(self, feature: FeatureConfig, inputs: Mapping[str, Any]) -> Tensor:
        ids = self._input(inputs, feature.name)
        if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(
                f"{self.name}: feature {feature.name!r} has length {feature.length}, received a {type(ids).__name__}; "
                "set length=None for ragged or sparse ids"
            )
        ids = tf.convert_to_tensor(ids)
        if not ids.dtype.is_integer:
            raise ValueError(f"{self.name}: feature {feature.name!r} needs integer ids, received {ids.dtype.name}")
        if feature.length is not None and ids.shape.rank == 2 and ids.shape[1] not in (None, feature.length):
            raise ValueError(
                f"{self.name}: feature {feature.name!r} needs ids of shape (B, {feature.length}), "
                f"received {tuple(ids.shape)}"
            )
        return ids

    def _parse(self, feature: FeatureConfig, inputs: Mapping[str, Any]) -> _FeatureIds:
        ids = self._input(inputs, feature.name)
        weights = None if feature.weights is None else self._input(inputs, feature.weights)
        if feature.length is None and isinstance(ids, tf.SparseTensor):
            # from_sparse keeps trailing empty rows: the row count comes from dense_shape (FC 28).
            ids = tf.RaggedTensor.from_sparse(ids)
        if isinstance(weights, tf.SparseTensor):
            weights = tf.RaggedTensor.from_sparse(weights)
        if feature.length is None and isinstance(ids, tf.RaggedTensor):
            values, splits, length = tf.cast(ids.flat_values, tf.int64), tf.cast(ids.row_splits, tf.int64), None
        else:
            dense = self._dense_ids(feature, inputs)
            length = tf.shape(dense, tf.int64)[1] if dense.shape.rank == 2 else tf.constant(1, tf.int64)
            values = tf.cast(tf.reshape(dense, [-1]), tf.int64)
            splits = tf.range(tf.shape(dense, tf.int64)[0] + 1) * length
        if weights is not None:
            flat = weights.flat_values if isinstance(weights, tf.RaggedTensor) else tf.reshape(weights, [-1])
            weights = tf.cast(flat, tf.float32)
        return _FeatureIds(values, splits, weights, length)

    def _call_group(self, group: TableGroup, parsed: dict[str, _FeatureIds], outputs: dict[str, Any]) -> None:
        features = group.layout.features
        sizes = [tf.shape(parsed[f.name].values, tf.int64)[0] for f in features]
        feature_splits = tf.cumsum(tf.stack([tf.constant(0, tf.int64), *sizes]))
        ids = tf.concat([parsed[f.name].values for f in features], axis=0)
        batch_rows = tf.shape(parsed[features[0].name].bag_splits)[0] - 1
        prepared = group.prepare(ids, feature_splits, self._facts(batch_rows))
        rows = self._rows(group, prepared)
        virtual_ids = tf.split(prepared.virtual_ids, tf.stack(sizes), num=len(features))
        by_combiner: dict[tuple[str, bool], list[int]] = {}
        for index, feature in enumerate(features):
            if feature.combiner is None:
                outputs[feature.name] = self._sequence(feature, parsed[feature.name], rows, virtual_ids[index])
            else:
                by_combiner.setdefault((feature.combiner, feature.weights is not None), []).append(index)
        for (combiner, _), members in by_combiner.items():
            bags = [parsed[features[index].name] for index in members]
            vectors = self._pool(combiner, bags, rows, [virtual_ids[index] for index in members])
            for index, vector in zip(members, vectors, strict=True):
                outputs[features[index].name] = vector

    def _pool(self, combiner: str, bags: list[_FeatureIds], rows: Tensor, virtual_ids: list[Tensor]) -> list[Tensor]:
        """Pools features of one combiner in one op: their bags one after the other. Returns (B, D) per feature."""
        splits, end = [bags[0].bag_splits], bags[0].bag_splits[-1]
        for bag in bags[1:]:
            splits.append(bag.bag_splits[1:] + end)
            end = end + bag.bag_splits[-1]
        weights = None if bags[0].weights is None else tf.concat([bag.weights for bag in bags], axis=0)
        pooled = pooling_ops.pool_rows(
            rows,
            tf.concat(virtual_ids, axis=0),
            bag_splits=tf.concat(splits, axis=0),
            weights=weights,
            combiner=combiner,
        )
        return list(tf.split(pooled, len(bags), axis=0))

    def _sequence(self, feature: FeatureConfig, ids: _FeatureIds, rows: Tensor, virtual_ids: Tensor) -> Any:
        vectors = pooling_ops.pool_rows(rows, virtual_ids)
        if ids.weights is not None:
            vectors = vectors * ids.weights[:, None]
        if ids.length is None:
            return tf.RaggedTensor.from_row_splits(vectors, ids.bag_splits, validate=False)
        batch = tf.shape(ids.bag_splits, tf.int64)[0] - 1
        return tf.ensure_shape(
            tf.reshape(vectors, [batch, ids.length, feature.table.dim]), [None, feature.length, feature.table.dim]
        )

    # ---- state ----

    def cache_stats(self) -> dict[str, Any]:
        """See ShardedEmbedding.cache_stats."""
        return self.sharded.cache_stats()

    def get_rows(self, table: str, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """See ShardedEmbedding.get_rows."""
        return self.sharded.get_rows(table, ids)
