"""Ops on a MixCache, the device/host cache of the embedding rows that this rank owns.

    handle = create(MixCacheSpec(...))                      # freed with the last reference to the handle
    ticket, ... = prefetch(handle, words, word_splits)      # plan, write back, load, pin
    rows, splits = lookup(handle, ticket, dim)              # (R, D) for the peers; they pass it through check_rows
    step = apply(handle, ticket, gradients, 1.0)            # sum, update, unpin

All ops run eagerly and inside a tf.function; there they are stateful, so they run once each and in program order. A
ticket ends with `apply` or `release`; a second use raises FailedPreconditionError naming it.

Shapes: W ranks, R keys received from all ranks, U keys of the local batch, D embedding dim, T tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr.config import HostConfig, TableConfig
from hvd_ctr.ops import native

Tensor = Any

# Numbers of the enums in tf_ops/core/options.h and row_type.h; stored in checkpoints, never renumber.
OPTIMIZERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "ftrl": 4}
INITIALIZERS = {"constant": 0, "uniform": 1, "normal": 2}
INVALID_ID_POLICIES = {"error": 0, "skip": 1}
ROW_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
EVICTION_POLICIES = {"lru": 0, "lfu": 1, "clock": 2, "freq": 3, "lookahead": 4}
HOST_KINDS = {"ram": 0, "disk": 1}

#: Fields of MixCacheTableStats in tf_ops/core/mix_cache.h, in order. Unit: rows.
TABLE_COUNTERS = (
    "requested",
    "unique",
    "hits",
    "misses",
    "created",
    "evictions",
    "write_backs",
    "invalid_ids",
    "host_rows",
    "cached_rows",
    "loads",
    "not_admitted",
    "waiting_ids",
    "deleted_idle",
    "deleted_max_rows",
)
#: Fields of MixCacheStats after `tables`, in order.
TOTAL_COUNTERS = (
    "steps",
    "foreign_keys",
    "pinned_slots",
    "pinned_peak",
    "device_bytes",
    "host_bytes",
    "disk_bytes",
    "disk_rows_read",
    "disk_rows_written",
    "record_bytes",
)

# Gradients stop at the rows: what follows `check_rows` is watched, nothing before it.
for _op in (
    "MixCache",
    "Announce",
    "EndAnnouncements",
    "Prefetch",
    "Lookup",
    "Read",
    "CheckRows",
    "Apply",
    "Release",
    "Flush",
):
    tf.no_gradient(f"HvdCtr{_op}")
for _op in ("Export", "Import", "Step", "SetStep", "Stats", "SetFrequencies", "WarmStart"):
    tf.no_gradient(f"HvdCtr{_op}")


@dataclasses.dataclass(frozen=True)
class MixCacheSpec:
    """One MixCache: the tables of one dim, this rank's share of their rows.

    Attributes:
        name: for messages.
        dim: D, floats per row.
        slots: S, rows cached on this rank.
        row_dtype: a key of ROW_TYPES, how the device stores rows; a row is rounded to it whenever it is set. The rows
            and gradients of the ops are float32 all the same, and so is the optimizer state.
        policy: a key of EVICTION_POLICIES.
        window: batches that may be announced ahead (lookahead), 0 .. 64.
        rank: this rank, 0 .. world_size-1.
        world_size: W.
        seed: -2^63 .. 2^63-1; with table name, id and column it determines initial values.
        tables: T tables.
        features: (F) names, for messages.
        feature_tables: (F) index into tables, non-decreasing.
        prefetch_wait_seconds: longest wait of a prefetch for slots pinned by batches in flight.
        host: where the rows live that are not on the device.
    """

    name: str
    dim: int
    slots: int
    tables: Sequence[TableConfig]
    features: Sequence[str] = ()
    feature_tables: Sequence[int] = ()
    row_dtype: str = "float32"
    policy: str = "lru"
    window: int = 8
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    prefetch_wait_seconds: float = 120.0
    host: HostConfig = dataclasses.field(default_factory=HostConfig)


class Prefetched(NamedTuple):
    """Result of `prefetch`.

    Attributes:
        ticket: int64 scalar; negative: this rank failed, and lookup answers with the error.
        reply_splits: (W) int32, rows that lookup answers to each peer; they sum to R.
        global_rows: int64 scalar, B summed over the ranks.
        global_weight: float64 scalar, sample weights summed over the ranks.
        active_ranks: int64 scalar, ranks that still have batches (batch_rows not -1).
    """

    ticket: Tensor
    reply_splits: Tensor
    global_rows: Tensor
    global_weight: Tensor
    active_ranks: Tensor


class ReadRows(NamedTuple):
    """Result of `read`: rows (R, D) float32, rows per peer (W) int32, and the sums of `Prefetched`."""

    rows: Tensor
    send_splits: Tensor
    global_rows: Tensor
    global_weight: Tensor
    active_ranks: Tensor


class ExportedRows(NamedTuple):
    """A chunk of `export_rows`, n rows. The arrays are read-only.

    Attributes:
        ids: (n) int64.
        rows: (n, D) float32.
        state: (n, s) float32, optimizer state; its layout is described in tf_ops/core/row_math.h.
        cursor: where the next chunk begins, -1 at the end.
        counts: (n) int64, occurrences of the ids; (0) unless the table tracks its rows (TableConfig.tracks_rows).
        last_steps: (n) int64, step at which each row was trained last; (0) likewise.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    state: NDArray[np.float32]
    cursor: int
    counts: NDArray[np.int64]
    last_steps: NDArray[np.int64]


