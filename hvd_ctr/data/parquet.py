"""Reader of Parquet files: columns by name through a schema in the configuration, rows dealt like those of text files.

A file without a configured column is an error naming both when the reader is opened, on every rank, unless the column
has a default. Columns the schema does not name are not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hvd_ctr.config import ParquetSchemaConfig
from hvd_ctr.data.ahead import read_ahead
from hvd_ctr.data.batch import Batch, concatenate
from hvd_ctr.data.dealing import Piece, Window
from hvd_ctr.data.reader import Dealing, FaultLog, Reader
from hvd_ctr.data.schema import NO_ID, Column, columns_of, dense_inputs, dense_numbers, label_numbers, sparse_ids

#: Rows decoded at a time, and per window when there is no shuffle.
CHUNK_ROWS = 65536
_LAY_OUT_ROWS = 2048
FAULTS = ("bad_label", "non_finite", "bad_integer", "bad_hex")


class ParquetReader(Reader):
    """One rank's view of Parquet files."""

    def __init__(
        self,
        paths: Sequence[str],
        dealing: Dealing,
        bad_lines: Literal["skip", "error"],
        *,
        has_label: bool,
        columns: ParquetSchemaConfig,
    ) -> None:
        super().__init__(paths, dealing, FaultLog(bad_lines, FAULTS))
        self._schema = columns
        self._has_label = has_label
        self._columns = columns_of(columns, has_label)
        self._total_rows = 0
        for path in paths:
            with _open(path) as file:
                _check(path, file.schema_arrow, self._columns)
                self._total_rows += file.metadata.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        """X dense and F sparse columns."""
        return len(self._schema.dense), len(self._schema.sparse)

    def _fraction_of_input(self) -> float:
        return self._rows_read / self._total_rows

    def _windows(self, paths: Sequence[str]) -> Iterator[Window]:
        first_row = 0
        with contextlib.closing(read_ahead(self._read(paths))) as chunks:
            for parts in _group(chunks, self._dealing.shuffle_rows or CHUNK_ROWS):
                rows = sum(len(p) for p in parts)
                yield _RowWindow(parts, first_row)
                first_row += rows

    def _read(self, paths: Sequence[str]) -> Generator[_Part, None, None]:
        for path in paths:
            with _open(path) as file:
                present = set(file.schema_arrow.names)
                names = [c.name for c in self._columns if c.name in present]
                row = 0
                try:
                    for chunk in file.iter_batches(batch_size=CHUNK_ROWS, columns=names):
                        arrays = [
                            c.convert(chunk.column(c.name)) if c.name in present else c.absent(chunk.num_rows)
                            for c in self._columns
                        ]
                        yield _Part(self._numbers(arrays), path, row)
                        row += chunk.num_rows
                except (pa.ArrowInvalid, OSError) as error:
                    raise ValueError(f"{path}: cannot read the Parquet data after row {row}: {error}") from error

    def _numbers(self, arrays: Sequence[pa.Array]) -> _Columns:
        remaining = iter(arrays)
        rows = len(arrays[0])
        return _Columns(
            label_numbers(next(remaining)) if self._has_label else np.zeros(rows),
            [dense_numbers(next(remaining), column) for column in self._schema.dense],
            [sparse_ids(next(remaining), column) for column in self._schema.sparse],
        )

    def _take(self, pieces: Sequence[Piece]) -> Batch:
        return concatenate([self._parse_piece(cast(_RowWindow, p.window), p.positions) for p in pieces])

    def _parse_piece(self, window: _RowWindow, positions: NDArray[np.int64]) -> Batch:
        """The batch of some rows of a window; bad ones are counted and left out."""
        n = len(positions)
        # Rows in order are a slice, which needs no copy.
        ordered = n > 0 and bool((np.diff(positions) == 1).all())
        which = slice(int(positions[0]), int(positions[0]) + n) if ordered else positions
        ids = window.ids[which]
        labels = np.zeros(n, np.float32)
        good = np.ones(n, np.bool_)

        def refuse(bad: NDArray[np.bool_], fault: str, detail: str) -> None:
            new = bad & good
            if new.any():
                good[new] = False
                places = positions[new]
                self._faults.bad(fault, window.place(int(places[0])), detail, len(places))

        if self._has_label:
            values = window.labels[which]
            refuse((values != 0) & (values != 1), "bad_label", f"column {self._schema.label!r} is not 0 or 1")
            labels[:] = values == 1
        dense, bad = dense_inputs(window.dense[which], self._schema.dense)
        for i in np.flatnonzero(bad.any(axis=0)):
            refuse(bad[:, i], "non_finite", f"column {self._schema.dense[i].name!r} is not a finite number")
        bad = ids == NO_ID
        for i in np.flatnonzero(bad.any(axis=0)):
            column = self._schema.sparse[i]
            if column.kind == "hex":
                refuse(bad[:, i], "bad_hex", f"column {column.name!r} is not of 1 to 8 hexadecimal digits")
            else:
                refuse(bad[:, i], "bad_integer", f"column {column.name!r} is beyond 2^63-1")
        batch = Batch(dense, ids, labels, None, positions + window.first_row)
        return batch if good.all() else batch.select(good)


