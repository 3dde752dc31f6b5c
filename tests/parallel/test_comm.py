"""Collectives of hvd_ctr.comm at any number of ranks: values, zero-sized parts, names, threads, gradients."""

from __future__ import annotations

import hashlib
import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm, HorovodComm


def _exchange_plan(comm: Comm, seed: int, largest: int) -> np.ndarray:
    """`(W, W)` numbers of rows from rank i to rank j, the same on all ranks; about a third are zero."""
    generator = np.random.default_rng(seed)
    plan = generator.integers(0, largest + 1, (comm.size, comm.size))
    plan[generator.random(plan.shape) < 0.33] = 0
    return plan.astype(np.int32)


def _rows(sender: int, receiver: int, count: int, width: int, dtype: type) -> np.ndarray:
    """The rows that `sender` sends to `receiver`: every value tells where it came from."""
    base = np.arange(count * width).reshape(count, width)
    return (base + 1_000_000 * sender + 10_000_000 * receiver).astype(dtype)


def _check_exchange(comm: Comm, plan: np.ndarray, width: int, dtype: type, exchange) -> None:
    sent = [_rows(comm.rank, peer, plan[comm.rank, peer], width, dtype) for peer in range(comm.size)]
    expected = [_rows(peer, comm.rank, plan[peer, comm.rank], width, dtype) for peer in range(comm.size)]
    received, splits = exchange(tf.constant(np.concatenate(sent)), tf.constant(plan[comm.rank]))
    np.testing.assert_array_equal(splits.numpy(), plan[:, comm.rank])
    assert received.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(received.numpy(), np.concatenate(expected))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_alltoall_moves_rows_to_their_rank(comm: Comm, graph: bool, dtype: type) -> None:
    def exchange(rows, splits):
        return comm.alltoall(rows, splits, name="moved")

    run = tf.function(exchange, reduce_retracing=True) if graph else exchange
    for seed in range(10):
        _check_exchange(comm, _exchange_plan(comm, seed, 20), 3, dtype, run)


def test_alltoall_keeps_large_ids_and_vectors(comm: Comm) -> None:
    ids = np.array([0, 2**31, 2**53 + 1, 2**63 - 1], np.int64)
    splits = [4 if peer == (comm.rank + 1) % comm.size else 0 for peer in range(comm.size)]
    received, received_splits = comm.alltoall(tf.constant(ids), tf.constant(splits), name="large_ids")
    np.testing.assert_array_equal(received.numpy(), ids)
    assert received_splits.numpy()[(comm.rank - 1) % comm.size] == 4


@pytest.mark.parametrize("case", ["all_to_rank_0", "nothing_for_the_last", "half_idle", "empty"])
def test_alltoall_with_zero_sized_parts(comm: Comm, case: str) -> None:
    plan = np.full((comm.size, comm.size), 5, np.int32)
    if case == "all_to_rank_0":
        plan[:, 1:] = 0
    elif case == "nothing_for_the_last":
        plan[:, -1] = 0
    elif case == "half_idle":
        idle = max(1, comm.size // 2)
        plan[idle:, :] = 0
        plan[:, idle:] = 0
    else:
        plan[:] = 0
    for dtype in (np.int64, np.float32):
        _check_exchange(comm, plan, 4, dtype, lambda rows, splits: comm.alltoall(rows, splits, name="zero_parts"))


def test_static_trailing_shape_survives(comm: Comm) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int32)])
    def exchange(rows, splits):
        received, received_splits = comm.alltoall(rows, splits, name="shaped")
        assert received.shape.as_list() == [None, 8]
        assert received_splits.shape.as_list() == [comm.size]
        return received

    assert exchange(tf.ones([comm.size, 8]), tf.ones([comm.size], tf.int32)).shape == (comm.size, 8)