def create(spec: MixCacheSpec) -> Tensor:
    """Creates a cache and returns its handle, a resource scalar; the cache is freed with the last reference to it.

    May be called while a tf.function is traced: the cache is created once, outside the graph.

    Raises:
        ValueError: a field of the spec cannot be used; the message names it, what was received and what is allowed.
        OSError: the file of the disk tier cannot be made (folder missing, file in use, ...); the message names it.
    """
    optimizers = [table.optimizer for table in spec.tables]
    with tf.init_scope():
        try:
            return native.ops().hvd_ctr_mix_cache(
                cache_name=spec.name,
                dim=spec.dim,
                slots=spec.slots,
                row_type=_number(ROW_TYPES, spec.row_dtype, "row_dtype"),
                policy=_number(EVICTION_POLICIES, spec.policy, "policy"),
                window=spec.window,
                rank=spec.rank,
                world_size=spec.world_size,
                seed=spec.seed,
                table_names=[table.name for table in spec.tables],
                table_rows=[-1 if table.rows is None else table.rows for table in spec.tables],
                table_hash_ids=[table.hash_ids for table in spec.tables],
                table_invalid_ids=[INVALID_ID_POLICIES[table.invalid_ids] for table in spec.tables],
                table_min_counts=[table.min_count for table in spec.tables],
                table_max_idle_steps=[table.max_idle_steps or 0 for table in spec.tables],
                table_max_rows=[table.max_rows or 0 for table in spec.tables],
                table_sweep_every_steps=[table.sweep_every_steps for table in spec.tables],
                optimizer_kinds=[OPTIMIZERS[optimizer.kind] for optimizer in optimizers],
                learning_rates=[optimizer.learning_rate for optimizer in optimizers],
                initial_accumulators=[optimizer.initial_accumulator for optimizer in optimizers],
                epsilons=[optimizer.epsilon for optimizer in optimizers],
                beta1s=[optimizer.beta1 for optimizer in optimizers],
                beta2s=[optimizer.beta2 for optimizer in optimizers],
                row_steps=[optimizer.bias_correction == "row" for optimizer in optimizers],
                l1s=[optimizer.l1 for optimizer in optimizers],
                l2s=[optimizer.l2 for optimizer in optimizers],
                learning_rate_powers=[optimizer.learning_rate_power for optimizer in optimizers],
                initializer_kinds=[INITIALIZERS[table.initializer] for table in spec.tables],
                initializer_scales=[table.init_scale for table in spec.tables],
                features=list(spec.features),
                feature_tables=list(spec.feature_tables),
                prefetch_wait_seconds=spec.prefetch_wait_seconds,
                host_kind=_number(HOST_KINDS, spec.host.kind, "host.kind"),
                host_path=spec.host.path or "",
                host_ram_bytes=spec.host.ram_bytes or 0,
                host_direct_io=spec.host.direct_io,
            )
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(error.message) from error
        except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError) as error:
            raise OSError(error.message) from error


