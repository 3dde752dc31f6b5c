"""Where samples come from, and the columns of Parquet files."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from hvd_ctr.config.base import Frozen as _Frozen

CRITEO_DENSE_NAMES: tuple[str, ...] = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE_NAMES: tuple[str, ...] = tuple(f"C{i}" for i in range(1, 27))

#: Id of an empty hexadecimal category, just above the range of 8-digit values (kCriteoMissingId in criteo_parser.h).
HEX_MISSING_ID = 1 << 32
#: Id of a null in an integer or string column unless the column names its own.
DEFAULT_MISSING_ID = (1 << 63) - 1


class DenseColumnConfig(_Frozen):
    """A numeric Parquet column."""

    name: str = Field(min_length=1, description="Column name in the files.")
    default: float | None = Field(
        default=None,
        description=(
            "Value, before the transform, of a null cell and of every row of a file without the column; null: the "
            "column must exist, null cells give 0."
        ),
    )
    transform: Literal["log1p", "none"] = Field(
        default="log1p", description="log1p: sign(v) * log1p(|v|), finite for negative values; none: as it is."
    )


class SparseColumnConfig(_Frozen):
    """A categorical Parquet column."""

    name: str = Field(min_length=1, description="Column name in the files, and name of the feature.")
    kind: Literal["int", "hex", "string"] = Field(
        default="int",
        description=(
            "int: the id itself, exact to 63 bits; hex: text of 1 to 8 hexadecimal digits; string: text, hashed to 63 "
            "bits."
        ),
    )
    default: int | str | None = Field(
        default=None, description="Value of every row of a file without the column; null: the column must exist."
    )
    missing_id: int | None = Field(
        default=None,
        ge=0,
        le=DEFAULT_MISSING_ID,
        description="Id of a null or empty cell; null: 2^32 for hex, 2^63-1 for int and string.",
    )

    @model_validator(mode="after")
    def _default_fits_kind(self) -> SparseColumnConfig:
        value = self.default
        fits = {
            "int": isinstance(value, int) and 0 <= value < 1 << 63,
            "hex": isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{0,8}", value) is not None,
            "string": isinstance(value, str),
        }
        if value is not None and not fits[self.kind]:
            allowed = {"int": "an integer 0 .. 2^63-1", "hex": "text of up to 8 hexadecimal digits", "string": "text"}
            raise ValueError(
                f"column {self.name!r}: default: received {value!r}; allowed for kind {self.kind}: {allowed[self.kind]}"
            )
        return self

    def resolved_missing_id(self) -> int:
        """Id of a null or empty cell."""
        if self.missing_id is not None:
            return self.missing_id
        return HEX_MISSING_ID if self.kind == "hex" else DEFAULT_MISSING_ID


class ParquetSchemaConfig(_Frozen):
    """Which columns of the Parquet files are used. Columns are found by name; others are ignored."""

    label: str = Field(default="label", min_length=1, description="Name of the label column (0 or 1).")
    dense: tuple[DenseColumnConfig, ...] = Field(
        default=(), description="Numeric columns, in the order of the model's dense input."
    )
    sparse: tuple[SparseColumnConfig, ...] = Field(
        default=(), description="Categorical columns, in the order of the model's features."
    )

    @model_validator(mode="after")
    def _unique(self) -> ParquetSchemaConfig:
        names = [self.label, *(c.name for c in self.dense), *(c.name for c in self.sparse)]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise ValueError(f"column(s) {', '.join(repeated)} listed more than once; each column has one role")
        return self


class DataConfig(_Frozen):
    """Where the samples are and how they are read. Paths are relative to the working directory; `*` and `?` match."""

    format: Literal["criteo", "parquet"] = Field(
        default="criteo",
        description="criteo: tab-separated display-advertising files, plain or .gz; parquet: columns by `columns`.",
    )
    train: tuple[str, ...] = Field(default=(), description="Files to train on.")
    eval: tuple[str, ...] = Field(default=(), description="Files to evaluate on.")
    predict: tuple[str, ...] = Field(default=(), description="Files to score.")
    predict_has_label: bool = Field(
        default=False, description="The files to score carry a label (it is read and not used)."
    )
    shuffle_rows: int = Field(
        default=262144,
        ge=0,
        description=(
            "Rows per shuffle window of the training data, held in memory as raw bytes by each rank; files are read in"
            " a seeded order. 0: no shuffle."
        ),
    )
    bad_lines: Literal["skip", "error"] = Field(
        default="skip",
        description="A line that cannot be parsed: skip and count it, or stop with file and line number.",
    )
    block_bytes: int = Field(
        default=1 << 20,
        ge=64,
        description=(
            "Size of one read of a text file, in bytes after decompression; the next one is read ahead. Larger blocks "
            "do not fit into a core's cache between reading and parsing, and are slower."
        ),
    )
    eval_rows: int | None = Field(
        default=None, ge=1, description="Evaluate on the first eval_rows rows only; null: all."
    )
    columns: ParquetSchemaConfig | None = Field(
        default=None, description="Columns of Parquet files; needed with format: parquet."
    )

    @model_validator(mode="after")
    def _columns_fit_format(self) -> DataConfig:
        if (self.format == "parquet") != (self.columns is not None):
            raise ValueError(
                f"format is {self.format!r} but columns is {'missing' if self.columns is None else 'set'}; "
                "columns belong to format: parquet"
            )
        return self

    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense inputs, in order."""
        return CRITEO_DENSE_NAMES if self.columns is None else tuple(c.name for c in self.columns.dense)

    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in order (F)."""
        return CRITEO_SPARSE_NAMES if self.columns is None else tuple(c.name for c in self.columns.sparse)
