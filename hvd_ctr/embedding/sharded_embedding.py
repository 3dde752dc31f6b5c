"""ShardedEmbedding: all tables of a model, sharded over the ranks, cached by MixCache.

The path of one batch (DESIGN 5) is split into stages that hand values to each other, so that a pipeline may run the
first ones for later batches while the last ones train the present batch:

    Data-Loader    prepare(ids)            de-duplicate, partition by owner           -> PreparedIds
    Host-Manager   input_dist, prefetch    key exchange, merge, plan, row movement    -> Prefetched
    GPU-Worker     lookup + output_dist    rows (R, D) at the owner -> (U, D) here
                   pool                    rows + virtual ids -> vectors of the bags  (hvd_ctr.layers)
                   backward                gradients (U, D) -> owners, sum, row optimizer

Keras users meet it through `MixCacheEmbedding`; a hand-written loop may use it directly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, TableConfig
from hvd_ctr.embedding import counters, id_counts
from hvd_ctr.embedding.counters import Stats
from hvd_ctr.embedding.dist import row_exchange
from hvd_ctr.embedding.sharding import GroupLayout, group_by_dim
from hvd_ctr.ops import id_ops, mix_cache_ops, row_life_ops
from hvd_ctr.ops.id_ops import PreparedIds
from hvd_ctr.ops.mix_cache_ops import ExportedRows, Prefetched
from hvd_ctr.ops.row_life_ops import WaitingIds

Tensor = Any
logger = logging.getLogger("hvd_ctr")


@dataclasses.dataclass(frozen=True)
class BatchFacts:
    """What a rank tells all others about its batch: rows B (int64 scalar), sum of sample weights (float64 scalar),
    error text (string scalar; not empty: this rank cannot go on, and all ranks shall fail with this text).
    """

    rows: Tensor
    weight_sum: Tensor
    error: Tensor = ""


class ReceivedWords(NamedTuple):
    """What the key exchange brought: words int64 of all ranks and their splits (W) int32."""

    words: Tensor
    splits: Tensor


class Staged(NamedTuple):
    """One group's batch after Data-Loader and Host-Manager: what a train step needs of them."""

    prepared: PreparedIds
    prefetched: Prefetched


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows (U, D) float32 of one group's batch in the order of its virtual ids, and the sums over all ranks'
    batches.
    """

    rows: Tensor
    global_rows: Tensor
    global_weight: Tensor


class TableGroup:
    """The tables of one dim on this rank: their MixCache and the stages of a step.

    Args:
        layout: tables and features.
        cache: slots per rank and policy.
        comm: the communicator.
        seed: seeds initial values, with table name, id and column.
        name: prefix of cache and collective names, unique in the process.
        host: where the rows live that are not in the cache; None: in memory, without a limit.
        exchange: how keys, rows and gradients travel: alltoall, allgather or allreduce.
    """

    def __init__(
        self,
        layout: GroupLayout,
        cache: CacheConfig,
        comm: Comm,
        seed: int,
        name: str,
        host: HostConfig | None = None,
        exchange: str = "alltoall",
    ) -> None:
        self.layout = layout
        self.name = f"{name}.dim{layout.dim}"
        self._comm = comm
        #: Batches whose keys a pipeline does well to exchange before the first of them is prefetched; 0: the policy
        #: makes no use of them.
        self.window = cache.window if cache.policy == "lookahead" else 0
        self._exchange = row_exchange(exchange, comm)
        self._prepare = id_ops.BatchPreparer(layout.tables, layout.features, layout.feature_tables, comm.size)
        limited = [table for table in layout.tables if table.max_rows or table.max_idle_steps]
        self._sweeps = sorted({table.sweep_every_steps for table in limited})
        self._has_max_rows = any(table.max_rows for table in limited)
        self.cache = mix_cache_ops.create(
            mix_cache_ops.MixCacheSpec(
                name=self.name,
                dim=layout.dim,
                slots=cache.slots,
                row_dtype=cache.row_dtype,
                policy=cache.policy,
                window=cache.window,
                rank=comm.rank,
                world_size=comm.size,
                seed=seed,
                tables=layout.tables,
                features=layout.feature_names,
                feature_tables=layout.feature_tables,
                prefetch_wait_seconds=cache.prefetch_wait_seconds,
                host=host or HostConfig(),
            )
        )
        if cache.policy == "freq":
            self._warm_start(str(cache.counts))

    def _warm_start(self, counts_file: str) -> None:
        """Reads the counts of the group's tables and fills the cache with the most frequent rows."""
        names = [table.name for table in self.layout.tables]
        counted = dict.fromkeys(names, 0)
        with tf.init_scope():
            for table, ids, counts in id_counts.read_counts(counts_file, names):
                mix_cache_ops.set_frequencies(self.cache, names.index(table), ids, counts)
                counted[table] += len(ids)
            rows = mix_cache_ops.warm_start(self.cache)
        if self._comm.rank == 0:
            logger.info("%s: the %d most frequent rows of this rank are cached (%s)", self.name, rows, counts_file)
            for table, ids_counted in counted.items():
                if not ids_counted:
                    logger.warning("%s has no counts of table %s: its rows leave the cache first", counts_file, table)

    def prepare(self, ids: Tensor, feature_splits: Tensor | None, facts: BatchFacts) -> PreparedIds:
        """De-duplicates and partitions one batch.

        Args:
            ids: int64; (B, F) with one column per feature of `layout.features`, or flat (N) with feature_splits.
            feature_splits: (F+1) int64 borders of the features in flat ids; None for (B, F).
            facts: what the other ranks are told about this batch.
        """
        return self._prepare(ids, feature_splits, facts.rows, facts.weight_sum, facts.error)

    def input_dist(self, prepared: PreparedIds) -> ReceivedWords:
        """Key exchange. Collective."""
        return ReceivedWords(*self._exchange.input_dist(prepared.send, prepared.send_splits, self.name))

    def announce(self, received: ReceivedWords) -> None:
        """Tells the policy `lookahead` the keys of a batch that will be prefetched after those told before. Local."""
        mix_cache_ops.announce(self.cache, received.words, received.splits)

    def prefetch(self, received: ReceivedWords) -> Prefetched:
        """Plan, write-back and load; pins the batch's rows until `backward` or `release`. Local. Batches are prefetched
        in the order of their key exchanges, though later exchanges may come before.

        Raises:
            tf.errors.InvalidArgumentError: a rank's batch holds an invalid id under `invalid_ids: error` (all ranks
            alike). tf.errors.InternalError: a rank reported an error (all ranks alike).
        """
        return mix_cache_ops.prefetch(self.cache, received.words, received.splits)

    def end_announcements(self) -> None:
        """The batches whose keys were exchanged and that are not prefetched yet will not be."""
        mix_cache_ops.end_announcements(self.cache)

    def prefetched_spec(self) -> Prefetched:
        """Specs of what `prefetch` returns."""
        scalar, splits = tf.TensorSpec([], tf.int64), tf.TensorSpec([self._comm.size], tf.int32)
        return Prefetched(scalar, splits, scalar, tf.TensorSpec([], tf.float64), scalar)

    def lookup(self, prepared: PreparedIds, prefetched: Prefetched) -> Rows:
        """Rows (U, D) of a prefetched batch, from their owners.

        Raises:
            tf.errors.ResourceExhaustedError: an owner's cache cannot hold the batch (all ranks alike).
        """
        rows, send_splits = mix_cache_ops.lookup(self.cache, prefetched.ticket, self.layout.dim)
        return self._deliver(prepared, rows, send_splits, prefetched.global_rows, prefetched.global_weight, "rows")

    def read(self, prepared: PreparedIds) -> Rows:
        """Rows (U, D) for evaluation: nothing is created, moved, pinned or counted. Unseen ids get their initial
        value.
        """
        words, splits = self._exchange.input_dist(prepared.send, prepared.send_splits, f"{self.name}.read", "read")
        answer = mix_cache_ops.read(self.cache, words, splits, self.layout.dim)
        return self._deliver(
            prepared, answer.rows, answer.send_splits, answer.global_rows, answer.global_weight, "read"
        )

    def _deliver(
        self,
        prepared: PreparedIds,
        rows: Tensor,
        send_splits: Tensor,
        global_rows: Tensor,
        global_weight: Tensor,
        kind: str,
    ) -> Rows:
        name = f"{self.name}.read" if kind == "read" else self.name
        rows = self._exchange.output_dist(rows, send_splits, prepared.row_splits, name, kind)
        return Rows(tf.ensure_shape(rows, [None, self.layout.dim]), global_rows, global_weight)

    def backward(
        self, prepared: PreparedIds, prefetched: Prefetched, d_rows: Tensor, learning_rate_scale: Tensor
    ) -> Tensor:
        """Sends d_rows (U, D) to the owners, sums them per key in rank order and applies the row optimizers. Ends the
        ticket. Then, at fixed steps, deletes the rows that `max_idle_steps` and `max_rows` end.

        Returns:
            The group's optimizer step, int64 scalar, 1 after the first.
        """
        gradients = self._exchange.reverse_output_dist(d_rows, prepared.row_splits, self.name)
        step = mix_cache_ops.apply(self.cache, prefetched.ticket, gradients, learning_rate_scale)
        if self._sweeps:
            # All ranks are at the same step, so all of them or none enter the collective.
            due = tf.reduce_any(tf.equal(step % tf.constant(self._sweeps, tf.int64), 0))
            tf.cond(due, self._sweep, lambda: tf.constant(0, tf.int64))
        return step

    def _sweep(self) -> Tensor:
        """Deletes the rows whose time has come; returns how many of this rank."""
        ages = row_life_ops.row_ages(self.cache)
        if self._has_max_rows:
            (ages,) = self._comm.allreduce_sum([ages], f"{self.name}.row_ages")
        return row_life_ops.sweep(self.cache, ages)

    def release(self, prefetched: Prefetched) -> None:
        """Ends the ticket without an update (frozen tables)."""
        mix_cache_ops.release(self.cache, prefetched.ticket)