def _number(numbers: dict[str, int], name: str, field: str) -> int:
    if name not in numbers:
        raise ValueError(f"MixCacheSpec.{field}: received {name!r}; allowed: {', '.join(sorted(numbers))}")
    return numbers[name]


def prefetch(handle: Tensor, received: Tensor, received_splits: Tensor) -> Prefetched:
    """Plans and loads the rows that all ranks asked this rank for, and pins them until `apply` or `release`.

    Args:
        handle: from `create`.
        received: int64, key messages of all ranks in rank order (the alltoall of PreparedIds.send).
        received_splits: (W) int32, words per rank.

    Raises:
        tf.errors.InvalidArgumentError: an invalid id in a table with invalid_ids "error" (all ranks alike).
        tf.errors.InternalError: a rank sent an error text (all ranks alike).
        tf.errors.DataLossError: a message is torn.
    """
    return Prefetched(*native.ops().hvd_ctr_prefetch(handle=handle, received=received, received_splits=received_splits))


def announce(handle: Tensor, received: Tensor, received_splits: Tensor) -> Tensor:
    """Tells the policy `lookahead` the keys of a batch that will be prefetched after those announced before. It changes
    which rows are kept, never a number; the rows need not be loaded. May run beside `prefetch` on another thread.

    Args:
        handle: from `create`.
        received, received_splits: what `prefetch` of that batch will get.

    Returns:
        bool scalar: noted. False: the policy is another one, `window` batches are announced already, or the batch has
        an error, which its `prefetch` reports.
    """
    return native.ops().hvd_ctr_announce(handle=handle, received=received, received_splits=received_splits)


def end_announcements(handle: Tensor) -> None:
    """The announced batches will not be prefetched. Eager only."""
    native.ops().hvd_ctr_end_announcements(handle=handle)


