"""Checkpoints: a directory that any number of ranks, any cache size and tier, and plain pyarrow can read.

    step-00000120/
        rows/<table>/part-00000-of-00002.arrow   Arrow IPC: id int64, row float32[D], state float32[s]; one per rank
        rows/<table>/waiting-00000-of-00002.arrow   of tables with min_count: ids that are no rows yet (row_files.py)
        dense.npz                                dense weights, optimizer state, seed generators; by rank 0
        manifest.json                            written last

A directory without a manifest is not a checkpoint; how one becomes visible at once, also under kill -9, is told in
checkpoint_folder.py. The keys of the manifest:

    schema      layout of the directory; another one is refused
    ranks       that wrote it: files per table
    written_at  seconds since the epoch; the newest checkpoint of a folder has the largest
    progress    step (global), epoch (from 0), step_in_epoch: the next sample is the first of that global batch
    tables      name -> dim, optimizer (kind), step (the row optimizer's), rows and waiting ids (over all ranks),
                columns, min_count
    run         what the caller wants to find again; `hvd-ctr train` keeps seed, sizes and data files (cli/resume.py)
    files       path in the directory -> bytes, sha256; and number of rows with their table (of waiting ids: waiting_of)

dense.npz holds weight/NNNNN and optimizer/NNNNN in the order of model.weights and optimizer.variables, seed/NNNNN (the
seed generators of dropout and the like) and embedding_learning_rate_scale. What is random otherwise follows from the
run's seed and the position: the order of the data from seed and epoch, a row's first value from seed, table and id.

Memory: rows are written and read in chunks of 65,536, and checksums are computed on the way; a table is never held as a
whole. Rows are keyed by id. On load at as many ranks as wrote it a rank reads its own file of each table; at another
number every rank streams all files and keeps what it owns. Either way the ranks then count that every row found its
owner. Long work is done in pieces with a short exchange every few seconds (together.py), since ranks that take long in
different measure would be taken for dead.

All functions but `latest` and `read_manifest` are collective: every rank calls them; an error on one rank is raised on
all. No pickle anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from hvd_ctr import comm as comms
from hvd_ctr.embedding import ShardedEmbedding
from hvd_ctr.training import checkpoint_folder, dense_file, row_files
from hvd_ctr.training.checkpoint_folder import (
    SCHEMA,
    CheckpointError,
    DamagedCheckpointError,
    latest,
    read_manifest,
)
from hvd_ctr.training.together import work_together

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far training had come: global steps, epoch (from 0), global steps within that epoch."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Point:
    """A checkpoint whose files have been checked, and its manifest."""

    directory: Path
    manifest: dict[str, Any]


def _together(comm: comms.Comm, what: str, pieces: Iterator[None]) -> None:
    """Does the work of all ranks; an error on one is raised on all."""

    def describe(error: Exception) -> list[Any]:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return [
            kind + str(getattr(error, "message", None) or error),
            isinstance(error, DamagedCheckpointError),
        ]

    reports, error = work_together(comm, pieces, describe)
    for rank, report in enumerate(reports):
        if report is not None:
            failure = DamagedCheckpointError if report[1] else CheckpointError
            raise failure(f"{what} failed on rank {rank}: {report[0]}") from error


# ---- saving ----


def save(
    directory: str | os.PathLike[str],
    model: keras.Model,
    embeddings: list[ShardedEmbedding],
    progress: Progress,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint: into a scratch directory beside it, which gets its name when complete. Replaces one of that
    name.

    Args:
        directory: its name should be step-NNNNNNNN, by which `latest` finds it. All ranks see it: a shared file system.
        model: built.
        embeddings: all embeddings of the model, with distinct table names.
        progress: where training stands.
        run: JSON-able, kept in the manifest; rank 0's counts.

    Raises:
        CheckpointError: a rank could not write (disk full, ...), or does not see the directory. What was there before
            is untouched, and what was written is removed again.
    """
    comm, final = comms.current(), Path(directory)
    names = [table for embedding in embeddings for table in embedding.table_names]
    if len(names) != len(set(names)):
        raise CheckpointError(
            f"two embeddings have tables of one name: {sorted(n for n in names if names.count(n) > 1)}"
        )
    scratch = checkpoint_folder.scratch_of(final)
    _together(comm, f"making {scratch}", _begin(comm, final, names))
    try:
        own: dict[str, dict[str, Any]] = {}
        _together(
            comm,
            f"writing {scratch}",
            _write_files(comm, scratch, model, embeddings, own),
        )
        files = {name: entry for part in comm.allgather_object(own) for name, entry in part.items()}
        manifest = _manifest(comm, embeddings, files, progress, run)
        _together(comm, f"publishing {final}", _publish(comm, scratch, final, manifest))
    except CheckpointError:
        if comm.rank == 0:
            checkpoint_folder.discard(final)
        raise
    return final


