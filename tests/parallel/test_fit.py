"""HybridModel through Keras' own loops at any number of ranks (FC 5, 12, 18, 22, 26, 29, 49, 64, 67, 77, 78)."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from tests.support.hybrid import exported, logits_model, share, unique_name

_F, _X, _GB = 3, 2, 24


def _model(kind: str = "sgd", **kwargs) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    tables = [
        TableConfig(f"t{i}", dim=4, optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.1)) for i in range(_F)
    ]
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig(f"f{i}", table=t) for i, t in enumerate(tables)],
        CacheConfig(slots=512),
        seed=5,
        name=unique_name("fit"),
    )
    inputs = {"ids": keras.Input((_F,), dtype="int64", name="ids"), "numbers": keras.Input((_X,), name="numbers")}
    model = hvd_ctr.HybridModel(inputs, logits_model(layer(inputs["ids"]), inputs["numbers"]))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), **kwargs)
    return model, layer


def _data(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    generator = np.random.default_rng(seed)
    ids = generator.zipf(1.5, (rows, _F)).clip(max=50).astype(np.int64)
    return {"ids": ids, "numbers": generator.random((rows, _X), np.float32)}, (
        generator.random((rows, 1)) < 0.3
    ).astype(np.float32)


def _global_batches(comm: Comm, rows: int) -> tf.data.Dataset:
    """This rank's slices of consecutive global batches."""
    x, y = _data(rows)
    parts = [share(comm, np.arange(b, min(b + _GB, rows))) for b in range(0, rows, _GB)]

    def batches():
        for part in parts:
            yield {name: value[part] for name, value in x.items()}, y[part]

    signature = (
        {"ids": tf.TensorSpec([None, _F], tf.int64), "numbers": tf.TensorSpec([None, _X])},
        tf.TensorSpec([None, 1]),
    )
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def _state(model, layer, comm: Comm) -> dict[str, np.ndarray]:
    rows = {f"t{i}": exported(layer.sharded, comm, f"t{i}") for i in range(_F)}
    state = {f"weight{i}": np.asarray(w) for i, w in enumerate(model.weights)}
    for table, entries in rows.items():
        state[table] = np.stack([np.concatenate([[i], *entries[i]]) for i in sorted(entries)])
    return state


def _assert_equal(left, right, tolerance: float) -> None:
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("mode", [{}, {"steps_per_execution": 4}, {"run_eagerly": True}])
def test_fit_equals_the_hand_written_loop(comm: Comm, mode: dict) -> None:
    """All modes of fit, uneven last batch included, against the raw loop over the same global batches."""
    rows = 5 * _GB + 7
    fitted, fitted_layer = _model(**mode)
    fitted.fit(_global_batches(comm, rows), epochs=2, verbose=0)
    looped, looped_layer = _model()
    looped.synchronise()
    run = tf.function(lambda x, y: looped.hybrid_step(x, y).loss, reduce_retracing=True)
    for _ in range(2):
        for x, y in _global_batches(comm, rows):
            run(x, y)
    _assert_equal(_state(fitted, fitted_layer, comm), _state(looped, looped_layer, comm), 1e-6)


def test_dense_weights_agree_bit_for_bit_on_all_ranks(comm: Comm) -> None:
    """FC 10, 12: different seeds, active clipping."""
    keras.utils.set_random_seed(100 + comm.rank)
    model, _ = _model()
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(_global_batches(comm, 4 * _GB), verbose=0)
    mine = [np.asarray(w).tobytes().hex() for w in [*model.weights, *model.optimizer.variables]]
    assert all(other == mine for other in comm.allgather_object(mine))


@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("counts", [(10, 7), (10, 0)])
def test_ranks_with_different_numbers_of_batches(comm: Comm, known_length: bool, counts: tuple[int, int]) -> None:
    """FC 64: everybody trains max(counts) steps; all samples are used."""
    batches = counts[comm.rank % 2]
    x, y = _data(max(1, batches) * 4, seed=comm.rank)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(batches)
    if not known_length:
        data = data.filter(lambda *_: True)
    model, layer = _model()
    model.fit(data, epochs=2, verbose=0, validation_data=data)
    assert layer.cache_stats()["total"]["steps"] == 2 * max(counts[: comm.size])
    assert np.isfinite(np.concatenate([np.asarray(w).ravel() for w in model.weights])).all()


