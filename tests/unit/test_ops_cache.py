"""MixCache ops: a batch's round trip, eager and in a tf.function, on one and several simulated ranks; errors; state."""

import gc
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.ops import id_ops, mix_cache_ops

DIM = 4
SGD = SparseOptimizerConfig(kind="sgd", learning_rate=0.5)
MAX_ID = (1 << 63) - 1


def table(name="t", **fields):
    return TableConfig(name, **{"dim": DIM, "optimizer": SGD, **fields})


def make(tables, *, slots=64, rank=0, world_size=1, **fields):
    return mix_cache_ops.create(
        mix_cache_ops.MixCacheSpec(
            name="cache",
            dim=DIM,
            slots=slots,
            rank=rank,
            world_size=world_size,
            tables=tables,
            features=[f"f{i}" for i in range(len(tables))],
            feature_tables=list(range(len(tables))),
            seed=5,
            **fields,
        )
    )


def prepare(ids, tables, world_size=1, error_text=""):
    """ids (B, T): one feature per table."""
    return id_ops.prepare_batch(
        ids,
        feature_splits=None,
        batch_rows=tf.shape(ids)[0],
        weight_sum=2.0 * tf.cast(tf.shape(ids)[0], tf.float64),
        error_text=error_text,
        tables=tables,
        features=[FeatureConfig(f"f{i}", table=t) for i, t in enumerate(tables)],
        feature_tables=list(range(len(tables))),
        world_size=world_size,
    )


def column(*ids):
    return tf.constant(ids, tf.int64)[:, None]


def alltoall(tensors, splits):
    """What rank w receives: the w-th part of each rank's tensor, and how long the parts are."""
    parts = [tf.split(tensor, split) for tensor, split in zip(tensors, splits, strict=True)]
    received = [tf.concat([part[w] for part in parts], axis=0) for w in range(len(tensors))]
    return received, [tf.stack([split[w] for split in splits]) for w in range(len(tensors))]


def read(handle, ids, tables):
    """Current rows of ids (B, T) -> (B, T, D), one rank."""
    prepared = prepare(ids, tables)
    rows, splits, *_ = mix_cache_ops.read(handle, prepared.send, prepared.send_splits, DIM)
    rows = mix_cache_ops.check_rows(rows, splits, prepared.row_splits)
    return tf.gather(rows, prepared.virtual_ids).numpy()


def train_step(handle, ids, gradients, tables):
    """One rank: gradients (B, T, D) of each id's row. Returns rows (B, T, D) before the update and the step."""
    prepared = prepare(ids, tables)
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits)
    rows, splits = mix_cache_ops.lookup(handle, ticket.ticket, DIM)
    rows = mix_cache_ops.check_rows(rows, splits, prepared.row_splits)
    flat = tf.reshape(prepared.virtual_ids, [-1])
    per_row = tf.math.unsorted_segment_sum(tf.reshape(gradients, [-1, DIM]), flat, tf.shape(rows)[0])
    step = mix_cache_ops.apply(handle, ticket.ticket, per_row, 1.0)
    return tf.gather(rows, prepared.virtual_ids), step, ticket.global_rows, ticket.global_weight


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("slots", [6, 1000])
def test_round_trip_equals_a_plain_table(graph, slots):
    """20 steps over two tables; with 6 slots rows are evicted and come back. Integer gradients: sums are exact."""
    tables = [table("item"), table("user")]
    handle = make(tables, slots=slots)
    if graph:
        signature = [tf.TensorSpec((None, 2), tf.int64), tf.TensorSpec((None, 2, DIM))]
        step_fn = tf.function(
            lambda ids, gradients: train_step(handle, ids, gradients, tables), input_signature=signature
        )
    else:
        step_fn = lambda ids, gradients: train_step(handle, ids, gradients, tables)  # noqa: E731
    pool = np.array([0, 1, 2**31, 2**53, 2**53 + 1, MAX_ID], np.int64)
    wanted = {t: id_ops.initial_rows(pool, config, 5).numpy() for t, config in enumerate(tables)}
    generator = np.random.default_rng(0)
    for step in range(1, 21):
        choice = generator.integers(0, len(pool), (3, 2))
        gradients = generator.integers(-3, 4, (3, 2, DIM)).astype(np.float32)
        rows, got_step, global_rows, global_weight = step_fn(tf.constant(pool[choice]), tf.constant(gradients))
        for t in range(2):
            np.testing.assert_array_equal(rows[:, t], wanted[t][choice[:, t]])
            summed = np.zeros_like(wanted[t])
            np.add.at(summed, choice[:, t], gradients[:, t])
            wanted[t] = wanted[t] - np.float32(0.5) * summed
        assert (int(got_step), int(global_rows), float(global_weight)) == (step, 3, 6.0)
    everything = read(handle, tf.constant(np.stack([pool, pool], axis=1)), tables)
    np.testing.assert_array_equal(everything, np.stack([wanted[0], wanted[1]], axis=1))
    per_table, totals = mix_cache_ops.stats(handle, ["item", "user"])
    assert totals["steps"] == 20
    assert totals["pinned_slots"] == totals["foreign_keys"] == 0
    for counters in per_table.values():
        assert counters["unique"] == counters["hits"] + counters["misses"]
        assert counters["created"] == 6
        assert (counters["evictions"] > 0) == (slots == 6)