def _begin(comm: comms.Comm, final: Path, tables: list[str]) -> Iterator[None]:
    if comm.rank == 0:
        checkpoint_folder.begin(final, [row_files.table_folder(name) for name in tables])
    yield


def _write_files(
    comm: comms.Comm,
    scratch: Path,
    model: keras.Model,
    embeddings: list[ShardedEmbedding],
    files: dict[str, dict[str, Any]],
) -> Iterator[None]:
    """Writes this rank's files, in pieces; fills in their entries of the manifest."""
    try:
        for embedding in embeddings:
            for table in embedding.table_names:
                part = row_files.part_path(table, comm.rank, comm.size)
                files[part] = yield from row_files.write(embedding, table, scratch / part)
                if embedding.table_config(table).min_count > 1:
                    part = row_files.waiting_path(table, comm.rank, comm.size)
                    files[part] = yield from row_files.write_waiting(embedding, table, scratch / part)
        if comm.rank == 0:
            files[dense_file.NAME] = dense_file.write(model, scratch / dense_file.NAME)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error}; the run folder must lie on a file system that all ranks share") from error


def _manifest(
    comm: comms.Comm,
    embeddings: list[ShardedEmbedding],
    files: dict[str, dict[str, Any]],
    progress: Progress,
    run: Mapping[str, Any] | None,
) -> dict[str, Any]:
    rows, waiting = _rows_by_table(files, "table"), _rows_by_table(files, "waiting_of")
    steps = {group.name: step for embedding in embeddings for group, step in _group_steps(embedding)}
    return {
        "schema": SCHEMA,
        "ranks": comm.size,
        "progress": dataclasses.asdict(progress),
        "tables": {
            table.name: {
                "dim": table.dim,
                "optimizer": table.optimizer.kind,
                "step": steps[group.name],
                "rows": rows[table.name],
                "waiting": waiting.get(table.name, 0),
                "columns": list(row_files.columns_of(table)),
                "min_count": table.min_count,
            }
            for embedding in embeddings
            for group in embedding.groups
            for table in group.layout.tables
        },
        "run": dict(run or {}),
        "files": files,
    }


def _rows_by_table(files: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, int]:
    """Rows over all ranks, by the table that entries name under `kind`."""
    rows: dict[str, int] = {}
    for entry in files.values():
        if kind in entry:
            rows[entry[kind]] = rows.get(entry[kind], 0) + entry["rows"]
    return rows


def _group_steps(embedding: ShardedEmbedding) -> list[tuple[Any, int]]:
    steps = embedding.steps()
    return [(group, steps[group.name]) for group in embedding.groups]


def _publish(comm: comms.Comm, scratch: Path, final: Path, manifest: dict[str, Any]) -> Iterator[None]:
    if comm.rank == 0:
        for name, entry in manifest["files"].items():
            path = scratch / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"rank 0 does not see {path} as another rank wrote it; the run folder must lie on a file system "
                    "that all ranks share"
                )
        written_at = checkpoint_folder.time_for_next(final.parent)
        checkpoint_folder.publish(scratch, final, {**manifest, "written_at": written_at})
    yield


