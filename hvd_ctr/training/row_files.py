"""The row files of a checkpoint: Arrow IPC with the columns id, row and state, one file per table and rank.

Tables with min_count, max_idle_steps or max_rows have two more columns, count and last_step (int64; occurrences of the
id, step at which the row was trained last); those with min_count have waiting files besides (id, count, last_step) of
the ids that occurred and are no rows yet.

A file is a stream of record batches of at most 65,536 rows, written and read one by one. A column that is not in
`COLUMNS` or `LIFE_COLUMNS` makes a file unreadable to this version, since to leave out what it holds would lose it
silently; a further column gets its place there, in `_to_batch` and in `read`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import urllib.parse
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hvd_ctr.config import TableConfig
from hvd_ctr.embedding import ShardedEmbedding
from hvd_ctr.ops.mix_cache_ops import ExportedRows
from hvd_ctr.training import checkpoint_folder

COLUMNS = ("id", "row", "state")
LIFE_COLUMNS = ("count", "last_step")
_SYNC_BYTES = 256 << 20


class HashedFile(io.RawIOBase):
    """A file for writing that knows its size and SHA-256."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._bytes = self._synced = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._bytes += len(view)
        written = self._file.write(view)
        # Not all at the end, which could take minutes without a sign of life.
        if self._bytes - self._synced >= _SYNC_BYTES:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._synced = self._bytes
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()

    def sync(self) -> dict[str, Any]:
        """Forces the file to disk; returns its entry for the manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def table_folder(table: str) -> str:
    """Folder of a table's files within the checkpoint."""
    return f"rows/{urllib.parse.quote(table, safe='')}"


def part_path(table: str, rank: int, size: int) -> str:
    """File of the rows that rank of size ranks owns, within the checkpoint."""
    return f"{table_folder(table)}/part-{rank:05d}-of-{size:05d}.arrow"


def waiting_path(table: str, rank: int, size: int) -> str:
    """File of the ids that rank of size ranks owns and that are no rows yet, within the checkpoint."""
    return f"{table_folder(table)}/waiting-{rank:05d}-of-{size:05d}.arrow"


def columns_of(table: TableConfig) -> tuple[str, ...]:
    """Columns of the table's row files."""
    return COLUMNS + LIFE_COLUMNS if table.tracks_rows else COLUMNS


def _to_lists(values: NDArray[np.float32]) -> pa.Array:
    """(n, w) float32 as an Arrow column of lists of w floats; without a fixed size for w = 0, which pyarrow divides
    by.
    """
    flat = pa.array(values.reshape(-1), pa.float32())
    if values.shape[1] == 0:
        return pa.ListArray.from_arrays(np.zeros(len(values) + 1, np.int32), flat)
    return pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.float32(), values.shape[1]))


def _to_batch(chunk: ExportedRows, columns: tuple[str, ...]) -> pa.RecordBatch:
    """A chunk as a record batch."""
    values = {
        "id": pa.array(chunk.ids, pa.int64()),
        "row": _to_lists(chunk.rows),
        "state": _to_lists(chunk.state),
    }
    if "count" in columns:
        values.update(
            {"count": pa.array(chunk.counts, pa.int64()), "last_step": pa.array(chunk.last_steps, pa.int64())}
        )
    return pa.record_batch([values[name] for name in columns], names=list(columns))


def write(embedding: ShardedEmbedding, table: str, path: Path) -> Generator[None, None, dict[str, Any]]:
    """Writes this rank's rows of a table, a batch at each yield, and forces them to disk; returns the entry of the
    manifest.
    """
    columns = columns_of(embedding.table_config(table))
    entry = yield from _write_batches(path, (_to_batch(chunk, columns) for chunk in embedding.export_rows(table)))
    return {"table": table, **entry}


def write_waiting(embedding: ShardedEmbedding, table: str, path: Path) -> Generator[None, None, dict[str, Any]]:
    """As `write`, of the ids that are no rows yet."""
    names = ["id", *LIFE_COLUMNS]
    batches = (
        pa.record_batch([pa.array(values, pa.int64()) for values in chunk[:3]], names=names)
        for chunk in embedding.export_waiting(table)
    )
    entry = yield from _write_batches(path, batches)
    return {"waiting_of": table, **entry}


def _write_batches(path: Path, batches: Iterator[pa.RecordBatch]) -> Generator[None, None, dict[str, Any]]:
    """Writes at least one batch."""
    rows_written = 0
    with (
        contextlib.closing(HashedFile(path)) as file,
        pa.PythonFile(file, mode="w") as sink,
    ):
        with contextlib.ExitStack() as stack:
            writer = None
            for batch in batches:
                writer = writer or stack.enter_context(pa.ipc.new_file(sink, batch.schema))
                writer.write_batch(batch)
                rows_written += batch.num_rows
                yield
        entry = file.sync()
    checkpoint_folder.sync_directory(path.parent)
    return {"rows": rows_written, **entry}


class RowBatch(NamedTuple):
    """n rows of a file: ids (n) int64, rows (n, D) float32, state (n, s) float32; counts and last_steps (n) int64 of
    tables that keep them, else None. Of a waiting file rows and state are None.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32] | None
    state: NDArray[np.float32] | None
    counts: NDArray[np.int64] | None
    last_steps: NDArray[np.int64] | None


def read(path: Path) -> Iterator[RowBatch]:
    """Streams the rows of a row or waiting file."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            names = set(batch.schema.names)
            rows, state = (_from_lists(batch.column(name)) if name in names else None for name in COLUMNS[1:])
            counts, steps = (batch.column(name).to_numpy() if name in names else None for name in LIFE_COLUMNS)
            yield RowBatch(batch.column("id").to_numpy(), rows, state, counts, steps)


def _from_lists(column: pa.Array) -> NDArray[np.float32]:
    """The reverse of _to_lists."""
    width = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0
    values: NDArray[np.float32] = column.flatten().to_numpy()
    return values.reshape(len(column), width)
