"""`hvd-ctr plan`: what a run will take and move, before it starts. One process, no launcher, no training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf

from hvd_ctr import models
from hvd_ctr.cli import assemble, plan_report
from hvd_ctr.cli.plan_findings import Finding, Machine, findings_of
from hvd_ctr.config import ConfigError, FeatureConfig, TrainConfig
from hvd_ctr.data.parquet import CHUNK_ROWS
from hvd_ctr.embedding.group_plan import GroupDemand, GroupPlan, plan_group
from hvd_ctr.embedding.id_counts import read_counts
from hvd_ctr.embedding.id_stream import IdCounts
from hvd_ctr.embedding.sharding import group_by_dim

#: Resident memory of a rank's process without data, model and tables: Python, TensorFlow, Horovod, MPI and
#: compiled graphs.
PROCESS_BYTES = 740 << 20

_FLOAT_BYTES = 4
# Dense weights, their gradients, and what the optimizer keeps beside them.
_DENSE_COPIES = {"adam": 4, "adagrad": 3, "sgd": 2}
# Bytes of a line, where the readers hold raw rows to shuffle them.
_CRITEO_LINE_BYTES = 240
# Of a reader, beside the rows to shuffle: text as it is read, split and read ahead; columns as they are decoded.
_READER_BLOCKS = 8
_READER_CHUNKS = 2


@dataclasses.dataclass(frozen=True)
class Counted:
    """A file of id counts.

    Attributes:
        path: the file.
        tables: the counts of each table that has any.
        lines: samples of an epoch.
        max_error: by which a count may be low; above 0 ids are missing, and were estimated.
        listed: ids in the file.
    """

    path: str
    tables: Mapping[str, IdCounts]
    lines: float
    max_error: int
    listed: int


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank beside the tables: process, dense weights with gradients and optimizer, batches in flight with
    their activations, rows read ahead to shuffle them.
    """

    process: float
    dense: float
    batches: float
    shuffle: float

    def total(self) -> float:
        """All of it."""
        return self.process + self.dense + self.batches + self.shuffle


@dataclasses.dataclass(frozen=True)
class Plan:
    """All figures of a run; of one rank unless named otherwise.

    Attributes:
        config: the run.
        ranks: W.
        ranks_per_host: on this machine.
        counted: id counts; None: none.
        steps: batches of the run; None: not known.
        dense_weights: trainable numbers of the dense model.
        groups: tables by dim.
        memory: beside the tables.
        machine: what there is.
        findings: what does not fit, or could be better.
    """

    config: TrainConfig
    ranks: int
    ranks_per_host: int
    counted: Counted | None
    steps: float | None
    dense_weights: int
    groups: Sequence[GroupPlan]
    memory: RankMemory
    machine: Machine
    findings: Sequence[Finding]

    def rank_bytes(self) -> float:
        """RAM of one rank: without a GPU the device tier is RAM too."""
        return self.memory.total() + sum(group.memory.device_bytes + group.memory.host_bytes for group in self.groups)


def plan(
    config: TrainConfig,
    *,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    counts_file: str | None = None,
    json_file: str | None = None,
) -> int:
    """Prints the plan of a run.

    Args:
        config: the run.
        ranks: W.
        ranks_per_host: of them on one machine like this one; None: all.
        counts_file: id counts; None: embedding.cache.counts, or counts.parquet in the run folder if it is there.
        json_file: file for the figures as JSON, "-" for standard output in place of the tables; None: none.

    Returns:
        1 if something cannot work, else 0.

    Raises:
        ConfigError: an argument or the file of counts cannot be used.
    """
    # Else TensorFlow would take the memory of all GPUs, which others may train on.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    made = make_plan(config, ranks=ranks, ranks_per_host=ranks_per_host, counts_file=counts_file)
    if json_file == "-":
        json.dump(as_json(made), sys.stdout, indent=1)
        print()
    else:
        plan_report.show(made)
        if json_file is not None:
            Path(json_file).write_text(json.dumps(as_json(made), indent=1))
            print(f"written: {json_file}")
    return 1 if any(finding.fatal for finding in made.findings) else 0


