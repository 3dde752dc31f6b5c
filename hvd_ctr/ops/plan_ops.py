"""The memory of a MixCache that is not there yet, and of the exchange between the ranks of one host.

plan_memory(spec, MemoryDemand(rows=[10**8], received=50_000, unique=40_000)).host_bytes
plan_shared_memory(ranks, Messages(rows=[400_000], sums=[2_000_000]))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvd_ctr.ops import native
from hvd_ctr.ops.mix_cache_ops import EVICTION_POLICIES, HOST_KINDS, OPTIMIZERS, ROW_TYPES, MixCacheSpec

tf.no_gradient("HvdCtrPlanMemory")
tf.no_gradient("HvdCtrPlanSharedMemory")


@dataclasses.dataclass(frozen=True)
class MemoryDemand:
    """What one rank meets, for `plan_memory`; the fields are those of MemoryDemand in tf_ops/core/memory_plan.h.

    Attributes:
        rows: (T) rows of each table that exist on this rank.
        received: R of a full batch, keys; so are the next two.
        unique: K.
        evictions: E.
        tickets: batches in flight.
        coming: lookahead: keys of the announced batches.
        counted: freq: keys with counts.
        read: keys of one call outside training: R of an evaluated batch, ids of a chunk of counts.
        appended: records written to the file so far; 0: each row once.
    """

    rows: Sequence[int]
    received: int = 0
    unique: int = 0
    evictions: int = 0
    tickets: int = 1
    coming: int = 0
    counted: int = 0
    read: int = 0
    appended: int = 0


class PlannedMemory(NamedTuple):
    """Result of `plan_memory`: bytes unless named otherwise; see MemoryPlan in tf_ops/core/memory_plan.h. `sum_bytes`
    are in the device's memory beside `device_bytes`, the records; with the CPU backend they are in `batch_bytes`.
    """

    device_bytes: int
    record_bytes: int
    index_bytes: int
    buffer_bytes: int
    slot_bytes: int
    batch_bytes: int
    sum_bytes: int
    cached_rows: int
    disk_bytes: int
    disk_row_bytes: int
    least_ram_bytes: int
    needed_ram_bytes: int
    record_floats: int

    @property
    def host_bytes(self) -> int:
        """TOTAL_COUNTERS' host_bytes."""
        return self.record_bytes + self.index_bytes + self.buffer_bytes + self.slot_bytes + self.batch_bytes


def plan_memory(spec: MixCacheSpec, demand: MemoryDemand, on_gpu: bool = False) -> PlannedMemory:
    """The memory of the cache that `create(spec)` would make, once it has met the demand; on_gpu: on a GPU. Makes no
    cache, and needs no GPU.

    Raises:
        ValueError: fields that do not fit together.
    """
    optimizers = [table.optimizer for table in spec.tables]
    rows, *fields = dataclasses.astuple(demand)
    with tf.init_scope():
        try:
            plan = native.ops().hvd_ctr_plan_memory(
                rows=tf.constant(list(rows), tf.int64),
                demand=tf.constant(fields, tf.int64),
                dim=spec.dim,
                slots=spec.slots,
                row_type=ROW_TYPES[spec.row_dtype],
                policy=EVICTION_POLICIES[spec.policy],
                optimizer_kinds=[OPTIMIZERS[optimizer.kind] for optimizer in optimizers],
                row_steps=[optimizer.bias_correction == "row" for optimizer in optimizers],
                host_kind=HOST_KINDS[spec.host.kind],
                host_ram_bytes=spec.host.ram_bytes or 0,
                on_gpu=on_gpu,
            )
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(error.message) from error
    return PlannedMemory(*np.asarray(plan).tolist())


@dataclasses.dataclass(frozen=True)
class Messages:
    """What a rank brings to the collectives of a run, by the names that they are called under: bytes of one call each.

    Attributes:
        rows: of an alltoall or allgather, for other ranks.
        sums: of an allreduce.
        once: of an alltoall or allgather that is called once only.
    """

    rows: Sequence[float] = ()
    sums: Sequence[float] = ()
    once: Sequence[float] = ()

    def __add__(self, other: Messages) -> Messages:
        return Messages([*self.rows, *other.rows], [*self.sums, *other.sums], [*self.once, *other.once])


def plan_shared_memory(ranks: int, messages: Messages) -> int:
    """Bytes of its own that a rank shares with the others of its host, where collectives travel over shared memory
    (tf_ops/core/shared_group.h): two slots for each name, with a quarter of room.
    """
    with tf.init_scope():
        planned = native.ops().hvd_ctr_plan_shared_memory(
            messages=tf.constant([round(size) for size in [*messages.rows, *messages.rows, *messages.once]], tf.int64),
            sums=tf.constant([round(size) for size in messages.sums], tf.int64),
            ranks=ranks,
        )
    return int(planned)
