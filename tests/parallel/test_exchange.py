"""The three modes of exchange move the same bits: alone, and through training, pipeline, evaluation and errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.dist import row_exchange
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from tests.support.hybrid import exported, logits_model, step, unique_name, zero_table

_MODES = ("alltoall", "allgather", "allreduce")
_GB, _X, _STEPS = 32, 2, 6
# Bit patterns that arithmetic on floats would change: -0.0, NaNs with payloads, the smallest subnormal, infinity.
_BITS = np.array([0x80000000, 0x7FC12345, 0xFFA00001, 0x00000001, 0x7F800000, 0x3F800000], np.uint32)


def _plan(comm: Comm, seed: int) -> np.ndarray:
    """(W, W) rows from rank to rank, the same on all ranks; many are 0, and at seed 0 all, at seed 1 all but one's."""
    generator = np.random.default_rng(seed)
    plan = generator.integers(0, 9, (comm.size, comm.size)) * (generator.random((comm.size, comm.size)) < 0.7)
    if seed < 2:
        plan[seed:] = 0
    return plan.astype(np.int32)


def _part(sender: int, receiver: int, rows: int, dtype: type) -> np.ndarray:
    generator = np.random.default_rng(100 * sender + receiver)
    if dtype is np.int64:
        return generator.integers(-(2**63), 2**63 - 1, rows)
    return generator.choice(_BITS, (rows, 3)).view(np.float32)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_every_bit_arrives_in_the_order_of_the_ranks(comm: Comm, mode: str, dtype: type) -> None:
    exchange = row_exchange(mode, comm)

    def run(tensor, splits):
        received = exchange.exchange(tensor, splits, "bits", "other")
        assert received[0].shape[1:] == tensor.shape[1:]
        return received

    graph = tf.function(run, reduce_retracing=True)
    for seed in range(4):
        plan = _plan(comm, seed)
        sent = np.concatenate([_part(comm.rank, peer, plan[comm.rank, peer], dtype) for peer in range(comm.size)])
        expected = np.concatenate([_part(peer, comm.rank, plan[peer, comm.rank], dtype) for peer in range(comm.size)])
        for call in (run, graph):
            received, splits = call(tf.constant(sent), tf.constant(plan[comm.rank]))
            np.testing.assert_array_equal(splits, plan[:, comm.rank])
            assert received.numpy().tobytes() == expected.tobytes(), (seed, call)


@pytest.mark.parametrize("mode", _MODES[1:])
def test_splits_that_leave_rows_behind_are_refused(comm: Comm, mode: str) -> None:
    splits = np.eye(1, comm.size, comm.rank, np.int32)[0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        row_exchange(mode, comm).exchange(tf.ones([2, 3]), tf.constant(splits), "left_behind", "other")


def test_an_unknown_mode_is_refused(comm: Comm) -> None:
    features = [FeatureConfig("f", table=TableConfig("f"))]
    with pytest.raises(ValueError, match="exchange: received 'ring'; allowed: alltoall, allgather, allreduce"):
        hvd_ctr.ShardedEmbedding(features, CacheConfig(slots=8), comm, exchange="ring")
    with pytest.raises(ValueError, match="exchange must be one of .* received 'ring'"):
        hvd_ctr.MixCacheEmbedding(features, exchange="ring")
    layer = hvd_ctr.MixCacheEmbedding(features, name=unique_name("copied"), exchange="allreduce")
    assert hvd_ctr.MixCacheEmbedding.from_config(layer.get_config()).exchange == "allreduce"


def _model(mode: str) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    """Three tables of two dims, so two groups; the cache holds little more than a batch."""
    tables = [
        TableConfig(f"t{i}", dim=dim, optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.05))
        for i, (dim, kind) in enumerate([(4, "adam"), (4, "adagrad"), (3, "ftrl")])
    ]
    features = [FeatureConfig(f"f{i}", table=table) for i, table in enumerate(tables)]
    layer = hvd_ctr.MixCacheEmbedding(
        features, CacheConfig(slots=3 * _GB), seed=2, name=unique_name("exchanged"), exchange=mode
    )
    inputs = {f.name: keras.Input((1,), dtype="int64", name=f.name) for f in features}
    numbers = keras.Input((_X,), name="numbers")
    vectors = keras.layers.Concatenate()(list(layer(inputs).values()))
    model = hvd_ctr.HybridModel({**inputs, "numbers": numbers}, logits_model(vectors, numbers))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