def test_three_ranks_equal_one():
    """The same global batches on one rank and, dealt out with idle ranks among them, on three."""
    tables = [table("a"), table("b")]
    single, world = make(tables), [make(tables, rank=r, world_size=3) for r in range(3)]
    generator = np.random.default_rng(1)
    for parts in ([2, 3, 1], [0, 5, 0], [0, 0, 0], [1, 1, 1]):
        ids = [tf.constant(generator.integers(0, 8, (n, 2))) for n in parts]
        gradients = [tf.constant(generator.integers(-2, 3, (n, 2, DIM)), tf.float32) for n in parts]
        prepared = [prepare(i, tables, 3) for i in ids]
        words, splits = alltoall([p.send for p in prepared], [p.send_splits for p in prepared])
        tickets = [mix_cache_ops.prefetch(c, w, s) for c, w, s in zip(world, words, splits, strict=True)]
        answers = [mix_cache_ops.lookup(c, t.ticket, DIM) for c, t in zip(world, tickets, strict=True)]
        for answer, ticket in zip(answers, tickets, strict=True):
            np.testing.assert_array_equal(answer[1], ticket.reply_splits)
            assert (int(ticket.global_rows), float(ticket.global_weight)) == (sum(parts), 2.0 * sum(parts))
        rows, received = alltoall(*zip(*answers, strict=True))
        rows = [mix_cache_ops.check_rows(r, s, p.row_splits) for r, s, p in zip(rows, received, prepared, strict=True)]
        expanded = [tf.gather(r, p.virtual_ids) for r, p in zip(rows, prepared, strict=True)]
        per_row = [
            tf.math.unsorted_segment_sum(tf.reshape(g, [-1, DIM]), tf.reshape(p.virtual_ids, [-1]), tf.shape(r)[0])
            for g, p, r in zip(gradients, prepared, rows, strict=True)
        ]
        at_owner, _ = alltoall(per_row, [p.row_splits for p in prepared])
        for cache, ticket, gradient in zip(world, tickets, at_owner, strict=True):
            mix_cache_ops.apply(cache, ticket.ticket, gradient, 1.0)
        wanted, *_ = train_step(single, tf.concat(ids, 0), tf.concat(gradients, 0), tables)
        np.testing.assert_array_equal(tf.concat(expanded, 0), wanted)
    created = [mix_cache_ops.stats(cache, ["a", "b"])[0]["a"]["created"] for cache in world]
    assert sum(created) == mix_cache_ops.stats(single, ["a", "b"])[0]["a"]["created"]
    assert all(mix_cache_ops.stats(cache, ["a", "b"])[1]["foreign_keys"] == 0 for cache in world)


