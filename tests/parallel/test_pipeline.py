"""The pipeline trains every batch once, leaves no trace of others, and fails on all ranks alike (FC 50, 64, 74, 77).

That its depth changes no bit: test_exactness.py.
"""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.training.pipeline import Inputs, Pipeline, PipelineError, tensor_specs
from tests.support.hybrid import exported, logits_model, needed_slots, share, unique_name

_GB, _X = 24, 2


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hvd_ctr")]


def _model(
    slots: int, policy: str = "lru", invalid_ids: str = "error", window: int = 8
) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    optimizer = SparseOptimizerConfig(kind="adam", learning_rate=0.05)
    features = [
        FeatureConfig(
            f"f{i}", table=TableConfig(f"t{i}", dim=4, optimizer=optimizer, rows=1000, invalid_ids=invalid_ids)
        )
        for i in range(2)
    ]
    layer = hvd_ctr.MixCacheEmbedding(
        features, CacheConfig(slots=slots, policy=policy, window=window), seed=1, name=unique_name("piped")
    )
    inputs = {"ids": keras.Input((2,), dtype="int64", name="ids"), "numbers": keras.Input((_X,), name="numbers")}
    model = hvd_ctr.HybridModel(inputs, logits_model(layer(inputs["ids"]), inputs["numbers"]))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


def _sliding(steps: int) -> np.ndarray:
    """Ids (steps, GB, 2): each batch brings some new rows and leaves as many."""
    return np.stack([np.stack([np.arange(_GB) + 12 * step] * 2, axis=1) % 300 for step in range(steps)])