def _batches(comm: Comm) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Skewed ids, many of them on several ranks and several times in a batch; rank 0 has no rows in step 2, and only
    rank 0 has any in step 3."""
    batches = []
    for number in range(_STEPS):
        generator = np.random.default_rng([number, comm.rank])
        rows = 0 if (number, comm.rank) == (2, 0) or (number == 3 and comm.rank > 0) else _GB // comm.size
        x = {f"f{i}": generator.zipf(1.3, (rows, 1)) % 500 for i in range(3)}
        x["numbers"] = generator.random((rows, _X), np.float32)
        batches.append((x, (generator.random((rows, 1)) < 0.4).astype(np.float32)))
    return batches


def _staged(comm: Comm, layer: hvd_ctr.MixCacheEmbedding, depth: int):
    batches = _batches(comm)
    if depth == 0:
        return ((batch, ()) for batch in batches)

    def inputs_of(batch):
        rows = len(batch[1])
        ids = {name: value for name, value in batch[0].items() if name != "numbers"}
        return Inputs([ids], BatchFacts(np.int64(rows), np.float64(rows)))

    def empty():
        return tf.nest.map_structure(lambda array: array[:0], batches[0])

    return Pipeline(comm, [layer], iter(batches), inputs_of, empty, depth)


def _train(comm: Comm, mode: str, depth: int) -> list[bytes]:
    """Bits of dense weights, rows, state and predictions after training."""
    model, layer = _model(mode)
    run = None
    for (x, y), staged in _staged(comm, layer, depth):
        inputs = tf.nest.map_structure(tf.convert_to_tensor, (x, y, tuple(staged)))
        if run is None:
            signature = list(tensor_specs(inputs))
            run = tf.function(
                lambda x, y, s: model.hybrid_step(x, y, staged=s).loss, input_signature=signature, autograph=False
            )
        run(*inputs)
    total = layer.cache_stats()["total"]
    assert total["pinned_slots"] == 0 and total["steps"] == _STEPS
    bits = [np.asarray(weight).tobytes() for weight in [*model.weights, *model.optimizer.variables]]
    bits.append(model.predict(_batches(comm)[comm.rank % 2][0], verbose=0).tobytes())
    for table in ("t0", "t1", "t2"):
        rows = exported(layer.sharded, comm, table)
        bits += [row.tobytes() + state.tobytes() for _, (row, state) in sorted(rows.items())]
    return bits


def test_the_mode_does_not_change_one_bit(comm: Comm) -> None:
    expected = _train(comm, "alltoall", 0)
    assert len(expected) > 100
    for mode, depth in (("allgather", 2), ("allreduce", 0), ("allreduce", 2)):
        assert _train(comm, mode, depth) == expected, (mode, depth)


@pytest.mark.parametrize("mode", _MODES)
def test_an_owners_error_is_the_same_on_all_ranks(comm: Comm, mode: str) -> None:
    """The failing owner answers with another number of rows than asked for; only rank 0 asks at all."""
    layer = hvd_ctr.MixCacheEmbedding(
        [FeatureConfig("item", table=zero_table(f"too_many_{mode}"))],
        CacheConfig(slots=10, policy="lru"),
        name=unique_name("failing"),
        exchange=mode,
    )
    layer.build(None)
    ids = np.arange(100 if comm.rank == 0 else 0)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=f"too_many_{mode}.*10 slots.*cache.slots") as error:
        step(layer, {"item": ids}, lambda outputs: tf.reduce_sum(outputs["item"]))
    text = error.value.message
    assert len(set(comm.allgather_object(text[text.index("mix_cache") :].split("\n")[0]))) == 1
    # The exchange still works.
    assert layer.get_rows(f"too_many_{mode}", [comm.rank, 7]).tolist() == [[0, 0], [0, 0]]
