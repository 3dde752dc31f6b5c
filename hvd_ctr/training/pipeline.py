"""The three-stage pipeline (ScaleFreeCTR): later batches are read and their rows fetched while the present one trains.

    Data-Loader    own thread   reads a batch, de-duplicates and partitions its ids
    Host-Manager   own thread   key exchange; merge, plan, write-back and load; pins the rows of up to `depth` batches
    GPU-Worker     the caller   the train step, with the batch's tickets

    with Pipeline(comm, embeddings, batches, inputs_of, depth=2) as pipeline:
        for batch, staged in pipeline:
            model.hybrid_step(x, y, staged=staged)

Results are the same bits for any depth: a ticket pins its rows, a row is read from the host only after its last
write-back, and the cache decides about batches in their order. The queue between the threads is bounded, the
Host-Manager waits (without spinning) for a permit that the caller gives back by asking for the next batch, and inside
the cache for slots that a finished step releases.

With the cache policy `lookahead` keys are exchanged `window` batches before their rows are loaded: the cache then knows
which rows the next batches need, and keeps those. Such a batch holds its data and keys in memory, but no slots.

The key exchange goes beside the step's collectives, over the same transport: those match by name, in whatever order the
threads of a rank come to them, so neither side can wait for the other in a circle.

Only the Host-Manager communicates, by the key exchange, once per batch and group and in the same order on all ranks.
Its headers also carry what else ranks must agree on: a rank whose data has ended says so and sends empty messages until
all have ended; a rank whose reader failed sends its error, which is then raised on all ranks. So no rank waits for one
that has gone.

`close` before the end is collective: ranks may have begun different numbers of exchanges, so they first agree on the
largest, finish up to there, and give the tickets back. What was exchanged and not loaded is forgotten.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf

from hvd_ctr import stage_clock
from hvd_ctr.comm import Comm
from hvd_ctr.embedding.sharded_embedding import BatchFacts, ReceivedWords, Staged
from hvd_ctr.layers.mix_cache_embedding import MixCacheEmbedding
from hvd_ctr.ops.id_ops import PreparedIds
from hvd_ctr.training.collective_end import CollectiveEnd

MAX_DEPTH = 8
_ENDED = -1  # kNoMoreBatches of tf_ops/core/key_exchange.h

T = TypeVar("T")


class PipelineError(RuntimeError):
    """A stage failed; the message names it and its cause."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a pipeline needs of a batch: per embedding layer its inputs, and the facts told to all ranks."""

    layers: Sequence[Any]
    facts: BatchFacts


@dataclasses.dataclass(frozen=True)
class _Prepared(Generic[T]):
    batch: T
    groups: list[PreparedIds]


@dataclasses.dataclass(frozen=True)
class _Exchanged(Generic[T]):
    prepared: _Prepared[T]
    received: list[ReceivedWords]


@dataclasses.dataclass(frozen=True)
class _Failure:
    stage: str
    error: BaseException


