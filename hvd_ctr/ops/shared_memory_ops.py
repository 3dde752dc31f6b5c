"""Collectives between the ranks of one host over shared memory; see tf_ops/core/shared_group.h.

The op functions are not stateful: on constant inputs TensorFlow would run them once and keep the answer, so callers
pass what it cannot take for constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ctr.ops import native

Tensor = Any


def create(rank: int, size: int, warn_seconds: float, fail_seconds: float, spin_seconds: float) -> list[int]:
    """Makes this process' part of the memory, once per process. A rank waits at most `fail_seconds` in a collective,
    says so after `warn_seconds`, and looks for the others for `spin_seconds` before it sleeps.

    Returns:
        its address, three integers for `connect`.

    Raises:
        tf.errors.OpError: the system has no such memory; or it was made before.
    """
    address = native.ops().hvd_ctr_shared_group_create(
        rank=rank, size=size, warn_seconds=warn_seconds, fail_seconds=fail_seconds, spin_seconds=spin_seconds
    )
    return [int(number) for number in address.numpy()]


def connect(addresses: Sequence[Sequence[int]]) -> str:
    """Finds the memory of all ranks, by their addresses in order. Returns an empty string, or why it cannot."""
    error = native.ops().hvd_ctr_shared_group_connect(addresses=tf.constant(np.array(addresses, np.int64)))
    return str(error.numpy().decode(errors="replace"))


def alltoall(rows: Tensor, splits: Tensor, channel: str) -> tuple[Tensor, Tensor]:
    """Sends `splits[p]` consecutive rows of `(n, ...)` to every rank p; splits (W) int32.

    Returns:
        The received rows in the order of the sending ranks, and how many came from each (W) int32.

    Raises:
        tf.errors.InvalidArgumentError: splits that are not one per rank or do not sum to n; or another rank sends rows
        of another width. tf.errors.DataLossError: a rank has ended or does not come.
    """
    received = native.ops().hvd_ctr_shared_alltoall(rows=rows, splits=splits, channel=channel)
    return received.received, received.received_splits


def allgather(rows: Tensor, channel: str) -> Tensor:
    """The rows `(n, ...)` of all ranks in their order; n may differ. Errors as of `alltoall`."""
    return native.ops().hvd_ctr_shared_allgather(rows=rows, channel=channel)


def allreduce(values: Sequence[Tensor], channel: str) -> list[Tensor]:
    """Sums over the ranks, in the order of the ranks; float32, float64, int32 or int64, all of one dtype. Errors as of
    `alltoall`.
    """
    return list(native.ops().hvd_ctr_shared_allreduce(values=list(values), channel=channel))


# hvd_ctr/comm.py gives alltoall its gradient, the reverse exchange under a name of its own.
for _name in ("GroupCreate", "GroupConnect", "Alltoall", "Allgather", "Allreduce"):
    tf.no_gradient(f"HvdCtrShared{_name}")
