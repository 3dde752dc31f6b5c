"""The three exchanges of a step: keys to their owners, rows back, gradients to the owners (TorchRec's input_dist,
output_dist), in three modes that move the same bits by different collectives:

    exchange = row_exchange("alltoall", comm)
    words, splits = exchange.input_dist(prepared.send, prepared.send_splits, name)
    rows = exchange.output_dist(answers, send_splits, prepared.row_splits, name)
    gradients = exchange.reverse_output_dist(d_rows, prepared.row_splits, name)

Shapes: U unique keys of the local batch, R keys received from all W ranks, D floats per row. Every rank calls each of
them in every step, with zero rows where it has nothing, so none ever waits for a rank that has gone its own way. An
owner that failed answers with another number of rows than it was asked for; the modes that must know all sizes
therefore exchange the sizes that are really sent, not those that were asked for.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_ctr.collective_inputs import match_rows
from hvd_ctr.comm import Comm
from hvd_ctr.ops import mix_cache_ops, placement, stage_ops

Tensor = Any


class RowExchange(abc.ABC):
    """Moves parts of a tensor from every rank to every rank. Works in a tf.function and eagerly, from any thread; all
    ranks make the same calls in the same order per thread.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._traces: dict[tuple[str, str], Any] = {}

    @abc.abstractmethod
    def exchange(self, tensor: Tensor, splits: Tensor, name: str, kind: str) -> tuple[Tensor, Tensor]:
        """Sends `splits[p]` consecutive rows to every rank p, bit for bit.

        Args:
            tensor: (n, ...) int64 or float32.
            splits: (W) int32, sum n.
            name: collective name, unique among those in flight.
            kind: what it counts as, see hvd_ctr/traffic.py.

        Returns:
            The received rows in the order of the sending ranks, and how many came from each (W) int32.
        """

    def input_dist(self, send: Tensor, send_splits: Tensor, name: str, kind: str = "keys") -> tuple[Tensor, Tensor]:
        """Key exchange: messages for all peers -> messages from all peers.

        Args:
            send: (sum of send_splits) int64, the messages of `prepare` (header and keys per peer).
            send_splits: (W) int32, words per peer.
            name: collective name, unique among those in flight.
            kind: what it counts as.

        Returns:
            Received words int64 and their splits (W) int32.
        """
        exchange = self._key_exchange(name, kind)
        with placement.on_host():
            words, splits = stage_ops.timed("key exchange", send, lambda words: exchange(words, send_splits))
        return words, splits

    def _key_exchange(self, name: str, kind: str) -> Any:
        """`exchange` of int64 words; for eager calls traced once, as the checks and counts around the exchange take
        longer than the exchange when they run one by one.
        """

        def exchange(words: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
            return self.exchange(words, splits, f"{name}.keys", kind)

        if not tf.executing_eagerly():
            return exchange
        if (name, kind) not in self._traces:
            specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([self._comm.size], tf.int32)]
            function = tf.function(exchange, input_signature=specs, autograph=False)
            self._traces[name, kind] = function.get_concrete_function()
        return self._traces[name, kind]

    def output_dist(
        self, rows: Tensor, send_splits: Tensor, expected_splits: Tensor, name: str, kind: str = "rows"
    ) -> Tensor:
        """Row exchange: the owner's answers (R, D) -> the rows this rank asked for (U, D), in owner order.

        An owner that failed answers with an encoded error, which is raised here on all ranks alike.

        Raises:
            tf.errors.OpError: the error of the lowest failing owner (cache too small, ...).
        """
        received, received_splits = stage_ops.timed(
            "row exchange", rows, lambda answers: self.exchange(answers, send_splits, f"{name}.rows", kind)
        )
        return mix_cache_ops.check_rows(received, received_splits, expected_splits)

    def reverse_output_dist(self, d_rows: Tensor, row_splits: Tensor, name: str) -> Tensor:
        """Gradient exchange: gradients of the rows asked for (U, D) -> gradients at the owner (R, D), in the order of
        the requests. The owner adds them up, in the same order in every mode.
        """
        return stage_ops.timed(
            "gradient exchange",
            tf.convert_to_tensor(d_rows),
            lambda gradients: self.exchange(gradients, row_splits, f"{name}.gradients", "gradients"),
        )[0]


