"""What the tables of one dim will take and move on one rank, before a run: memory by tier, rows and bytes per step, hit
rates.

    demand = GroupDemand(ranks=4, global_batch=8192, depth=2, steps=5000, counts=counts, lines=4e7)
    plan = plan_group(layout, demand, cache, host)
    plan.memory.host_bytes, plan.traffic.unique, plan.hit_rate

From the counts of ids where there are any: expectations over the order of the samples and the owners of the ids
(id_stream.py, hit_rate.py, disk_traffic.py). Else upper bounds from the batch and the tables' rows: `exact` is False
then.

Symbols: B local batch, F features, U unique keys of a rank's batch, R keys received, K working keys, M misses, E
evictions, W ranks, D dim, S slots, T tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_ctr.config import CacheConfig, HostConfig
from hvd_ctr.embedding.disk_traffic import DiskTraffic, disk_traffic
from hvd_ctr.embedding.hit_rate import CachePolicy, Prediction, predict
from hvd_ctr.embedding.id_stream import IdCounts, IdStream
from hvd_ctr.embedding.policy_replay import predict_by_replay
from hvd_ctr.embedding.sharding import GroupLayout
from hvd_ctr.ops import plan_ops
from hvd_ctr.ops.mix_cache_ops import MixCacheSpec
from hvd_ctr.ops.plan_ops import MemoryDemand, Messages, PlannedMemory

# Rows of a chunk of counts that `freq` is told at a time (id_counts.py).
_COUNTS_CHUNK = 1 << 20
# Batches differ: the largest of a run has about this many standard deviations more keys than the mean.
_LARGEST_BATCH = 4.0
_FLOAT_BYTES = 4
_KEY_BYTES = 8
_SPLIT_BYTES = 4
_HEADER_WORDS = 8  # kKeyHeaderWords of tf_ops/core/key_exchange.h; then two numbers per table


@dataclasses.dataclass(frozen=True)
class GroupDemand:
    """What is asked of a group's tables.

    Attributes:
        ranks: W.
        global_batch: samples of a step over all ranks.
        depth: batches whose rows are fetched ahead.
        steps: batches of the run; None: not known.
        lines: samples of an epoch; None: not known.
        counts: table -> occurrences of its ids in an epoch.
        rows: table -> rows that exist in the end, for tables without counts; over all ranks.
        evaluates: whether the run evaluates in between.
        exchange: how keys, rows and gradients travel (embedding.exchange).
        on_gpu: whether the device tier is on GPUs; then what is there travels over NCCL.
    """

    ranks: int
    global_batch: int
    depth: int
    steps: float | None = None
    lines: float | None = None
    counts: Mapping[str, IdCounts] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    evaluates: bool = False
    exchange: str = "alltoall"
    on_gpu: bool = False

    def sent(self, size: float, reduced: bool = True) -> float:
        """Bytes that a rank sends to other ranks (hvd_ctr/traffic.py) for `size` bytes that it has for all ranks, the
        same number on each; reduced: as a sum, in the mode allreduce (not keys).
        """
        others = self.ranks - 1
        if self.exchange == "alltoall":
            return size * others / self.ranks
        return size * others * (2 if reduced and self.exchange == "allreduce" else 1)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Per step and rank, expected (or at most, where GroupPlan.exact is False). Bytes between ranks are those sent to
    other ranks.

    Attributes:
        local_keys: U.
        received: R.
        unique: K.
        largest_unique: K of the largest batch.
        in_flight: different rows of the batches in flight, depth + 1.
        misses: M at the end of the run; None: not known.
        key_bytes, row_bytes, gradient_bytes: sent to other ranks.
        load_bytes, write_back_bytes: between host and device, of rows with state; None: not known.
        disk_reads, disk_writes: rows from and to the file; None: not known.
        disk_read_bytes, disk_write_bytes: of them; None: not known.
    """

    local_keys: float
    received: float
    unique: float
    largest_unique: float
    in_flight: float
    misses: float | None
    key_bytes: float
    row_bytes: float
    gradient_bytes: float
    load_bytes: float | None
    write_back_bytes: float | None
    disk_reads: float | None
    disk_writes: float | None
    disk_read_bytes: float | None
    disk_write_bytes: float | None


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """One table, on one rank.

    Attributes:
        name: its name.
        rows: rows that exist at the end; None: not known, they grow.
        row_bytes: of a row and its optimizer state in the host tier, padded to the largest state of the group.
        index_bytes_per_row: of the host tier's index.
        host_bytes: rows, state and index in the host tier, RAM and file together.
        cached_rows: expected in the device cache; None: not known.
        device_bytes: of them.
        hit_rate: expected of the device cache; None: not known.
    """

    name: str
    rows: float | None
    row_bytes: int
    index_bytes_per_row: float
    host_bytes: float | None
    cached_rows: float | None
    device_bytes: float | None
    hit_rate: float | None


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One dim's tables on one rank.

    Attributes:
        name: of the group.
        dim: D.
        slots: S.
        policy: of the device cache.
        exact: figures are expectations from counts; False: upper bounds.
        rows: rows that exist at the end; None: not known.
        memory: bytes at the end, after the last flush, for `rows` (for none where they are not known).
        tables: the tables.
        traffic: rows and bytes of a step.
        prediction: of the device cache; None: not known.
        disk: of a disk tier; None: none, or not known.
        messages: what this rank brings to the exchanges, of what is in host memory.
        on_gpu: GroupDemand's.
    """

    name: str
    dim: int
    slots: int
    policy: CachePolicy
    exact: bool
    rows: float | None
    memory: PlannedMemory
    tables: Sequence[TablePlan]
    traffic: Traffic
    prediction: Prediction | None
    disk: DiskTraffic | None
    messages: Messages
    on_gpu: bool
    _spec: MixCacheSpec
    _demand: MemoryDemand

    @property
    def hit_rate(self) -> float | None:
        """Of the device cache, over the run."""
        return None if self.prediction is None else self.prediction.hit_rate()

    def memory_for(self, rows: float) -> PlannedMemory:
        """Bytes with that many rows in all on this rank, spread over the tables as planned (evenly where not known)."""
        known = np.array([table.rows or 0.0 for table in self.tables])
        shares = known / known.sum() if known.sum() > 0 else np.full(len(known), 1 / len(known))
        demand = dataclasses.replace(self._demand, rows=[round(rows * share) for share in shares.tolist()], appended=0)
        return plan_ops.plan_memory(self._spec, demand, self.on_gpu)


def plan_group(layout: GroupLayout, demand: GroupDemand, cache: CacheConfig, host: HostConfig) -> GroupPlan:
    """Plans one group."""
    ranks = demand.ranks
    spec = MixCacheSpec(
        name=f"dim{layout.dim}",
        dim=layout.dim,
        slots=cache.slots,
        row_dtype=cache.row_dtype,
        policy=cache.policy,
        window=cache.window,
        world_size=ranks,
        tables=layout.tables,
        host=host,
    )
    names = [table.name for table in layout.tables]
    exact = demand.lines is not None and all(name in demand.counts for name in names)
    stream = prediction = None
    policy = CachePolicy(cache.policy, cache.slots, cache.window, demand.depth)
    if exact and demand.lines is not None:
        counts = [demand.counts[name] for name in names]
        whole = IdStream.of_counts(counts, demand.lines, demand.global_batch)
        stream = whole.shared(1 / ranks)
        if stream.rows() > 0:
            steps = demand.steps or stream.batches
            predicted = predict_by_replay if cache.policy == "lfu" else predict
            prediction = predicted(stream, policy, steps)
    rows = _rows(layout, demand, exact)
    keys = _Keys.of(layout, demand, stream, cache)
    needed = _memory_demand(spec, demand, rows, keys, stream, prediction)
    disk = None
    if host.kind == "disk" and prediction is not None:

        def room(existing: float) -> float:
            share = existing / max(sum(needed.rows), 1)
            parts = [round(count * share) for count in needed.rows]
            cached = plan_ops.plan_memory(spec, dataclasses.replace(needed, rows=parts)).cached_rows
            return float(cached) if cached < sum(parts) else float("inf")

        disk = disk_traffic(prediction, cache.slots, room)
        needed = dataclasses.replace(needed, appended=round(disk.appended))
    memory = plan_ops.plan_memory(spec, needed, demand.on_gpu)
    known = [value for value in rows if value is not None]
    return GroupPlan(
        name=spec.name,
        dim=layout.dim,
        slots=cache.slots,
        policy=policy,
        exact=exact,
        rows=sum(known) if len(known) == len(rows) else None,
        memory=memory,
        tables=_tables(layout, spec, rows, memory, prediction),
        traffic=_traffic(layout, demand, keys, memory, prediction, disk, cache.slots),
        prediction=prediction,
        disk=disk,
        messages=_messages(_Payload.of(layout, demand, keys), demand),
        on_gpu=demand.on_gpu,
        _spec=spec,
        _demand=needed,
    )


def _rows(layout: GroupLayout, demand: GroupDemand, exact: bool) -> list[float | None]:
    """Rows of each table (T) on one rank at the end of the run."""
    rows: list[float | None] = []
    for table in layout.tables:
        if table.name in demand.counts:
            counts = demand.counts[table.name]
            total = counts.distinct
            if exact and demand.lines and demand.steps is not None:
                stream = IdStream.of_counts([counts], demand.lines, demand.global_batch)
                total = stream.seen(min(demand.steps, stream.batches))
            rows.append(total / demand.ranks)
        elif table.name in demand.rows:
            rows.append(demand.rows[table.name] / demand.ranks)
        else:
            rows.append(None if table.rows is None else table.rows / demand.ranks)
    return rows


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Keys of one rank's batches: U, R, K, K of the largest batch, different ones of the batches in flight, and those
    that lookahead knows.
    """

    local: float
    received: float
    unique: float
    largest: float
    in_flight: float
    coming: float

    @classmethod
    def of(cls, layout: GroupLayout, demand: GroupDemand, stream: IdStream | None, cache: CacheConfig) -> _Keys:
        ranks, flying = demand.ranks, demand.depth + 1
        known = cache.window if cache.policy == "lookahead" and demand.depth > 0 else 0
        if stream is not None and demand.lines is not None:
            # U keys at each of W ranks go to W owners: R = U.
            local = dataclasses.replace(
                stream, ids=stream.ids * ranks, batches=max(1.0, demand.lines / demand.global_batch) * ranks
            ).unique()
            unique = stream.unique()
            largest = unique + _LARGEST_BATCH * stream.unique_spread() + 1 if stream.batches > 1 else unique
            coming = stream.seen(known - 1) + unique if known > 0 else 0.0
            return cls(local, local, unique, largest, stream.seen(flying), coming)
        local = unique = in_flight = coming = 0.0
        for index, table in enumerate(layout.tables):
            features = [f for f, t in zip(layout.features, layout.feature_tables, strict=True) if t == index]
            ids = demand.global_batch * sum(feature.length or 1 for feature in features)
            most = float("inf") if table.rows is None else table.rows
            local += min(ids / ranks, most)
            unique += min(ids, most) / ranks
            in_flight += min(ids * flying, most) / ranks
            coming += min(ids * known, most) / ranks
        return cls(local, local, unique, unique, in_flight, coming)