def set_progress(directory: str | os.PathLike[str], progress: Progress) -> None:
    """Changes what a checkpoint says about the position, for one whose state is the present one already.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    comm = comms.current()

    def update() -> Iterator[None]:
        if comm.rank == 0:
            manifest = {
                **read_manifest(directory),
                "progress": dataclasses.asdict(progress),
            }
            checkpoint_folder.write_manifest(Path(directory), manifest)
        yield

    _together(comm, f"updating {directory}", update())


# ---- loading ----


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Checks that all files are as they were written, each by one rank; returns the manifest, the same on all ranks.

    Raises:
        DamagedCheckpointError: some are not (all ranks alike; names one).
        CheckpointError: of another schema, or not readable on a rank.
    """
    comm, path = comms.current(), Path(directory)
    manifest: dict[str, Any] = {}

    def check() -> Iterator[None]:
        manifest.update(read_manifest(path))
        _check_complete(path, manifest)
        for index, (name, info) in enumerate(sorted(manifest["files"].items())):
            yield from _check_file(path, name, info, content=index % comm.size == comm.rank)

    _together(comm, f"checking {directory}", check())
    return manifest


def newest_valid(directory: Path) -> Point | None:
    """The checkpoint `directory`, or the newest of the folder `directory` whose files are as they were written; None:
    there is none. Damaged ones are told and passed over. Collective: the folder as rank 0 sees it counts.

    Raises:
        CheckpointError: there are some, and all are damaged; or the newest that is not is of another schema.
    """
    comm, damaged = comms.current(), []
    found = [directory] if (directory / checkpoint_folder.MANIFEST).is_file() else None
    for name in comm.broadcast_object([str(path) for path in found or checkpoint_folder.complete_in(directory)]):
        try:
            return Point(Path(name), verify(name))
        except DamagedCheckpointError as error:
            damaged.append(Path(name).name)
            if comm.rank == 0:
                logger.warning("passed over: %s", error)
    if damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoint(s) in {directory} can be read ({', '.join(damaged)}); see the "
            "lines above"
        )
    return None


def load(
    directory: str | os.PathLike[str],
    model: keras.Model,
    embeddings: list[ShardedEmbedding],
    *,
    optimizer: bool = True,
    manifest: dict[str, Any] | None = None,
) -> Progress:
    """Restores rows, dense weights and (with `optimizer`) optimizer state, step counts and seed generators.

    Args:
        directory: a checkpoint; all ranks see it.
        model: built, and compiled if `optimizer`.
        embeddings: all embeddings of the model, without rows so far.
        optimizer: False: for scoring.
        manifest: what `verify` has just returned; None: the checkpoint is verified here.

    Raises:
        CheckpointError: damaged or missing files, other tables, dims, row optimizers, columns or dense shapes than the
            model's (all ranks alike).
    """
    comm, path = comms.current(), Path(directory)
    manifest = verify(path) if manifest is None else manifest
    owned: dict[str, int] = {}
    _together(
        comm,
        f"loading {directory}",
        _load_pieces(comm, path, manifest, model, embeddings, optimizer, owned),
    )
    _check_rows_found(path, manifest, comm.allgather_object(owned))
    return Progress(**manifest["progress"])


def _load_pieces(
    comm: comms.Comm,
    directory: Path,
    manifest: dict[str, Any],
    model: keras.Model,
    embeddings: list[ShardedEmbedding],
    optimizer: bool,
    owned: dict[str, int],
) -> Iterator[None]:
    """Loads everything, in pieces; fills in how many rows of each table this rank owns."""
    Progress(**manifest["progress"])
    _check_tables(directory, manifest, embeddings, optimizer)
    for embedding in embeddings:
        embedding.check_empty()
    dense_file.load(directory, model, optimizer)
    for embedding in embeddings:
        if optimizer:
            # Before the rows: one without last_step counts as trained now.
            embedding.set_steps(
                {
                    group.name: max(manifest["tables"][table.name]["step"] for table in group.layout.tables)
                    for group in embedding.groups
                }
            )
        yield from _load_rows(comm, directory, manifest, embedding, optimizer, owned)