@dataclass(frozen=True)
class _Columns:
    """n rows as numbers without nulls, an array (n,) for each column."""

    labels: NDArray[np.float64]
    dense: list[NDArray[np.float64]]
    ids: list[NDArray[np.int64]]

    def select(self, which: slice) -> _Columns:
        return _Columns(self.labels[which], [c[which] for c in self.dense], [c[which] for c in self.ids])


class _Part:
    """Consecutive rows of one file. first_row: 0-based number in the file."""

    def __init__(self, columns: _Columns, path: str, first_row: int) -> None:
        self.columns = columns
        self.path = path
        self.first_row = first_row

    def __len__(self) -> int:
        return len(self.columns.labels)

    def split(self, rows: int) -> tuple[_Part, _Part]:
        """The first `rows` rows and the others, sharing the data."""
        return (
            _Part(self.columns.select(slice(rows)), self.path, self.first_row),
            _Part(self.columns.select(slice(rows, None)), self.path, self.first_row + rows),
        )


def _group(parts: Iterator[_Part], rows: int) -> Iterator[list[_Part]]:
    """Parts regrouped so that each group but the last has `rows` rows."""
    group: list[_Part] = []
    missing = rows
    for part in parts:
        while len(part) >= missing:
            head, part = part.split(missing)
            group.append(head)
            del head
            yield group
            group, missing = [], rows
        if len(part):
            group.append(part)
            missing -= len(part)
    if group:
        yield group


def _lay_out(columns: Sequence[NDArray[Any]], rows: NDArray[Any]) -> None:
    """Columns (n,) into rows (n, columns), in blocks of rows that stay in the cache from column to column."""
    for begin in range(0, len(rows), _LAY_OUT_ROWS):
        block = slice(begin, begin + _LAY_OUT_ROWS)
        for i, column in enumerate(columns):
            rows[block, i] = column[block]


class _RowWindow(Window):
    """The decoded but not yet transformed rows of a window, each row in one place: shuffled batches take rows.

    labels (n,) float64, dense (n, X) float64, ids (n, F) int64.
    """

    def __init__(self, parts: list[_Part], first_row: int) -> None:
        self._first_positions = np.cumsum([0, *(len(p) for p in parts)])
        self._places = [(p.path, p.first_row) for p in parts]
        self.first_row = first_row
        self.labels = np.concatenate([p.columns.labels for p in parts])
        self.dense = np.empty((len(self), len(parts[0].columns.dense)), np.float64)
        self.ids = np.empty((len(self), len(parts[0].columns.ids)), np.int64)
        for part, begin in zip(parts, self._first_positions, strict=False):
            _lay_out(part.columns.dense, self.dense[begin : begin + len(part)])
            _lay_out(part.columns.ids, self.ids[begin : begin + len(part)])
        parts.clear()  # the window has its own copy

    def __len__(self) -> int:
        return int(self._first_positions[-1])

    def place(self, position: int) -> str:
        """file:row of a row of the window, 1-based like line numbers."""
        part = int(np.searchsorted(self._first_positions, position, side="right")) - 1
        path, first_row = self._places[part]
        return f"{path}:{first_row + position - int(self._first_positions[part]) + 1}"


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def _check(path: str, schema: pa.Schema, columns: Sequence[Column]) -> None:
    """Raises ValueError for a column that is absent without a default, given twice, or of an unfit type."""
    for column in columns:
        found = schema.get_all_field_indices(column.name)
        if not found:
            if column.default is None:
                raise ValueError(
                    f"{path}: column {column.name!r} is missing; the file has {', '.join(schema.names)}. "
                    "Give the column a default under data.columns, or leave it out"
                )
        elif len(found) > 1:
            raise ValueError(f"{path}: column {column.name!r} occurs {len(found)} times; column names must be unique")
        elif not column.accepts(schema.field(found[0]).type):
            raise ValueError(
                f"{path}: column {column.name!r} has type {schema.field(found[0]).type}; expected {column.expected} "
                "(data.columns)"
            )
