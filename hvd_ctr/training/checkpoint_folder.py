"""The directories of checkpoints: which are complete, how one becomes visible at once, which are left over or too old.

    checkpoints/
        step-00000120/                a checkpoint: it holds manifest.json
        step-00000160.incomplete/     a save in progress, or one that was cut off
        step-00000120.replaced/       the older one of that name while a new one takes its place
        step-00000080.removed/        one that is being deleted

A save writes into NAME.incomplete, forces every file and directory to disk, and renames. A deletion renames first. So a
directory without one of these endings is complete at any moment, also after kill -9 or a power failure, and what has
one is a leftover unless its writer still runs. Only NAME.replaced is still of use: when a kill came between its two
renames it is the checkpoint, which readers know.

These functions are local, for rank 0, and need no communication. Names end in digits (step-00000120); whatever else
lies in the folder is left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = 3
MANIFEST = "manifest.json"
_KEYS = {"files", "progress", "ranks", "run", "tables", "written_at"}
_NAME = re.compile(r"step-\d+")
_INCOMPLETE, _REPLACED, _REMOVED = ".incomplete", ".replaced", ".removed"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names directory, file and cause."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were written: cut off, changed or missing."""


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The checked manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: no manifest (not a checkpoint, or one cut off while it was written), or unreadable.
        CheckpointError: of another schema.
    """
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise DamagedCheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict):
        raise DamagedCheckpointError(f"{path} is damaged: it holds no JSON object")
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: schema {manifest.get('schema')!r}, this version reads {SCHEMA}; use the version of hvd_ctr that "
            "wrote it"
        )
    missing = sorted(_KEYS - set(manifest))
    if missing:
        raise DamagedCheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}")
    return manifest


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes or replaces the manifest; whenever the process ends, the old or the new one is there, whole."""
    scratch = directory / f"{MANIFEST}{_INCOMPLETE}"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, directory / MANIFEST)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Forces a directory's entries to disk, on file systems that can do it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of a folder, the one written last first. Their files are not checked."""
    found = []
    for path in _children(Path(folder)):
        base = path.name.removesuffix(_REPLACED)
        if not _NAME.fullmatch(base) or (base != path.name and (path.with_name(base) / MANIFEST).is_file()):
            continue  # none, or its successor is in place
        with contextlib.suppress(FileNotFoundError):  # incomplete, or deleted while we look
            found.append((_written_at(path), path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of a folder that was written last, or None."""
    return next(iter(complete_in(folder)), None)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def _written_at(path: Path) -> float:
    try:
        return float(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["written_at"])
    except (ValueError, KeyError, TypeError):  # damaged: whoever loads it says so
        return (path / MANIFEST).stat().st_mtime


def time_for_next(folder: Path) -> float:
    """Seconds since the epoch for the manifest of the next checkpoint: later than those of all others, also when the
    clock of this host is behind that of an earlier one.
    """
    newest = latest(folder)
    if newest is None:
        return time.time()
    return max(time.time(), _written_at(newest) + 1e-3)


def scratch_of(final: Path) -> Path:
    """Where the checkpoint `final` is written."""
    return final.with_name(final.name + _INCOMPLETE)


def begin(final: Path, subfolders: list[str]) -> Path:
    """Makes the scratch directory of a save, empty but for the subfolders.

    Raises:
        CheckpointError: `final` exists and is no checkpoint: it would be overwritten.
        OSError: it cannot be made.
    """
    if final.exists() and not (final / MANIFEST).is_file() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final} exists and is not a checkpoint: it has no {MANIFEST}; move it away")
    _settle(final)
    scratch = scratch_of(final)
    scratch.mkdir(parents=True)
    for name in subfolders:
        (scratch / name).mkdir(parents=True)
    return scratch


def publish(scratch: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Makes a complete scratch directory the checkpoint `final`, in place of one of that name."""
    write_manifest(scratch, manifest)
    for folder in (scratch / "rows", scratch):
        if folder.is_dir():
            sync_directory(folder)
    if (final / MANIFEST).is_file():
        replaced = final.with_name(final.name + _REPLACED)
        final.rename(replaced)
        scratch.rename(final)
        sync_directory(final.parent)
        shutil.rmtree(replaced)
    else:
        scratch.rename(final)
        sync_directory(final.parent)


def discard(final: Path) -> None:
    """Removes what a failed save of `final` has left, which also gives back the space of a full disk."""
    shutil.rmtree(scratch_of(final), ignore_errors=True)


def _settle(final: Path) -> list[str]:
    """Ends what was cut off around one name; returns the names of what was removed or put back."""
    done = []
    replaced = final.with_name(final.name + _REPLACED)
    if replaced.is_dir() and not (final / MANIFEST).is_file() and (replaced / MANIFEST).is_file():
        replaced.rename(final)
        sync_directory(final.parent)
        done.append(f"{final.name} put back")
    for suffix in (_INCOMPLETE, _REPLACED, _REMOVED):
        leftover = final.with_name(final.name + suffix)
        if leftover.is_dir():
            shutil.rmtree(leftover)
            done.append(f"{leftover.name} removed")
    return done


def clean(folder: str | os.PathLike[str]) -> None:
    """Removes the leftovers of saves and deletions that were cut off, and says so; what cannot be removed is told and
    left. No save may be running there.
    """
    names = {path.name.rsplit(".", 1)[0] for path in _children(Path(folder)) if "." in path.name}
    done = []
    for name in sorted(names):
        if _NAME.fullmatch(name):
            try:
                done += _settle(Path(folder) / name)
            except OSError as error:
                logger.warning("checkpoints: leftovers of %s cannot be removed: %s", name, error)
    if done:
        logger.info("checkpoints: an earlier run was cut off: %s", ", ".join(done))


def remove(directory: Path) -> None:
    """Deletes one checkpoint; at no moment is half of one taken for a whole.

    Raises:
        CheckpointError: it is none of ours, as far as its manifest tells.
    """
    try:
        keys = set(json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{directory} is not removed: {MANIFEST} does not tell that it is a checkpoint: {error}"
        ) from error
    if not keys >= {"schema", "progress", "files"}:
        raise CheckpointError(f"{directory} is not removed: its {MANIFEST} is not one of a checkpoint")
    removed = directory.with_name(directory.name + _REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    directory.rename(removed)
    shutil.rmtree(removed)


def keep_newest(folder: Path, count: int) -> None:
    """Deletes all but the `count` checkpoints written last; one that cannot be deleted is told and left."""
    for directory in complete_in(folder)[count:]:
        try:
            remove(directory)
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint %s is older than checkpoint.keep allows, and stays: %s", directory, error)


def remove_all(folder: str | os.PathLike[str]) -> list[Path]:
    """Deletes all checkpoints of a folder and the leftovers of others; returns those deleted."""
    clean(folder)
    found = complete_in(folder)
    for directory in found:
        remove(directory)
    return found