class AllToAllExchange(RowExchange):
    """One alltoall: every rank gets its part only. The least traffic in all but small jobs."""

    def exchange(self, tensor: Tensor, splits: Tensor, name: str, kind: str) -> tuple[Tensor, Tensor]:
        return self._comm.alltoall(tensor, splits, name, kind)


class _Sizes(NamedTuple):
    """Rows from every rank (first axis) to every rank (second), (W, W) int32, and where they begin when all of them
    stand one after another, ordered by sender and, within it, by receiver; or the other way round.
    """

    rows: Tensor
    begin_by_sender: Tensor
    begin_by_receiver: Tensor


class AllGatherExchange(RowExchange):
    """Every rank gathers what all ranks send, and takes its part (the ids of ScaleFreeCTR). Gradients stop here."""

    def exchange(self, tensor: Tensor, splits: Tensor, name: str, kind: str) -> tuple[Tensor, Tensor]:
        tensor = match_rows(tensor, splits, name)
        sizes = self._sizes(splits, name, kind)
        everything = self._comm.allgather(tensor, name, kind)
        begins, mine = sizes.begin_by_sender[:, self._comm.rank], sizes.rows[:, self._comm.rank]
        received = tf.gather(everything, tf.ragged.range(begins, begins + mine).values)
        return tf.ensure_shape(received, [None, *tensor.shape[1:]]), mine

    def _sizes(self, splits: Tensor, name: str, kind: str) -> _Sizes:
        ranks = self._comm.size
        splits = tf.ensure_shape(splits, [ranks])
        rows = tf.ensure_shape(self._comm.allgather(splits[tf.newaxis], f"{name}_sizes", kind), [None, ranks])
        rows = tf.reshape(rows, [ranks, ranks])
        return _Sizes(rows, _begins(rows), tf.transpose(_begins(tf.transpose(rows))))


class AllReduceExchange(AllGatherExchange):
    """The masked allreduce of ScaleFreeCTR's public implementation: every rank puts the rows it sends into a buffer for
    the rows of all ranks that is zero elsewhere, the buffers are summed, and each rank takes its part. Keys travel by
    allgather. Gradients stop here.

    The sum is one of int32 bit patterns, of which at most one is not zero: it changes no bit, neither of -0.0 (which
    float32 would make +0.0) nor of a NaN's payload, and it is never fused with the dense gradients' sum.
    """

    def exchange(self, tensor: Tensor, splits: Tensor, name: str, kind: str) -> tuple[Tensor, Tensor]:
        if tensor.dtype != tf.float32:
            return super().exchange(tensor, splits, name, kind)
        tensor = match_rows(tensor, splits, name)
        sizes, rank = self._sizes(splits, name, kind), self._comm.rank
        begins = sizes.begin_by_receiver[rank]
        places = tf.ragged.range(begins, begins + splits).values
        shape = tf.concat([tf.reduce_sum(sizes.rows)[tf.newaxis], tf.shape(tensor)[1:]], 0)
        buffer = tf.scatter_nd(places[:, tf.newaxis], tf.bitcast(tensor, tf.int32), shape)
        total = self._comm.allreduce_sum([buffer], f"{name}_sum", kind)[0]
        mine = sizes.rows[:, rank]
        begin = sizes.begin_by_receiver[0, rank]
        received = tf.bitcast(total[begin : begin + tf.reduce_sum(mine)], tf.float32)
        return tf.ensure_shape(received, [None, *tensor.shape[1:]]), mine


def _begins(rows: Tensor) -> Tensor:
    """Where each entry's rows begin when the entries (W, W) stand one after another, row by row."""
    return tf.reshape(tf.cumsum(tf.reshape(rows, [-1]), exclusive=True), tf.shape(rows))


_MODES: dict[str, type[RowExchange]] = {
    "alltoall": AllToAllExchange,
    "allgather": AllGatherExchange,
    "allreduce": AllReduceExchange,
}


def row_exchange(mode: str, comm: Comm) -> RowExchange:
    """The exchange of a mode: alltoall, allgather or allreduce.

    Raises:
        ValueError: another mode.
    """
    if mode not in _MODES:
        raise ValueError(f"exchange: received {mode!r}; allowed: {', '.join(_MODES)}")
    return _MODES[mode](comm)