def test_arrays_and_weights(comm: Comm) -> None:
    """Sample weights scale samples: weight 0 equals leaving the sample's influence out; class_weight is the same as
    weights.
    """
    x, y = _data(_GB)
    mine = share(comm, np.arange(_GB))
    part = {name: value[mine] for name, value in x.items()}
    by_class, by_weight = _model(), _model()
    by_class[0].fit(part, y[mine], batch_size=_GB, class_weight={0: 1.0, 1: 3.0}, shuffle=False, verbose=0)
    by_weight[0].fit(
        part, y[mine], batch_size=_GB, sample_weight=np.where(y[mine][:, 0] > 0, 3.0, 1.0), shuffle=False, verbose=0
    )
    _assert_equal(_state(*by_class, comm), _state(*by_weight, comm), 0)


def test_metrics_are_of_all_ranks_together(comm: Comm) -> None:
    x, y = _data(2000)
    part = share(comm, np.arange(2000))
    model, _ = _model(
        metrics=[hvd_ctr.DistributedAUC(name="auc", from_logits=True), keras.metrics.BinaryAccuracy(threshold=0.0)]
    )
    values = model.evaluate({n: v[part] for n, v in x.items()}, y[part], batch_size=16, return_dict=True, verbose=0)
    assert all(other == values for other in comm.allgather_object(values))
    logits = np.concatenate(
        [
            part
            for rank in comm.allgather_object(model.predict({n: v[part] for n, v in x.items()}, verbose=0).tolist())
            for part in [np.array(rank)]
        ]
    )
    order, positive = logits[:, 0], y[:, 0] > 0
    pairs = (order[positive][:, None] > order[~positive]).mean() + 0.5 * (
        order[positive][:, None] == order[~positive]
    ).mean()
    assert values["auc"] == pytest.approx(pairs, abs=1e-4)
    assert values["binary_accuracy"] == pytest.approx(((order > 0) == positive).mean(), abs=1e-6)
    assert values["loss"] == pytest.approx(np.mean(np.logaddexp(0, order) - order * positive), abs=1e-5)


def test_evaluation_changes_nothing(comm: Comm) -> None:
    """FC 49: unseen ids, full cache."""
    model, layer = _model("adam")
    model.fit(_global_batches(comm, 4 * _GB), verbose=0)
    before = _state(model, layer, comm), layer.cache_stats()
    x, y = _data(64, seed=9)
    x["ids"] = x["ids"] + 10_000
    first = model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert model.evaluate(x, y, verbose=0) == first
    _assert_equal(before[0], _state(model, layer, comm), 0)
    assert before[1] == layer.cache_stats()


def test_frozen_embedding_does_not_move(comm: Comm) -> None:
    """FC 26."""
    model, layer = _model()
    layer.trainable = False
    seen = np.arange(51)
    before = layer.get_rows("t0", seen)
    model.fit(_global_batches(comm, 2 * _GB), verbose=0)
    np.testing.assert_array_equal(layer.get_rows("t0", seen), before)


def test_unseen_ids_have_the_same_default_on_every_rank(comm: Comm) -> None:
    """FC 48: the deterministic first value, whatever rank owns the id."""
    _, layer = _model()
    rows = layer.get_rows("t1", np.arange(100, 200))
    assert all(other == rows.tolist() for other in comm.allgather_object(rows.tolist()))
    assert np.abs(rows).max() <= 0.05 and len(np.unique(rows[:, 0])) > 90


@pytest.mark.parametrize("problem", ["jit", "batch_norm", "loss_scale", "endless"])
def test_what_cannot_work_is_refused(comm: Comm, problem: str) -> None:
    model, _ = _model()
    with pytest.raises(
        ValueError,
        match={
            "jit": "jit_compile",
            "batch_norm": "BatchNormalization",
            "loss_scale": "mixed_bfloat16",
            "endless": "never ends",
        }[problem],
    ):
        if problem == "jit":
            model.compile("sgd", "mse", jit_compile=True)
        elif problem == "batch_norm":
            x = keras.Input((2,))
            hvd_ctr.HybridModel(x, keras.layers.BatchNormalization()(x)).compile("sgd", "mse")
        elif problem == "loss_scale":
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        else:
            model.fit(_global_batches(comm, _GB).repeat(), verbose=0)


