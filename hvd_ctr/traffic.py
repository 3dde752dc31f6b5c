"""Counters of what the collectives of this process move between the ranks: the one place that says what they mean.

Per kind (`KINDS`), since the start of the process, as `Comm.traffic()` returns them:

* `calls`: collectives that took part, one per operation on all ranks together.
* `sent_bytes`: payload that this rank sends to other ranks; what a rank keeps for itself does not count, nor do headers
  of the transport. Of an alltoall: the rows for the others. Of an allgather: this rank's part, once per other rank. Of
  an allreduce of n bytes: 2 (W - 1) / W n, rounded down, what the bandwidth-optimal algorithm makes each rank send. Of
  a broadcast: n bytes per other rank, at the root.
* `received_bytes`: the same seen from the other side. Summed over the ranks both are equal.

Without other ranks all are zero. The exchanges that need to know sizes first (allgather, allreduce) move a table of W
int32 per rank for it, which counts with its kind.

A collective runs inside a tf.function, where Python only sees the trace: the counters are TensorFlow variables, and the
additions are operations of the graph, so each execution counts, from any thread.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tensorflow as tf

Tensor = Any

#: keys: training's key exchange. rows: training's rows from their owners. gradients: gradients of rows to their owners.
#: dense: gradients of the dense weights. read: keys and rows of evaluation, prediction and get_rows. other: metrics,
#: objects, weights at the start, and whatever names no kind.
KINDS = ("keys", "rows", "gradients", "dense", "read", "other")
COUNTERS = ("calls", "sent_bytes", "received_bytes")


class Traffic:
    """One counter (3) int64 per kind, in the order of COUNTERS."""

    def __init__(self) -> None:
        self._counters: dict[str, tf.Variable] = {}
        self._lock = threading.Lock()

    def count(self, kind: str, sent: Tensor, received: Tensor) -> None:
        """Adds one call with `sent` and `received` bytes, integer scalars. In a graph: as an operation of it.

        Raises:
            ValueError: no such kind.
        """
        change = tf.stack([tf.constant(1, tf.int64), tf.cast(sent, tf.int64), tf.cast(received, tf.int64)])
        self._counter(kind).assign_add(change, read_value=False)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{kind: {counter: value}} for all kinds. Eager only."""
        found: dict[str, dict[str, int]] = {}
        for kind in KINDS:
            with self._lock:
                counter = self._counters.get(kind)
            values = np.zeros(3, np.int64) if counter is None else counter.numpy()
            found[kind] = dict(zip(COUNTERS, values.tolist(), strict=True))
        return found

    def _counter(self, kind: str) -> tf.Variable:
        if kind not in KINDS:
            raise ValueError(f"no kind of traffic is called {kind!r}; allowed: {', '.join(KINDS)}")
        with self._lock:
            if kind not in self._counters:
                with tf.init_scope(), tf.device("CPU:0"):
                    self._counters[kind] = tf.Variable(np.zeros(3, np.int64), trainable=False, name=f"traffic_{kind}")
            return self._counters[kind]