def make_plan(
    config: TrainConfig,
    *,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    counts_file: str | None = None,
    machine: Machine | None = None,
) -> Plan:
    """The figures behind `plan`; machine: what there is, None: this one."""
    per_host = ranks if ranks_per_host is None else ranks_per_host
    if ranks < 1 or per_host < 1 or per_host > ranks:
        raise ConfigError(
            f"--ranks {ranks}, --ranks-per-host {per_host}: allowed are 1 or more ranks, and no more on a host "
            f"than in all"
        )
    features = assemble.model_features(config)
    counted = _counted(config, features, counts_file)
    steps = _steps(config, counted)
    demand = GroupDemand(
        ranks=ranks,
        global_batch=config.train.global_batch,
        depth=config.train.pipeline_depth,
        steps=steps,
        lines=None if counted is None else counted.lines,
        counts={} if counted is None else counted.tables,
        evaluates=bool(config.data.eval),
        exchange=config.embedding.exchange,
    )
    cache, host = config.embedding.cache, config.embedding.host
    groups = [plan_group(layout, demand, cache, host) for layout in group_by_dim(features)]
    weights = dense_weights(config, features)
    made = Plan(
        config=config,
        ranks=ranks,
        ranks_per_host=per_host,
        counted=counted,
        steps=steps,
        dense_weights=weights,
        groups=groups,
        memory=_rank_memory(config, features, weights, groups, ranks),
        machine=machine or Machine.this(host.path),
        findings=(),
    )
    return dataclasses.replace(made, findings=findings_of(made))


# ---- what is known of the data ----


def _counted(config: TrainConfig, features: Sequence[FeatureConfig], counts_file: str | None) -> Counted | None:
    path = counts_file or config.embedding.cache.counts
    if path is None:
        usual = config.resolved_run_dir() / "counts.parquet"
        if not usual.exists():
            return None
        path = str(usual)
    if not Path(path).is_file():
        if counts_file is not None:
            raise ConfigError(f"--counts {path}: no such file; `hvd-ctr count` writes one")
        return None  # A finding tells.
    names = list(dict.fromkeys(feature.table.name for feature in features))
    parts: dict[str, list[Any]] = {name: [] for name in names}
    try:
        for table, _, counts in read_counts(path, names):
            parts[table].append(counts)
        metadata = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
        lines = float(metadata.get("hvd_ctr.lines", 0))
        max_error = int(metadata.get("hvd_ctr.max_error", 0))
    except ValueError as error:
        raise ConfigError(f"id counts: {error}") from error
    tables = {name: IdCounts.of(np.concatenate(counts)) for name, counts in parts.items() if counts}
    tables = {name: table for name, table in tables.items() if table.distinct > 0}
    uses = {name: sum(feature.table.name == name for feature in features) for name in names}
    if lines <= 0:  # Written by another tool: an id per feature and line.
        lines = max((table.occurrences / uses[name] for name, table in tables.items()), default=0.0)
    if lines <= 0:
        return None
    listed = sum(int(table.distinct) for table in tables.values())
    tables = {name: table.completed(lines * uses[name], max_error) for name, table in tables.items()}
    return Counted(path, tables, lines, max_error, listed)


def _steps(config: TrainConfig, counted: Counted | None) -> float | None:
    loop = config.train
    if counted is None:
        return None if loop.max_steps is None else float(loop.max_steps)
    steps = loop.epochs * max(1.0, counted.lines / loop.global_batch)
    return steps if loop.max_steps is None else min(steps, float(loop.max_steps))


# ---- memory beside the tables ----


