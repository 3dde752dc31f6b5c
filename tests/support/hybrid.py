"""Small hybrid models and direct steps for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding import ShardedEmbedding
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.embedding.step_context import StepContext
from hvd_ctr.layers import FactorizedDense, MixCacheEmbedding
from hvd_ctr.training.train_step import batch_facts
from tests.support.dense_reference import DenseReference

_names = itertools.count()


def unique_name(stem: str) -> str:
    """A name no other layer of this process has, the same on all ranks (they run the same tests in the same order)."""
    return f"{stem}_{next(_names)}"


def zero_table(name: str, dim: int = 2, learning_rate: float = 1.0, kind: str = "sgd", **fields: Any) -> TableConfig:
    """Rows start at 0: expected changes can be read off."""
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=learning_rate)
    return TableConfig(name, dim=dim, initializer="constant", init_scale=0.0, optimizer=optimizer, **fields)


def embedding(
    features: Sequence[FeatureConfig], slots: int = 1024, policy: str = "lru", seed: int = 3
) -> MixCacheEmbedding:
    """A built layer."""
    layer = MixCacheEmbedding(features, CacheConfig(slots=slots, policy=policy), seed=seed, name=unique_name("emb"))
    layer.build(None)
    return layer


def step(layer: Callable[[Any], Any], inputs: Any, loss: Callable[[Any], Any], learning_rate_scale: float = 1.0) -> Any:
    """One train step without a dense model: gradients of loss(outputs), summed over ranks as they are. Returns the
    outputs.
    """
    with tf.GradientTape() as tape:
        with StepContext(tape, batch_facts(inputs, None)) as context:
            outputs = layer(inputs)
        value = loss(outputs)
    context.backward(tape.gradient(value, context.watched_rows), tf.constant(learning_rate_scale, tf.float32))
    return outputs


def share(comm: comms.Comm, batch: np.ndarray) -> np.ndarray:
    """This rank's consecutive part of a global batch; sizes differ by at most one."""
    return np.array_split(batch, comm.size)[comm.rank]


def needed_slots(sharded: ShardedEmbedding, ids: np.ndarray) -> int:
    """Most rows that any rank must hold at once for the global batches ids (steps, GB, F), by the op library's own
    ownership.
    """
    (group,) = sharded.groups
    order = [sharded.features.index(feature) for feature in group.layout.features]
    most = 0
    for batch in ids:
        prepared = group.prepare(
            tf.constant(batch[:, order]), None, BatchFacts(np.int64(len(batch)), np.float64(len(batch)))
        )
        most = max(most, int(np.max(prepared.row_splits)))
    return most


def exported(sharded: ShardedEmbedding, comm: comms.Comm, table: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """All ranks' rows of a table: id -> (row, state)."""
    mine = [
        [int(i), r.tolist(), s.tolist()]
        for chunk in sharded.export_rows(table)
        for i, r, s in zip(chunk.ids, chunk.rows, chunk.state, strict=True)
    ]
    everything = [entry for part in comm.allgather_object(mine) for entry in part]
    assert len({entry[0] for entry in everything}) == len(everything), "a row is held by two ranks"
    return {i: (np.asarray(row, np.float32), np.asarray(state, np.float32)) for i, row, state in everything}


def logits_model(vectors: keras.KerasTensor, dense: keras.KerasTensor, seed: int = 1) -> keras.KerasTensor:
    """A small dense tower over (B, F, D) vectors and (B, X) dense features."""
    x = keras.layers.Concatenate()([dense, keras.layers.Flatten()(vectors)])
    x = keras.layers.Dense(8, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(seed))(x)
    return keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed + 1))(x)


def factorized_logits(factored: keras.KerasTensor, dense: keras.KerasTensor, max_share: float) -> keras.KerasTensor:
    """`logits_model` on distinct rows; with the same weights."""
    initializer = keras.initializers.GlorotUniform(1)
    first = FactorizedDense(8, activation="relu", max_share=max_share, kernel_initializer=initializer)
    x = first(factored, dense=dense)
    return keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))(x)


def train_reference(
    reference: DenseReference,
    tables: Sequence[str],
    tower: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: keras.losses.Loss,
    stream: Iterable[Any],
) -> None:
    """One process with dense tables trains ids (steps, B, F), dense features (steps, B, X), labels (steps, B, 1);
    tables[f] is the table of feature f."""

    @tf.function
    def gradients(rows: Any, dense: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            value = loss(labels, tower([rows, dense]))
        return tape.gradient(value, [rows, *(v.value for v in tower.trainable_variables)])

    for ids, dense, labels in zip(*stream, strict=True):
        rows = np.stack([reference.lookup(name, ids[:, i]) for i, name in enumerate(tables)], axis=1)
        d_rows, *d_dense = gradients(tf.constant(rows), dense, labels)
        optimizer.apply(d_dense, tower.trainable_variables)
        reference.next_step()
        for table in dict.fromkeys(tables):
            columns = [i for i, name in enumerate(tables) if name == table]
            reference.apply(table, ids[:, columns].ravel(), np.asarray(d_rows)[:, columns].reshape(-1, rows.shape[2]))
