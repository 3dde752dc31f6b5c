"""The models of a run's configuration: every key with unit, default and meaning. Frozen; unknown keys are refused.

Symbols: B local batch, F sparse features, D embedding dim, W ranks, S cache slots per rank.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from hvd_ctr.config.base import Frozen as _Frozen
from hvd_ctr.config.data import DataConfig
from hvd_ctr.config.host import HostConfig
from hvd_ctr.config.row_life import (
    MaxIdleSteps,
    MaxRows,
    MinCount,
    OwnMinCount,
    OwnSweepEverySteps,
    SweepEverySteps,
)
from hvd_ctr.config.synth import SynthConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names key, file, received and allowed value."""


class SparseOptimizerConfig(_Frozen):
    """Row optimizer of a table. Lazy: rows that are not in a batch do not move."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"] = Field(
        default="adagrad", description="Update rule of the rows."
    )
    learning_rate: float = Field(
        default=0.01, gt=0, description="Step size, multiplied by the schedule's scale if one is used."
    )
    initial_accumulator: float = Field(
        default=0.1, ge=0, description="First value of the squared-gradient sum (adagrad, rowwise_adagrad, ftrl)."
    )
    epsilon: float = Field(
        default=1e-7, ge=0, description="Added to the root of the second moment (adagrad, rowwise_adagrad, adam)."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment (adam).")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment (adam).")
    bias_correction: Literal["global", "row"] = Field(
        default="global", description="Step count of adam's bias correction: steps of the run, or updates of the row."
    )
    l1: float = Field(default=0.0, ge=0, description="L1 strength (ftrl).")
    l2: float = Field(default=0.0, ge=0, description="L2 strength (ftrl).")
    learning_rate_power: float = Field(
        default=-0.5, le=0, description="Power of the accumulator in the step size (ftrl)."
    )


Initializer = Literal["constant", "uniform", "normal"]
InvalidIds = Literal["error", "skip"]
ExchangeMode = Literal["alltoall", "allgather", "allreduce"]


class TableConfig(_Frozen):
    """One embedding table. `TableConfig("item", dim=8)` is the short form."""

    name: str = Field(min_length=1, description="Unique name; part of the seed of the initial values.")
    dim: int = Field(default=16, ge=1, description="Embedding dim D, in floats.")
    rows: int | None = Field(
        default=None,
        ge=1,
        description="Number of rows; legal ids are 0 .. rows-1. null: any id >= 0, rows grow on first use.",
    )
    hash_ids: bool = Field(default=False, description="Map every id to 0 .. rows-1 by hash; needs rows.")
    invalid_ids: InvalidIds = Field(
        default="error",
        description="Negative ids and ids beyond rows: stop all ranks, or leave them out and count them.",
    )
    optimizer: SparseOptimizerConfig = Field(default_factory=SparseOptimizerConfig, description="Row optimizer.")
    initializer: Initializer = Field(default="uniform", description="Distribution of a row's first value.")
    init_scale: float = Field(
        default=0.05, ge=0, description="Value (constant), half width (uniform) or standard deviation (normal)."
    )
    min_count: MinCount = 1
    max_idle_steps: MaxIdleSteps = None
    max_rows: MaxRows = None
    sweep_every_steps: SweepEverySteps = 64

    def __init__(self, name: str | None = None, /, **fields: Any) -> None:
        super().__init__(**(fields if name is None else {"name": name, **fields}))

    @property
    def tracks_rows(self) -> bool:
        """Occurrences and last steps of the table's ids are kept, because one of the options needs them."""
        return self.min_count > 1 or self.max_idle_steps is not None or self.max_rows is not None

    @model_validator(mode="after")
    def _hash_needs_rows(self) -> TableConfig:
        if self.hash_ids and self.rows is None:
            raise ValueError(
                f"table {self.name!r}: hash_ids is true but rows is not set; set rows to the number of buckets"
            )
        return self


