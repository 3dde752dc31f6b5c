"""Errors are the same on all ranks and leave nobody waiting (FC 33, 34, 36, 58, 64, 74)."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import FeatureConfig
from hvd_ctr.training.agreed_data import agreed_batches
from tests.support.hybrid import embedding, step, zero_table


def _total(outputs):
    return tf.add_n([tf.reduce_sum(vectors) for vectors in tf.nest.flatten(outputs)])


def _same_on_all_ranks(comm: Comm, text: str) -> None:
    assert len(set(comm.allgather_object(text))) == 1


def test_a_cache_smaller_than_one_batch_fails_on_all_ranks_with_one_message(comm: Comm) -> None:
    layer = embedding([FeatureConfig("item", table=zero_table("too_many"))], slots=10)
    # Only rank 0 has ids, so an owner may serve nobody else and still has to tell everybody.
    ids = np.arange(100 if comm.rank == 0 else 0)
    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        step(layer, {"item": ids}, _total)
    text = error.value.message
    for word in ("too_many", "10", "cache.slots"):
        assert word in text, text
    _same_on_all_ranks(comm, text[text.index("mix_cache") :].split("\n")[0])


@pytest.mark.parametrize("bad, limit", [(-1, None), (-(2**63), None), (100, 100), (10**6, 100)])
def test_an_invalid_id_on_one_rank_stops_all(comm: Comm, bad: int, limit: int | None) -> None:
    layer = embedding([FeatureConfig("item", table=zero_table(f"strict_{bad}", rows=limit))])
    ids = np.array([1, bad, bad] if comm.rank == comm.size - 1 else [1], np.int64)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(layer, {"item": ids}, _total)
    for word in (f"rank {comm.size - 1}", "'item'", str(bad), "99" if limit else "2^63-1"):
        assert word in error.value.message, error.value.message


def test_skipped_ids_are_counted_alike_on_all_ranks(comm: Comm, caplog: pytest.LogCaptureFixture) -> None:
    a, b = zero_table("tolerant_a", rows=100, invalid_ids="skip"), zero_table("tolerant_b", invalid_ids="skip")
    layer = embedding([FeatureConfig("a", table=a), FeatureConfig("b", table=b)])
    for _ in range(5):
        outputs = step(layer, {"a": np.array([99, 100, 10**6]), "b": np.array([3, -1, 5])}, _total)
        np.testing.assert_array_equal(outputs["a"][1:], 0)
    with caplog.at_level(logging.WARNING, logger="hvd_ctr"):
        counts = layer.sharded.warn_of_invalid_ids()
    assert counts == {"tolerant_a": 2 * 5 * comm.size, "tolerant_b": 5 * comm.size}
    if comm.rank == 0:
        assert any("tolerant_a" in record.getMessage() for record in caplog.records)
    np.testing.assert_array_equal(layer.get_rows("tolerant_a", [99, 0])[:, 0], [-5 * comm.size, 0])


def test_hash_ids_take_any_value(comm: Comm) -> None:
    layer = embedding([FeatureConfig("f", table=zero_table("hashed", rows=10, hash_ids=True))])
    step(layer, {"f": np.array([-1, 2**63 - 1, -(2**63), 12345, 12345], np.int64)}, _total)
    total = -sum(layer.get_rows("hashed", [12345])[0]) / 2
    assert total >= 2 * comm.size
    assert layer.cache_stats()["total"]["invalid_ids"] == 0


def test_an_error_in_one_ranks_reader_reaches_all(comm: Comm) -> None:
    def batches():
        yield from range(3)
        if comm.rank == comm.size - 1:
            raise OSError("disk gone")
        yield from range(20)

    seen = []
    with pytest.raises(RuntimeError, match=f"rank {comm.size - 1}: OSError: disk gone"):
        for batch in agreed_batches(comm, batches(), lambda: -1, block=2):
            seen.append(batch)
    _same_on_all_ranks(comm, str(len(seen)))


@pytest.mark.parametrize("counts", [(10, 7), (10, 0), (0, 0), (8, 16)])
def test_ranks_with_fewer_batches_join_with_empty_ones(comm: Comm, counts: tuple[int, int]) -> None:
    mine = counts[comm.rank % 2]
    most = max(counts[: comm.size])
    seen = list(agreed_batches(comm, iter(range(mine)), lambda: -1, block=4))
    assert seen == list(range(mine)) + [-1] * (most - mine)


def test_calling_one_embedding_twice_in_a_step_is_refused(comm: Comm) -> None:
    layer = embedding([FeatureConfig("f", table=zero_table("twice"))])
    with pytest.raises(ValueError, match="called twice in one step"):
        step_twice(layer)


def step_twice(layer) -> None:
    from hvd_ctr.embedding.step_context import StepContext
    from hvd_ctr.training.train_step import batch_facts

    inputs = {"f": np.array([1], np.int64)}
    with tf.GradientTape() as tape, StepContext(tape, batch_facts(inputs, None)):
        layer(inputs)
        layer(inputs)
