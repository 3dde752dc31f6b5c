"""Checkpoints: a directory that any number of ranks, any cache size and plain pyarrow can read.

    step-00000120/
        rows/<table>/part-00000-of-00002.arrow   Arrow IPC: id int64, row float32[D], state float32[s]; one file per
        rank dense.npz                                dense weights and optimizer state, by rank 0 manifest.json
        written last: schema, progress, rows and SHA-256 of every file

Tables with min_count, max_idle_steps or max_rows have two more columns, count and last_step (int64; occurrences of the
id, step at which the row was trained last); those with min_count have files rows/<table>/waiting-00000-of-00002.arrow
(id, count, last_step) of the ids that occurred and are no rows yet.

A directory without a manifest is not a checkpoint. Rows are keyed by id: on load each rank streams all parts and keeps
what it owns. All functions are collective: every rank calls them; an error on one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hvd_ctr import comm as comms
from hvd_ctr.embedding import ShardedEmbedding

SCHEMA = 1
_MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names directory, file and cause."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far training had come: global steps, epoch (from 0), global steps within that epoch."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


def _agree_on_error(comm: comms.Comm, what: str, error: Exception | None) -> None:
    reports = comm.allgather_object(None if error is None else f"{type(error).__name__}: {error}")
    for rank, text in enumerate(reports):
        if text is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {text}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _part_path(table: str, rank: int, size: int, kind: str = "part") -> str:
    return f"rows/{urllib.parse.quote(table, safe='')}/{kind}-{rank:05d}-of-{size:05d}.arrow"


def _to_lists(values: NDArray[np.float32]) -> pa.Array:
    """(n, w) float32 as an Arrow column of lists of w floats; without a fixed size for w = 0, which pyarrow divides
    by.
    """
    flat = pa.array(values.reshape(-1), pa.float32())
    if values.shape[1] == 0:
        return pa.ListArray.from_arrays(np.zeros(len(values) + 1, np.int32), flat)
    return pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.float32(), values.shape[1]))


def _write_part(embedding: ShardedEmbedding, table: str, path: Path) -> dict[str, Any]:
    tracked = embedding.table_config(table).tracks_rows

    def batches() -> Iterator[pa.RecordBatch]:
        for chunk in embedding.export_rows(table):
            columns = {"id": pa.array(chunk.ids), "row": _to_lists(chunk.rows), "state": _to_lists(chunk.state)}
            if tracked:
                columns.update({"count": pa.array(chunk.counts), "last_step": pa.array(chunk.last_steps)})
            yield pa.record_batch(list(columns.values()), names=list(columns))

    return {"rows": _write_batches(path, batches()), "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_waiting(embedding: ShardedEmbedding, table: str, path: Path) -> dict[str, Any]:
    names = ["id", "count", "last_step"]
    batches = (
        pa.record_batch([pa.array(values) for values in chunk[:3]], names=names)
        for chunk in embedding.export_waiting(table)
    )
    return {"ids": _write_batches(path, batches), "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_batches(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    """Writes at least one batch; returns the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with pa.OSFile(str(path), "wb") as sink, contextlib.ExitStack() as stack:
        writer = None
        for batch in batches:
            writer = writer or stack.enter_context(pa.ipc.new_file(sink, batch.schema))
            writer.write_batch(batch)
            written += batch.num_rows
    return written


def _dense_arrays(model: keras.Model) -> dict[str, NDArray[Any]]:
    arrays = {f"weight/{i:05d}": np.asarray(variable) for i, variable in enumerate(model.weights)}
    if model.optimizer is not None:
        arrays.update(
            {f"optimizer/{i:05d}": np.asarray(variable) for i, variable in enumerate(model.optimizer.variables)}
        )
    return arrays