@pytest.mark.parametrize("rank", [0, 1])
def test_foreign_keys_and_absent_rows_stay_as_they_are_under_adam(rank):
    """A full cache of rows whose moments are not zero: neither messages meant for the other rank nor batches without
    them touch a row, those in the first and the last slot among them."""
    adam = [table(optimizer=SparseOptimizerConfig(kind="adam", learning_rate=0.1))]
    slots = 8
    cache = make(adam, rank=rank, world_size=2, slots=slots)

    def sent_to(owner, ids):
        """The message of a batch for one owner, and its keys."""
        prepared = prepare(column(*ids), adam, 2)
        words = tf.split(prepared.send, prepared.send_splits)[owner]
        return words, int(prepared.row_splits[owner])

    def train(words, keys):
        # The other rank sends nothing but its header.
        silent, _ = sent_to(rank, [])
        received = tf.concat([words, silent], 0)
        ticket = mix_cache_ops.prefetch(cache, received, tf.stack([tf.size(words), tf.size(silent)])).ticket
        rows, _ = mix_cache_ops.lookup(cache, ticket, DIM)
        mix_cache_ops.apply(cache, ticket, tf.ones((keys, DIM)), 1.0)
        return rows.numpy()

    def rows():
        chunk = mix_cache_ops.export_rows(cache, 0, 0, 100)
        return {int(i): (r.tobytes(), s.tobytes()) for i, r, s in zip(chunk.ids, chunk.rows, chunk.state, strict=True)}

    own = [i for i in range(100) if sent_to(rank, [i])[1]][:slots]
    for _ in range(3):
        train(*sent_to(rank, own))
    before = rows()
    assert sorted(before) == own
    assert mix_cache_ops.stats(cache, ["t"])[0]["t"]["cached_rows"] == slots
    foreign = [i for i in range(100) if not sent_to(rank, [i])[1]][:5]
    np.testing.assert_array_equal(train(*sent_to(1 - rank, foreign)), np.zeros((5, DIM), np.float32))
    assert rows() == before
    assert mix_cache_ops.stats(cache, ["t"])[1]["foreign_keys"] == 5
    train(*sent_to(rank, [own[3]]))
    after = rows()
    assert [i for i in own if after[i] != before[i]] == [own[3]]


def test_failed_prefetch_reaches_every_rank_through_the_rows():
    """Rank 1's cache is too small: its answer is the error, and both ranks raise the same."""
    tables = [table()]
    world = [make(tables, rank=0, world_size=2, slots=100), make(tables, rank=1, world_size=2, slots=3)]
    prepared = [prepare(column(*range(20)), tables, 2), prepare(column(), tables, 2)]
    words, splits = alltoall([p.send for p in prepared], [p.send_splits for p in prepared])
    tickets = [mix_cache_ops.prefetch(c, w, s) for c, w, s in zip(world, words, splits, strict=True)]
    assert int(tickets[0].ticket) >= 0 > int(tickets[1].ticket)
    answers = [mix_cache_ops.lookup(c, t.ticket, DIM) for c, t in zip(world, tickets, strict=True)]
    np.testing.assert_array_equal(answers[1][1], tickets[1].reply_splits)
    rows, received = alltoall(*zip(*answers, strict=True))
    messages = []
    for r, s, p in zip(rows, received, prepared, strict=True):
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"'cache'.*'t'.*3 slots.*cache\.slots") as error:
            mix_cache_ops.check_rows(r, s, p.row_splits)
        messages.append(error.value.message)
    assert messages[0] == messages[1]
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"its prefetch failed.*3 slots"):
        mix_cache_ops.apply(world[1], tickets[1].ticket, tf.zeros((0, DIM)), 1.0)
    mix_cache_ops.apply(world[0], tickets[0].ticket, tf.zeros((int(prepared[0].row_splits[0]), DIM)), 1.0)
    for cache in world:
        assert mix_cache_ops.stats(cache, ["t"])[1]["pinned_slots"] == 0


def test_failed_prefetch_may_be_released():
    handle = make([table()], slots=1)
    prepared = prepare(column(1, 2), [table()])
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
    mix_cache_ops.release(handle, ticket)
    with pytest.raises(tf.errors.FailedPreconditionError, match=str(int(ticket))):
        mix_cache_ops.lookup(handle, ticket, DIM)


@pytest.mark.parametrize("end", ["apply", "release"])
def test_second_use_of_a_ticket_is_an_error_that_names_it(end):
    handle = make([table()])
    prepared = prepare(column(1, 2), [table()])
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
    gradients = tf.zeros((2, DIM))
    if end == "apply":
        mix_cache_ops.apply(handle, ticket, gradients, 1.0)
    else:
        mix_cache_ops.release(handle, ticket)
    for use in (
        lambda: mix_cache_ops.apply(handle, ticket, gradients, 1.0),
        lambda: mix_cache_ops.release(handle, ticket),
        lambda: mix_cache_ops.lookup(handle, ticket, DIM),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match=rf"ticket {int(ticket)}\b"):
            use()