class FeatureConfig(_Frozen):
    """One sparse input and the table it looks up. `FeatureConfig("item", table=item)` is the short form."""

    name: str = Field(min_length=1, description="Unique name of the input.")
    table: TableConfig = Field(description="Table of this feature; features may share one.")
    combiner: Literal["sum", "mean", "sqrtn"] | None = Field(
        default="sum",
        description="How the rows of one sample are pooled to (D); null: no pooling, the rows come back as a sequence.",
    )
    length: int | None = Field(default=1, ge=1, description="Ids per sample; null: ragged or sparse input.")
    padding_id: int | None = Field(
        default=None, description="This id takes no part: no row, no gradient, not counted by mean."
    )
    weights: str | None = Field(
        default=None, description="Name of the input that holds one weight per id; null: all 1."
    )

    def __init__(self, name: str | None = None, /, **fields: Any) -> None:
        super().__init__(**(fields if name is None else {"name": name, **fields}))


class CacheConfig(_Frozen):
    """Device cache of the rows a rank owns. It changes speed, never results, but for row_dtype, which rounds rows."""

    slots: int = Field(default=65536, ge=1, description="Rows cached per rank, for each group of tables with one dim.")
    row_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32",
        description=(
            "How the cache stores the values of a row. float16 and bfloat16 take half the device memory; each update "
            "is computed in float32 and rounded to them, so that updates below half a unit in the last place are lost "
            "(float16: 11 bits, values up to 65504; bfloat16: 8 bits, any size). Optimizer state, rows on the host and "
            "checkpoints are float32. Any cache size gives the same numbers, here too."
        ),
    )
    policy: Literal["lru", "lfu", "clock", "freq", "lookahead"] = Field(
        default="lookahead",
        description=(
            "Which unpinned row makes room. lru: the longest unused. lfu: the one with the fewest uses since it was "
            "loaded; all uses are halved after every 16 x slots uses. clock: second chance, an LRU that costs less. "
            "freq: the one whose id has the smallest count in `counts`; the cache starts with the most frequent rows. "
            "lookahead: one that none of the next `window` batches needs, the longest unused first; without a "
            "pipeline it is lru."
        ),
    )
    window: int = Field(
        default=8,
        ge=0,
        le=64,
        description="Batches the policy lookahead may know ahead; their rows need not be loaded. 0: none.",
    )
    counts: str | None = Field(
        default=None,
        description=(
            "Parquet file of id counts for the policy freq, as written by `hvd-ctr count` (columns table, id, count), "
            "relative to the working directory. Needed with freq, not used by the others."
        ),
    )
    prefetch_wait_seconds: float = Field(
        default=120.0, gt=0, description="Longest wait of a prefetch for slots pinned by batches in flight, in seconds."
    )

    @model_validator(mode="after")
    def _freq_needs_counts(self) -> CacheConfig:
        if self.policy == "freq" and self.counts is None:
            raise ValueError(
                "policy is 'freq' but counts is not set; write the file with `hvd-ctr count CONFIG` and name it there"
            )
        return self


Widths = tuple[typing.Annotated[int, Field(ge=1)], ...]


class ModelConfig(_Frozen):
    """The dense part of the model."""

    name: Literal["deepfm", "wide_deep", "dcnv2", "dlrm"] = Field(default="deepfm", description="Which model.")
    hidden: Widths = Field(default=(400, 400, 400), description="Widths of the hidden layers (DLRM: of the top MLP).")
    cross_layers: int = Field(default=3, ge=1, description="Number of cross layers (dcnv2).")
    bottom_hidden: Widths = Field(
        default=(512, 256), description="Widths of the layers before the projection of the dense input to D (dlrm)."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of hidden units dropped in training.")
    l2: float = Field(default=0.0, ge=0, description="L2 strength on the dense kernels.")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "Number format of the dense layers' products. bfloat16 is faster on processors that have it, and rounds to "
            "8 bits; weights, optimizer state, embedding rows, first-order terms, logits and the loss stay float32."
        ),
    )


