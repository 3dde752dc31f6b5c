"""Trains a small model for some steps and prints a hash of all that it has learned, as the last line:

    python -m tests.support.trained_bits

Dense columns beside the pooled vectors, weights of ids that are learned too, two dims, a cache that evicts, evaluation.
"""

from __future__ import annotations

import hashlib
import itertools

import keras
import numpy as np
import tensorflow as tf

import hvd_ctr
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.ops import interaction_ops
from hvd_ctr.training.train_step import batch_facts, hybrid_train_step

_numbers = itertools.count()


class Pairs(keras.layers.Layer):
    """The fused interactions."""

    def call(self, vectors: tf.Tensor) -> tf.Tensor:
        return tf.concat([interaction_ops.dot_pairs(vectors), interaction_ops.pair_sum(vectors)], axis=1)


def build() -> tuple[keras.Model, list[hvd_ctr.MixCacheEmbedding]]:
    """A model over a matrix of ids (B, 3), bags of two features, and dense columns (B, 2)."""
    number = next(_numbers)
    cache = CacheConfig(slots=80, policy="lru")
    adam = SparseOptimizerConfig(kind="adam", learning_rate=0.05)
    matrix = [FeatureConfig(f"m{i}", table=TableConfig(f"t{i}", dim=4, optimizer=adam)) for i in range(3)]
    bags = [
        FeatureConfig(f"b{i}", table=TableConfig(f"s{i}", dim=6), combiner="mean", length=3, weights=f"w{i}")
        for i in range(2)
    ]
    ids = keras.Input((3,), dtype="int64", name="ids")
    dense = keras.Input((2,), name="columns")
    bag_inputs = {feature.name: keras.Input((3,), dtype="int64", name=feature.name) for feature in bags}
    weights = {f"w{i}": keras.Input((3,), name=f"w{i}") for i in range(2)}
    layers = [
        hvd_ctr.MixCacheEmbedding(features, cache, seed=5, name=f"bits{number}_{part}")
        for part, features in enumerate((matrix, bags))
    ]
    vectors = layers[0](ids)
    tower = layers[1]({**bag_inputs, **weights}, dense)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), Pairs()(vectors), tower])
    keras.utils.set_random_seed(7)
    output = keras.layers.Dense(1)(joined)
    return keras.Model({"ids": ids, "columns": dense, **bag_inputs, **weights}, output), layers


def batch(seed: int, rows: int = 16) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Inputs and labels (B, 1)."""
    random = np.random.default_rng(seed)
    inputs = {
        "ids": random.integers(0, 100, (rows, 3)),
        "columns": random.normal(size=(rows, 2)).astype(np.float32),
        **{f"b{i}": random.integers(0, 60, (rows, 3)) for i in range(2)},
        **{f"w{i}": random.uniform(0.5, 2.0, (rows, 3)).astype(np.float32) for i in range(2)},
    }
    labels = random.integers(0, 2, (rows, 1)).astype(np.float32)
    return {name: tf.constant(value) for name, value in inputs.items()}, tf.constant(labels)


def train(steps: int = 6) -> str:
    """Trains, evaluates, exports; the hash of dense weights, rows with their state, and predictions."""
    model, layers = build()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        facts = batch_facts(inputs, None)
        return hybrid_train_step(model, optimizer, lambda out: loss(labels, out), inputs, facts).loss

    for seed in range(steps):
        step(*batch(seed))
    learned = hashlib.sha256()
    for weight in model.weights:
        learned.update(np.asarray(weight).tobytes())
    learned.update(np.asarray(model(batch(steps)[0])).tobytes())
    for layer in layers:
        for table in layer.sharded.table_names:
            chunks = list(layer.sharded.export_rows(table))
            ids = np.concatenate([chunk.ids for chunk in chunks])
            order = np.argsort(ids)
            learned.update(ids[order].tobytes())
            for part in ("rows", "state"):
                learned.update(np.concatenate([getattr(chunk, part) for chunk in chunks])[order].tobytes())
    assert sum(stats["evictions"] for layer in layers for stats in layer.cache_stats()["tables"].values()) > 0
    return learned.hexdigest()


if __name__ == "__main__":
    hvd_ctr.init()
    print(train())