def test_gradients_of_another_shape_are_refused_and_the_ticket_stays_open():
    handle = make([table()])
    prepared = prepare(column(1, 2), [table()])
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
    for shape in ((1, DIM), (2, DIM + 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradients of shape \[2,4\]"):
            mix_cache_ops.apply(handle, ticket, tf.zeros(shape), 1.0)
    assert int(mix_cache_ops.apply(handle, ticket, tf.zeros((2, DIM)), 1.0)) == 1


def test_invalid_ids_are_an_error_or_counted():
    strict, lenient = table(rows=10), table(rows=10, invalid_ids="skip")
    prepared = prepare(column(3, 12, -1), [strict])
    for use in (
        lambda: mix_cache_ops.prefetch(make([strict]), prepared.send, prepared.send_splits),
        lambda: mix_cache_ops.read(make([strict]), prepared.send, prepared.send_splits, DIM),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"'f0'.*'t'.*12.*0 \.\. 9.*invalid_ids: skip"):
            use()
    handle = make([lenient])
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits)
    rows, _ = mix_cache_ops.lookup(handle, ticket.ticket, DIM)
    assert rows.shape == (1, DIM)
    assert mix_cache_ops.stats(handle, ["t"])[0]["t"]["invalid_ids"] == 2


def test_error_text_of_one_rank_fails_all():
    tables = [table()]
    world = [make(tables, rank=r, world_size=2) for r in range(2)]
    prepared = [prepare(column(1), tables, 2), prepare(column(2), tables, 2, error_text="file x.tsv is cut short")]
    words, splits = alltoall([p.send for p in prepared], [p.send_splits for p in prepared])
    for cache, w, s in zip(world, words, splits, strict=True):
        with pytest.raises(tf.errors.InternalError, match=r"rank 1: file x\.tsv is cut short"):
            mix_cache_ops.prefetch(cache, w, s)


def test_torn_exchanges_are_errors():
    handle = make([table()])
    prepared = prepare(column(1, 2), [table()])
    with pytest.raises(tf.errors.InvalidArgumentError, match="received_splits"):
        mix_cache_ops.prefetch(handle, prepared.send[:-1], prepared.send_splits)
    with pytest.raises(tf.errors.DataLossError, match="rank 0"):
        mix_cache_ops.prefetch(handle, prepared.send + 1, prepared.send_splits)
    with pytest.raises(tf.errors.DataLossError, match=r"owner 1|rank 1"):
        mix_cache_ops.check_rows(tf.zeros((5, DIM)), tf.constant([2, 3]), tf.constant([2, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="sum 4"):
        mix_cache_ops.check_rows(tf.zeros((5, DIM)), tf.constant([2, 2]), tf.constant([2, 2]))


def test_check_rows_passes_the_buffer_on():
    rows = tf.random.uniform((5, DIM))
    checked = mix_cache_ops.check_rows(rows, tf.constant([2, 3]), tf.constant([2, 3]))
    assert np.asarray(checked).ctypes.data == np.asarray(rows).ctypes.data


def test_read_changes_nothing():
    tables = [table()]
    handle = make(tables, slots=2)
    train_step(handle, column(1, 2), tf.ones((2, 1, DIM)), tables)
    before = mix_cache_ops.stats(handle, ["t"])
    rows = read(handle, column(1, 2, 3, 4, 5), tables)
    initial = id_ops.initial_rows(np.arange(1, 6), tables[0], 5).numpy()
    initial[:2] -= 0.5
    np.testing.assert_array_equal(rows[:, 0], initial)
    assert mix_cache_ops.stats(handle, ["t"]) == before


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_export_import_round_trip(kind):
    """Exported rows and optimizer state, imported elsewhere, go on exactly as the original does."""
    config = table(optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.1))
    source, target = make([config], slots=8), make([config], slots=100)
    for first in range(0, 40, 5):
        train_step(source, column(*range(first, first + 8)), tf.ones((8, 1, DIM)), [config])
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk = mix_cache_ops.export_rows(source, 0, cursor, 10)
        assert len(chunk.ids) <= 10
        chunks.append(chunk)
        cursor = chunk.cursor
    ids, rows, state = (np.concatenate([c[i] for c in chunks]) for i in range(3))
    assert sorted(ids.tolist()) == list(range(43))
    assert state.shape == (43, {"sgd": 0, "adagrad": DIM, "adam": 2 * DIM}[kind])
    assert mix_cache_ops.import_rows(target, 0, ids, rows, state) == 0
    mix_cache_ops.set_step(target, mix_cache_ops.get_step(source))
    for _ in range(2):
        for handle in (source, target):
            train_step(handle, column(3, 40, 41), tf.fill((3, 1, DIM), 2.0), [config])
    assert int(mix_cache_ops.get_step(target)) == int(mix_cache_ops.get_step(source)) == 10
    everything = column(*range(43))
    np.testing.assert_array_equal(read(target, everything, [config]), read(source, everything, [config]))


def test_import_without_state_and_of_foreign_rows():
    config = table(optimizer=SparseOptimizerConfig(kind="adagrad"))
    world = [make([config], rank=r, world_size=2) for r in range(2)]
    ids = np.arange(100)
    rows = np.arange(400, dtype=np.float32).reshape(100, DIM)
    foreign = [mix_cache_ops.import_rows(cache, 0, ids, rows) for cache in world]
    assert sum(foreign) == 100
    assert all(20 < count < 80 for count in foreign)
    for cache, count in zip(world, foreign, strict=True):
        chunk = mix_cache_ops.export_rows(cache, 0, 0, 1000)
        assert len(chunk.ids) == 100 - count
        np.testing.assert_array_equal(chunk.rows, rows[chunk.ids])
        np.testing.assert_array_equal(chunk.state, np.full((100 - count, DIM), 0.1, np.float32))


@pytest.mark.parametrize(
    ("rows", "state", "message"),
    [((3, DIM), None, "rows has shape"), ((2, DIM), (2, 1), "state has shape"), ((2, DIM), (2, 0), "state has shape")],
)
def test_import_of_other_shapes_is_refused(rows, state, message):
    handle = make([table(optimizer=SparseOptimizerConfig(kind="adagrad"))])
    state = None if state is None else np.zeros(state, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        mix_cache_ops.import_rows(handle, 0, np.arange(2), np.zeros(rows, np.float32), state)


def test_unknown_table_is_refused():
    handle = make([table()])
    with pytest.raises(tf.errors.InvalidArgumentError, match="table 1 does not exist"):
        mix_cache_ops.export_rows(handle, 1, 0, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="table -1 does not exist"):
        mix_cache_ops.import_rows(handle, -1, np.arange(0), np.zeros((0, DIM), np.float32))


def test_step_cannot_be_set_while_tickets_are_open():
    handle = make([table()])
    prepared = prepare(column(1), [table()])
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
    with pytest.raises(tf.errors.FailedPreconditionError):
        mix_cache_ops.set_step(handle, 7)
    mix_cache_ops.release(handle, ticket)
    mix_cache_ops.set_step(handle, 7)
    assert int(mix_cache_ops.get_step(handle)) == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"row_dtype": "float64"}, "row_dtype: received 'float64'; allowed: bfloat16, float16, float32"),
        ({"policy": "fifo"}, "'fifo'.*clock, freq, lfu, lookahead, lru"),
        ({"window": 65}, "window is 65.*0 .. 64"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
    ],
)
def test_bad_specs_are_value_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        make([table()], **fields)


