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

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from numpy.typing import NDArray

from hvd_ctr import comm
from hvd_ctr.config import CacheConfig, ExchangeMode, FeatureConfig, HostConfig
from hvd_ctr.embedding import ShardedEmbedding, TableGroup, step_context
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.layers.id_inputs import Bags, GroupIds, check_integer, get_input, group_ids
from hvd_ctr.ops import placement, pooling_ops
from hvd_ctr.ops.id_ops import PreparedIds

Tensor = Any


class MixCacheEmbedding(keras.layers.Layer):
    """Looks up, expands and pools the vectors of sparse features.

    Call with
      * a mapping of feature name to ids: (B,), (B, 1) for `length` 1; (B, L) for `length` L; RaggedTensor or
        SparseTensor (B, None) for `length` None; any integer dtype. Features with `weights` also read the input of that
        name, shaped like the ids. Returns a dict: (B, D) per pooled feature; (B, L, D), or ragged (B, None, D), for
        `combiner=None`.
      * or one integer tensor (B, F) with a column per feature, all of `length` 1 and one dim. Returns (B, F, D). The
        fast path.
    With `dense`, (B, X) floats, it returns the input of a tower instead: (B, X + the widths of all features), the dense
    columns and then each feature's vector in the order of the features, which are pooled ones then. The vectors are
    written there as they are looked up, without the copies that Concatenate makes of them and of their gradients.

    With `factored=True`, for features of length 1 and one dim, nothing is expanded: it returns {"rows": (U, D) float32
    under any precision policy, the distinct rows of the batch; "row_of_id": (B, F) int32, the row of each id, -1 for an
    id that was dropped}, for the layers of hvd_ctr/layers/factored.py, which take what they need of it.

    Args:
        features: the features, which name their tables.
        cache: slots per rank and dim, eviction policy.
        seed: with table name, id and column it determines every row's initial value.
        trainable: False: rows are looked up and never updated.
        name: layer name; also names the collectives, and the files of a disk tier.
        host: where the rows live that are not in the cache; None: in memory, without a limit.
        exchange: how keys, rows and gradients travel between the ranks: alltoall, allgather or allreduce. The numbers
            are the same.

    Raises:
        ValueError: contradictory configuration (at construction), or inputs that do not fit a feature (at the call),
            named.
        OSError: the file of the disk tier cannot be made; the message names it.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        cache: CacheConfig | None = None,
        seed: int = 0,
        trainable: bool = True,
        name: str | None = None,
        host: HostConfig | None = None,
        exchange: ExchangeMode = "alltoall",
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, name=name, **kwargs)
        if exchange not in get_args(ExchangeMode):
            raise ValueError(
                f"{self.name}: exchange must be one of {', '.join(get_args(ExchangeMode))}, received {exchange!r}"
            )
        self.supports_jit = False  # Horovod's collectives and our ops have no XLA kernels.
        self.features = tuple(features)
        self.cache = cache or CacheConfig()
        self.host = host or HostConfig()
        self.exchange = exchange
        self.seed = seed
        self._sharded: ShardedEmbedding | None = None
        self._dims = {feature.name: feature.table.dim for feature in self.features}

    @property
    def sharded(self) -> ShardedEmbedding:
        """The tables; made at first use, after `hvd_ctr.init()`."""
        if self._sharded is None:
            self._sharded = ShardedEmbedding(
                self.features, self.cache, comm.current(), self.seed, self.name, self.host, self.exchange
            )
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
            "host": self.host.model_dump(),
            "exchange": self.exchange,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MixCacheEmbedding:
        """Rebuilds the layer from `get_config`."""
        config = dict(config)
        config["features"] = [FeatureConfig.model_validate(feature) for feature in config["features"]]
        config["cache"] = CacheConfig.model_validate(config["cache"])
        config["host"] = HostConfig.model_validate(config.get("host", {}))
        return cls(**config)

    # ---- shapes ----

    def compute_output_spec(self, inputs: Any, dense: Any = None, factored: bool = False) -> Any:
        """Symbolic outputs; see the class docstring for shapes."""
        if factored:
            self._check_factored(dense)
        vectors = self._vectors_spec(inputs)
        if factored:
            batch = tf.nest.flatten(inputs)[0].shape[0]
            return {
                "rows": keras.KerasTensor((None, self.features[0].table.dim), dtype="float32"),
                "row_of_id": keras.KerasTensor((batch, len(self.features)), dtype="int32"),
            }
        if dense is None:
            return vectors
        self._check_dense(dense)
        width = dense.shape[-1] + sum(self._dims[feature.name] for feature in self.features)
        return keras.KerasTensor((dense.shape[0], width), dtype=self.compute_dtype)

    def _vectors_spec(self, inputs: Any) -> Any:
        if not isinstance(inputs, Mapping):
            self._check_matrix(inputs.shape)
            check_integer(self.name, "the id matrix", inputs.dtype)
            return keras.KerasTensor(
                (inputs.shape[0], len(self.features), self.features[0].table.dim), dtype=self.compute_dtype
            )
        outputs = {}
        for feature in self.features:
            ids = get_input(self.name, inputs, feature.name)
            check_integer(self.name, f"feature {feature.name!r}", ids.dtype)
            batch = ids.shape[0]
            bag = () if feature.combiner is not None else (feature.length,)
            ragged = feature.combiner is None and feature.length is None
            outputs[feature.name] = keras.KerasTensor(
                (batch, *bag, feature.table.dim), dtype=self.compute_dtype, ragged=ragged
            )
        return outputs

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

    def _check_dense(self, dense: Any) -> None:
        if len(dense.shape) != 2 or dense.shape[-1] is None:
            raise ValueError(f"{self.name}: dense must have shape (B, X) with X known; received {tuple(dense.shape)}")
        sequences = [feature.name for feature in self.features if feature.combiner is None]
        if sequences:
            raise ValueError(
                f"{self.name}: dense needs features that are pooled to one vector; without a combiner are "
                f"{', '.join(sequences)}; call the layer without dense and put its outputs together yourself"
            )

    def _check_factored(self, dense: Any) -> None:
        if dense is not None:
            raise ValueError(f"{self.name}: dense is for the layers behind factored=True; pass it to them")
        sequences = [f.name for f in self.features if f.length != 1 or f.combiner is None or f.weights is not None]
        if sequences or len(set(self._dims.values())) > 1:
            raise ValueError(
                f"{self.name}: factored=True needs features of length 1 with a combiner, without weights, and tables "
                f"of one dim; not so are {', '.join(sequences) or self._dims}; call the layer without factored"
            )

    # ---- lookup ----

    def prepare(self, inputs: Any, facts: BatchFacts) -> list[PreparedIds]:
        """The Data-Loader's part of a lookup: de-duplicates and partitions the ids of each group. Local, no
        communication.
        """
        return [self._prepare(group, self._group_ids(group, inputs), facts) for group in self.sharded.groups]

    def _group_ids(self, group: TableGroup, inputs: Any) -> GroupIds:
        if not isinstance(inputs, Mapping):
            self._check_matrix(inputs.shape)
        with placement.on_host():
            return group_ids(self.name, self.features, group.layout, inputs)

    @staticmethod
    def _prepare(group: TableGroup, ids: GroupIds, facts: BatchFacts | None) -> PreparedIds:
        if facts is None:
            facts = BatchFacts(tf.cast(ids.batch_rows, tf.int64), tf.cast(ids.batch_rows, tf.float64))
        return group.prepare(ids.ids, ids.feature_splits, facts)

    def call(self, inputs: Any, dense: Any = None, factored: bool = False) -> Any:
        """See the class docstring. Inside a train step the rows are watched for gradients; elsewhere they are only
        read.
        """
        if factored:
            return self._factored(inputs, dense)
        if dense is not None:
            return self._tower_input(inputs, dense)
        outputs: dict[str, Any] = {}
        for group in self.sharded.groups:
            ids, rows, virtual_ids = self._lookup(group, inputs)
            if not ids.bags:
                vectors = pooling_ops.pool_rows(rows, virtual_ids)
                vectors = tf.reshape(vectors, [-1, len(group.layout.features), group.layout.dim])
                if not isinstance(inputs, Mapping):
                    return tf.cast(self._in_column_order(group, vectors), self.compute_dtype)
                outputs.update(zip(group.layout.feature_names, tf.unstack(vectors, axis=1), strict=True))
            else:
                outputs.update(self._pool_group(group, ids, rows, virtual_ids))
        return {feature.name: tf.cast(outputs[feature.name], self.compute_dtype) for feature in self.features}

    def _lookup(self, group: TableGroup, inputs: Any) -> tuple[GroupIds, Tensor, Tensor]:
        """The group's ids, the rows (U, D) they need, and which row each id needs."""
        # Keras traces a model without running it to learn shapes: such a pass is no part of the step.
        context = None if in_symbolic_scope() else step_context.current()
        ids = self._group_ids(group, inputs)
        if context is None:
            prepared = self._prepare(group, ids, None)
            return ids, group.read(prepared).rows, prepared.virtual_ids
        prepared = context.prepared(group) or self._prepare(group, ids, context.facts)
        return ids, context.lookup(group, prepared, self.trainable).rows, prepared.virtual_ids

    def _tower_input(self, inputs: Any, dense: Any) -> Tensor:
        """The dense columns and the vectors of all features (B, X + F * D), by one op where one can do it: one dim, one
        combiner, tables in the order of their features.
        """
        dense = tf.convert_to_tensor(dense)
        self._check_dense(dense)
        kinds = {(feature.combiner, feature.weights is not None) for feature in self.features}
        layout = self.sharded.groups[0].layout
        if len(self.sharded.groups) > 1 or layout.features != self.features or len(kinds) > 1:
            vectors = self.call(inputs)
            flat = (
                [vectors[feature.name] for feature in self.features]
                if isinstance(inputs, Mapping)
                else [tf.reshape(vectors, [-1, len(self.features) * layout.dim])]
            )
            return tf.concat([tf.cast(dense, self.compute_dtype), *flat], axis=1)
        ids, rows, virtual_ids = self._lookup(self.sharded.groups[0], inputs)
        columns = tf.cast(dense, tf.float32)
        if ids.bags:
            beside = pooling_ops.Beside(columns, len(self.features), feature_major=True)
            pooled = self._pool_bags(str(self.features[0].combiner), ids.bags, rows, [virtual_ids], beside)
        else:
            pooled = pooling_ops.pool_rows(rows, virtual_ids, beside=pooling_ops.Beside(columns, len(self.features)))
        return tf.cast(pooled, self.compute_dtype)

    def _factored(self, inputs: Any, dense: Any) -> dict[str, Tensor]:
        self._check_factored(dense)
        group = self.sharded.groups[0]
        _, rows, virtual_ids = self._lookup(group, inputs)
        with placement.on_host():
            row_of_id = self._in_column_order(group, tf.reshape(virtual_ids, [-1, len(self.features)]))
        # Not in fewer bits: their gradients, sums over the batch, would be rounded to them too.
        return {"rows": rows, "row_of_id": row_of_id}

    def _in_column_order(self, group: TableGroup, columns: Tensor) -> Tensor:
        """(B, F, ...) in the group's feature order -> in the order of the layer's features."""
        if group.layout.features == self.features:
            return columns
        return tf.gather(columns, [group.layout.features.index(feature) for feature in self.features], axis=1)

    def _pool_group(self, group: TableGroup, ids: GroupIds, rows: Tensor, virtual_ids: Tensor) -> dict[str, Any]:
        features, outputs = group.layout.features, {}
        with placement.on_host():
            sizes = [tf.shape(bag.values)[0] for bag in ids.bags]
            parts = tf.split(virtual_ids, tf.stack(sizes), num=len(features))
        by_combiner: dict[tuple[str, bool], list[int]] = {}
        for index, feature in enumerate(features):
            if feature.combiner is None:
                outputs[feature.name] = self._sequence(feature, ids.bags[index], rows, parts[index])
            else:
                by_combiner.setdefault((feature.combiner, feature.weights is not None), []).append(index)
        for (combiner, _), members in by_combiner.items():
            vectors = self._pool(combiner, [ids.bags[i] for i in members], rows, [parts[i] for i in members])
            outputs.update(zip((features[index].name for index in members), vectors, strict=True))
        return outputs

    def _pool(self, combiner: str, bags: list[Bags], rows: Tensor, virtual_ids: list[Tensor]) -> list[Tensor]:
        """Pools features of one combiner in one op. Returns (B, D) per feature."""
        return list(tf.split(self._pool_bags(combiner, bags, rows, virtual_ids), len(bags), axis=0))

    @staticmethod
    def _pool_bags(
        combiner: str,
        bags: Sequence[Bags],
        rows: Tensor,
        virtual_ids: list[Tensor],
        beside: pooling_ops.Beside | None = None,
    ) -> Tensor:
        """Pools the bags of several features, one feature after the other."""
        with placement.on_host():
            splits, end = [bags[0].splits], bags[0].splits[-1]
            for bag in bags[1:]:
                splits.append(bag.splits[1:] + end)
                end = end + bag.splits[-1]
            all_ids, all_splits = tf.concat(virtual_ids, axis=0), tf.concat(splits, axis=0)
        weights = None if bags[0].weights is None else tf.concat([bag.weights for bag in bags], axis=0)
        return pooling_ops.pool_rows(
            rows,
            all_ids,
            bag_splits=all_splits,
            weights=weights,
            combiner=combiner,
            beside=beside,
        )

    def _sequence(self, feature: FeatureConfig, bags: Bags, rows: Tensor, virtual_ids: Tensor) -> Any:
        vectors = pooling_ops.pool_rows(rows, virtual_ids)
        if bags.weights is not None:
            vectors = vectors * bags.weights[:, None]
        if bags.length is None:
            return tf.RaggedTensor.from_row_splits(vectors, bags.splits, validate=False)
        batch = tf.shape(bags.splits, tf.int64)[0] - 1
        return tf.ensure_shape(
            tf.reshape(vectors, [batch, bags.length, feature.table.dim]), [None, feature.length, feature.table.dim]
        )

    # ---- state ----

    def save_own_variables(self, store: Any) -> None:
        """Keras' saving (model.save, save_weights): this process' rows and optimizer state, by table.

        Raises:
            RuntimeError: on several ranks, each of which holds a part of the rows only.
        """
        self._check_one_rank("saved")
        for number, table in enumerate(self.sharded.table_names):
            chunks = list(self.sharded.export_rows(table))
            store[f"{number}/ids"] = np.concatenate([chunk.ids for chunk in chunks])
            store[f"{number}/rows"] = np.concatenate([chunk.rows for chunk in chunks])
            store[f"{number}/state"] = np.concatenate([chunk.state for chunk in chunks])
            if self.sharded.table_config(table).tracks_rows:
                # Ids that wait come after those of the rows.
                waiting = list(self.sharded.export_waiting(table))
                for field in ("ids", "counts", "last_steps"):
                    known = [getattr(chunk, field) for chunk in (*chunks, *waiting)]
                    store[f"{number}/known_{field}"] = np.concatenate(known)
        store["steps"] = np.array(list(self.sharded.steps().values()), np.int64)

    def load_own_variables(self, store: Any) -> None:
        """Keras' loading: the reverse of save_own_variables, into tables that hold no rows yet.

        Raises:
            RuntimeError: on several ranks; or the tables hold rows.
        """
        self._check_one_rank("loaded")
        self.sharded.check_empty()
        self.sharded.set_step(int(np.max(store["steps"])))
        for number, table in enumerate(self.sharded.table_names):
            ids, rows, state = (np.asarray(store[f"{number}/{part}"]) for part in ("ids", "rows", "state"))
            if len(ids):
                self.sharded.import_rows(table, ids, rows, state)
            if f"{number}/known_ids" in store.keys():  # noqa: SIM118 - a Keras store is no mapping
                life = (
                    np.asarray(store[f"{number}/{part}"]) for part in ("known_ids", "known_counts", "known_last_steps")
                )
                self.sharded.import_life(table, *life)

    def _check_one_rank(self, done: str) -> None:
        ranks = comm.current().size
        if ranks > 1:
            raise RuntimeError(
                f"{self.name}: Keras files are {done} by one process, but the rows are spread over {ranks} ranks; "
                "use hvd_ctr.training.checkpoint.save and load, on all ranks"
            )

    def cache_stats(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """See ShardedEmbedding.cache_stats."""
        return self.sharded.cache_stats(all_ranks=all_ranks)

    def get_rows(self, table: str, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """See ShardedEmbedding.get_rows."""
        return self.sharded.get_rows(table, ids)