def _memory_demand(
    spec: MixCacheSpec,
    demand: GroupDemand,
    rows: Sequence[float | None],
    keys: _Keys,
    stream: IdStream | None,
    prediction: Prediction | None,
) -> MemoryDemand:
    evicts = stream is None or stream.rows() > spec.slots
    evictions = keys.unique if prediction is None else float(prediction.steady_misses.sum())
    counted = [demand.counts[table.name].distinct if table.name in demand.counts else 0.0 for table in spec.tables]
    freq = spec.policy == "freq"
    read = max(keys.received if demand.evaluates else 0.0, min(_COUNTS_CHUNK, max(counted)) if freq else 0.0)
    # Keys are looked at from the first batch on whose predecessors may not find room (EvictionPolicy::Expect).
    known = [value for value in rows if value is not None]
    fits = len(known) == len(rows) and sum(known) + (spec.window - 1) * keys.received <= spec.slots
    return MemoryDemand(
        rows=[round(value or 0.0) for value in rows],
        received=round(keys.received),
        unique=round(keys.unique),
        evictions=round(min(evictions, keys.unique)) if evicts else 0,
        tickets=demand.depth + 1,
        coming=0 if fits else round(keys.coming),
        counted=round(sum(counted) / demand.ranks) if freq else 0,
        read=round(read),
    )