class TableOverrideConfig(_Frozen):
    """What one table has different from the common settings of `embedding`; keys not given keep the common value."""

    dim: int | None = Field(default=None, ge=1, description="Embedding dim D, in floats.")
    rows: int | None = Field(default=None, ge=1, description="Number of rows.")
    hash_ids: bool | None = Field(default=None, description="Map every id to 0 .. rows-1 by hash.")
    invalid_ids: InvalidIds | None = Field(default=None, description="Policy for ids outside the table.")
    optimizer: SparseOptimizerConfig | None = Field(default=None, description="Keys of the row optimizer that differ.")
    initializer: Initializer | None = Field(default=None, description="Distribution of a row's first value.")
    init_scale: float | None = Field(default=None, ge=0, description="Scale of a row's first value.")
    min_count: OwnMinCount = None
    max_idle_steps: MaxIdleSteps = None
    max_rows: MaxRows = None
    sweep_every_steps: OwnSweepEverySteps = None


class EmbeddingConfig(_Frozen):
    """Embedding tables: common settings, and what single tables have different."""

    dim: int = Field(default=16, ge=1, description="Embedding dim D of every table, in floats.")
    rows: int | None = Field(
        default=None, ge=1, description="Rows of every table; null: any id >= 0, rows grow on first use."
    )
    hash_ids: bool = Field(default=False, description="Map every id to 0 .. rows-1 by hash; needs rows.")
    invalid_ids: InvalidIds = Field(
        default="error",
        description="Negative ids and ids beyond rows: stop all ranks, or leave them out and count them.",
    )
    optimizer: SparseOptimizerConfig = Field(
        default_factory=SparseOptimizerConfig, description="Row optimizer of every table."
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="Device cache.")
    host: HostConfig = Field(default_factory=HostConfig, description="Rows that are not on the device.")
    exchange: ExchangeMode = Field(
        default="alltoall",
        description=(
            "How keys, rows and gradients travel between the ranks; the numbers are the same. alltoall: each rank gets "
            "its part. allgather: each gets everything and takes its part. allreduce: rows and gradients as a sum over "
            "buffers that are zero where another rank has the row, keys by allgather."
        ),
    )
    initializer: Initializer = Field(default="uniform", description="Distribution of a row's first value.")
    init_scale: float = Field(
        default=0.05, ge=0, description="Value (constant), half width (uniform) or standard deviation (normal)."
    )
    min_count: MinCount = 1
    max_idle_steps: MaxIdleSteps = None
    max_rows: MaxRows = None
    sweep_every_steps: SweepEverySteps = 64
    tables: dict[str, TableOverrideConfig] = Field(
        default_factory=dict,
        description=(
            "Table name -> settings that differ. A feature's table has the feature's name unless `shared` says "
            "otherwise."
        ),
    )
    shared: dict[str, str] = Field(
        default_factory=dict,
        description="Feature name -> name of the table it looks up; features with one table name share its rows.",
    )

    def table(self, name: str) -> TableConfig:
        """The table of that name: the common settings with its own over them."""
        common: dict[str, Any] = {f: getattr(self, f) for f in TableOverrideConfig.model_fields}
        own = self.tables.get(name)
        if own is not None:
            changes = {f: getattr(own, f) for f in own.model_fields_set}
            if own.optimizer is not None:
                given = {f: getattr(own.optimizer, f) for f in own.optimizer.model_fields_set}
                changes["optimizer"] = self.optimizer.model_copy(update=given)
            common.update(changes)
        return TableConfig(name, **common)


class DenseOptimizerConfig(_Frozen):
    """Optimizer of the dense weights."""

    kind: Literal["adam", "sgd", "adagrad"] = Field(default="adam", description="Update rule.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Step size.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum (sgd).")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment (adam).")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment (adam).")
    epsilon: float = Field(default=1e-7, gt=0, description="Added to the root of the second moment (adam, adagrad).")
    initial_accumulator: float = Field(
        default=0.1, ge=0, description="First value of the squared-gradient sum (adagrad)."
    )