def save(
    directory: str | os.PathLike[str], model: keras.Model, embeddings: list[ShardedEmbedding], progress: Progress
) -> Path:
    """Writes a checkpoint: into a scratch directory beside it, which gets its name when complete. Replaces one of that
    name.

    Raises:
        CheckpointError: a rank could not write (disk full, ...); the previous checkpoint of that name is untouched.
    """
    comm, final = comms.current(), Path(directory)
    names = [table for embedding in embeddings for table in embedding.table_names]
    if len(names) != len(set(names)):
        raise CheckpointError(
            f"two embeddings have tables of one name: {sorted(n for n in names if names.count(n) > 1)}"
        )
    scratch = final.with_name(final.name + ".incomplete")
    error: Exception | None = None
    if comm.rank == 0:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        except OSError as exception:
            error = exception
    _agree_on_error(comm, f"making {scratch}", error)
    files: dict[str, Any] = {}
    try:
        for embedding in embeddings:
            for table in embedding.table_names:
                part = _part_path(table, comm.rank, comm.size)
                files[part] = {"table": table, **_write_part(embedding, table, scratch / part)}
                if embedding.table_config(table).min_count > 1:
                    part = _part_path(table, comm.rank, comm.size, "waiting")
                    files[part] = {"waiting_of": table, **_write_waiting(embedding, table, scratch / part)}
        if comm.rank == 0:
            np.savez(scratch / "dense.npz", **_dense_arrays(model))
            files["dense.npz"] = {
                "sha256": _sha256(scratch / "dense.npz"),
                "bytes": (scratch / "dense.npz").stat().st_size,
            }
    except (OSError, pa.ArrowException) as exception:
        error = exception
    _agree_on_error(comm, f"writing {scratch}", error)
    parts = comm.allgather_object(files)
    if comm.rank == 0:
        try:
            _publish(
                scratch,
                final,
                embeddings,
                {name: info for part in parts for name, info in part.items()},
                progress,
                comm.size,
            )
        except OSError as exception:
            error = exception
    _agree_on_error(comm, f"publishing {final}", error)
    return final


def _publish(
    scratch: Path,
    final: Path,
    embeddings: list[ShardedEmbedding],
    files: dict[str, Any],
    progress: Progress,
    ranks: int,
) -> None:
    manifest = {
        "schema": SCHEMA,
        "ranks": ranks,
        "written_at": time.time(),
        "progress": dataclasses.asdict(progress),
        "optimizer_steps": {name: step for embedding in embeddings for name, step in embedding.steps().items()},
        "tables": {
            table.name: {"dim": table.dim, "optimizer": table.optimizer.kind, "min_count": table.min_count}
            for embedding in embeddings
            for group in embedding.groups
            for table in group.layout.tables
        },
        "files": files,
    }
    with (scratch / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final)
    scratch.rename(final)


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The checked manifest of a checkpoint.

    Raises:
        CheckpointError: no manifest (not a checkpoint, or one cut off while it was written), unreadable, or of another
            schema.
    """
    path = Path(directory) / _MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {_MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: schema {manifest.get('schema') if isinstance(manifest, dict) else None!r}, this "
            f"version reads {SCHEMA}"
        )
    missing = sorted({"files", "progress", "ranks", "tables", "written_at"} - set(manifest))
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
    return manifest


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint under a directory of `step-*` checkpoints that was written last, or None."""
    complete = [path for path in Path(directory).glob("step-*") if (path / _MANIFEST).is_file()]
    return max(complete, key=lambda path: (read_manifest(path)["written_at"], path.name), default=None)