def _tables(
    layout: GroupLayout,
    spec: MixCacheSpec,
    rows: Sequence[float | None],
    memory: PlannedMemory,
    prediction: Prediction | None,
) -> list[TablePlan]:
    total = sum(value or 0.0 for value in rows)
    row_bytes = memory.record_floats * _FLOAT_BYTES
    index = memory.index_bytes / total if total else 0.0
    slot_bytes = memory.device_bytes / spec.slots
    cached = hit_rates = None
    if prediction is not None:
        cached, hit_rates = prediction.stream.by_table(prediction.cached), prediction.table_hit_rates()
    plans = []
    for number, (table, value) in enumerate(zip(layout.tables, rows, strict=True)):
        mine = None if cached is None else float(cached[number])
        rate = None if hit_rates is None or np.isnan(hit_rates[number]) else float(hit_rates[number])
        plans.append(
            TablePlan(
                name=table.name,
                rows=value,
                row_bytes=row_bytes,
                index_bytes_per_row=index,
                host_bytes=None if value is None else value * (row_bytes + index),
                cached_rows=mine,
                device_bytes=None if mine is None else mine * slot_bytes,
                hit_rate=rate,
            )
        )
    return plans


@dataclasses.dataclass(frozen=True)
class _Payload:
    """Bytes of a step's keys, rows and gradients that a rank has for all ranks, itself included."""

    keys: float
    rows: float
    gradients: float

    @classmethod
    def of(cls, layout: GroupLayout, demand: GroupDemand, keys: _Keys) -> _Payload:
        # A message to each rank.
        words = keys.local + (_HEADER_WORDS + 2 * len(layout.tables)) * demand.ranks
        vector_bytes = layout.dim * _FLOAT_BYTES
        return cls(words * _KEY_BYTES, keys.received * vector_bytes, keys.local * vector_bytes)


