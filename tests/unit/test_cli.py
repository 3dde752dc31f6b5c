"""Small parts of the command line that need no job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hvd_ctr import cli
from hvd_ctr.cli import commands
from hvd_ctr.config import DataConfig, TrainConfig


class _Trainer:
    def __init__(self, invalid: int) -> None:
        self._invalid = invalid

    def cache_totals(self) -> tuple[int, int, int]:
        return 5, 9, self._invalid


def test_skipped_ids_are_told() -> None:
    told: Any = commands._skipped_line
    assert told(_Trainer(1234)) == ["invalid ids skipped: 1,234"] and told(_Trainer(0)) == []


def test_where_scores_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands._output_problem(Path("scores.txt")) == "" == commands._output_problem(tmp_path / "scores.txt")
    assert "is a folder" in commands._output_problem(tmp_path)
    assert f"the folder gone does not exist (working directory {tmp_path})" in commands._output_problem(
        Path("gone/scores.txt")
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in commands._output_problem(Path("scores.txt"))


def test_a_broken_teacher_report_is_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "teacher.json").write_text("{")
    config = TrainConfig(data=DataConfig(eval=(str(tmp_path / "eval-*.tsv"),)))
    assert commands.teacher_of(config) is None
    assert str(tmp_path / "teacher.json") in caplog.text


def test_a_config_error_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.startswith(f"hvd-ctr: {tmp_path}/none.yaml: cannot read the configuration")
