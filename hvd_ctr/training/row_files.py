"""The row files of a checkpoint: Arrow IPC with the columns id, row and state, one file per table and rank.

A file is a stream of record batches of at most 65,536 rows, written and read one by one. A column that is not in
`COLUMNS` makes a file unreadable to this version, since to leave out what it holds would lose it silently; a further
column gets its place in `COLUMNS`, `_to_batch` and `read`.
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

from hvd_ctr.embedding import ShardedEmbedding
from hvd_ctr.ops.mix_cache_ops import ExportedRows
from hvd_ctr.training import checkpoint_folder

COLUMNS = ("id", "row", "state")
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


def _to_lists(values: NDArray[np.float32]) -> pa.Array:
    """(n, w) float32 as an Arrow column of lists of w floats; without a fixed size for w = 0, which pyarrow divides
    by.
    """
    flat = pa.array(values.reshape(-1), pa.float32())
    if values.shape[1] == 0:
        return pa.ListArray.from_arrays(np.zeros(len(values) + 1, np.int32), flat)
    return pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.float32(), values.shape[1]))


def _to_batch(chunk: ExportedRows) -> pa.RecordBatch:
    """A chunk as a record batch of the columns COLUMNS."""
    columns = [
        pa.array(chunk.ids, pa.int64()),
        _to_lists(chunk.rows),
        _to_lists(chunk.state),
    ]
    return pa.record_batch(columns, names=list(COLUMNS))


def write(embedding: ShardedEmbedding, table: str, path: Path) -> Generator[None, None, dict[str, Any]]:
    """Writes this rank's rows of a table, a batch at each yield, and forces them to disk; returns the entry of the
    manifest.
    """
    rows_written = 0
    with (
        contextlib.closing(HashedFile(path)) as file,
        pa.PythonFile(file, mode="w") as sink,
    ):
        with contextlib.ExitStack() as stack:
            writer = None
            for chunk in embedding.export_rows(table):
                batch = _to_batch(chunk)
                writer = writer or stack.enter_context(pa.ipc.new_file(sink, batch.schema))
                writer.write_batch(batch)
                rows_written += len(chunk.ids)
                yield
        entry = file.sync()
    checkpoint_folder.sync_directory(path.parent)
    return {"table": table, "rows": rows_written, **entry}


class RowBatch(NamedTuple):
    """n rows of a file: ids (n) int64, rows (n, D) float32, state (n, s) float32."""

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    state: NDArray[np.float32]


def read(path: Path) -> Iterator[RowBatch]:
    """Streams the rows of a file."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            ids = batch.column("id").to_numpy()
            yield RowBatch(
                ids,
                _from_lists(batch.column("row")),
                _from_lists(batch.column("state")),
            )


def _from_lists(column: pa.Array) -> NDArray[np.float32]:
    """The reverse of _to_lists."""
    width = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0
    values: NDArray[np.float32] = column.flatten().to_numpy()
    return values.reshape(len(column), width)