class _Vectors(keras.layers.Layer):
    """Stands in for the embedding layer, which would make its tables: (B, F) ids to (B, F, D), behind dense columns
    (B, X) to (B, X + F * D), or with `factored` to distinct rows and the row of each id.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self._shape = (features, dim)

    def compute_output_spec(self, ids: Any, dense: Any = None, factored: bool = False) -> Any:
        if factored:
            rows = keras.KerasTensor((None, self._shape[1]), dtype="float32")
            return {"rows": rows, "row_of_id": keras.KerasTensor(ids.shape, dtype="int32")}
        shape = self._shape if dense is None else (dense.shape[1] + math.prod(self._shape),)
        return keras.KerasTensor((ids.shape[0], *shape), dtype="float32")


def dense_weights(config: TrainConfig, features: Sequence[FeatureConfig]) -> int:
    """Numbers in the dense weights of the configured model."""
    vectors = _Vectors(len(features), features[0].table.dim)
    inputs, outputs = models.build_model(config.model, features, len(config.data.dense_names()), vectors)
    return int(keras.Model(inputs, outputs).count_params())


def _rank_memory(
    config: TrainConfig, features: Sequence[FeatureConfig], weights: int, groups: Sequence[GroupPlan], ranks: int
) -> RankMemory:
    batch = math.ceil(config.train.global_batch / ranks)
    dense, sparse = len(config.data.dense_names()), len(features)
    dim = max(feature.table.dim for feature in features)
    # A batch and its virtual ids; while it trains also its vectors, their gradients, and each layer's output with its
    # gradient.
    read = batch * (_FLOAT_BYTES * (dense + 1) + 8 * sparse + _FLOAT_BYTES * sparse)
    widths = sum(config.model.hidden) + (sum(config.model.bottom_hidden) if config.model.name == "dlrm" else 0)
    trained = 3 * batch * sparse * dim * _FLOAT_BYTES + 2 * batch * widths * _FLOAT_BYTES
    rows = sum(2 * (group.traffic.local_keys + group.traffic.received) * group.dim * _FLOAT_BYTES for group in groups)
    cache, depth = config.embedding.cache, config.train.pipeline_depth
    # Loaded, fetched, training, and one being read; lookahead reads further.
    flying = 2 * depth + 2 + (cache.window if cache.policy == "lookahead" and depth > 0 else 0)
    line = _CRITEO_LINE_BYTES if config.data.format == "criteo" else 8 * (dense + sparse) + 8
    read_ahead = _READER_CHUNKS * CHUNK_ROWS * line if config.data.columns else _READER_BLOCKS * config.data.block_bytes
    shuffle = config.data.shuffle_rows * line + read_ahead
    dense_bytes = weights * _FLOAT_BYTES * _DENSE_COPIES[config.train.dense_optimizer.kind]
    return RankMemory(PROCESS_BYTES, dense_bytes, flying * read + trained + rows, shuffle)


# ---- JSON ----


def as_json(made: Plan) -> dict[str, Any]:
    """All figures by name, in bytes, rows and shares; of one rank unless named otherwise; null where not known."""
    return {
        "name": made.config.name,
        "ranks": made.ranks,
        "ranks_per_host": made.ranks_per_host,
        "steps": made.steps,
        "counts": None
        if made.counted is None
        else {
            "path": made.counted.path,
            "lines": made.counted.lines,
            "ids_listed": made.counted.listed,
            "max_error": made.counted.max_error,
        },
        "groups": [_group_json(group, made.ranks) for group in made.groups],
        "rank_bytes": {
            "tables_device": sum(group.memory.device_bytes for group in made.groups),
            "tables_host": sum(group.memory.host_bytes for group in made.groups),
            **dataclasses.asdict(made.memory),
            "total_ram": made.rank_bytes(),
        },
        "dense_weights": made.dense_weights,
        "machine": dataclasses.asdict(made.machine),
        "findings": [dataclasses.asdict(finding) for finding in made.findings],
    }


def _group_json(group: GroupPlan, ranks: int) -> dict[str, Any]:
    return {
        "name": group.name,
        "dim": group.dim,
        "slots": group.slots,
        "from_counts": group.exact,
        "rows": group.rows,
        "hit_rate": group.hit_rate,
        "device_bytes": group.memory.device_bytes,
        "host_bytes": group.memory.host_bytes,
        "disk_bytes": group.memory.disk_bytes,
        "all_ranks": {
            "rows": None if group.rows is None else group.rows * ranks,
            "device_bytes": group.memory.device_bytes * ranks,
            "host_bytes": group.memory.host_bytes * ranks,
            "disk_bytes": group.memory.disk_bytes * ranks,
        },
        "memory": group.memory._asdict(),
        "per_step": dataclasses.asdict(group.traffic),
        "tables": [dataclasses.asdict(table) for table in group.tables],
        "disk": None
        if group.disk is None
        else {**dataclasses.asdict(group.disk), "ram_hit_rate": group.disk.hit_rate()},
    }
