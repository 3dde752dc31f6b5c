"""Runs train steps of one model over batches made beforehand, with or without the pipeline: what is timed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.comm import Comm
from hvd_ctr.embedding import step_context
from hvd_ctr.embedding.sharded_embedding import BatchFacts, Rows
from hvd_ctr.ops.mix_cache_ops import Prefetched
from hvd_ctr.training.hybrid_model import HybridModel
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from hvd_ctr.training.profiler import Profiler

# In which a pipeline fetches what it may fetch ahead, so that it does not take the cores from the next variant.
_SETTLE_SECONDS = 0.5

Tensor = Any
Batch = tuple[dict[str, Any], Any]  # the model's inputs by name, and labels (B, 1)


class Stepper:
    """A model, its batches and its compiled step.

    Args:
        make_model: builds and compiles the model; its embedding layer, if any, reads the input "ids".
        batches: x and y in turn, without end: the pipeline asks for more than are trained. Of a tf.data.Dataset a step
            without a pipeline takes its batch inside of its graph, as Keras' fit does: handing hundreds of tensors to a
            tf.function takes longer than a step.
        depth: batches whose rows the pipeline fetches ahead; 0: no pipeline.
        comm: what the model and its steps communicate by; None: the job's communicator. `LocalComm()`: each rank
            trains on its own, so nothing is communicated, in the same processes.
    """

    def __init__(
        self,
        make_model: Callable[[], HybridModel],
        batches: Iterator[Batch] | tf.data.Dataset,
        depth: int = 0,
        comm: Comm | None = None,
    ) -> None:
        self._comm = comm or comms.current()
        with answering(self._comm):
            self.model = make_model()
            self.model.synchronise()
        self._pipeline: Pipeline[Batch] | None = None
        self._stream: Iterator[Any] = iter(())
        self._step: Any = None
        if isinstance(batches, tf.data.Dataset) and not depth:
            iterator = iter(batches)

            def take() -> Tensor:
                x, y = next(iterator)
                return self._body(x, y, ())

            self._stream, self._step = itertools.repeat(()), tf.function(take, autograph=False)
        elif not depth:
            self._stream = ((*batch, ()) for batch in batches)
        else:
            tensors = (tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in batches)
            self._pipeline = Pipeline(self._comm, self.model.embeddings, tensors, _inputs_of, _no_batch, depth)
            self._stream = ((*batch, tuple(staged)) for batch, staged in self._pipeline)
        self.loss = 0.0
        #: Told of every step, when set before the first.
        self.profiler: Profiler | None = None
        self._trained = 0

    def run(self, steps: int) -> float:
        """Runs that many steps; returns ms per step. Collective."""
        with answering(self._comm):
            begin, loss = time.perf_counter(), self.loss
            for _ in range(steps):
                arguments = tf.nest.map_structure(tf.convert_to_tensor, next(self._stream))
                if self._step is None:
                    step = tf.function(self._body, input_signature=list(tensor_specs(arguments)), autograph=False)
                    self._step = step.get_concrete_function()
                loss = self._step(*arguments)
                self._trained += 1
                if self.profiler is not None:
                    self.profiler.step(self._trained)
            self.loss = float(loss)
            return 1e3 * (time.perf_counter() - begin) / steps

    def timed(self, steps: int, untimed: int) -> Callable[[], float]:
        """A variant for `measure.interleaved`: ms per step of `steps` steps after `untimed` ones, which bring caches
        and pipeline back into their stride.
        """

        def variant() -> float:
            if untimed:
                self.run(untimed)
            milliseconds = self.run(steps)
            if self._pipeline is not None:
                time.sleep(_SETTLE_SECONDS)
            return milliseconds

        return variant

    def close(self) -> None:
        """Ends the pipeline. Collective."""
        if self._pipeline is not None:
            with answering(self._comm):
                self._pipeline.close()

    def _body(self, x: Any, y: Tensor, staged: Any) -> Tensor:
        return self.model.hybrid_step(x, y, staged=staged).loss


def _inputs_of(batch: Batch) -> Inputs:
    x, y = batch
    return Inputs([x["ids"]], BatchFacts(np.int64(len(y)), np.float64(len(y))))


def _no_batch() -> Batch:
    raise ValueError("the benchmark has no more batches; give the pipeline an endless iterator")


@contextlib.contextmanager
def answering(comm: Comm) -> Iterator[None]:
    """Makes `comm` the process' communicator: models built and steps traced meanwhile use it for good."""
    before = comms.current()
    comms._current = comm
    try:
        yield
    finally:
        comms._current = before


@keras.saving.register_keras_serializable("hvd_ctr")
class ReadyRows(keras.layers.Layer):
    """Stands in for the embedding in the dense-only ceiling: (B, n) float32 that are there already.

    They go through the train step as an embedding's rows do: watched on its tape, so that the backward pass makes their
    gradient. It is used (one number of it), or TensorFlow would leave it out.
    """

    def build(self, input_shape: Any) -> None:
        del input_shape
        with tf.init_scope():
            self.seen = tf.Variable(0.0, trainable=False)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The rows; in a train step they are its looked-up rows."""
        context = step_context.current()
        if context is None:
            return inputs
        group: Any = _ReadyGroup(self.seen, context.facts)
        return context.lookup(group, inputs, True).rows


class _ReadyGroup:
    """A table group whose rows need no exchange."""

    name = "ready"

    def __init__(self, seen: tf.Variable, facts: BatchFacts) -> None:
        self._seen, self._facts = seen, facts

    def input_dist(self, prepared: Tensor) -> Tensor:
        return prepared

    def prefetch(self, received: Tensor) -> Prefetched:
        size = comms.current().size
        rows, weight = tf.cast(self._facts.rows, tf.int64), tf.cast(self._facts.weight_sum, tf.float64)
        none = tf.constant(0, tf.int64)
        return Prefetched(none, tf.zeros([size], tf.int32), rows * size, weight * float(size), none)

    def lookup(self, prepared: Tensor, prefetched: Prefetched) -> Rows:
        return Rows(tf.identity(prepared), prefetched.global_rows, prefetched.global_weight)

    def backward(self, prepared: Tensor, prefetched: Prefetched, d_rows: Tensor, scale: Tensor) -> None:
        self._seen.assign(d_rows[0, 0], read_value=False)
