"""StepContext: what one step's embedding lookups leave behind for its backward half.

Tables are not TensorFlow variables: gradients stop at the looked-up rows (U, D). The train step opens a context around
the forward pass; each embedding call inside it watches its rows on the step's tape and records how to send their
gradients back. Without a context a lookup only reads (evaluation, prediction, a bare model call).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvd_ctr.embedding.sharded_embedding import BatchFacts, Rows, Staged, TableGroup
from hvd_ctr.ops.id_ops import PreparedIds
from hvd_ctr.ops.mix_cache_ops import Prefetched

Tensor = Any
_active = threading.local()


@dataclasses.dataclass(frozen=True)
class _Lookup:
    group: TableGroup
    prepared: PreparedIds
    prefetched: Prefetched
    rows: Tensor
    trainable: bool


class StepContext:
    """Collects the lookups of one training step.

    Args:
        tape: the step's tape; rows are watched on it.
        facts: this rank's batch, told to all ranks with the keys.
        staged: what a pipeline did for this batch beforehand, by group; empty: the step does it.
    """

    def __init__(
        self, tape: tf.GradientTape, facts: BatchFacts, staged: Mapping[TableGroup, Staged] | None = None
    ) -> None:
        self._tape = tape
        self.facts = facts
        self._staged = staged or {}
        self._lookups: list[_Lookup] = []

    def __enter__(self) -> StepContext:
        if current() is not None:
            raise RuntimeError(
                "a StepContext is already open on this thread; one train step may not run inside another"
            )
        _active.context = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.context = None

    def prepared(self, group: TableGroup) -> PreparedIds | None:
        """What a pipeline prepared for the group's lookup, or None without a pipeline."""
        return self._staged[group].prepared if group in self._staged else None

    def lookup(self, group: TableGroup, prepared: PreparedIds, trainable: bool) -> Rows:
        """Prefetches (unless a pipeline has), looks up and watches the rows of one group.

        Raises:
            ValueError: the group was looked up before in this step: its rows would be updated twice.
        """
        if any(known.group is group for known in self._lookups):
            raise ValueError(
                f"embedding {group.name!r} is called twice in one step, which would apply its row optimizer twice; "
                "list all features that share its tables in one MixCacheEmbedding and call it once"
            )
        if group in self._staged:
            prefetched = self._staged[group].prefetched
        else:
            prefetched = group.prefetch(group.input_dist(prepared))
        rows = group.lookup(prepared, prefetched)
        self._tape.watch(rows.rows)
        self._lookups.append(_Lookup(group, prepared, prefetched, rows.rows, trainable))
        return rows

    @property
    def watched_rows(self) -> list[Tensor]:
        """Rows (U, D) of every lookup, in call order: what to ask the tape's gradient for."""
        return [lookup.rows for lookup in self._lookups]

    @property
    def totals(self) -> tuple[Tensor, Tensor] | None:
        """(global rows int64, global weight float64) over all ranks, or None when no embedding was called."""
        if not self._lookups:
            return None
        prefetched = self._lookups[0].prefetched
        return prefetched.global_rows, prefetched.global_weight

    def backward(self, gradients: list[Tensor], learning_rate_scale: Tensor) -> None:
        """Sends the gradients (one per watched_rows; None: unused) to the owners and ends every ticket."""
        for lookup, gradient in zip(self._lookups, gradients, strict=True):
            if not lookup.trainable:
                lookup.group.release(lookup.prefetched)
                continue
            if gradient is None:
                gradient = tf.zeros_like(lookup.rows)
            lookup.group.backward(lookup.prepared, lookup.prefetched, gradient, learning_rate_scale)


def current() -> StepContext | None:
    """The context open on this thread, if any."""
    return getattr(_active, "context", None)