def _batch(comm: Comm, ids: np.ndarray, step: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    generator = np.random.default_rng(step)
    numbers = generator.random((len(ids), _X), np.float32)
    labels = (generator.random((len(ids), 1)) < 0.4).astype(np.float32)
    mine = share(comm, np.arange(len(ids)))
    return {"ids": ids[mine], "numbers": numbers[mine]}, labels[mine]


def _empty() -> tuple[dict[str, np.ndarray], np.ndarray]:
    return {"ids": np.zeros((0, 2), np.int64), "numbers": np.zeros((0, _X), np.float32)}, np.zeros((0, 1), np.float32)


def _inputs_of(batch) -> Inputs:
    rows = len(batch[1])
    return Inputs([batch[0]["ids"]], BatchFacts(np.int64(rows), np.float64(rows)))


def _pipeline(comm: Comm, layer, batches, depth: int) -> Pipeline:
    return Pipeline(comm, [layer], iter(batches), _inputs_of, _empty, depth)


def _train(
    comm: Comm, ids: np.ndarray, slots: int, depth: int, policy: str, stop_after: int | None = None
) -> list[bytes]:
    """Bits of all weights, rows and state after training the stream."""
    model, layer = _model(slots, policy)
    batches = [_batch(comm, ids[step], step) for step in range(len(ids))]
    run = None
    stream = ((batch, ()) for batch in batches) if depth == 0 else _pipeline(comm, layer, batches, depth)
    for done, ((x, y), staged) in enumerate(stream, start=1):
        if run is None:
            specs = tensor_specs(tf.nest.map_structure(tf.convert_to_tensor, (x, y, tuple(staged))))
            run = tf.function(
                lambda x, y, s: model.hybrid_step(x, y, staged=s).loss, input_signature=list(specs), autograph=False
            )
        run(x, y, tuple(staged))
        if done == stop_after:
            break
    if depth:
        stream.close()
    assert layer.cache_stats()["total"]["pinned_slots"] == 0
    rows = {table: exported(layer.sharded, comm, table) for table in ("t0", "t1")}
    bits = [np.asarray(w).tobytes() for w in [*model.weights, *model.optimizer.variables]]
    return bits + [
        row_id.to_bytes(8, "big") + r.tobytes() + s.tobytes()
        for t in rows.values()
        for row_id, (r, s) in sorted(t.items())
    ]


def test_lookahead_keeps_what_the_next_batches_need(comm: Comm) -> None:
    """Three working sets in turn, room for two: the longest unused row is always the one needed next, so lru has no
    hit at all; who knows the next batches keeps one set.
    """
    ids = np.stack([np.stack([np.arange(_GB) + _GB * (step % 3)] * 2, axis=1) for step in range(24)])
    needed = max(comm.allgather_object(needed_slots(_model(1)[1].sharded, ids)))
    hits = {}
    for policy, window in (("lru", 8), ("lookahead", 0), ("lookahead", 8)):
        _, layer = _model(2 * needed, policy, window=window)
        with _pipeline(comm, layer, [_batch(comm, ids[step], step) for step in range(24)], 1) as pipeline:
            for _, staged in pipeline:
                layer.sharded.groups[0].release(staged[0].prefetched)
        total = layer.cache_stats()["total"]
        hits[policy, window] = sum(comm.allgather_object(total["hits"]))
    assert hits["lookahead", 0] == hits["lru", 8]
    assert hits["lookahead", 8] >= hits["lru", 8] + 10 * _GB, hits


@pytest.mark.parametrize(("depth", "policy"), [(1, "lookahead"), (2, "lru"), (8, "lookahead")])
def test_leaving_early_leaves_no_trace_of_later_batches(comm: Comm, depth: int, policy: str) -> None:
    """max_steps, stop_training: prefetched and untrained batches give their slots back and create no row."""
    ids = _sliding(20)
    stopped = _train(comm, ids, 400, depth, policy, stop_after=7)
    assert not _threads()
    assert stopped == _train(comm, ids[:7], 400, 0, "lru")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("counts", [(10, 7), (10, 0), (0, 0), (1, 12)])
def test_ranks_with_different_numbers_of_batches(comm: Comm, depth: int, counts: tuple[int, int]) -> None:
    """FC 64, 77: everybody trains as many steps as the fullest rank has batches, each batch once."""
    _, layer = _model(400)
    ids = _sliding(12)
    mine = counts[comm.rank % 2]
    seen = []
    with _pipeline(comm, layer, [_batch(comm, ids[step], step) for step in range(mine)], depth) as pipeline:
        for (_, labels), staged in pipeline:
            seen.append(len(labels))
            layer.sharded.groups[0].release(staged[0].prefetched)
    most = max(counts[: comm.size])
    assert len(seen) == most
    assert seen[mine:] == [0] * (most - mine)
    assert not _threads()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_reader_ends_all_ranks_with_stage_and_cause(comm: Comm, depth: int) -> None:
    _, layer = _model(400)
    ids = _sliding(12)

    def batches():
        for step in range(12):
            if step == 5 and comm.rank == comm.size - 1:
                raise OSError("disk gone")
            yield _batch(comm, ids[step], step)

    seen = 0
    with pytest.raises(PipelineError, match=f"Data-Loader failed on rank {comm.size - 1}: OSError: disk gone"):
        for _, staged in _pipeline(comm, layer, batches(), depth):
            seen += 1
            layer.sharded.groups[0].release(staged[0].prefetched)
    assert seen == 5


def test_an_invalid_id_ends_all_ranks(comm: Comm) -> None:
    _, layer = _model(400)
    ids = np.zeros((3, _GB, 2), np.int64)
    ids[2, -1, 1] = 5000
    with pytest.raises(PipelineError, match=r"Host-Manager: .*feature 'f1' \(table 't1'\): id 5000 is invalid"):
        for _, staged in _pipeline(comm, layer, [_batch(comm, ids[step], step) for step in range(3)], 2):
            layer.sharded.groups[0].release(staged[0].prefetched)


def test_a_cache_too_small_ends_all_ranks(comm: Comm) -> None:
    model, layer = _model(3)
    ids = _sliding(3)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="cache.slots"):
        batches = [_batch(comm, ids[step], step) for step in range(3)]
        with _pipeline(comm, layer, batches, 2) as pipeline:
            for (x, y), staged in pipeline:
                model.hybrid_step(tf.nest.map_structure(tf.constant, x), tf.constant(y), staged=staged)


def _dataset(comm: Comm, ids: np.ndarray) -> tf.data.Dataset:
    batches = [_batch(comm, ids[step], step) for step in range(len(ids))]
    signature = (
        {"ids": tf.TensorSpec([None, 2], tf.int64), "numbers": tf.TensorSpec([None, _X])},
        tf.TensorSpec([None, 1]),
    )
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


