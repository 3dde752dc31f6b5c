"""FactorizedDense and ExpandRows: the same weights and numbers as a plain Dense on expanded vectors."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.layers import ExpandRows, FactorizedDense, MixCacheEmbedding, factored
from hvd_ctr.ops import factorized_ops, placement
from tests.support.hybrid import unique_name

_DIM, _X = 4, 3


def _embedding(dim=_DIM, **fields):
    """Features whose order is not that of their tables."""
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=0.1)
    a, b = (TableConfig(name, dim=dim, optimizer=optimizer) for name in ("a", "b"))
    features = [FeatureConfig("x", table=a), FeatureConfig("y", table=b), FeatureConfig("z", table=a, **fields)]
    return MixCacheEmbedding(features, CacheConfig(slots=512), seed=5, name=unique_name("factored"))


def _batch(rows=60, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, [3, 50, 5], (rows, 3))
    return {"ids": ids, "numbers": generator.random((rows, _X), np.float32)}, generator.integers(0, 2, (rows, 1))


def _model(kind, first=None, **options):
    """A tower over [numbers, vectors]; `kind` says how its first layer comes by them."""
    hvd_ctr.init()
    embedding = _embedding()
    ids, numbers = keras.Input((3,), dtype="int64", name="ids"), keras.Input((_X,), name="numbers")
    options = {"activation": "relu", "kernel_initializer": keras.initializers.GlorotUniform(1), **options}
    if kind == "factorized":
        x = (first or FactorizedDense(8, max_share=0.6, **options))(embedding(ids, factored=True), dense=numbers)
    elif kind == "expanded":
        x = ExpandRows()(embedding(ids, factored=True), dense=numbers)
        x = keras.layers.Dense(8, **options)(x)
    else:
        x = keras.layers.Dense(8, **options)(embedding(ids, dense=numbers))
    logits = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2), dtype="float32")(x)
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def _rows(model, table):
    chunks = list(model.embeddings[0].sharded.export_rows(table))
    order = np.argsort(np.concatenate([chunk.ids for chunk in chunks]))
    return np.concatenate([chunk.rows for chunk in chunks])[order]


def _trained(kind, depth=2, **options):
    model = _model(kind, **options)
    x, y = _batch(600)
    history = model.fit(x, y, batch_size=60, epochs=2, shuffle=False, verbose=0, pipeline_depth=depth)
    numbers = [np.asarray(w) for w in model.weights] + [_rows(model, "a"), _rows(model, "b"), model.predict(x)]
    return numbers, history.history["loss"][-1]


def _assert_alike(left, right, tolerance):
    for one, other in zip(left[0], right[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    assert left[1] == pytest.approx(right[1], abs=1e-5)


@pytest.mark.parametrize("depth", [0, 2])
def test_training_is_that_of_a_plain_tower(monkeypatch, depth):
    calls = []
    make_plan = factorized_ops.factor_plan
    monkeypatch.setattr(factorized_ops, "factor_plan", lambda *a: calls.append(a) or make_plan(*a))
    plain = _trained("plain", depth)
    assert not calls
    factorized = _trained("factorized", depth)
    assert placement.rows_on_gpu() or calls, "the layer was a plain one"
    _assert_alike(factorized, plain, 1e-6)
    _assert_alike(_trained("expanded", depth), plain, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False},
        {"activation": None},
        {"activation": "tanh", "bias_initializer": "ones"},
        {"kernel_regularizer": keras.regularizers.L2(0.01), "activity_regularizer": keras.regularizers.L2(0.01)},
        {"kernel_constraint": keras.constraints.MaxNorm(0.5)},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_options_of_dense_mean_the_same(options):
    _assert_alike(_trained("factorized", **options), _trained("plain", **options), 2e-6)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float64"])
def test_in_other_types_it_is_a_plain_dense(monkeypatch, dtype):
    plain = _trained("plain", dtype=dtype)
    monkeypatch.setattr(factorized_ops, "factorized_dense", None)
    _assert_alike(_trained("factorized", dtype=dtype), plain, 1e-6)


def test_with_rows_on_a_gpu_it_is_a_plain_dense(monkeypatch):
    plain = _trained("plain")
    here = types.SimpleNamespace(rows_on_gpu=lambda: True, on_host=placement.on_host)
    monkeypatch.setattr(factored, "placement", here)
    monkeypatch.setattr(factorized_ops, "factorized_dense", None)
    _assert_alike(_trained("factorized"), plain, 0)


def test_gradients_of_rows_are_not_summed_in_fewer_bits():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plain, expanded, factorized = (_trained(kind) for kind in ("plain", "expanded", "factorized"))
    finally:
        keras.config.set_dtype_policy(before)
    _assert_alike(expanded, plain, 0)
    _assert_alike(factorized, plain, 0)


def test_max_share_zero_is_a_plain_dense(monkeypatch):
    plain = _trained("plain")
    monkeypatch.setattr(factorized_ops, "factorized_dense", None)
    _assert_alike(
        _trained(
            "factorized",
            first=FactorizedDense(
                8, activation="relu", max_share=0, kernel_initializer=keras.initializers.GlorotUniform(1)
            ),
        ),
        plain,
        0,
    )


def test_a_dict_of_ids_and_an_empty_batch():
    hvd_ctr.init()
    embedding, layer = _embedding(), FactorizedDense(8, max_share=1.0)
    x, _ = _batch(20)
    from_matrix = layer(embedding(x["ids"], factored=True))
    from_dict = layer(embedding({name: x["ids"][:, i] for i, name in enumerate("xyz")}, factored=True))
    np.testing.assert_array_equal(from_matrix, from_dict)
    assert layer.kernel.shape == (3 * _DIM, 8)
    assert layer(embedding(x["ids"][:0], factored=True)).shape == (0, 8)
    vectors = ExpandRows()(embedding(x["ids"], factored=True))
    np.testing.assert_array_equal(vectors, embedding(x["ids"]))


def test_dropped_ids_contribute_nothing():
    hvd_ctr.init()
    embedding, layer = _embedding(padding_id=0), FactorizedDense(8, max_share=1.0)
    ids = np.array([[1, 2, 0], [1, 2, 3]] * 4)
    vectors = np.asarray(embedding(ids))
    assert not vectors[0, 2].any() and vectors[1, 2].any()
    outputs = layer(embedding(ids, factored=True))
    np.testing.assert_allclose(outputs, vectors.reshape(8, -1) @ np.asarray(layer.kernel), atol=1e-6)


def test_weights_and_configuration_are_saved_and_loaded(tmp_path):
    model, loaded = _model("factorized"), _model("factorized")
    x, y = _batch()
    model.fit(x, y, verbose=0)
    model.save_weights(tmp_path / "all.weights.h5")
    loaded.load_weights(tmp_path / "all.weights.h5")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    copied = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(FactorizedDense(5, activation="tanh", use_bias=False, max_share=0.125))
    )
    assert (copied.units, copied.use_bias, copied.max_share) == (5, False, 0.125)
    assert copied.activation is keras.activations.tanh


def test_arrays_and_lists_make_the_same_layer_as_tensors():
    x, _ = _batch(20)
    factored = {"rows": np.ones((5, 2), np.float32), "row_of_id": np.arange(20, dtype=np.int32).reshape(10, 2) % 5}
    expected = FactorizedDense(8, kernel_initializer="ones")(
        {name: tf.constant(value) for name, value in factored.items()}, dense=tf.constant(x["numbers"][:10])
    )
    for dense in (x["numbers"][:10], x["numbers"][:10].tolist()):
        layer = FactorizedDense(8, kernel_initializer="ones")
        np.testing.assert_array_equal(layer(factored, dense=dense), expected)
        assert layer.kernel.shape == (_X + 2 * 2, 8)
        assert ExpandRows()(factored, dense=dense).shape == (10, _X + 2 * 2)
    with pytest.raises(ValueError, match="dense must be one tensor, received list"):
        FactorizedDense(8)(factored, dense=[keras.Input((2,)), keras.Input((3,))])


def test_training_may_be_said_when_a_model_is_built():
    ids = keras.Input((3,), dtype="int64")
    factored = _embedding()(ids, factored=True)
    assert FactorizedDense(8)(factored, training=True).shape == (None, 8)
    assert keras.Sequential([FactorizedDense(8)])(factored).shape == (None, 8)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_max_share_is_checked(share):
    with pytest.raises(ValueError, match="max_share must be 0 .. 1, received"):
        FactorizedDense(8, max_share=share)


def test_other_inputs_are_refused():
    with pytest.raises(ValueError, match="factored=True"):
        FactorizedDense(8)(tf.zeros([3, 4]))
    with pytest.raises(ValueError, match="factored=True"):
        ExpandRows()({"rows": tf.zeros([3, 4])})
    ids = keras.Input((3,), dtype="int64")
    with pytest.raises(ValueError, match=r"dense must have shape \(B, X\)"):
        FactorizedDense(8)(_embedding()(ids, factored=True), dense=keras.Input((2, 2)))
    with pytest.raises(ValueError, match="pass it to them"):
        _embedding()(ids, dense=keras.Input((2,)), factored=True)


@pytest.mark.parametrize("fields", [{"combiner": None}, {"length": 2}, {"weights": "w"}])
def test_bags_cannot_be_factored(fields):
    inputs = {name: keras.Input((1,), dtype="int64") for name in "xy"}
    inputs["z"] = keras.Input((fields.get("length", 1),), dtype="int64")
    inputs["w"] = keras.Input((1,))
    with pytest.raises(ValueError, match="not so are z"):
        _embedding(**fields)(inputs, factored=True)


def test_bags_as_a_matrix_are_refused_with_the_same_words():
    with pytest.raises(ValueError, match="factored=True needs features of length 1"):
        _embedding(length=2)(keras.Input((3,), dtype="int64"), factored=True)


def test_tables_of_several_dims_cannot_be_factored():
    a, b = TableConfig("a", dim=4), TableConfig("b", dim=8)
    embedding = MixCacheEmbedding([FeatureConfig("x", table=a), FeatureConfig("y", table=b)])
    with pytest.raises(ValueError, match="tables of one dim; not so are {'x': 4, 'y': 8}"):
        embedding({name: keras.Input((1,), dtype="int64") for name in "xy"}, factored=True)
