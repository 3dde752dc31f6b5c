"""Directories of checkpoints: whenever the process ends, the newest complete one is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_ctr.training import checkpoint_folder as folders
from hvd_ctr.training.checkpoint_folder import CheckpointError, DamagedCheckpointError


def _write(final: Path, text: str, written_at: float | None = None) -> None:
    scratch = folders.begin(final, ["rows/t"])
    (scratch / "rows/t/part").write_text(text)
    manifest = {key: {} for key in ("files", "progress", "run", "tables")}
    time = folders.time_for_next(final.parent) if written_at is None else written_at
    folders.publish(scratch, final, {**manifest, "schema": folders.SCHEMA, "ranks": 1, "written_at": time})


def _text(path: Path | None) -> str | None:
    return None if path is None else (path / "rows/t/part").read_text()


class _Killed(BaseException):
    pass


class _Killer:
    """Counts calls that change the disk and ends the "process" before the chosen one; of a tree that is being deleted
    it leaves a half.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls, self._at = 0, at
        for owner, name in ((Path, "rename"), (Path, "mkdir"), (Path, "open"), (os, "replace"), (os, "fsync")):
            self._wrap(monkeypatch, owner, name)
        rmtree = shutil.rmtree

        def half(path: Path, ignore_errors: bool = False) -> None:
            if self._counts() and Path(path).is_dir():
                first = next((entry for entry in sorted(Path(path).rglob("*")) if entry.is_file()), None)
                if first is not None:
                    first.unlink()
                raise _Killed
            rmtree(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", half)

    def _counts(self) -> bool:
        self.calls += 1
        return self.calls == self._at

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            if self._counts():
                raise _Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("same_name", [False, True])
def test_killed_before_any_change_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_name: bool) -> None:
    """A save of a new or of an old name, with the deletion of the checkpoint before: at each moment the newest is the
    old one or the new one, whole; the next save works, and leaves nothing over.
    """
    at, seen = 0, set()
    while True:
        at += 1
        folder = tmp_path / str(at)
        old, new = folder / "step-00000001", folder / ("step-00000001" if same_name else "step-00000002")
        _write(old, "old")
        with monkeypatch.context() as patch:
            killer = _Killer(patch, at)
            try:
                _write(new, "new")
                folders.keep_newest(folder, 1)
            except _Killed:
                pass
        seen.add(_text(folders.latest(folder)))
        folders.clean(folder)
        assert _text(folders.latest(folder)) in ("old", "new")
        assert not [path.name for path in folder.iterdir() if "." in path.name]
        _write(folder / "step-00000003", "next")
        folders.keep_newest(folder, 1)
        assert _text(folders.latest(folder)) == "next" and len(list(folder.iterdir())) == 1
        if killer.calls < at:
            break
    assert at > 10 and seen == {"old", "new"}


def test_the_newest_is_the_one_written_last_whatever_the_clock(tmp_path: Path) -> None:
    _write(tmp_path / "step-00000020", "far ahead", written_at=4e9)
    _write(tmp_path / "step-00000010", "later")
    assert _text(folders.latest(tmp_path)) == "later"
    assert [path.name for path in folders.complete_in(tmp_path)] == ["step-00000010", "step-00000020"]
    folders.keep_newest(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_only_what_is_a_checkpoint_is_removed(tmp_path: Path) -> None:
    _write(tmp_path / "step-00000001", "ours")
    for name, content in {"step-notes": "{}", "step-7": "[]", "other": "{}"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "mine.txt").write_text("no manifest")
    with pytest.raises(CheckpointError, match=r"step-7 is not removed: its manifest.json is not one of a checkpoint"):
        folders.remove_all(tmp_path)
    shutil.rmtree(tmp_path / "step-7")
    folders.remove_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step-00000009", "step-notes"]
    with pytest.raises(CheckpointError, match="step-00000009 exists and is not a checkpoint"):
        folders.begin(tmp_path / "step-00000009", [])
    assert (tmp_path / "step-00000009" / "mine.txt").read_text() == "no manifest"


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Path]:
    _write(tmp_path / "step-00000001", "text")
    yield tmp_path / "step-00000001" / "manifest.json"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, DamagedCheckpointError, "is not a checkpoint: it has no manifest.json"),
        ("{", DamagedCheckpointError, "is damaged"),
        ("[]", DamagedCheckpointError, "is damaged: it holds no JSON object"),
        (json.dumps({"schema": folders.SCHEMA, "files": {}}), DamagedCheckpointError, "lacks progress, ranks, run"),
        (json.dumps({"schema": 99}), CheckpointError, f"schema 99, this version reads {folders.SCHEMA}"),
    ],
)
def test_what_a_bad_manifest_is_called(manifest: Path, content: str | None, error: type, message: str) -> None:
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    with pytest.raises(error, match=message) as caught:
        folders.read_manifest(manifest.parent)
    assert type(caught.value) is error
