"""Spans of Python's stages, and marks in TensorFlow's graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr import stage_clock
from hvd_ctr.config import FeatureConfig, TableConfig
from hvd_ctr.ops import id_ops, pooling_ops, stage_ops
from hvd_ctr.stage_clock import Span


@pytest.fixture(autouse=True)
def _all_off() -> Iterator[None]:
    yield
    stage_ops.insert_marks(False)
    stage_ops.set_clock(False)
    stage_ops.drain()
    stage_clock.stop()


def _drained() -> list[tuple[str, int, int]]:
    events, lost = stage_ops.drain()
    assert lost == 0
    return [(stage_ops.stage_names()[stage], begin, end) for stage, begin, end in events.tolist()]


# ---- Python's spans ----


def test_off_nothing_is_kept() -> None:
    with stage_clock.span("read"):
        pass
    stage_clock.record("parse", 1, 2)
    assert stage_clock.call("parse", lambda a, b: a + b, 1, 2) == 3
    stage_clock.start()
    assert stage_clock.take() == [] and stage_clock.on()


def test_spans_have_times_and_nest() -> None:
    stage_clock.start()
    before = time.monotonic_ns()
    with stage_clock.span("read"):
        assert stage_clock.call("parse", sum, [1, 2]) == 3
    parse, read = stage_clock.take()
    assert (parse.stage, read.stage) == ("parse", "read") and parse.thread == read.thread == "GPU-Worker"
    assert before <= read.begin_ns <= parse.begin_ns <= parse.end_ns <= read.end_ns <= time.monotonic_ns()
    assert stage_clock.take() == []


def test_an_exception_ends_a_span() -> None:
    stage_clock.start()
    with pytest.raises(KeyError), stage_clock.span("read"):
        raise KeyError
    assert [span.stage for span in stage_clock.take(with_running=True)] == ["read"]


def test_making_each_item_is_a_span() -> None:
    stage_clock.start()

    def slow() -> Iterator[int]:
        for i in range(2):
            time.sleep(0.002)
            yield i

    assert list(stage_clock.iterate("read", slow())) == [0, 1]
    durations = [span.end_ns - span.begin_ns for span in stage_clock.take()]
    assert len(durations) == 3 and min(durations[:2]) >= 2_000_000


def test_spans_of_pipeline_threads_and_those_that_run() -> None:
    stage_clock.start()
    entered, leave = threading.Event(), threading.Event()

    def load() -> None:
        with stage_clock.span("waiting"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=load, name="hvd_ctr Data-Loader")
    thread.start()
    entered.wait()
    assert stage_clock.take() == []
    (running,) = stage_clock.take(with_running=True)
    leave.set()
    thread.join()
    (ended,) = stage_clock.take(with_running=True)
    assert (running.stage, running.thread) == ("waiting", "Data-Loader") == (ended.stage, ended.thread)
    assert running.begin_ns == ended.begin_ns and running.end_ns <= ended.end_ns


# ---- C++ and marks ----


def _prepare() -> None:
    table = TableConfig("t", dim=2)
    id_ops.prepare_batch(
        tf.constant([[1], [2], [1]], tf.int64),
        feature_splits=None,
        batch_rows=tf.constant(3, tf.int64),
        weight_sum=tf.constant(3.0, tf.float64),
        error_text="",
        tables=[table],
        features=[FeatureConfig("f", table=table)],
        feature_tables=[0],
        world_size=1,
    )


def test_kernels_are_timed_while_the_clock_runs() -> None:
    _prepare()
    assert _drained() == []
    stage_ops.set_clock(True)
    before = time.monotonic_ns()
    _prepare()
    rows = tf.ones([2, 2])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        pooled = pooling_ops.pool_rows(rows, tf.constant([0, 1, 1]))
    tape.gradient(pooled, rows)
    after = time.monotonic_ns()
    events = _drained()
    assert [stage for stage, *_ in events] == ["dedupe", "partition", "pool", "pool gradient"]
    assert all(before <= begin <= end <= after for _, begin, end in events)  # Python's clock is the same
    stage_ops.set_clock(False)
    _prepare()
    assert _drained() == []


def _step(x: tf.Tensor) -> tf.Tensor:
    def double(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return [2 * value for value in values]

    first, second = stage_ops.timed("dense allreduce", [x, x + 1], double)
    return stage_ops.moment("loss", tf.reduce_sum(first * second))


def test_marks_time_and_change_no_number() -> None:
    x = tf.constant([1.0, 3.0])
    plain = tf.function(_step, autograph=False)
    expected = plain(x)
    assert not any(op.type == "HvdCtrStageMark" for op in plain.get_concrete_function(x).graph.get_operations())
    stage_ops.insert_marks(True)
    marked = tf.function(_step, autograph=False)
    assert float(marked(x)) == float(expected)
    assert _drained() == []  # the clock does not run
    stage_ops.set_clock(True)
    assert float(marked(x)) == float(expected)
    (first, begin, end), (loss, now, also_now) = _drained()
    assert (first, loss) == ("dense allreduce", "loss") and 0 < begin <= end <= now == also_now
    assert marked.get_concrete_function(x).structured_outputs.shape == expected.shape


def test_gradients_pass_a_mark_after_its_tensors() -> None:
    stage_ops.insert_marks(True)

    @tf.function(autograph=False)
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = stage_ops.moment("loss", tf.reduce_sum(x * x))
        return tape.gradient(value, x)

    x = tf.constant([1.0, -2.5])
    np.testing.assert_array_equal(gradient(x), 2 * x)
    marks = [op for op in gradient.get_concrete_function(x).graph.get_operations() if op.type == "HvdCtrStageMark"]
    forward, backward = marks
    assert backward.inputs[-1] is forward.outputs[-1]


def test_eager_calls_are_spans() -> None:
    stage_clock.start()
    stage_ops.insert_marks(True)
    assert float(_step(tf.constant([1.0, 3.0]))) == 4.0 * (1 * 2 + 3 * 4)
    allreduce, loss = stage_clock.take()
    assert isinstance(allreduce, Span) and allreduce.stage == "dense allreduce"
    assert loss.stage == "loss" and loss.begin_ns == loss.end_ns


def test_an_unknown_stage_is_refused() -> None:
    stage_ops.insert_marks(True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no stage is called 'lunch'"):
        tf.function(lambda x: stage_ops.moment("lunch", x), autograph=False)(tf.constant(1.0))


def test_what_found_no_room_is_told() -> None:
    stage_ops.set_clock(True)
    stage_ops.insert_marks(True)

    @tf.function(autograph=False)
    def many(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 9000, lambda i, y: (i + 1, stage_ops.moment("loss", y)), (0, x))[1]

    many(tf.constant(1.0))
    events, lost = stage_ops.drain()
    assert len(events) + lost == 9000
    assert stage_ops.drain()[1] == 0