def lookup(handle: Tensor, ticket: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rows of a prefetched batch in the order received; if the prefetch failed, the error that `check_rows` raises.

    Args:
        handle: from `create`.
        ticket: int64 scalar.
        dim: D, for the static shape.

    Returns:
        rows (R, D) float32 and the rows for each peer (W) int32.

    Raises:
        tf.errors.FailedPreconditionError: the ticket is not open.
    """
    rows, send_splits = native.ops().hvd_ctr_lookup(handle=handle, ticket=ticket)
    rows.set_shape((None, dim))
    return rows, send_splits


def read(handle: Tensor, received: Tensor, received_splits: Tensor, dim: int) -> ReadRows:
    """Evaluation: the rows asked for as they are now; rows that do not exist have their initial value. Changes nothing.

    Args and errors as in `prefetch`; dim is D, for the static shape.
    """
    result = ReadRows(*native.ops().hvd_ctr_read(handle=handle, received=received, received_splits=received_splits))
    result.rows.set_shape((None, dim))
    return result


def check_rows(rows: Tensor, received_splits: Tensor, expected_splits: Tensor) -> Tensor:
    """Passes on the rows that the owners answered with, or raises the error of the lowest owner that had one.

    Args:
        rows: (U, D) float32 in owner order (more or fewer rows where an owner failed).
        received_splits: (W) int32, rows received from each owner.
        expected_splits: (W) int32, PreparedIds.row_splits.

    Returns:
        rows (U, D), the same buffer.

    Raises:
        tf.errors.ResourceExhaustedError: the owner's cache is too small for the batch; or any other error of an owner.
        tf.errors.DataLossError: an answer is neither rows nor an error.
    """
    return native.ops().hvd_ctr_check_rows(rows=rows, received_splits=received_splits, expected_splits=expected_splits)


def apply(handle: Tensor, ticket: Tensor, gradients: Tensor, learning_rate_scale: Tensor) -> Tensor:
    """Sums gradients by key in the order received, updates the rows, unpins them and ends the ticket.

    Args:
        handle: from `create`.
        ticket: int64 scalar.
        gradients: (R, D) float32, in the order received.
        learning_rate_scale: float scalar, factor on every table's learning rate.

    Returns:
        int64 scalar: the optimizer's step after this one; it counts also where R is 0.

    Raises:
        tf.errors.FailedPreconditionError: the ticket is not open.
        tf.errors.InvalidArgumentError: gradients do not have the ticket's shape.
    """
    return native.ops().hvd_ctr_apply(
        handle=handle, ticket=ticket, gradients=gradients, learning_rate_scale=learning_rate_scale
    )


def release(handle: Tensor, ticket: Tensor) -> None:
    """Ends a ticket (int64 scalar) without an update; FailedPreconditionError if it is not open."""
    native.ops().hvd_ctr_release(handle=handle, ticket=ticket)


def flush(handle: Tensor) -> None:
    """Writes all dirty rows back to the host store; they stay cached."""
    native.ops().hvd_ctr_flush(handle=handle)


def export_rows(handle: Tensor, table: int, cursor: int, max_rows: int) -> ExportedRows:
    """The next rows of one table that this rank owns. Eager only.

    Args:
        handle: from `create`.
        table: index into MixCacheSpec.tables.
        cursor: 0 at the start (flushes first), then ExportedRows.cursor of the chunk before.
        max_rows: most rows of a chunk, >= 1.

    Raises:
        tf.errors.InvalidArgumentError: no such table, cursor or max_rows.
    """
    ids, rows, state, next_cursor, counts, last_steps = native.ops().hvd_ctr_export(
        handle=handle, table=table, cursor=cursor, max_rows=max_rows
    )
    return ExportedRows(
        np.asarray(ids),
        np.asarray(rows),
        np.asarray(state),
        int(next_cursor),
        np.asarray(counts),
        np.asarray(last_steps),
    )


def import_rows(
    handle: Tensor,
    table: int,
    ids: NDArray[np.int64],
    rows: NDArray[np.float32],
    state: NDArray[np.float32] | None = None,
) -> int:
    """Creates or overwrites the rows that this rank owns. Eager only.

    Args:
        handle: from `create`.
        table: index into MixCacheSpec.tables.
        ids: (n) int64, distinct.
        rows: (n, D) float32.
        state: (n, s) float32, optimizer state; None: the initial state.

    Returns:
        How many ids belong to other ranks; they were ignored.

    Raises:
        tf.errors.InvalidArgumentError: no such table, or shapes other than the above.
    """
    if state is None:
        state = np.zeros((0, 0), np.float32)
    return int(native.ops().hvd_ctr_import(handle=handle, table=table, ids=ids, rows=rows, state=state))


def set_frequencies(handle: Tensor, table: int, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """Tells the policy `freq` how often ids occur; ids without a count have 0. Eager only.

    Args:
        handle: from `create`.
        table: index into MixCacheSpec.tables.
        ids: (n) int64, distinct.
        counts: (n) int64, >= 0.

    Returns:
        How many ids belong to other ranks; they were ignored.

    Raises:
        tf.errors.FailedPreconditionError: the cache has another policy.
        tf.errors.InvalidArgumentError: no such table, or a negative id or count.
    """
    return int(native.ops().hvd_ctr_set_frequencies(handle=handle, table=table, ids=ids, counts=counts))


def warm_start(handle: Tensor) -> int:
    """Loads the rows with the largest counts (`set_frequencies`) into the free slots; returns how many. Creates no row.
    Eager only.
    """
    return int(native.ops().hvd_ctr_warm_start(handle=handle))


def get_step(handle: Tensor) -> Tensor:
    """The row optimizer's step, int64 scalar: tickets applied so far."""
    return native.ops().hvd_ctr_step(handle=handle)


def set_step(handle: Tensor, step: Tensor) -> None:
    """Sets the step when a checkpoint is restored; FailedPreconditionError while tickets are open."""
    native.ops().hvd_ctr_set_step(handle=handle, step=step)


def stats(handle: Tensor, table_names: Sequence[str]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Counters since creation. Eager only.

    Args:
        handle: from `create`.
        table_names: (T) names, in the order of MixCacheSpec.tables.

    Returns:
        {table: {counter of TABLE_COUNTERS: value}} and {counter of TOTAL_COUNTERS: value}.

    Raises:
        ValueError: the cache has another number of tables than there are names.
    """
    tables, totals = native.ops().hvd_ctr_stats(handle=handle)
    per_table = {
        name: dict(zip(TABLE_COUNTERS, row, strict=True))
        for name, row in zip(table_names, np.asarray(tables).tolist(), strict=True)
    }
    return per_table, dict(zip(TOTAL_COUNTERS, np.asarray(totals).tolist(), strict=True))
