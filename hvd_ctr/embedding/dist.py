"""The three exchanges of a step: keys to their owners, rows back, gradients to the owners (TorchRec's input_dist,
output_dist).

Shapes: U unique keys of the local batch, R keys received from all W ranks, D floats per row. Every rank calls each
function in every step, with zero rows where it has nothing, so none ever waits for a rank that has gone its own way.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.ops import mix_cache_ops

Tensor = Any


def input_dist(comm: Comm, send: Tensor, send_splits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Key exchange: messages for all peers -> messages from all peers.

    Args:
        comm: the communicator.
        send: (sum of send_splits) int64, the messages of `prepare` (header and keys per peer).
        send_splits: (W) int32, words per peer.
        name: collective name, unique among those in flight.

    Returns:
        Received words int64 and their splits (W) int32.
    """
    return comm.alltoall(send, send_splits, f"{name}.keys")


def output_dist(comm: Comm, rows: Tensor, send_splits: Tensor, expected_splits: Tensor, name: str) -> Tensor:
    """Row exchange: the owner's answers (R, D) -> the rows this rank asked for (U, D), in owner order.

    An owner that failed answers with an encoded error, which is raised here on all ranks alike.

    Raises:
        tf.errors.OpError: the error of the lowest failing owner (cache too small, ...).
    """
    received, received_splits = comm.alltoall(rows, send_splits, f"{name}.rows")
    return mix_cache_ops.check_rows(received, received_splits, expected_splits)


def reverse_output_dist(comm: Comm, d_rows: Tensor, row_splits: Tensor, name: str) -> Tensor:
    """Gradient exchange: gradients of the rows asked for (U, D) -> gradients at the owner (R, D), in the order of
    the requests.
    """
    gradients, _ = comm.alltoall(tf.convert_to_tensor(d_rows), row_splits, f"{name}.gradients")
    return gradients
