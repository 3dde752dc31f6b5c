"""The file of id counts: Parquet with columns table (string), id (int64, after hash_ids) and count (int64).

`hvd-ctr count` writes it, a table's rows by falling count; a cache with the policy freq reads it when it is built. Any
other tool may write one: the order of rows does not matter, an id stands once per table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

#: Table name, ids (n) int64 and their counts (n) int64.
TableCounts = tuple[str, NDArray[np.int64], NDArray[np.int64]]

_COLUMNS = ("table", "id", "count")
_CHUNK_ROWS = 1 << 20


def write_counts(path: Path, parts: Iterable[TableCounts], facts: Mapping[str, str]) -> None:
    """Writes counts; the file appears when it is complete.

    Args:
        path: the file; its folder is made.
        parts: in the order of the file.
        facts: kept in the file's metadata.
    """
    schema = pa.schema(
        [("table", pa.dictionary(pa.int32(), pa.string())), ("id", pa.int64()), ("count", pa.int64())],
        metadata={f"hvd_ctr.{name}": value for name, value in facts.items()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".incomplete")
    with pq.ParquetWriter(scratch, schema) as writer:
        for table, ids, counts in parts:
            for begin in range(0, len(ids), _CHUNK_ROWS):
                chunk = slice(begin, begin + _CHUNK_ROWS)
                rows = len(ids[chunk])
                names = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([table]))
                writer.write_batch(
                    pa.record_batch([names, pa.array(ids[chunk]), pa.array(counts[chunk])], schema=schema)
                )
    os.replace(scratch, path)


def read_counts(path: str | os.PathLike[str], tables: Sequence[str]) -> Iterator[TableCounts]:
    """Streams the counts of some tables in chunks.

    Raises:
        ValueError: the file is missing or cannot be read, lacks a column, or holds nulls or negative numbers.
    """
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(
                    f"{path}: column(s) {', '.join(missing)} missing; a file of id counts has the columns "
                    f"{', '.join(_COLUMNS)} (hvd-ctr count writes one)"
                )
            for batch in file.iter_batches(batch_size=_CHUNK_ROWS, columns=list(_COLUMNS)):
                yield from _split(path, batch, tables)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as a Parquet file of id counts: {error}") from error


def _split(path: str | os.PathLike[str], batch: pa.RecordBatch, tables: Sequence[str]) -> Iterator[TableCounts]:
    if any(batch.column(name).null_count for name in _COLUMNS):
        raise ValueError(f"{path}: a null in {', '.join(_COLUMNS)}; every row needs all three")
    names = batch.column("table")
    if not pa.types.is_dictionary(names.type):
        names = names.cast(pa.string()).dictionary_encode()
    which = names.indices.to_numpy(zero_copy_only=False)
    ids = batch.column("id").cast(pa.int64()).to_numpy()
    counts = batch.column("count").cast(pa.int64()).to_numpy()
    if len(ids) and min(ids.min(), counts.min()) < 0:
        raise ValueError(f"{path}: a negative id or count; ids after hash_ids and counts are 0 or more")
    for index, table in enumerate(names.dictionary.to_pylist()):
        if table in tables:
            mine = which == index
            yield table, ids[mine], counts[mine]