def test_a_stock_embedding_beside_ours(comm: Comm) -> None:
    """FC 5: its sparse gradients are summed like dense ones. (Keras' own Adam squares the entries of a sparse
    gradient one by one, duplicates unsummed, so the one-process reference makes the gradient dense first.)
    """
    x, y = _data(_GB)
    part = share(comm, np.arange(_GB))

    def build(kind):
        inputs = {"ids": keras.Input((_F,), dtype="int64", name="ids"), "numbers": keras.Input((_X,), name="numbers")}
        small = keras.layers.Embedding(64, 4, embeddings_initializer=keras.initializers.RandomUniform(seed=3))(
            inputs["ids"]
        )
        return kind(inputs, logits_model(small, inputs["numbers"]))

    ours, plain = build(hvd_ctr.HybridModel), build(keras.Model)
    loss, optimizer = keras.losses.BinaryCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)
    ours.compile(keras.optimizers.Adam(0.01), loss)
    mine = {n: v[part] for n, v in x.items()}
    ours.fit(mine, y[part], batch_size=_GB, epochs=3, shuffle=False, verbose=0)
    for _ in range(3):
        with tf.GradientTape() as tape:
            value = loss(y, plain(x))
        gradients = tape.gradient(value, [v.value for v in plain.trainable_variables])
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], plain.trainable_variables)
    for left, right in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_collectives_do_not_grow_with_tables(comm: Comm) -> None:
    """FC 63, 114: per dim one exchange of keys, one of rows, one of gradients; one allreduce group for all dense
    weights.
    """
    if comm.size == 1:
        return  # one rank exchanges nothing
    counts = {}
    for tables in (1, 26):
        features = [FeatureConfig(f"f{i}", table=TableConfig(f"fused_{tables}_{i}", dim=4)) for i in range(tables)]
        layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=256), name=unique_name("fused"))
        ids, numbers = keras.Input((tables,), dtype="int64", name="ids"), keras.Input((_X,), name="numbers")
        model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(layer(ids), numbers))
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        x = {"ids": tf.zeros([2, tables], tf.int64), "numbers": tf.zeros([2, _X])}
        graph = tf.function(model.hybrid_step, autograph=False).get_concrete_function(x, tf.zeros([2, 1])).graph
        types = [op.type for op in graph.get_operations()]
        kinds = [
            kind
            for kind in ("Alltoall", "Allgather", "Allreduce")
            for name in types
            if name in (f"Horovod{kind}", f"HorovodGrouped{kind}", f"HvdCtrShared{kind}")
        ]
        counts[tables] = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts[1] == counts[26] == {"Alltoall": 3, "Allreduce": 1}


def test_scoring_without_compile(comm: Comm) -> None:
    """FC 24: a model that was never compiled predicts."""
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig("f", table=TableConfig("scored", dim=4))], name=unique_name("scored")
    )
    ids, numbers = keras.Input((1,), dtype="int64", name="ids"), keras.Input((_X,), name="numbers")
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(layer(ids), numbers))
    scores = model.predict({"ids": np.arange(5)[:, None], "numbers": np.zeros((5, _X), np.float32)}, verbose=0)
    assert scores.shape == (5, 1) and np.isfinite(scores).all()
    assert layer.cache_stats()["total"]["host_rows"] == 0


def test_mixed_bfloat16_keeps_float32_rows(comm: Comm) -> None:
    """FC 82: rows after 20 steps stay near the float32 run's."""
    states = []
    for policy in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        try:
            model, layer = _model()
        finally:
            keras.config.set_dtype_policy("float32")
        model.fit(_global_batches(comm, 4 * _GB), epochs=5, verbose=0)
        states.append(_state(model, layer, comm))
    _assert_equal(states[0], states[1], 0.02)


def test_an_invalid_id_is_no_end_of_data(comm: Comm) -> None:
    """FC 33: Keras takes some errors for the end of a dataset; this one must come out of all three loops, on every
    rank.
    """
    model, _ = _model()
    x, y = _data(64)
    x["ids"][40 if comm.rank == comm.size - 1 else 0, 1] = -7 if comm.rank == comm.size - 1 else 1
    for call in (
        lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0, pipeline_depth=0),
        lambda: model.evaluate(x, y, batch_size=8, verbose=0),
        lambda: model.predict(x, batch_size=8, verbose=0),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="id -7 is invalid"):
            call()