class LoopConfig(_Frozen):
    """The training loop."""

    global_batch: int = Field(
        default=4096, ge=1, description="Samples per step over all ranks; the loss is their mean."
    )
    epochs: int = Field(default=1, ge=1, description="Passes over the training data.")
    max_steps: int | None = Field(
        default=None, ge=1, description="Stop after this many steps; null: after the last epoch."
    )
    dense_optimizer: DenseOptimizerConfig = Field(
        default_factory=DenseOptimizerConfig, description="Optimizer of the dense weights."
    )
    log_every_steps: int = Field(
        default=100, ge=1, description="Steps between two log lines; without a terminal at most one every 10 s."
    )
    eval_every_steps: int | None = Field(
        default=None, ge=1, description="Steps between two evaluations; null: after each epoch only."
    )
    pipeline_depth: int = Field(
        default=2,
        ge=0,
        le=8,
        description="Batches whose rows are fetched while an earlier one trains; 0: none. Results are the same bits.",
    )
    intra_op_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of TensorFlow's kernels per rank; null: the cores of the host divided by its ranks.",
    )


class CheckpointConfig(_Frozen):
    """When the model is saved to the run folder."""

    at_end: bool = Field(default=True, description="Save after the last step.")
    every_steps: int | None = Field(
        default=None, ge=1, description="Steps between two checkpoints; null: none for this reason."
    )
    every_minutes: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Minutes of wall clock between two checkpoints, counted from the start and from each checkpoint, by rank "
            "0's clock; null: none for this reason."
        ),
    )
    keep: int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints kept, the newest; an older one is deleted once a newer one is complete. null: all.",
    )


class TrainConfig(_Frozen):
    """A whole run: the YAML file."""

    name: str = Field(default="run", min_length=1, description="Name of the run.")
    run_dir: str | None = Field(
        default=None, description="Folder of the run's output, relative to the working directory; null: runs/<name>."
    )
    seed: int = Field(default=1, ge=0, lt=1 << 63, description="Seed of weights, rows and shuffle.")
    data: DataConfig = Field(default_factory=DataConfig, description="Samples.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Dense part of the model.")
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig, description="Embedding tables.")
    train: LoopConfig = Field(default_factory=LoopConfig, description="Training loop.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving the model.")
    synth: SynthConfig | None = Field(default=None, description="Data to generate with `hvd-ctr synth`; null: none.")

    @model_validator(mode="after")
    def _names_exist(self) -> TrainConfig:
        features = self.data.sparse_names()
        _require_known("embedding.shared", self.embedding.shared, features, "feature")
        tables = tuple(dict.fromkeys(self.embedding.shared.get(f, f) for f in features))
        _require_known("embedding.tables", self.embedding.tables, tables, "table")
        self.feature_configs()
        return self

    def resolved_run_dir(self) -> Path:
        """Folder of the run's output."""
        return Path(self.run_dir) if self.run_dir is not None else Path("runs") / self.name

    def feature_configs(self) -> tuple[FeatureConfig, ...]:
        """One single-id feature per sparse column (F), in the order of the columns of a batch's ids (B, F)."""
        names = self.data.sparse_names()
        tables = {t: self.embedding.table(t) for t in dict.fromkeys(self.embedding.shared.get(f, f) for f in names)}
        return tuple(FeatureConfig(f, table=tables[self.embedding.shared.get(f, f)]) for f in names)


def _require_known(key: str, given: dict[str, Any], known: Sequence[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{key}: no {what} is called {name!r}{nearest(name, known)}")


def nearest(name: str, known: Sequence[str]) -> str:
    """ "; did you mean ...?", or nothing when no known name is close."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