def test_cache_outlives_the_handle_only_while_a_function_captures_it():
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def capture(cache):
        return tf.function(lambda: mix_cache_ops.get_step(cache))

    count, config = 1_000_000, table()
    handle = make([config], slots=16)
    mix_cache_ops.import_rows(handle, 0, np.arange(count), np.ones((count, DIM), np.float32))
    size = mix_cache_ops.stats(handle, ["t"])[1]["host_bytes"]
    assert size > 16_000_000
    function = capture(handle)
    assert int(function()) == 0
    gc.collect()
    with_cache = resident_bytes()
    del handle
    gc.collect()
    assert int(function()) == 0
    assert resident_bytes() > with_cache - size // 2
    del function
    gc.collect()
    assert resident_bytes() < with_cache - size // 2


def test_waiting_prefetch_leaves_the_only_inter_op_thread_free():
    """Batch 2 does not fit beside batch 1: its prefetch waits until batch 1 is applied, by the one thread for ops."""
    code = """
        import sys, threading, time
        import tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(1)
        sys.path.insert(0, "tests/unit")
        from test_ops_cache import DIM, column, make, mix_cache_ops, prepare, table
        handle = make([table()], slots=3, prefetch_wait_seconds=60.0)
        batches = [prepare(column(*ids), [table()]) for ids in ((1, 2), (3, 4))]
        prefetch = tf.function(lambda words, splits: mix_cache_ops.prefetch(handle, words, splits).ticket)
        apply = tf.function(lambda ticket: mix_cache_ops.apply(handle, ticket, tf.zeros((2, DIM)), 1.0))
        apply.get_concrete_function(tf.TensorSpec((), tf.int64))
        first = prefetch(batches[0].send, batches[0].send_splits)
        tickets = []
        thread = threading.Thread(target=lambda: tickets.append(prefetch(batches[1].send, batches[1].send_splits)))
        start = time.monotonic()
        thread.start()
        time.sleep(0.5)
        assert not tickets
        assert int(apply(first)) == 1
        thread.join()
        assert int(apply(tickets[0])) == 2
        assert time.monotonic() - start < 30
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": "."})
    assert done.stdout == "done\n", done.stderr