def test_weights_that_are_not_trained_are_equal_too(comm: Comm) -> None:
    """FC 12: a frozen layer, and a model that is only evaluated."""
    keras.utils.set_random_seed(comm.rank)
    inputs = {"ids": keras.Input((1,), dtype="int64", name="ids"), "numbers": keras.Input((_X,), name="numbers")}
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig("f", table=TableConfig("frozen", dim=4))], name=unique_name("frozen")
    )
    frozen = keras.layers.Dense(3, trainable=False)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(layer(inputs["ids"])), frozen(inputs["numbers"])])
    model = hvd_ctr.HybridModel(inputs, keras.layers.Dense(1)(x))
    same = {"ids": np.arange(6)[:, None], "numbers": np.ones((6, _X), np.float32)}
    scores = comm.allgather_object(model.predict(same, verbose=0).tolist())
    assert all(other == scores[0] for other in scores)
    kernels = comm.allgather_object(np.asarray(frozen.kernel).tolist())
    assert all(other == kernels[0] for other in kernels)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_penalties_and_reported_losses_do_not_depend_on_ranks(comm: Comm, reduction: str) -> None:
    """Against one process of plain Keras: weights and the reported loss, with an L2 penalty and sample weights."""
    x, y = _data(2 * _GB, seed=3)
    weights = np.random.default_rng(1).random(len(y)).astype(np.float32)

    def build(kind):
        numbers = keras.Input((_X,), name="numbers")
        top = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(1), kernel_regularizer=keras.regularizers.L2(0.1)
        )
        model = kind(numbers, top(numbers))
        model.compile(
            keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
        )
        return model

    ours, plain = build(hvd_ctr.HybridModel), build(keras.Model)
    part = np.concatenate([share(comm, np.arange(b, b + _GB)) for b in (0, _GB)])
    batch = len(part) // 2
    data = tf.data.Dataset.from_tensor_slices((x["numbers"][part], y[part], weights[part])).batch(batch)
    history = ours.fit(data, epochs=3, verbose=0)
    expected = plain.fit(x["numbers"], y, sample_weight=weights, batch_size=_GB, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours.weights[0], plain.weights[0], atol=1e-6)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("on_rank_0", [8, 14, 16])
def test_losses_of_single_outputs_do_not_depend_on_the_split(comm: Comm, on_rank_0: int) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.random((16, _X), np.float32), {"a": np.arange(16.0)[:, None] / 16, "b": np.ones((16, 1))}
    rows = np.arange(16) if comm.size == 1 else np.arange(on_rank_0) if comm.rank == 0 else np.arange(on_rank_0, 16)
    mine = rows if comm.rank < 2 else rows[:0]

    def build(kind):
        numbers = keras.Input((_X,), name="numbers")
        outputs = {n: keras.layers.Dense(1, name=n, kernel_initializer="ones")(numbers) for n in ("a", "b")}
        model = kind({"numbers": numbers}, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"})
        return model

    values = build(hvd_ctr.HybridModel).evaluate(
        {"numbers": x[mine]}, {n: v[mine] for n, v in y.items()}, batch_size=4, return_dict=True, verbose=0
    )
    expected = build(keras.Model).evaluate({"numbers": x}, y, return_dict=True, verbose=0)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-5), (name, values, expected)


def test_float_ids_are_refused(comm: Comm) -> None:
    """FC 41: Keras would cast int64 ids to a float input, and 2^24 and 2^24 + 1 would be one row."""
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig("f", table=TableConfig("float_ids", dim=4))], name=unique_name("float")
    )
    with pytest.raises(ValueError, match="integer ids, received float32"):
        layer(keras.Input((1,)))
    with pytest.raises(ValueError, match="integer ids, received float32"):
        layer(np.zeros((2, 1), np.float32))


def test_keras_files_hold_the_rows_or_say_no(comm: Comm, tmp_path) -> None:
    """FC 93: never a model that comes back without its rows and without a word."""
    model, layer = _model("adam")
    model.fit(_global_batches(comm, 2 * _GB), verbose=0)
    path = str(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="EarlyStopping would restore the dense weights and not the embedding rows"):
        model.fit(_global_batches(comm, _GB), callbacks=[keras.callbacks.EarlyStopping(restore_best_weights=True)])
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="spread over"):
            model.save_weights(path)
        return
    model.save_weights(path)
    loaded, loaded_layer = _model("adam")
    loaded.load_weights(path)
    _assert_equal(_state(model, layer, comm), _state(loaded, loaded_layer, comm), 0)
    assert loaded_layer.sharded.steps().popitem()[1] == 2
    with pytest.raises(ValueError, match="holds rows already"):
        loaded.load_weights(path)


