"""The four models over a plain embedding layer: shapes, formulas, gradients, equal starts, learning."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, ModelConfig, TableConfig
from hvd_ctr.models import build_model, row_dim

NAMES = ("deepfm", "wide_deep", "dcnv2", "dlrm")
FEATURES, DENSE, DIM, ROWS = 3, 2, 4, 50


@keras.saving.register_keras_serializable("hvd_ctr_tests")
class PlainEmbedding(keras.layers.Layer):
    """Stands in for the cached embedding: a dense table per feature, `(B, F)` to `(B, F, dim)`."""

    def __init__(self, features: int, dim: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.features, self.dim = features, dim

    def build(self, input_shape) -> None:
        initializer = keras.initializers.RandomNormal(stddev=0.5, seed=7)
        self.table = self.add_weight((self.features * ROWS, self.dim), initializer, name="table")
        self.built = True

    def call(self, ids, factored=False):
        rows = ids + tf.range(self.features, dtype=tf.int64) * ROWS
        if factored:
            return {"rows": tf.convert_to_tensor(self.table), "row_of_id": tf.cast(rows, tf.int32)}
        return tf.gather(self.table, rows)

    def compute_output_spec(self, ids, factored=False):
        if factored:
            return {
                "rows": keras.KerasTensor((None, self.dim), dtype=self.compute_dtype),
                "row_of_id": keras.KerasTensor(ids.shape, dtype="int32"),
            }
        return keras.KerasTensor((*ids.shape, self.dim), dtype=self.compute_dtype)

    def get_config(self):
        return {**super().get_config(), "features": self.features, "dim": self.dim}


def _config(name: str, **fields) -> ModelConfig:
    return ModelConfig(name=name, hidden=fields.pop("hidden", (8, 4)), bottom_hidden=(5,), cross_layers=2, **fields)


def _features(dim: int, count: int = FEATURES) -> list[FeatureConfig]:
    return [FeatureConfig(f"f{i}", table=TableConfig(f"f{i}", dim=dim)) for i in range(count)]


def _model(config: ModelConfig, dense: int = DENSE, count: int = FEATURES) -> keras.Model:
    dim = row_dim(config, DIM)
    inputs, outputs = build_model(config, _features(dim, count), dense, PlainEmbedding(count, dim, name="embedding"))
    return keras.Model(inputs, outputs)


def _batch(rows: int, dense: int = DENSE, count: int = FEATURES, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "dense_features": generator.normal(size=(rows, dense)).astype(np.float32),
        "ids": generator.integers(0, ROWS, (rows, count)),
    }


def _rows(model: keras.Model, batch: dict[str, np.ndarray]) -> np.ndarray:
    return model.get_layer("embedding")(batch["ids"]).numpy()


def _perceptron(model: keras.Model, x: np.ndarray, prefix: str, layers: int) -> np.ndarray:
    names = [f"{prefix}_{index}" for index in range(layers)]
    if prefix == "deep":
        names = ["deep_first", *names[:-1]]
    for name in names:
        kernel, bias = (weight.numpy() for weight in model.get_layer(name).weights)
        x = np.maximum(x @ kernel + bias, 0)
    return x


def _linear(model: keras.Model, x: np.ndarray, name: str) -> np.ndarray:
    weights = [weight.numpy() for weight in model.get_layer(name).weights]
    return x @ weights[0] + (weights[1] if len(weights) > 1 else 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dense", [0, DENSE])
def test_logits_have_one_column(name: str, dense: int) -> None:
    model = _model(_config(name), dense)
    assert model.output_shape == (None, 1)
    logits = model(_batch(6, dense))
    assert logits.shape == (6, 1)
    assert logits.dtype == tf.float32
    assert model(_batch(0, dense)).shape == (0, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [(), (8,), (8, 4)])
def test_any_number_of_hidden_layers(name: str, hidden: tuple[int, ...]) -> None:
    assert _model(_config(name, hidden=hidden))(_batch(4)).shape == (4, 1)


def test_deepfm_formula() -> None:
    model, batch = _model(_config("deepfm")), _batch(7)
    rows = _rows(model, batch)
    weights, vectors, dense = rows[:, :, 0], rows[:, :, 1:], batch["dense_features"]
    pairs = sum((vectors[:, f] * vectors[:, g]).sum(1) for f in range(FEATURES) for g in range(f))
    deep = _perceptron(model, np.concatenate([dense, vectors.reshape(7, -1)], 1), "deep", 2)
    expected = (
        weights.sum(1, keepdims=True)
        + _linear(model, dense, "first_order_dense")
        + pairs[:, None]
        + _linear(model, deep, "deep_logit")
    )
    np.testing.assert_allclose(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_wide_deep_formula() -> None:
    model, batch = _model(_config("wide_deep")), _batch(7)
    rows, dense = _rows(model, batch), batch["dense_features"]
    deep = _perceptron(model, np.concatenate([dense, rows[:, :, 1:].reshape(7, -1)], 1), "deep", 2)
    expected = (
        rows[:, :, 0].sum(1, keepdims=True)
        + _linear(model, dense, "first_order_dense")
        + _linear(model, deep, "deep_logit")
    )
    np.testing.assert_allclose(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_dcnv2_formula() -> None:
    model, batch = _model(_config("dcnv2")), _batch(7)
    x0 = np.concatenate([batch["dense_features"], _rows(model, batch).reshape(7, -1)], 1)
    crossed = x0
    cross = model.get_layer("cross")
    for kernel, bias in zip(cross.kernels, cross.biases, strict=True):
        crossed = x0 * (crossed @ kernel.numpy() + bias.numpy()) + crossed
    expected = _linear(model, np.concatenate([crossed, _perceptron(model, x0, "deep", 2)], 1), "logit")
    np.testing.assert_allclose(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_dlrm_formula() -> None:
    model, batch = _model(_config("dlrm")), _batch(7)
    bottom = _perceptron(model, batch["dense_features"], "bottom", 2)
    vectors = np.concatenate([bottom[:, None], _rows(model, batch)], 1)
    pairs = [(vectors[:, f] * vectors[:, g]).sum(1) for f in range(FEATURES + 1) for g in range(f)]
    top = _perceptron(model, np.concatenate([bottom, np.stack(pairs, 1)], 1), "top", 2)
    np.testing.assert_allclose(model(batch), _linear(model, top, "logit"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_and_every_column_of_a_row_has_a_gradient(name: str) -> None:
    model, batch = _model(_config(name)), _batch(64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(batch) - 1.0))
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        assert gradient is not None, weight.path
        values = tf.convert_to_tensor(gradient).numpy()
        assert np.isfinite(values).all(), weight.path
        assert np.abs(values).max() > 0, weight.path
        if weight.name == "table":
            assert (np.abs(values).max(0) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_start_equally(name: str) -> None:
    """Ranks with one seed start with the same dense weights (before anything is broadcast); another seed differs."""
    starts = []
    for seed in (3, 3, 4):
        keras.utils.set_random_seed(seed)
        starts.append([weight.numpy() for weight in _model(_config(name)).trainable_weights])
    for first, second in zip(starts[0], starts[1], strict=True):
        np.testing.assert_array_equal(first, second)
    assert any((first != third).any() for first, third in zip(starts[0], starts[2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_learns_a_pair_interaction(name: str) -> None:
    """Clicks depend on the pair of two ids, which no single weight explains."""
    keras.utils.set_random_seed(1)
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 8, (4096, FEATURES))
    batch = {"dense_features": generator.normal(size=(4096, DENSE)).astype(np.float32), "ids": ids}
    labels = ((ids[:, 0] + ids[:, 1]) % 2).astype(np.float32)
    model = _model(_config(name, hidden=(32, 16)))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    history = model.fit(batch, labels, batch_size=256, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.25, history


def test_regularization_and_dropout_reach_the_layers() -> None:
    model = _model(_config("deepfm", l2=0.01, dropout=0.5))
    model(_batch(2))
    assert len(model.losses) == 4  # two hidden layers, the logit, the first order of the dense columns
    assert [layer.rate for layer in model.layers if isinstance(layer, keras.layers.Dropout)] == [0.5, 0.5]


def test_logits_stay_float32_in_mixed_precision() -> None:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        for name in NAMES:
            assert _model(_config(name))(_batch(4)).dtype == tf.float32
    finally:
        keras.config.set_dtype_policy(previous)


def test_row_dim_makes_room_for_the_first_order_weight() -> None:
    assert {name: row_dim(_config(name), 16) for name in NAMES} == {
        "deepfm": 17,
        "wide_deep": 17,
        "dcnv2": 16,
        "dlrm": 16,
    }


def test_unknown_model_names_the_known_ones() -> None:
    config = _config("deepfm").model_copy(update={"name": "deepfn"})
    with pytest.raises(ValueError, match="no model 'deepfn'; known are dcnv2, deepfm, dlrm, wide_deep"):
        build_model(config, _features(5), DENSE, PlainEmbedding(FEATURES, 5))


def test_unequal_dims_and_missing_features_are_errors() -> None:
    mixed = [*_features(4, 1), FeatureConfig("g", table=TableConfig("g", dim=8))]
    with pytest.raises(ValueError, match=r"one dim, got \[4, 8\]"):
        build_model(_config("dcnv2"), mixed, DENSE, PlainEmbedding(2, 4))
    with pytest.raises(ValueError, match="at least one sparse feature"):
        build_model(_config("dcnv2"), [], DENSE, PlainEmbedding(1, 4))
    with pytest.raises(ValueError, match="two vectors or more"):
        build_model(_config("dlrm"), _features(4, 1), 0, PlainEmbedding(1, 4))


@pytest.mark.parametrize("name", NAMES)
def test_models_survive_saving(name: str, tmp_path) -> None:
    model, batch = _model(_config(name)), _batch(5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(batch), model(batch))
