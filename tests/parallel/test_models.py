"""Models train alike whoever has the samples: all ranks, or one of them while the others are idle."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, ModelConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.models import build_model, row_dim
from tests.support.hybrid import exported, share, unique_name

_F, _X, _GB, _STEPS = 3, 2, 24, 4


def _trained(comm: Comm, name: str, only_first_rank: bool) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    config = ModelConfig(name=name, hidden=(8, 4))
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=0.1)
    tables = [TableConfig(table, dim=row_dim(config, 4), optimizer=optimizer) for table in ("a", "b")]
    # Not in the order of the tables; zipfian ids, so that some features are factored and others are not.
    features = [FeatureConfig(f"f{i}", table=tables[i % 2]) for i in range(_F)]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=512), seed=5, name=unique_name("models"))
    model = hvd_ctr.HybridModel(*build_model(config, features, _X, layer))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    step = tf.function(lambda x, y: model.hybrid_step(x, y).loss, reduce_retracing=True)
    generator = np.random.default_rng(0)
    for _ in range(_STEPS):
        ids = generator.zipf([1.2, 3.0, 1.5], (_GB, _F)).clip(max=50)
        dense, labels = generator.random((_GB, _X), np.float32), generator.integers(0, 2, (_GB, 1)).astype(np.float32)
        mine = np.arange(_GB if comm.rank == 0 else 0) if only_first_rank else share(comm, np.arange(_GB))
        x = {"ids": tf.constant(ids[mine], tf.int64), "dense_features": tf.constant(dense[mine])}
        step(x, tf.constant(labels[mine]))
    state = [np.asarray(weight) for weight in model.weights]
    for table in ("a", "b"):
        rows = exported(layer.sharded, comm, table)
        state.append(np.stack([np.concatenate([[i], *rows[i]]) for i in sorted(rows)]))
    return state


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcnv2"])
def test_idle_ranks_do_not_matter(comm: Comm, name: str) -> None:
    for left, right in zip(_trained(comm, name, True), _trained(comm, name, False), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