class Pipeline(CollectiveEnd, Generic[T]):
    """Iterates (batch, staged) with `depth` batches fetched ahead. Collective: all ranks iterate in step.

    Args:
        comm: the communicator.
        embeddings: the model's embedding layers in call order, built.
        batches: this rank's batches. Ranks may have different numbers of them.
        inputs_of: a batch -> its Inputs.
        empty: makes a zero-row batch, for ranks that ran dry before the others.
        depth: batches whose rows are fetched ahead, 1 .. 8.

    Raises:
        ValueError: depth out of range.
        PipelineError: (while iterating) a stage failed; on all ranks, where the failure was one of data or cache.
    """

    def __init__(
        self,
        comm: Comm,
        embeddings: Sequence[MixCacheEmbedding],
        batches: Iterator[T],
        inputs_of: Callable[[T], Inputs],
        empty: Callable[[], T],
        depth: int,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"pipeline depth must be 1 .. {MAX_DEPTH}, received {depth}")
        self._comm, self._batches, self._inputs_of, self._empty = comm, batches, inputs_of, empty
        self._embeddings = list(embeddings)
        self._groups = [group for layer in embeddings for group in layer.sharded.groups]
        self._depth = self._permits = depth
        # Batches that are exchanged before the first of them is loaded, itself included.
        self._window = max([1, *(group.window for group in self._groups)])
        # One lock for all that the three threads share; whoever changes something wakes the others.
        self._shared = threading.Condition()
        self._loaded: deque[_Prepared[T] | _Failure | None] = deque()
        self._ready: deque[tuple[T, list[Staged]] | _Failure | None] = deque()
        self._sent = tf.zeros([0], tf.int64)  # in place of keys that need not be kept
        self._begun = 0  # key exchanges
        self._frozen = False  # closing: no further exchange begins until the ranks have agreed on how many there are
        self._limit: int | None = None  # closing: exchanges in all
        self._finished = False
        self.waited_seconds = {"Data-Loader": 0.0, "Host-Manager": 0.0, "GPU-Worker": 0.0}
        self._threads = [
            threading.Thread(target=self._guard, args=(stage, run), name=f"hvd_ctr {stage}", daemon=True)
            for stage, run in (("Data-Loader", self._load), ("Host-Manager", self._manage))
        ]
        for thread in self._threads:
            thread.start()

    # ---- caller ----

    def __iter__(self) -> Iterator[tuple[T, list[Staged]]]:
        while not self._finished:
            item = self._take_ready()
            if item is None:
                self._finished = True
                self._join()
                return
            yield item

    def abandon(self) -> None:
        """Tells the threads to end, and waits for nothing: after an exception the ranks are no longer in step, and
        the process is to end. Pinned rows stay pinned.
        """
        self._finished = True
        with self._shared:
            self._limit = self._begun
            self._shared.notify_all()

    def close(self) -> None:
        """Ends the pipeline: at once after its last batch, else after the exchanges that some rank has begun.
        Collective.

        Raises:
            PipelineError: a stage failed meanwhile.
        """
        if self._finished:
            return
        self._finished = True
        with self._shared:
            self._frozen = True
            begun = self._begun
        limit = max(self._comm.allgather_object(begun))
        with self._shared:
            self._limit = limit
            self._shared.notify_all()
        while (item := self._take_ready()) is not None:
            self._release(item[1])
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _take_ready(self) -> tuple[T, list[Staged]] | None:
        """The next batch, and a permit for one more; None at the end."""
        with self._shared:
            self._wait("GPU-Worker", lambda: self._ready)
            item = self._ready.popleft()
            self._permits += 1
            self._shared.notify_all()
        if isinstance(item, _Failure):
            self._finished = True
            raise PipelineError(f"{item.stage}: {_message(item.error)}") from item.error
        return item

    # ---- stages ----

    def _guard(self, stage: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # whatever it is, it must end the run and not just a thread
            if stage == "Data-Loader":
                self._put_loaded(_Failure(stage, error))
                return
            with self._shared:
                self._limit = self._begun
                self._ready.append(_Failure(stage, error))
                self._shared.notify_all()

    def _wait(self, stage: str, condition: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        stage_clock.call("waiting", self._shared.wait_for, condition)
        self.waited_seconds[stage] += time.perf_counter() - begin

    def _done(self) -> bool:
        """All exchanges are made that there will be."""
        return self._limit is not None and self._begun >= self._limit

    def _put_loaded(self, item: _Prepared[T] | _Failure | None) -> bool:
        """False: nobody wants it any more."""
        with self._shared:
            self._wait("Data-Loader", lambda: len(self._loaded) < self._depth or self._done())
            self._loaded.append(item)
            self._shared.notify_all()
            return not self._done()

    def _load(self) -> None:
        for batch in stage_clock.iterate("read", self._batches):
            if not self._put_loaded(self._prepare(batch, self._inputs_of(batch))):
                return
        self._put_loaded(None)

    def _prepare(self, batch: T, inputs: Inputs) -> _Prepared[T]:
        groups: list[PreparedIds] = []
        for layer, layer_inputs in zip(self._embeddings, inputs.layers, strict=True):
            groups += layer.prepare(layer_inputs, inputs.facts)
        return _Prepared(batch, groups)

    def _manage(self) -> None:
        if self._load_rows():
            self._finish_exchanges()
        for group in self._groups:
            group.end_announcements()
        with self._shared:
            self._limit = self._begun
            self._ready.append(None)
            self._shared.notify_all()

    def _load_rows(self) -> bool:
        """Until the data has ended on all ranks, or, True, the pipeline is being closed."""
        exchanged: deque[_Exchanged[T]] = deque()
        while True:
            while len(exchanged) < self._window:
                if not self._begin_exchange():
                    return True
                exchanged.append(self._exchange())
                self._announce(exchanged[-1])
            if not self._take_permit():
                return True
            item = exchanged.popleft()
            staged = [
                Staged(prepared._replace(send=self._sent), group.prefetch(received))
                for group, prepared, received in zip(self._groups, item.prepared.groups, item.received, strict=True)
            ]
            if not int(staged[0].prefetched.active_ranks):
                self._release(staged)
                return False
            with self._shared:
                self._ready.append((item.prepared.batch, staged))
                self._shared.notify_all()

    def _exchange(self) -> _Exchanged[T]:
        prepared = self._next_prepared()
        received = [group.input_dist(ids) for group, ids in zip(self._groups, prepared.groups, strict=True)]
        return _Exchanged(prepared, received)

    def _announce(self, item: _Exchanged[T]) -> None:
        for group, received in zip(self._groups, item.received, strict=True):
            if group.window > 1:
                group.announce(received)

    def _release(self, staged: Sequence[Staged]) -> None:
        for group, stage in zip(self._groups, staged, strict=True):
            group.release(stage.prefetched)

    def _closing(self) -> bool:
        return self._frozen or self._limit is not None

    def _begin_exchange(self) -> bool:
        """Waits for a batch; False when the pipeline is being closed."""
        with self._shared:
            self._wait("Host-Manager", lambda: self._loaded or self._closing())
            if self._closing():
                return False
            self._begun += 1
            return True

    def _take_permit(self) -> bool:
        """Waits until the rows of one more batch may be loaded; False when the pipeline is being closed."""
        with self._shared:
            self._wait("Host-Manager", lambda: self._permits > 0 or self._closing())
            if self._closing():
                return False
            self._permits -= 1
            return True

    def _finish_exchanges(self) -> None:
        """Closing: makes the exchanges that some rank has begun."""
        while True:
            with self._shared:
                self._wait("Host-Manager", lambda: self._limit is not None and (self._loaded or self._done()))
                if self._done():
                    return
                self._begun += 1
            self._exchange()

    def _next_prepared(self) -> _Prepared[T]:
        """The loaded batch, or the stand-in of a rank whose data has ended or whose Data-Loader failed (kept for
        ever).
        """
        item = self._loaded[0]
        if item is None:
            return self._stand_in("")
        if isinstance(item, _Failure):
            return self._stand_in(f"{item.stage} failed on rank {self._comm.rank}: {_message(item.error)}")
        with self._shared:
            self._loaded.popleft()
            self._shared.notify_all()
        return item

    def _stand_in(self, error: str) -> _Prepared[T]:
        batch = self._empty()
        facts = BatchFacts(np.int64(_ENDED), np.float64(0.0), error)
        return self._prepare(batch, Inputs(self._inputs_of(batch).layers, facts))


def tensor_specs(structure: Any) -> Any:
    """Specs of a structure of tensors with the first dimension left open: one trace serves every batch."""

    def spec(tensor: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)

    return tf.nest.map_structure(spec, structure)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {getattr(error, 'message', None) or error}"
