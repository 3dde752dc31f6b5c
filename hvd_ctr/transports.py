"""How collectives travel: over Horovod, or, between the ranks of one host, over shared memory.

Both move the same bits under the same names, and both end a rank that waits for one that does not come. Horovod's
threads agree on every collective in rounds, and those that wait take a part of the cores that the training step needs;
shared memory needs neither rounds nor threads that spin.

Rows and gradients that are on a GPU travel through Horovod's NCCL where it has that, see `for_gpu`; where not,
TensorFlow copies them to the host and back, and they travel like all others.

The methods work on graph tensors only. Their inputs must not be constants (`collective_inputs.opaque_zeros`).
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ctr.ops import placement, shared_memory_ops

#: auto: shared memory where all ranks are on one host and it works, else Horovod.
TRANSPORTS = ("auto", "horovod", "shared_memory")
TRANSPORT_VARIABLE = "HVD_CTR_TRANSPORT"

# How long a rank looks for the others before it sleeps, where it has a core of its own: at B=256, where a step takes a
# millisecond, steps are a seventh faster than with none, and longer times change nothing.
_SPIN_SECONDS = 0.0005

_SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)


def wanted() -> str:
    """The transport that the environment asks for.

    Raises:
        ValueError: HVD_CTR_TRANSPORT is none of TRANSPORTS.
    """
    name = os.environ.get(TRANSPORT_VARIABLE, "auto")
    if name not in TRANSPORTS:
        raise ValueError(f"{TRANSPORT_VARIABLE} must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return name


class Transport(abc.ABC):
    """The collectives that training needs, as operations of a graph."""

    #: For the line that rank 0 logs at the start.
    name: str

    @abc.abstractmethod
    def alltoall(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """`splits[p]` consecutive rows to every rank p; returns received rows and their splits (W) int32."""

    @abc.abstractmethod
    def allgather(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """The rows of all ranks."""

    @abc.abstractmethod
    def allreduce(self, group: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums tensors of one dtype over the ranks."""

    @abc.abstractmethod
    def broadcast(self, value: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """The bits of the tensor of rank `root`, which all ranks pass in the same shape."""


class HorovodTransport(Transport):
    """Over Horovod.

    Args:
        hvd: the initialised module horovod.tensorflow.
        on_gpu: for tensors on the rank's GPU, over NCCL; else for tensors in host memory, over MPI or Gloo.
    """

    def __init__(self, hvd: Any, on_gpu: bool = False) -> None:
        self._hvd = hvd
        self._device = placement.on_rows_device if on_gpu else placement.on_host
        self.name = f"Horovod over {'NCCL' if on_gpu else 'MPI' if hvd.mpi_enabled() else 'Gloo'}"

    def alltoall(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        with self._device():
            received: tuple[tf.Tensor, tf.Tensor] = self._hvd.alltoall(
                rows, splits=splits, name=name, ignore_name_scope=True
            )
        return received

    def allgather(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        with self._device():
            return self._hvd.allgather(rows, name=name, ignore_name_scope=True)

    def allreduce(self, group: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        with self._device():
            return list(self._hvd.grouped_allreduce(list(group), op=self._hvd.Sum, name=name, ignore_name_scope=True))

    def broadcast(self, value: tf.Tensor, root: int, name: str) -> tf.Tensor:
        if value.dtype == tf.bool or value.dtype.size == 1:
            return self._hvd.broadcast(value, root, name=name, ignore_name_scope=True)
        # As bytes: Horovod knows no bfloat16 and no unsigned integers (the seeds of Keras are uint32 in some versions).
        received = self._hvd.broadcast(tf.bitcast(value, tf.uint8), root, name=name, ignore_name_scope=True)
        return tf.bitcast(tf.ensure_shape(received, [*value.shape, value.dtype.size]), value.dtype)


class SharedMemoryTransport(Transport):
    """Over memory that the ranks of this host share. Sums of dtypes it does not know go to `other`."""

    name = "shared memory"

    def __init__(self, rank: int, other: Transport) -> None:
        """`rank`: of this process; `connect` has succeeded on all ranks."""
        self._rank = rank
        self._other = other

    def alltoall(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        with placement.on_host():
            return shared_memory_ops.alltoall(rows, splits, name)

    def allgather(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        with placement.on_host():
            return shared_memory_ops.allgather(rows, name)

    def allreduce(self, group: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        if group[0].dtype not in _SUMMED:
            return self._other.allreduce(group, name)
        with placement.on_host():
            return shared_memory_ops.allreduce(group, name)

    def broadcast(self, value: tf.Tensor, root: int, name: str) -> tf.Tensor:
        # Everybody gathers what the root alone brings.
        with placement.on_host():
            rows = tf.reshape(value, [-1])[: None if self._rank == root else 0]
            return tf.reshape(shared_memory_ops.allgather(rows, name), tf.shape(value))


def for_gpu(hvd: Any, allgather_object: Callable[[Any], list[Any]]) -> Transport | None:
    """What carries tensors that are on the ranks' GPUs; None: no rows are there, or Horovod was built without NCCL.
    Collective, over `allgather_object`, on ranks that all have a GPU.

    Raises:
        RuntimeError: on all ranks with the same text: they were installed differently.
    """
    built = allgather_object([bool(hvd.nccl_built()), placement.rows_on_gpu()])
    has = [
        f"Horovod {'with' if nccl else 'without'} NCCL and an op library {'with' if cuda else 'without'} CUDA"
        for nccl, cuda in built
    ]
    for rank, mine in enumerate(has):
        if mine != has[0]:
            raise RuntimeError(
                f"rank 0 has {has[0]}, rank {rank} has {mine}: they would wait for each other; set up all hosts alike "
                "(HVD_CTR_GPU=1 ./launch/setup.sh)"
            )
    return HorovodTransport(hvd, on_gpu=True) if all(built[0]) else None


def connect(rank: int, size: int, allgather_object: Callable[[Any], list[Any]]) -> str:
    """Sets up the shared memory between all ranks, with the stall times of the environment. Collective, over
    `allgather_object`.

    Returns:
        An empty string, or, the same on all ranks, why it is not possible.
    """
    try:
        mine: Any = shared_memory_ops.create(
            rank,
            size,
            float(os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]),
            float(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]),
            _SPIN_SECONDS if size <= (os.cpu_count() or 1) else 0.0,
        )
    except (tf.errors.OpError, ImportError) as error:
        mine = f"rank {rank}: {getattr(error, 'message', None) or error}"
    addresses = allgather_object(mine)
    failures = [address for address in addresses if isinstance(address, str)]
    if not failures:
        reason = shared_memory_ops.connect(addresses)
        failures = [text for text in allgather_object(f"rank {rank}: {reason}" if reason else "") if text]
    return failures[0] if failures else ""
