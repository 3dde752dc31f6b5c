"""Parquet columns: which types a column may have, and how its values become dense floats or ids.

Every column is first brought to one type for its role, so that files may differ (int32 in one, int64 in another):
labels and dense values to float64, integer ids to int64, text to large_binary. Ids keep all 63 bits. Then each becomes
an array of numbers without nulls, a chunk of rows at a time: no Python object is made per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hvd_ctr.config import DenseColumnConfig, ParquetSchemaConfig, SparseColumnConfig
from hvd_ctr.ops import reader_ops

# Stands for what is no id, a uint64 beyond 2^63-1 or bad hexadecimal text; no reader gives it out.
NO_ID = np.iinfo(np.int64).min
_HEX_DIGITS = 8
_NOT_HEX = 255


@dataclass(frozen=True)
class Column:
    """A column that is read: its role's type, and the value in files that lack it (None: it must be there)."""

    name: str
    type: pa.DataType
    default: float | int | bytes | None
    expected: str
    may_be_null: bool = True

    def accepts(self, actual: pa.DataType) -> bool:
        """Whether a file's column can be brought to the type of this role. Of type null are columns that were written
        with no value at all: each cell is a missing one, which a label cannot be.
        """
        if pa.types.is_dictionary(actual):
            actual = actual.value_type
        if pa.types.is_null(actual):
            return self.may_be_null
        if self.type == pa.int64():
            return bool(pa.types.is_integer(actual) or pa.types.is_boolean(actual))
        if self.type == pa.float64():
            return bool(pa.types.is_integer(actual) or pa.types.is_floating(actual) or pa.types.is_boolean(actual))
        text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        return any(is_type(actual) for is_type in text)

    def convert(self, array: pa.Array) -> pa.Array:
        """The values in the type of this role."""
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.type == self.type:
            return array
        if array.type == pa.uint64() and self.type == pa.int64():
            too_large = pc.greater(array, pa.scalar((1 << 63) - 1, pa.uint64()))
            ids = pc.if_else(too_large, pa.scalar(0, pa.uint64()), array).cast(pa.int64())
            return pc.if_else(too_large, pa.scalar(NO_ID, pa.int64()), ids)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int64())
        return array.cast(self.type, safe=False)

    def absent(self, rows: int) -> pa.Array:
        """The column of a file that lacks it."""
        return pa.repeat(pa.scalar(self.default, self.type), rows)


def columns_of(schema: ParquetSchemaConfig, has_label: bool) -> list[Column]:
    """The columns to read: label (unless the files have none), dense, sparse, in this order."""
    label = [Column(schema.label, pa.float64(), None, "a number, 0 or 1", False)] if has_label else []
    dense = [Column(c.name, pa.float64(), c.default, "a number") for c in schema.dense]
    return [*label, *dense, *(_sparse_column(c) for c in schema.sparse)]


def _sparse_column(config: SparseColumnConfig) -> Column:
    if config.kind == "int":
        default = config.default if isinstance(config.default, int) else None
        return Column(config.name, pa.int64(), default, "an integer (kind int)")
    text = None if config.default is None else str(config.default).encode()
    return Column(config.name, pa.large_binary(), text, f"text (kind {config.kind})")


def label_numbers(array: pa.Array) -> NDArray[np.float64]:
    """Labels (n,) of a float64 column; NaN for a null."""
    numbers: NDArray[np.float64] = _numbers(array.fill_null(np.nan))
    return numbers


def dense_numbers(array: pa.Array, config: DenseColumnConfig) -> NDArray[np.float64]:
    """Values (n,) of a float64 column, before the transform."""
    numbers: NDArray[np.float64] = _numbers(array.fill_null(0.0 if config.default is None else config.default))
    return numbers


def dense_inputs(
    values: NDArray[np.float64], columns: Sequence[DenseColumnConfig]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Transformed values (n, X) float32 of the columns' numbers (n, X), and where they were not finite (n, X)."""
    bad = ~np.isfinite(values)
    logarithmic = np.array([column.transform == "log1p" for column in columns], np.bool_)
    if logarithmic.all():
        values = np.copysign(np.log1p(np.abs(values)), values)
    else:
        bad |= ~logarithmic & (np.abs(values) > np.finfo(np.float32).max)
        values = np.where(logarithmic, np.copysign(np.log1p(np.abs(values)), values), values)
    if bad.any():
        values = np.where(bad, 0.0, values)
    # -0.0 + 0.0 is 0.0: a count of -0 is 0, as in the text format.
    return (values + 0.0).astype(np.float32), bad


def sparse_ids(array: pa.Array, config: SparseColumnConfig) -> NDArray[np.int64]:
    """Ids (n,) int64 of a column; NO_ID where the value was not valid for its kind; the missing id for a null or empty
    cell.

    int: the value. hex: the value of 1 to 8 digits. string: HashBytes(text) >> 1, the same on every host and run.
    """
    missing_id = config.resolved_missing_id()
    ids: NDArray[np.int64]
    if config.kind == "int":
        ids = _numbers(array.fill_null(missing_id))
        return ids
    texts = array.fill_null(b"")
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    raw = b"" if data is None else data.slice(offsets[0], offsets[-1] - offsets[0]).to_pybytes()
    offsets = offsets - offsets[0]
    if config.kind == "string":
        ids = reader_ops.hash_strings(raw, offsets)
    else:
        values, bad = hex_values(raw, offsets)
        ids = np.where(bad, NO_ID, values)
    empty = np.diff(offsets) == 0
    return np.where(empty, missing_id, ids) if empty.any() else ids


def _numbers(array: pa.Array) -> Any:
    """A view of an array without nulls."""
    return array.to_numpy(zero_copy_only=True)


def _hex_table() -> NDArray[np.uint8]:
    table = np.full(256, _NOT_HEX, np.uint8)
    for value, digit in enumerate("0123456789abcdef"):
        table[ord(digit)] = table[ord(digit.upper())] = value
    return table


_HEX = _hex_table()


def hex_values(data: bytes, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Values (n,) of texts data[offsets[i]:offsets[i+1]] of up to 8 hex digits, and which are not (n,). Empty: 0."""
    sizes = np.diff(offsets)
    bad = sizes > _HEX_DIGITS
    values = np.zeros(len(sizes), np.int64)
    if not data:
        return values, bad
    digits = _HEX[np.frombuffer(data, np.uint8)]
    for back in range(1, _HEX_DIGITS + 1):
        present = sizes >= back
        digit = digits[np.maximum(offsets[1:] - back, 0)]
        bad |= present & (digit == _NOT_HEX)
        values += np.where(present, digit.astype(np.int64), 0) << (4 * (back - 1))
    return np.where(bad, 0, values), bad