class ShardedEmbedding:
    """All tables of one embedding, grouped by dim.

    Args:
        features: the features and, through them, the tables.
        cache: cache of each group.
        comm: the communicator.
        seed: seeds initial values: with one seed, any number of ranks starts alike.
        name: unique in the process.
        host: where the rows of each group live that are not in its cache; None: in memory, without a limit.
        exchange: how keys, rows and gradients travel: alltoall, allgather or allreduce. The numbers are the same.

    Raises:
        ValueError: see `group_by_dim`; or a field outside its range, named.
        OSError: the file of the disk tier cannot be made; the message names it.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        cache: CacheConfig,
        comm: Comm,
        seed: int = 0,
        name: str = "embedding",
        host: HostConfig | None = None,
        exchange: str = "alltoall",
    ) -> None:
        self.features = tuple(features)
        self.groups = [TableGroup(layout, cache, comm, seed, name, host, exchange) for layout in group_by_dim(features)]
        self._tables = {
            table.name: (group, index) for group in self.groups for index, table in enumerate(group.layout.tables)
        }
        self._warned: dict[str, int] = {}
        self._tracked = [table for group in self.groups for table in group.layout.tables if table.tracks_rows]
        self._told: dict[str, list[int]] = {}
        self._comm = comm

    @property
    def table_names(self) -> list[str]:
        """Names of all tables."""
        return list(self._tables)

    def _find(self, table: str) -> tuple[TableGroup, int]:
        if table not in self._tables:
            raise ValueError(f"no table {table!r}; there are {', '.join(sorted(self._tables))}")
        return self._tables[table]

    def table_config(self, table: str) -> TableConfig:
        """Configuration of a table."""
        group, index = self._find(table)
        return group.layout.tables[index]

    def cache_stats(self, *, all_ranks: bool = False) -> Stats:
        """Counters of this rank, or over all ranks (collective, the same on each): {"tables": {name: {counter: int}},
        "total": {counter: int, "hit_rate": float}}. hvd_ctr/embedding/counters.py says what they mean. What moves
        between the ranks is counted for the process, not for one embedding: `Comm.traffic()`,
        `HybridModel.statistics()`.
        """
        stats = counters.of_groups(
            mix_cache_ops.stats(group.cache, [table.name for table in group.layout.tables]) for group in self.groups
        )
        return counters.over_ranks(self._comm.allgather_object(stats)) if all_ranks else stats

    def warn_of_invalid_ids(self) -> dict[str, int]:
        """Logs each table's invalid ids since the last call on rank 0 (FC 36); returns the counts over all ranks and
        steps.
        """
        counts = {name: row["invalid_ids"] for name, row in self.cache_stats()["tables"].items()}
        for name, count in counts.items():
            new = count - self._warned.get(name, 0)
            if new and self._comm.rank == 0:
                logger.warning("table %s: %d invalid ids were skipped (%d in all)", name, new, count)
        self._warned = counts
        return counts

    def report_row_life(self) -> dict[str, dict[str, int]]:
        """Logs on rank 0 what `min_count`, `max_idle_steps` and `max_rows` did since the last call, per table.
        Collective.

        Returns:
            Sums over the ranks of not_admitted, waiting_ids, deleted_idle and deleted_max_rows, for the tables that
            have one of the options.
        """
        if not self._tracked:
            return {}
        names = ("not_admitted", "waiting_ids", "deleted_idle", "deleted_max_rows")
        stats = self.cache_stats()["tables"]
        everyone = self._comm.allgather_object([[stats[table.name][name] for name in names] for table in self._tracked])
        sums = np.sum(np.asarray(everyone, np.int64), axis=0).tolist()
        for table, counts in zip(self._tracked, sums, strict=True):
            before = self._told.get(table.name, [0, 0, 0, 0])
            new = [count - old for count, old in zip(counts, before, strict=True)]
            if self._comm.rank == 0 and (new[0] or new[2] or new[3]):
                logger.info(
                    "table %s: %d idle rows deleted (%d in all), %d beyond max_rows (%d in all); gradients of %d rows "
                    "dropped below min_count (%d in all), %d ids wait",
                    *(table.name, new[2], counts[2], new[3], counts[3], new[0], counts[0], counts[1]),
                )
            self._told[table.name] = counts
        return {
            table.name: dict(zip(names, counts, strict=True)) for table, counts in zip(self._tracked, sums, strict=True)
        }

    def get_rows(self, table: str, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Current rows (n, D) float32 of any ids, dirty cached ones included. Collective: every rank calls it, with
        ids of its own.
        """
        group, index = self._find(table)
        ids = np.asarray(ids, np.int64).reshape(-1)
        feature = group.layout.feature_tables.index(index)
        splits = np.where(np.arange(len(group.layout.features) + 1) > feature, len(ids), 0).astype(np.int64)
        prepared = group.prepare(
            tf.constant(ids), tf.constant(splits), BatchFacts(np.int64(len(ids)), np.float64(len(ids)))
        )
        rows = np.asarray(group.read(prepared).rows)
        virtual_ids = np.asarray(prepared.virtual_ids)
        out = np.zeros((len(ids), group.layout.dim), np.float32)
        out[virtual_ids >= 0] = rows[virtual_ids[virtual_ids >= 0]]
        return out

    def check_empty(self) -> None:
        """For loading: rows that the file does not have would stay.

        Raises:
            RuntimeError: this rank holds rows; names the table.
        """
        self.flush()  # a row exists from its first update on; what a warm start has cached is none yet
        for name, row in self.cache_stats()["tables"].items():
            if row["host_rows"] or row["waiting_ids"]:
                raise RuntimeError(
                    f"table {name!r} holds rows already, which would stay beside the loaded ones; load into a new model"
                )

    def flush(self) -> None:
        """Writes dirty cached rows of this rank back to the host store."""
        for group in self.groups:
            mix_cache_ops.flush(group.cache)

    def export_rows(self, table: str, chunk_rows: int = 65536) -> Iterator[ExportedRows]:
        """Streams this rank's rows of a table in chunks of at most chunk_rows, at least one (it may be empty, and tells
        the shapes). The first chunk flushes the cache; where the host tier is full and cannot take the rows, they come
        from the cache itself, so that they can be saved elsewhere."""
        group, index = self._find(table)
        cursor = 0
        while cursor >= 0:
            chunk = mix_cache_ops.export_rows(group.cache, index, cursor, chunk_rows)
            cursor = chunk.cursor
            yield chunk

    def import_rows(
        self, table: str, ids: NDArray[np.int64], rows: NDArray[np.float32], state: NDArray[np.float32] | None = None
    ) -> int:
        """Creates or overwrites the rows that this rank owns; returns how many belonged to other ranks.

        Args:
            table: name of the table.
            ids: (n) int64, distinct.
            rows: (n, D) float32.
            state: (n, s) float32 optimizer state, or None for the initial state.
        """
        group, index = self._find(table)
        if rows.shape != (len(ids), group.layout.dim):
            raise ValueError(
                f"table {table!r}: rows must have shape ({len(ids)}, {group.layout.dim}) for "
                f"{len(ids)} ids, received {rows.shape}"
            )
        return int(mix_cache_ops.import_rows(group.cache, index, ids, rows, state))

    def export_waiting(self, table: str, chunk_ids: int = 65536) -> Iterator[WaitingIds]:
        """Streams this rank's ids of a table that have not occurred min_count times, in chunks of at most chunk_ids, at
        least one (it may be empty)."""
        group, index = self._find(table)
        cursor = 0
        while cursor >= 0:
            chunk = row_life_ops.export_waiting(group.cache, index, cursor, chunk_ids)
            cursor = chunk.cursor
            yield chunk

    def import_life(
        self, table: str, ids: NDArray[np.int64], counts: NDArray[np.int64], last_steps: NDArray[np.int64]
    ) -> int:
        """Restores what export_rows and export_waiting tell of ids (n), after import_rows of those that have a row;
        returns how many belonged to other ranks. Does nothing for a table that does not track its rows.
        """
        group, index = self._find(table)
        return row_life_ops.import_life(group.cache, index, ids, counts, last_steps)

    def steps(self) -> Mapping[str, int]:
        """Optimizer step of each group, by group name."""
        return {group.name: int(mix_cache_ops.get_step(group.cache)) for group in self.groups}

    def set_step(self, step: int) -> None:
        """Sets every group's optimizer step (restore; FC 22)."""
        self.set_steps({group.name: step for group in self.groups})

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the optimizer step of each group named (restore): the reverse of `steps`."""
        for group in self.groups:
            if group.name in steps:
                mix_cache_ops.set_step(group.cache, steps[group.name])