@pytest.mark.parametrize(("depth", "known_length"), [(1, True), (2, False), (3, True)])
def test_fit_trains_each_batch_once(comm: Comm, depth: int, known_length: bool) -> None:
    """FC 77: epochs, validation in between, evaluation right after; the same bits as without a pipeline."""
    ids = _sliding(10)
    outcomes = []
    for pipeline_depth in (0, depth):
        model, layer = _model(60 * 2)
        data = _dataset(comm, ids)
        if known_length:
            data = data.apply(tf.data.experimental.assert_cardinality(len(ids)))
        model.fit(data, epochs=2, validation_data=data, verbose=0, pipeline_depth=pipeline_depth)
        assert layer.cache_stats()["total"]["steps"] == 20
        assert int(model.optimizer.iterations) == 20
        outcomes.append([np.asarray(w).tobytes() for w in model.weights] + [repr(model.evaluate(data, verbose=0))])
        assert not _threads()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_fit_of_a_mapping_of_features(comm: Comm, by_keyword: bool) -> None:
    """Features of one id and of several, passed by name: the same bits with and without a pipeline."""
    generator = np.random.default_rng(8)
    x = {"user": generator.integers(0, 40, 96), "history": generator.integers(-1, 30, (96, 3))}
    y = (generator.random((96, 1)) < 0.4).astype(np.float32)
    mine = share(comm, np.arange(96))
    data = tf.data.Dataset.from_tensor_slices(({k: v[mine] for k, v in x.items()}, y[mine])).batch(len(mine) // 4)
    outcomes = []
    for depth in (0, 2):
        user, item = TableConfig("user", dim=4), TableConfig("item", dim=4)
        features = [
            FeatureConfig("user", table=user),
            FeatureConfig("history", table=item, combiner="mean", length=3, padding_id=-1),
        ]
        layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=100), seed=1, name=unique_name("mapping"))
        inputs = {
            "user": keras.Input((), dtype="int64", name="user"),
            "history": keras.Input((3,), dtype="int64", name="history"),
        }
        vectors = layer(inputs=inputs) if by_keyword else layer(inputs)
        kernel = keras.initializers.GlorotUniform(3)
        logits = keras.layers.Dense(1, kernel_initializer=kernel)(keras.layers.Concatenate()(list(vectors.values())))
        model = hvd_ctr.HybridModel(inputs, logits)
        model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit(data, epochs=2, verbose=0, pipeline_depth=depth)
        rows = [layer.get_rows("user", np.arange(40)), layer.get_rows("item", np.arange(30))]
        outcomes.append([np.asarray(value).tobytes() for value in [*model.weights, *rows]])
    assert outcomes[0] == outcomes[1]


def test_fit_with_steps_per_epoch_and_early_stop(comm: Comm) -> None:
    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.optimizer.iterations >= 7

    ids = _sliding(10)
    outcomes = []
    for depth in (0, 2):
        model, layer = _model(200)
        model.fit(_dataset(comm, ids).repeat(), steps_per_epoch=4, epochs=2, verbose=0, pipeline_depth=depth)
        assert layer.cache_stats()["total"]["steps"] == 8
        model.fit(_dataset(comm, ids), epochs=3, callbacks=[StopAt()], verbose=0, pipeline_depth=depth)
        assert layer.cache_stats()["total"]["steps"] == 9
        assert layer.cache_stats()["total"]["pinned_slots"] == 0
        outcomes.append([np.asarray(w).tobytes() for w in model.weights])
    assert outcomes[0] == outcomes[1]


def test_a_subclassed_model_trains_without_a_pipeline(comm: Comm) -> None:
    _, layer = _model(200)

    class Subclassed(hvd_ctr.HybridModel):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = layer
            self.top = keras.layers.Dense(1)

        def call(self, inputs):
            return self.top(keras.ops.reshape(self.embedding(inputs["ids"]), (-1, 8)))

    keras.utils.set_random_seed(comm.rank)
    model = Subclassed()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    ids = _sliding(5)
    x, y = _batch(comm, ids[0], 0)
    with pytest.raises(ValueError, match="has no weights yet"):
        model.hybrid_step(x, y)
    before = layer.get_rows("t0", np.arange(10))
    model.fit(_dataset(comm, ids), verbose=0)
    assert layer.cache_stats()["total"]["steps"] == 5
    assert (layer.get_rows("t0", np.arange(10)) != before).all()
    kernels = comm.allgather_object(np.asarray(model.top.kernel).tolist())
    assert all(kernel == kernels[0] for kernel in kernels)