def _messages(payload: _Payload, demand: GroupDemand) -> Messages:
    """What a rank brings to the exchanges of dist.py. Evaluation has exchanges of its own, of batches that are as
    large.
    """
    ranks, kinds = demand.ranks, 5 if demand.evaluates else 3
    keys = [payload.keys] * (kinds // 2)
    values = [payload.rows, payload.gradients, payload.rows][: kinds - len(keys)]
    in_host_memory = [] if demand.on_gpu else values
    if demand.exchange == "alltoall":
        return Messages(rows=[size * (ranks - 1) / ranks for size in keys + in_host_memory])
    splits = [float(_SPLIT_BYTES * ranks)] * kinds
    if demand.exchange == "allgather":
        return Messages(rows=keys + in_host_memory + splits)
    # Keys travel by allgather, rows and gradients as integers in a buffer for those of all ranks.
    return Messages(rows=keys + splits, sums=[size * ranks for size in values])


def _traffic(
    layout: GroupLayout,
    demand: GroupDemand,
    keys: _Keys,
    memory: PlannedMemory,
    prediction: Prediction | None,
    disk: DiskTraffic | None,
    slots: int,
) -> Traffic:
    record = memory.record_floats * _FLOAT_BYTES
    misses = loads = None
    if prediction is not None:
        misses = float(prediction.steady_misses.sum())
        loads = misses * record
    evicts = prediction is not None and float(prediction.misses.sum()) > slots
    payload = _Payload.of(layout, demand, keys)
    return Traffic(
        local_keys=keys.local,
        received=keys.received,
        unique=keys.unique,
        largest_unique=keys.largest,
        in_flight=keys.in_flight,
        misses=misses,
        key_bytes=demand.sent(payload.keys, reduced=False),
        row_bytes=demand.sent(payload.rows),
        gradient_bytes=demand.sent(payload.gradients),
        load_bytes=loads,
        write_back_bytes=loads if evicts else (None if loads is None else 0.0),
        disk_reads=None if disk is None else disk.last_reads,
        disk_writes=None if disk is None else disk.last_writes,
        disk_read_bytes=None if disk is None else disk.last_reads * max(memory.disk_row_bytes, 512),
        disk_write_bytes=None if disk is None else disk.last_writes * memory.disk_row_bytes,
    )
