"""The stage clock of the C++ part, and marks that time what TensorFlow and Horovod run inside a step.

    insert_marks(True)                                  # before the step is traced
    rows = timed("row exchange", rows, exchange)        # exchange(rows), timed
    loss = moment("loss", loss)
    set_clock(True); ...; events, lost = drain()

A mark passes tensors on unchanged. It is put into a graph only where `insert_marks` has asked for it, so a run without
a profile has the graph that it always had; an eager call is timed by hvd_ctr/stage_clock.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr import stage_clock
from hvd_ctr.ops import native

Tensor = Any
T = TypeVar("T")
_marks = False

for _op in ("HvdCtrStageClock", "HvdCtrDrainStages", "HvdCtrStageNames"):
    tf.no_gradient(_op)


def insert_marks(wanted: bool) -> None:
    """Whether graphs that are traced from now on get marks."""
    global _marks
    _marks = wanted


def set_clock(on: bool) -> None:
    """Starts or stops the clock of the C++ part. Off, a mark only passes its tensors on."""
    native.ops().hvd_ctr_stage_clock(on=on)


def drain() -> tuple[NDArray[np.int64], int]:
    """Events since the last call, (n, 3) int64: stage number, begin and end in ns of CLOCK_MONOTONIC; and how many
    found no room (a thread holds 8192).
    """
    events, lost = native.ops().hvd_ctr_drain_stages()
    return np.asarray(events), int(lost)


@functools.cache
def stage_names() -> tuple[str, ...]:
    """Names of the stages by number."""
    return tuple(name.decode() for name in np.asarray(native.ops().hvd_ctr_stage_names()))


def timed(stage: str, values: Any, function: Callable[[Any], T]) -> T:
    """function(values), timed from the moment at which all values are there until all results are.

    Args:
        stage: one of `stage_names()`.
        values: a tensor or a list of tensors.
        function: values -> a structure of tensors.
    """
    if tf.executing_eagerly():
        return stage_clock.call(stage, function, values)
    if not _marks:
        return function(values)
    passed, begin = _mark(values, tf.constant(0, tf.int64))
    results: T = _mark(function(passed), begin, stage=stage)[0]
    return results


def moment(stage: str, value: Tensor) -> Tensor:
    """`value`, and an event without duration when it is there. Its gradient passes after it."""
    if tf.executing_eagerly():
        now = time.monotonic_ns()
        stage_clock.record(stage, now, now)
        return value
    return _mark(value, tf.constant(0, tf.int64), stage=stage, moment=True)[0] if _marks else value


def _mark(values: Any, since: Tensor, **attributes: Any) -> tuple[Any, Tensor]:
    passed, now = native.ops().hvd_ctr_stage_mark(values=tf.nest.flatten(values), since=since, **attributes)
    return tf.nest.pack_sequence_as(values, passed), now


@tf.RegisterGradient("HvdCtrStageMark")
def _mark_gradient(op: Any, *gradients: Tensor | None) -> list[Tensor | None]:
    passed = iter(_mark([g for g in gradients[:-1] if g is not None], op.outputs[-1])[0])
    return [*(None if gradient is None else next(passed) for gradient in gradients[:-1]), None]