def _check_complete(directory: Path, manifest: dict[str, Any]) -> None:
    """The manifest lists the dense weights and, for each table, the part of every rank."""
    names, ranks = set(manifest["files"]), int(manifest["ranks"])
    wanted = {dense_file.NAME}
    for table, info in manifest["tables"].items():
        wanted |= {row_files.part_path(table, rank, ranks) for rank in range(ranks)}
        if info["min_count"] > 1:
            wanted |= {row_files.waiting_path(table, rank, ranks) for rank in range(ranks)}
    for name in names:
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise CheckpointError(f"{directory}: file {name!r} of the manifest lies outside the checkpoint")
    if names != wanted:
        raise DamagedCheckpointError(
            f"{directory}: the manifest lists {sorted(names - wanted)} and lacks {sorted(wanted - names)}"
        )


def _check_file(directory: Path, name: str, info: dict[str, Any], content: bool) -> Iterator[None]:
    path = directory / name
    if not path.is_file():
        raise DamagedCheckpointError(
            f"{path} is missing; where it is on another rank's host only, put it on a file system that all ranks share"
        )
    intact = path.stat().st_size == info["bytes"]
    if intact and content:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
                yield
        intact = digest.hexdigest() == info["sha256"]
    if not intact:
        raise DamagedCheckpointError(
            f"{path} is damaged: size or SHA-256 differs from the manifest's; load an older checkpoint "
            "of the run (hvd-ctr: --checkpoint DIR; train --resume takes the newest intact one)"
        )


def _check_tables(
    directory: Path,
    manifest: dict[str, Any],
    embeddings: list[ShardedEmbedding],
    optimizer: bool,
) -> None:
    saved = manifest["tables"]
    wanted = {t.name: t for embedding in embeddings for group in embedding.groups for t in group.layout.tables}
    if set(saved) != set(wanted):
        missing, extra = (
            sorted(set(wanted) - set(saved)),
            sorted(set(saved) - set(wanted)),
        )
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
        known = row_files.COLUMNS + row_files.LIFE_COLUMNS
        unknown = [column for column in saved[name]["columns"] if column not in known]
        if unknown:
            raise CheckpointError(
                f"{directory}: table {name!r} has column(s) {', '.join(unknown)}, which this version does not know; "
                "use the version of hvd_ctr that wrote it"
            )


def _load_rows(
    comm: comms.Comm,
    directory: Path,
    manifest: dict[str, Any],
    embedding: ShardedEmbedding,
    optimizer: bool,
    owned: dict[str, int],
) -> Iterator[None]:
    """Streams the rows into an embedding; counts by table how many this rank owns."""
    owned.update(dict.fromkeys(embedding.table_names, 0))
    # The owner is a function of key and number of ranks: with equal numbers, part r is rank r's.
    paths = (row_files.part_path, row_files.waiting_path)
    own = {path(table, comm.rank, comm.size) for table in embedding.table_names for path in paths}
    # Rows first: ids that have one by then are not taken for waiting ones.
    for name, info in sorted(manifest["files"].items(), key=lambda entry: "waiting_of" in entry[1]):
        table = info.get("table") or (info.get("waiting_of") if optimizer else None)
        if table not in embedding.table_names or (manifest["ranks"] == comm.size and name not in own):
            continue
        for batch in row_files.read(directory / name):
            if batch.rows is not None:
                state = batch.state if optimizer else None
                owned[table] += len(batch.ids) - embedding.import_rows(table, batch.ids, batch.rows, state)
            if optimizer and batch.counts is not None and batch.last_steps is not None:
                embedding.import_life(table, batch.ids, batch.counts, batch.last_steps)
            yield


def _check_rows_found(directory: Path, manifest: dict[str, Any], owned: list[dict[str, int]]) -> None:
    for table, saved in manifest["tables"].items():
        found = sum(rank.get(table, 0) for rank in owned)
        if found != saved["rows"]:
            raise CheckpointError(
                f"{directory}: table {table!r} has {saved['rows']:,} rows, of which {found:,} found an owner"
            )


__all__ = [
    "SCHEMA",
    "CheckpointError",
    "DamagedCheckpointError",
    "Point",
    "Progress",
    "latest",
    "load",
    "newest_valid",
    "read_manifest",
    "save",
    "set_progress",
    "verify",
]