@pytest.mark.parametrize("graph", [False, True])
def test_gradient_is_the_reverse_exchange(comm: Comm, graph: bool) -> None:
    """The upstream factor differs per rank: the gradient at the sender is the factor of the rank that received the
    row.
    """
    splits = tf.constant([(comm.rank + peer) % 3 for peer in range(comm.size)], tf.int32)
    rows = tf.ones([int(tf.reduce_sum(splits)), 2])

    def gradient(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            received, _ = comm.alltoall(rows, splits, name="differentiated")
            loss = 10.0**comm.rank * tf.reduce_sum(received)
        return tape.gradient(loss, rows)

    result = (tf.function(gradient) if graph else gradient)(rows)
    expected = np.concatenate([np.full((int(splits[peer]), 2), 10.0**peer, np.float32) for peer in range(comm.size)])
    np.testing.assert_array_equal(result.numpy(), expected)


def test_allreduce_sums_mixed_dtypes_and_empty_tensors(comm: Comm) -> None:
    total = sum(range(1, comm.size + 1))
    mine = comm.rank + 1
    tensors = [
        tf.fill([3, 2], float(mine)),
        tf.constant(mine * 2**40, tf.int64),
        tf.zeros([0, 4]),
        tf.fill([2], tf.constant(mine, tf.float64) * 2.0**40),
    ]
    for run in (
        lambda: comm.allreduce_sum(tensors, "mixed"),
        tf.function(lambda: comm.allreduce_sum(tensors, "mixed")),
    ):
        floats, big, empty, doubles = run()
        np.testing.assert_array_equal(floats.numpy(), np.full((3, 2), total, np.float32))
        assert big.numpy() == total * 2**40
        assert empty.shape == (0, 4)
        np.testing.assert_array_equal(doubles.numpy(), np.full(2, total * 2.0**40))
    assert comm.allreduce_sum([], "nothing") == []


def test_constant_inputs_still_wait_for_the_others(comm: Comm) -> None:
    """A collective on a constant must not be folded into one: each call waits for the slowest rank."""

    @tf.function
    def signal():
        reduced = comm.allreduce_sum([tf.constant([1, 2])], "constant_sum")[0]
        moved, _ = comm.alltoall(tf.ones([comm.size, 1]), tf.ones([comm.size], tf.int32), name="constant_rows")
        return reduced, moved

    signal()
    for _ in range(2):
        if comm.rank == comm.size - 1:
            time.sleep(0.4)
        begin = time.monotonic()
        reduced, _ = signal()
        np.testing.assert_array_equal(reduced.numpy(), [comm.size, 2 * comm.size])
        if comm.rank != comm.size - 1:
            assert time.monotonic() - begin > 0.2
        comm.barrier()


def test_equal_inputs_are_not_merged(comm: Comm) -> None:
    @tf.function
    def twice(rows, splits):
        first, _ = comm.alltoall(rows, splits, name="first")
        second, _ = comm.alltoall(rows, splits, name="second")
        return first, second

    rows = tf.fill([comm.size, 2], float(comm.rank))
    first, second = twice(rows, tf.ones([comm.size], tf.int32))
    expected = np.repeat(np.arange(comm.size, dtype=np.float32)[:, None], 2, 1)
    np.testing.assert_array_equal(first.numpy(), expected)
    np.testing.assert_array_equal(second.numpy(), expected)


def test_interleaved_exchanges_and_reductions(comm: Comm) -> None:
    """300 pairs of tiny collectives of random size finish with the right values."""

    @tf.function(reduce_retracing=True)
    def both(rows, splits, values):
        received, _ = comm.alltoall(rows, splits, name="interleaved_rows")
        return received, comm.allreduce_sum([values], "interleaved_sum")[0]

    for seed in range(300):
        plan = _exchange_plan(comm, seed, 6)
        sent = np.concatenate(
            [_rows(comm.rank, peer, plan[comm.rank, peer], 2, np.float32) for peer in range(comm.size)]
        )
        length = int(np.random.default_rng(seed).integers(1, 50))
        received, total = both(tf.constant(sent), tf.constant(plan[comm.rank]), tf.fill([length], comm.rank + seed))
        expected = [_rows(peer, comm.rank, plan[peer, comm.rank], 2, np.float32) for peer in range(comm.size)]
        np.testing.assert_array_equal(received.numpy(), np.concatenate(expected))
        np.testing.assert_array_equal(total.numpy(), np.full(length, comm.size * seed + sum(range(comm.size))))


def test_two_threads_in_different_order(comm: Comm) -> None:
    """Eager calls from two threads find their partners by name, whatever rank comes first."""
    errors: list[BaseException] = []

    def work(name: str, first_row: int) -> None:
        try:
            for step in range(40):
                if (comm.rank + first_row + step) % 2:
                    time.sleep(0.001)
                rows = tf.fill([comm.size, 2], first_row + 10 * comm.rank + 1000 * step)
                received, _ = comm.alltoall(rows, tf.ones([comm.size], tf.int32), name=name)
                expected = first_row + 10 * np.arange(comm.size) + 1000 * step
                np.testing.assert_array_equal(received.numpy()[:, 1], expected)
        except BaseException as error:  # reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"thread_{index}", index + 1)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


def test_objects(comm: Comm) -> None:
    mine = {"rank": comm.rank, "text": "é" * (100 * comm.rank), "list": [1, 2.5, None, True], "big": 2**62 + comm.rank}
    gathered = comm.allgather_object(mine)
    assert [item["rank"] for item in gathered] == list(range(comm.size))
    assert [len(item["text"]) for item in gathered] == [100 * rank for rank in range(comm.size)]
    assert gathered[comm.size - 1]["big"] == 2**62 + comm.size - 1
    last = comm.size - 1
    assert comm.broadcast_object(f"from {comm.rank}", root=last) == f"from {last}"
    assert comm.broadcast_object("only here" if comm.rank == 0 else None) == "only here"
    with pytest.raises(ValueError, match="root must be in"):
        comm.broadcast_object(1, root=comm.size)


def test_objects_that_are_no_json(comm: Comm) -> None:
    with pytest.raises(TypeError):
        comm.allgather_object(b"bytes")


def test_broadcast_variables_of_all_dtypes(comm: Comm) -> None:
    dtypes = [tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.uint32, tf.uint8, tf.bool]
    variables = [tf.Variable(tf.cast(tf.fill([2, 3], 1 if comm.rank == 0 else 0), dtype)) for dtype in dtypes]
    variables.append(tf.Variable(tf.constant(1.5 + comm.rank)))
    variables.append(tf.Variable(tf.zeros([0, 4])))
    comm.broadcast_variables(variables)
    for dtype, variable in zip(dtypes, variables, strict=False):
        np.testing.assert_array_equal(tf.cast(variable, tf.float32).numpy(), np.ones((2, 3)), err_msg=dtype.name)
    assert variables[-2].numpy() == 1.5


def test_barrier_waits_for_the_slowest(comm: Comm) -> None:
    comm.barrier()
    begin = time.monotonic()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
    comm.barrier()
    assert time.monotonic() - begin > 0.25


def test_ranks_and_sizes(comm: Comm) -> None:
    everyone = comm.allgather_object([comm.rank, comm.size, comm.local_rank, comm.local_size, comm.hosts])
    assert [item[0] for item in everyone] == list(range(comm.size))
    assert {tuple(item[1:2] + item[3:]) for item in everyone} == {(comm.size, comm.local_size, comm.hosts)}
    assert comm.local_size * comm.hosts >= comm.size


def test_transport_is_the_one_asked_for(comm: Comm) -> None:
    """launch/test.sh runs this file over both."""
    if isinstance(comm, HorovodComm):
        horovod = os.environ.get("HVD_CTR_TRANSPORT") == "horovod"
        assert comm.transport.name.startswith("Horovod over" if horovod else "shared memory")


def test_dtypes_that_shared_memory_does_not_sum_are_summed(comm: Comm) -> None:
    (total,) = comm.allreduce_sum([tf.fill([3], tf.constant(comm.rank + 1, tf.float16))], "halves")
    np.testing.assert_array_equal(total, np.full(3, sum(range(1, comm.size + 1)), np.float16))


def test_large_sums_are_the_same_bits_on_all_ranks(comm: Comm) -> None:
    """More than 1 MB: with more than two ranks each sums a part."""
    generator = np.random.default_rng(comm.rank)
    mine = [generator.normal(size=shape).astype(np.float32) for shape in ((300_000,), (1, 7), (1000, 33))]
    sums = comm.allreduce_sum([tf.constant(value) for value in mine], "large_sums")
    everyone = [np.random.default_rng(rank) for rank in range(comm.size)]
    for total, value in zip(sums, mine, strict=True):
        exact = np.sum([g.normal(size=value.shape).astype(np.float32) for g in everyone], axis=0, dtype=np.float64)
        np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-5)
    digests = comm.allgather_object([hashlib.sha256(total.numpy().tobytes()).hexdigest() for total in sums])
    assert all(digest == digests[0] for digest in digests)