def load(
    directory: str | os.PathLike[str], model: keras.Model, embeddings: list[ShardedEmbedding], *, optimizer: bool = True
) -> Progress:
    """Restores rows, dense weights and (with `optimizer`) optimizer state and step counts.

    Raises:
        CheckpointError: damaged or missing files, other tables, dims, row optimizers or dense shapes than the model's
            (all ranks alike).
    """
    comm, error, progress = comms.current(), None, Progress()
    try:
        manifest = read_manifest(directory)
        progress = Progress(**manifest["progress"])
        _check_tables(Path(directory), manifest, embeddings, optimizer)
        for embedding in embeddings:
            embedding.check_empty()
        for name, info in manifest["files"].items():
            _check_file(Path(directory), name, info)
        _check_complete(Path(directory), manifest)
        _load_dense(Path(directory), model, optimizer)
        for embedding in embeddings:
            if optimizer:
                embedding.set_step(progress.step)  # First: rows of files without last_step count as trained now.
            _load_rows(Path(directory), manifest, embedding, optimizer)
            if optimizer:
                _load_waiting(Path(directory), manifest, embedding)
    except (RuntimeError, OSError, pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as exception:
        error = exception
    _agree_on_error(comm, f"loading {directory}", error)
    return progress


def _check_complete(directory: Path, manifest: dict[str, Any]) -> None:
    """The manifest lists the dense weights and, for each table, the part of every rank."""
    names, ranks = set(manifest["files"]), int(manifest["ranks"])
    wanted = {_part_path(table, rank, ranks) for table in manifest["tables"] for rank in range(ranks)} | {"dense.npz"}
    counted = [table for table, info in manifest["tables"].items() if info.get("min_count", 1) > 1]
    wanted |= {_part_path(table, rank, ranks, "waiting") for table in counted for rank in range(ranks)}
    if names != wanted:
        raise CheckpointError(
            f"{directory}: the manifest lists {sorted(names - wanted)} and lacks {sorted(wanted - names)}"
        )


def _check_file(directory: Path, name: str, info: dict[str, Any]) -> None:
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{directory}: file {name!r} of the manifest lies outside the checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != info["bytes"] or _sha256(path) != info["sha256"]:
        raise CheckpointError(f"{path} is damaged: size or SHA-256 differs from the manifest's")


def _check_tables(
    directory: Path, manifest: dict[str, Any], embeddings: list[ShardedEmbedding], optimizer: bool
) -> None:
    saved = manifest["tables"]
    wanted = {t.name: t for embedding in embeddings for group in embedding.groups for t in group.layout.tables}
    if set(saved) != set(wanted):
        missing, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
        raise CheckpointError(
            f"{directory}: tables differ: missing in the checkpoint {missing}, not in the model {extra}"
        )
    for name, table in wanted.items():
        if saved[name]["dim"] != table.dim:
            raise CheckpointError(
                f"{directory}: table {name!r} has dim {saved[name]['dim']}, the model wants {table.dim}"
            )
        if optimizer and saved[name]["optimizer"] != table.optimizer.kind:
            raise CheckpointError(
                f"{directory}: table {name!r} was trained with {saved[name]['optimizer']}, the model "
                f"uses {table.optimizer.kind}; "
                "load without optimizer state"
            )


def _load_dense(directory: Path, model: keras.Model, optimizer: bool) -> None:
    with np.load(directory / "dense.npz", allow_pickle=False) as arrays:
        targets = {f"weight/{i:05d}": variable for i, variable in enumerate(model.weights)}
        if optimizer and model.optimizer is not None:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            targets.update({f"optimizer/{i:05d}": variable for i, variable in enumerate(model.optimizer.variables)})
        for key, variable in targets.items():
            if key not in arrays or arrays[key].shape != tuple(variable.shape):
                found = arrays[key].shape if key in arrays else None
                raise CheckpointError(
                    f"{directory}: dense variable {variable.path} has shape {found}, the model wants "
                    f"{tuple(variable.shape)}"
                )
            variable.assign(arrays[key])


def _load_rows(directory: Path, manifest: dict[str, Any], embedding: ShardedEmbedding, optimizer: bool) -> None:
    for name, info in manifest["files"].items():
        if info.get("table") not in embedding.table_names or not info["rows"]:
            continue
        for batch in _read_batches(directory / name):
            rows = _from_lists(batch.column("row"))
            state = _from_lists(batch.column("state")) if optimizer else None
            embedding.import_rows(info["table"], batch.column("id").to_numpy(), rows, state)
            if optimizer and "count" in batch.schema.names:
                _import_life(embedding, info["table"], batch)


def _load_waiting(directory: Path, manifest: dict[str, Any], embedding: ShardedEmbedding) -> None:
    for name, info in manifest["files"].items():
        if info.get("waiting_of") in embedding.table_names:
            for batch in _read_batches(directory / name):
                _import_life(embedding, info["waiting_of"], batch)


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _import_life(embedding: ShardedEmbedding, table: str, batch: pa.RecordBatch) -> None:
    embedding.import_life(table, *(batch.column(name).to_numpy() for name in ("id", "count", "last_step")))


def _from_lists(column: pa.Array) -> NDArray[np.float32]:
    """The reverse of _to_lists."""
    width = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0
    values: NDArray[np.float32] = column.flatten().to_numpy()
    return values.reshape(len(column), width)
