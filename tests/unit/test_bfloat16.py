"""Dense layers that compute in bfloat16 over the cached embedding: train, evaluate, predict; rows stay float32."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.config import CacheConfig, FeatureConfig, ModelConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.models import build_model, row_dim
from hvd_ctr.training.hybrid_model import HybridModel
from tests.support.hybrid import unique_name

NAMES = ("deepfm", "wide_deep", "dcnv2", "dlrm")


def _data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Clicks depend on the pair of two ids."""
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 8, (4096, 3))
    dense = generator.normal(size=(4096, 2)).astype(np.float32)
    return {"dense_features": dense, "ids": ids}, ((ids[:, 0] + ids[:, 1]) % 2).astype(np.float32)


def _model(name: str, compute_dtype: str) -> HybridModel:
    config = ModelConfig(
        name=name, hidden=(32, 16), bottom_hidden=(8,), cross_layers=2, dropout=0.01, compute_dtype=compute_dtype
    )
    table = SparseOptimizerConfig(kind="adam", learning_rate=0.02)
    features = [
        FeatureConfig(f"f{i}", table=TableConfig(f"f{i}", dim=row_dim(config, 4), init_scale=0.5, optimizer=table))
        for i in range(3)
    ]
    keras.utils.set_random_seed(1)
    embedding = MixCacheEmbedding(features, CacheConfig(slots=256), name=unique_name("bfloat16"))
    inputs, outputs = build_model(config, features, 2, embedding)
    model = HybridModel(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_trains_evaluates_and_predicts(name: str) -> None:
    hvd_ctr.init()
    x, y = _data()
    model, exact = _model(name, "bfloat16"), _model(name, "float32")
    assert keras.config.dtype_policy().name == "float32"  # the policy is of the model, not of the process

    start = model.predict(x, batch_size=4096)
    assert start.dtype == np.float32
    wanted = exact.predict(x, batch_size=4096)
    assert np.abs(start - wanted).max() > 0  # something is rounded
    np.testing.assert_allclose(start, wanted, atol=0.03 * np.abs(wanted).max())

    losses = model.fit(x, y, batch_size=256, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.3, losses
    assert model.evaluate(x, y, batch_size=1024, verbose=0) < 0.3
    assert all(weight.dtype == "float32" for weight in model.trainable_weights)
    hidden = model.get_layer("top_0" if name == "dlrm" else "deep_first")
    assert hidden.compute_dtype == "bfloat16"
    rows = model.embeddings[0].get_rows("f0", np.arange(8))
    assert rows.dtype == np.float32
    assert (tf.cast(tf.cast(rows, tf.bfloat16), tf.float32).numpy() != rows).any()  # more digits than bfloat16 has


@pytest.mark.parametrize("name", ["deepfm", "wide_deep"])
def test_first_order_terms_are_added_up_in_float32(name: str) -> None:
    model = _model(name, "bfloat16")
    assert model.get_layer("split_row").compute_dtype == "float32"


def test_an_embedding_under_a_policy_for_the_whole_process_gives_bfloat16_vectors_of_float32_rows() -> None:
    hvd_ctr.init()
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        name = unique_name("mixed")
        features = [FeatureConfig("f", table=TableConfig("t", dim=4, init_scale=0.5))]
        ids = keras.Input((1,), dtype="int64", name="ids")
        vectors = MixCacheEmbedding(features, CacheConfig(slots=64), name=name)(ids)
        assert vectors.dtype == "bfloat16"
        outputs = keras.layers.Dense(1, dtype="float32")(keras.layers.Flatten()(vectors))
        model = HybridModel({"ids": ids}, outputs)
        model.compile("sgd", "mse")
        before = model.embeddings[0].get_rows("t", [1])
        model.fit({"ids": np.ones((4, 1), np.int64)}, np.full((4, 1), 100.0, np.float32), verbose=0)
        after = model.embeddings[0].get_rows("t", [1])
    finally:
        keras.config.set_dtype_policy(previous)
    assert after.dtype == np.float32
    assert (before != after).all()
