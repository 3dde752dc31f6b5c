"""Reader of Parquet files: columns by name through a schema in the configuration, rows dealt like those of text files.

A file without a configured column is an error naming both when the reader is opened, on every rank, unless the column
has a default. Columns the schema does not name are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hvd_ctr.config import ParquetSchemaConfig
from hvd_ctr.data.batch import Batch, concatenate
from hvd_ctr.data.dealing import Piece, Window
from hvd_ctr.data.reader import Dealing, FaultLog, Reader
from hvd_ctr.data.schema import Column, columns_of, dense_values, sparse_ids

#: Rows decoded at a time, and per window when there is no shuffle.
CHUNK_ROWS = 65536
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
        for parts in _group(self._read(paths), self._dealing.shuffle_rows or CHUNK_ROWS):
            rows = sum(len(p) for p in parts)
            yield _RowWindow(parts, first_row)
            first_row += rows

    def _read(self, paths: Sequence[str]) -> Iterator[_Part]:
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
                        rows = pa.RecordBatch.from_arrays(arrays, names=[c.name for c in self._columns])
                        yield _Part(rows, path, row)
                        row += chunk.num_rows
                except (pa.ArrowInvalid, OSError) as error:
                    raise ValueError(f"{path}: cannot read the Parquet data after row {row}: {error}") from error

    def _take(self, pieces: Sequence[Piece]) -> Batch:
        return concatenate([self._parse_piece(cast(_RowWindow, p.window), p.positions) for p in pieces])

    def _parse_piece(self, window: _RowWindow, positions: NDArray[np.int64]) -> Batch:
        """The batch of some rows of a window; bad ones are counted and left out."""
        rows = window.take(positions)
        n = rows.num_rows
        dense = np.zeros((n, len(self._schema.dense)), np.float32)
        ids = np.zeros((n, len(self._schema.sparse)), np.int64)
        labels = np.zeros(n, np.float32)
        arrays = iter(rows.columns)
        good = np.ones(n, np.bool_)

        def refuse(bad: NDArray[np.bool_], fault: str, detail: str) -> None:
            new = bad & good
            if new.any():
                good[new] = False
                which = positions[new]
                self._faults.bad(fault, window.place(int(which[0])), detail, len(which))

        if self._has_label:
            values = next(arrays).fill_null(np.nan).to_numpy(zero_copy_only=False)
            refuse((values != 0) & (values != 1), "bad_label", f"column {self._schema.label!r} is not 0 or 1")
            labels[:] = values == 1
        for i, dense_column in enumerate(self._schema.dense):
            dense[:, i], bad = dense_values(next(arrays), dense_column)
            refuse(bad, "non_finite", f"column {dense_column.name!r} is not a finite number")
        for i, column in enumerate(self._schema.sparse):
            ids[:, i], bad = sparse_ids(next(arrays), column)
            if column.kind == "hex":
                refuse(bad, "bad_hex", f"column {column.name!r} is not of 1 to 8 hexadecimal digits")
            else:
                refuse(bad, "bad_integer", f"column {column.name!r} is beyond 2^63-1")
        batch = Batch(dense, ids, labels, None, positions + window.first_row)
        return batch if good.all() else batch.select(good)


class _Part:
    """Consecutive rows of one file, columns in the reader's order and types. first_row: 0-based number in the file."""

    def __init__(self, rows: pa.RecordBatch, path: str, first_row: int) -> None:
        self.rows = rows
        self.path = path
        self.first_row = first_row

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def split(self, rows: int) -> tuple[_Part, _Part]:
        """The first `rows` rows and the others, sharing the data."""
        return (
            _Part(self.rows.slice(0, rows), self.path, self.first_row),
            _Part(self.rows.slice(rows), self.path, self.first_row + rows),
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


class _RowWindow(Window):
    """The decoded but not yet converted rows of a window."""

    def __init__(self, parts: list[_Part], first_row: int) -> None:
        table = pa.Table.from_batches([p.rows for p in parts]).combine_chunks()
        self._rows = table.to_batches(max_chunksize=None)[0]
        self._first_positions = np.cumsum([0, *(len(p) for p in parts)])
        self._places = [(p.path, p.first_row) for p in parts]
        self.first_row = first_row
        parts.clear()  # the window has its own copy

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def take(self, positions: NDArray[np.int64]) -> pa.RecordBatch:
        """The rows at these positions of the window, in this order."""
        return self._rows.take(pa.array(positions))

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