def test_skipped_ids_are_told_in_fit_and_counted_in_evaluation(comm: Comm, caplog: pytest.LogCaptureFixture) -> None:
    """FC 36."""
    table = TableConfig("told", dim=4, rows=10, invalid_ids="skip")
    layer = hvd_ctr.MixCacheEmbedding([FeatureConfig("f", table=table)], name=unique_name("told"))
    inputs = {"ids": keras.Input((1,), dtype="int64", name="ids"), "numbers": keras.Input((_X,), name="numbers")}
    model = hvd_ctr.HybridModel(inputs, logits_model(layer(inputs["ids"]), inputs["numbers"]))
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    x, y = {"ids": np.array([[1], [99], [3], [-1]]), "numbers": np.zeros((4, _X), np.float32)}, np.zeros((4, 1))
    with caplog.at_level("WARNING", logger="hvd_ctr"):
        model.fit(x, y, verbose=0)
    assert comm.rank or any("told: " in record.getMessage() for record in caplog.records)
    model.evaluate(x, y, verbose=0)
    assert layer.cache_stats()["tables"]["told"]["invalid_ids"] == 2 * 2 * comm.size


def _two_towers(inputs: list[keras.KerasTensor], names: tuple[str, ...]) -> keras.Model:
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig(f"f{i}", table=TableConfig(f"t{i}", dim=4)) for i in range(_F)],
        CacheConfig(slots=512),
        seed=5,
        name=unique_name("lists"),
    )
    ids, numbers = inputs
    vectors = layer(ids)
    heads = [logits_model(vectors, numbers, seed=1 + 2 * i) for i in range(max(1, len(names)))]
    return hvd_ctr.HybridModel(inputs, dict(zip(names, heads, strict=True)) if names else heads[0])


@pytest.mark.parametrize("depth", [0, 2])
def test_lists_of_inputs(comm: Comm, depth: int) -> None:
    """Keras' list form, with ranks of unlike length: fit, evaluate and predict as with a dict."""
    x, y = _data(_GB, seed=comm.rank)
    count = _GB if comm.rank == 0 else 5
    arrays = [x["ids"][:count], x["numbers"][:count]]
    model = _two_towers([keras.Input((_F,), dtype="int64"), keras.Input((_X,))], ())
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(arrays, y[:count], batch_size=4, epochs=2, verbose=0, pipeline_depth=depth).history
    assert np.isfinite(history["loss"]).all()
    scores = model.predict(arrays, batch_size=4, verbose=0)
    assert scores.shape == (count, 1) and np.isfinite(model.evaluate(arrays, y[:count], verbose=0))
    np.testing.assert_allclose(model.predict(iter([(arrays,)]), verbose=0), scores, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weights_of_several_outputs(comm: Comm, reduction: str) -> None:
    """Equal weights on both outputs, unlike ones over the ranks: the loss history of one process."""
    x, y = _data(_GB)
    weights = np.linspace(0.1, 2.0, _GB, dtype=np.float32)
    mine = share(comm, np.arange(_GB))
    losses = []
    for rows in (mine, None):
        if rows is None:  # every rank alike: the loss of the whole batch on each
            rows = np.arange(_GB)
        model = _two_towers([keras.Input((_F,), dtype="int64"), keras.Input((_X,))], ("a", "b"))
        loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
        model.compile(keras.optimizers.SGD(0.1), {"a": loss, "b": loss})
        arrays = [x["ids"][rows], x["numbers"][rows]]
        labels = {"a": y[rows], "b": 1 - y[rows]}
        given = {"a": weights[rows], "b": weights[rows]}
        model.fit(arrays, labels, sample_weight=given, batch_size=_GB, epochs=3, shuffle=False, verbose=0)
        losses.append([np.asarray(w) for w in model.weights])
    for left, right in zip(*losses, strict=True):
        np.testing.assert_allclose(left, right, atol=2e-6)


class _Pages(keras.utils.PyDataset):
    """This rank's own data in batches of 4, inputs only or with labels."""

    def __init__(self, x: dict[str, np.ndarray], y: np.ndarray | None) -> None:
        super().__init__()
        self._x, self._y = x, y
        self.ended = 0

    @property
    def num_batches(self) -> int:
        return -(-len(self._x["ids"]) // 4)

    def __getitem__(self, index: int):
        part = slice(4 * index, 4 * index + 4)
        x = {name: value[part] for name, value in self._x.items()}
        return x if self._y is None else (x, self._y[part])

    def on_epoch_end(self) -> None:
        self.ended += 1


def test_py_datasets(comm: Comm) -> None:
    rows = 10 if comm.rank == 0 else 6
    x, y = _data(rows, seed=comm.rank)
    model, _ = _model()
    pages = _Pages(x, y)
    model.fit(pages, epochs=3, verbose=0)
    assert pages.ended == 3
    np.testing.assert_allclose(model.predict(_Pages(x, None), verbose=0), model.predict(x, verbose=0), atol=1e-6)
