"""`hvd-ctr count`: how often each id of each table occurs in the training data, for the policy freq and for `plan`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.config import ConfigError, TableConfig, TrainConfig
from hvd_ctr.data import Batch, open_reader
from hvd_ctr.data.counts import DEFAULT_MAX_IDS, MIN_MAX_IDS, IdCounter
from hvd_ctr.embedding.id_counts import TableCounts, write_counts
from hvd_ctr.ops import id_ops
from hvd_ctr.training.progress import ProgressReport

# Counts that rank 0 receives at a time, from all ranks together.
_EXCHANGE_ROWS = 1 << 20


@dataclasses.dataclass
class _Tables:
    """The tables of a run, the table of each column of a batch's ids, and the invalid ids met per table."""

    tables: list[TableConfig]
    columns: list[int]
    invalid: list[int]

    @classmethod
    def of(cls, config: TrainConfig) -> _Tables:
        features = config.feature_configs()
        tables = list({feature.table.name: feature.table for feature in features}.values())
        names = [table.name for table in tables]
        return cls(tables, [names.index(feature.table.name) for feature in features], [0] * len(tables))

    def add(self, batch: Batch, counter: IdCounter) -> None:
        """Counts a batch's ids as the tables see them: after hash_ids, without invalid ones."""
        for column, table in enumerate(self.columns):
            ids, config = batch.ids[:, column], self.tables[table]
            if config.hash_ids:
                ids = np.asarray(id_ops.hash_to_range(tf.constant(ids), int(config.rows or 0)))
            else:
                valid = ids >= 0 if config.rows is None else (ids >= 0) & (ids < config.rows)
                self.invalid[table] += int(np.sum(~valid))
                ids = ids[valid]
            counter.add(table, ids)


def count(config: TrainConfig, output: str | None = None, max_ids: int | None = None) -> int:
    """Counts the ids of data.train in one pass and writes them to `output` (default: counts.parquet in the run folder).

    Collective: every rank reads its part. Exact up to `max_ids` (default: DEFAULT_MAX_IDS) distinct ids over all tables
    and ranks.
    """
    max_ids = DEFAULT_MAX_IDS if max_ids is None else max_ids
    if not config.data.train:
        raise ConfigError("data.train names no files")
    if max_ids < MIN_MAX_IDS:
        raise ConfigError(f"--max-ids: received {max_ids}; allowed: {MIN_MAX_IDS} or more")
    comm = comms.init(intra_op_threads=config.train.intra_op_threads)
    start = time.perf_counter()
    # The order of the samples does not matter here, and a shuffle would cost memory.
    data = config.data.model_copy(update={"shuffle_rows": 0})
    reader = open_reader(
        data, "train", rank=comm.rank, size=comm.size, global_batch=config.train.global_batch, seed=config.seed
    )
    tables = _Tables.of(config)
    counter = IdCounter(len(tables.tables), max_ids)
    with ProgressReport("count", comm.rank) as report:
        for step, batch in enumerate(reader.epoch(0), 1):
            tables.add(batch, counter)
            fraction = reader.fraction_read()
            report.position(f"{step:,} batches", fraction)
            report.values(step, {"of_data": fraction}, f"batch {step:,}")
    gather_on_rank_0(comm, counter)
    invalid = [sum(values) for values in zip(*comm.allgather_object(tables.invalid), strict=True)]
    lines = sum(comm.allgather_object(reader.counts()["lines"]))
    if comm.rank == 0:
        path = Path(output) if output is not None else config.resolved_run_dir() / "counts.parquet"
        _write(path, tables.tables, counter, lines)
        seconds = time.perf_counter() - start
        summary = _summary(tables.tables, counter, invalid)
        summary += [
            f"counted {lines:,} lines on {comm.size} rank(s) in {seconds:.1f} s ({lines / seconds:,.0f} lines/s)",
            f"written: {path} ({path.stat().st_size / 2**20:,.1f} MiB)",
        ]
        print("\n".join(summary), flush=True)
    comm.barrier()
    return 0


def gather_on_rank_0(comm: comms.Comm, counter: IdCounter) -> None:
    """Adds all ranks' counts to those of rank 0, a bounded part at a time."""
    chunk = max(1, _EXCHANGE_ROWS // comm.size)
    error = 0 if counter.exact else counter.max_error
    for table in range(counter.tables):
        ids, counts = counter.result(table) if comm.rank != 0 else (np.zeros(0, np.int64), np.zeros(0, np.int64))
        most = max(comm.allgather_object(len(ids)))
        for begin in range(0, most, chunk):
            part = np.stack([ids[begin : begin + chunk], counts[begin : begin + chunk]], axis=1)
            splits = np.zeros(comm.size, np.int32)
            splits[0] = len(part)
            received, _ = comm.alltoall(tf.constant(part), tf.constant(splits), "hvd_ctr.count")
            if comm.rank == 0:
                counter.add(table, received.numpy()[:, 0], received.numpy()[:, 1])
    for other in comm.allgather_object(error)[1:]:
        counter.add_error(other)


def _write(path: Path, tables: list[TableConfig], counter: IdCounter, lines: int) -> None:
    def parts() -> Iterator[TableCounts]:
        for index, table in enumerate(tables):
            yield (table.name, *counter.result(index))

    write_counts(path, parts(), {"lines": str(lines), "max_error": str(counter.max_error)})


def _summary(tables: list[TableConfig], counter: IdCounter, invalid: list[int]) -> list[str]:
    lines = [f"{'table':<24} {'ids':>12} {'occurrences':>14}   share of the most frequent 1 % of ids"]
    ids_total = occurrences_total = 0
    for index, table in enumerate(tables):
        ids, counts = counter.result(index)
        occurrences = int(counts.sum())
        top = int(counts[: max(1, len(ids) // 100)].sum())
        share = f"{100 * top / occurrences:.1f} %" if occurrences else "-"
        skipped = f"   ({invalid[index]:,} invalid ids left out)" if invalid[index] else ""
        lines.append(f"{table.name:<24} {len(ids):>12,} {occurrences:>14,}   {share}{skipped}")
        ids_total, occurrences_total = ids_total + len(ids), occurrences_total + occurrences
    lines.append(f"{'total':<24} {ids_total:>12,} {occurrences_total:>14,}")
    if counter.exact:
        lines.append("all counts are exact")
    else:
        lines.append(
            f"only the most frequent ids are kept (--max-ids); every count is low by at most {counter.max_error:,}, "
            "and ids that are not listed do not occur more often than that"
        )
    return lines
