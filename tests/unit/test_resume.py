"""hvd-ctr train --resume and --overwrite in one process: the same bits, and every refusal."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hvd_ctr import cli
from hvd_ctr.config import ConfigError
from hvd_ctr.training.checkpoint import CheckpointError
from tests.support.checkpoints import assert_same_bits, read_checkpoint
from tests.support.dense_reference import round_to
from tests.support.resume_program import configuration, job, run, write_data

# Dropout draws numbers, Adam counts steps, shuffle windows cross batches; step 40 is the second of epoch 2.
_SECTIONS: dict[str, Any] = {
    "model": {"dropout": 0.2},
    "train": {"dense_optimizer": {"kind": "adam", "learning_rate": 0.01}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and an uninterrupted run "whole" of 70 steps with checkpoints at 20, 40, 60, 70."""
    folder = tmp_path_factory.mktemp("resume")
    write_data(folder)
    run([job(configuration(folder, "whole", **_SECTIONS))])
    return folder


def _interrupted(folder: Path, name: str, *steps: int) -> Path:
    """A run folder as if the run had ended after its checkpoints of these steps; returns that of the checkpoints."""
    checkpoints = folder / "runs" / name / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    for step in steps:
        shutil.copytree(folder / "runs/whole/checkpoints" / f"step-{step:08d}", checkpoints / f"step-{step:08d}")
    return checkpoints


@pytest.mark.parametrize(
    ("step", "sections"),
    [
        (20, {}),
        (20, {"train": {"pipeline_depth": 0}, "embedding": {"host": {"kind": "disk", "ram_bytes": 2e6}}}),
        (
            40,
            {
                "embedding": {
                    "host": {"kind": "disk", "ram_bytes": 2e6},
                    "cache": {"slots": 2000, "policy": "lookahead"},
                }
            },
        ),
    ],
)
def test_goes_on_with_the_same_bits(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, sections: dict[str, Any]
) -> None:
    """Mid-epoch and in a later epoch, in either tier, with another depth, cache and policy."""
    checkpoints = _interrupted(folder, "again", step)
    if "host" in sections.get("embedding", {}):
        sections["embedding"]["host"]["path"] = str(tmp_path)
    merged = {name: {**_SECTIONS.get(name, {}), **sections.get(name, {})} for name in {*_SECTIONS, *sections}}
    with caplog.at_level(logging.INFO):
        run([job(configuration(folder, "again", **merged), "RESUME")])
    assert f"step-{step:08d} (written by 1 rank(s), now 1): step {step}" in caplog.text
    assert "begin anew here" in caplog.text
    assert_same_bits(checkpoints / "step-00000070", folder / "runs/whole/checkpoints/step-00000070")
    report = json.loads((folder / "runs/again/report.json").read_text())
    assert (report["first_step"], report["steps"]) == (step, 70)


def test_rows_may_be_stored_otherwise_which_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From float32 rows to bfloat16: those of the checkpoint are rounded as they are loaded, also where no step touches
    them; state and dense weights go on as they are. From there on a resumed run has the same bits as one that goes on.
    """
    checkpoints = _interrupted(folder, "narrow", 20)
    narrow = {**_SECTIONS, "embedding": {"cache": {"slots": 700, "row_dtype": "bfloat16"}}}
    with caplog.at_level(logging.INFO):
        run([job(configuration(folder, "narrow", **narrow), "RESUME")])
    assert "embedding.cache.row_dtype: the checkpoint has 'float32', the configuration 'bfloat16'" in caplog.text
    for table, rows in read_checkpoint(checkpoints / "step-00000070")[1].items():
        before = read_checkpoint(checkpoints / "step-00000020")[1][table]
        assert rows.keys() >= before.keys()
        values = np.stack(list(rows.values()))[:, :4]
        np.testing.assert_array_equal(values, round_to("bfloat16", values))
        assert (
            np.stack(list(before.values()))[:, :4] != round_to("bfloat16", np.stack(list(before.values()))[:, :4])
        ).any()
    shutil.copytree(checkpoints, tmp_path / "whole")
    for step in (60, 70):
        shutil.rmtree(checkpoints / f"step-000000{step}")
    slots = {"cache": {"slots": 300, "row_dtype": "bfloat16", "policy": "lru"}}
    run([job(configuration(folder, "narrow", **{**narrow, "embedding": slots}), "RESUME")])
    assert_same_bits(checkpoints / "step-00000070", tmp_path / "whole/step-00000070")


def test_without_a_checkpoint_it_starts_from_the_beginning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _interrupted(folder, "first")
    with caplog.at_level(logging.INFO):
        run([job(configuration(folder, "first", 20, **_SECTIONS), "RESUME")])
    assert caplog.text.count("no checkpoint in") == 1 and "starting from the beginning" in caplog.text
    checkpoints = folder / "runs/first/checkpoints"
    assert_same_bits(checkpoints / "step-00000020", folder / "runs/whole/checkpoints/step-00000020")


def test_an_older_run_is_not_overwritten_unasked(folder: Path) -> None:
    checkpoints = _interrupted(folder, "old", 20, 40)
    (checkpoints / "step-99.incomplete").mkdir()
    (checkpoints / "notes").mkdir()
    with pytest.raises(ConfigError, match=r"holds 2 checkpoint\(s\) already, the newest is step-00000040; --resume"):
        run([job(configuration(folder, "old", **_SECTIONS))])
    # Nothing is removed for a run that cannot begin.
    with pytest.raises(ValueError, match=r"nowhere-\*"):
        run([job(configuration(folder, "old", data={"train": ["nowhere-*"]}), "OVERWRITE")])
    assert len(list(checkpoints.iterdir())) == 4
    run([job(configuration(folder, "old", 3, **_SECTIONS), "OVERWRITE")])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["notes", "step-00000003"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seed": 2}, "seed: the checkpoint has 1, the configuration 2"),
        ({"train": {"global_batch": 32}}, "train.global_batch: the checkpoint has 64, the configuration 32"),
        ({"model": {"name": "dcnv2"}}, "model.name: the checkpoint has 'deepfm', the configuration 'dcnv2'"),
        ({"model": {"hidden": [8, 8]}}, r"model.hidden: the checkpoint has \[8\], the configuration \[8, 8\]"),
        ({"train": {"dense_optimizer": {"kind": "sgd"}}}, "dense_optimizer.kind: the checkpoint has 'adam', .* 'sgd'"),
        ({"embedding": {"dim": 5}}, "embedding.tables.item.dim: the checkpoint has 4, the configuration 5"),
        (
            {"embedding": {"tables": {"user": {"optimizer": {"kind": "adam"}}}}},
            "embedding.tables.user.optimizer.kind: the checkpoint has 'adagrad', the configuration 'adam'",
        ),
        (
            {"embedding": {"shared": {"place": "user"}}},
            "embedding.shared: .*; embedding.tables.place.dim: the checkpoint has 4, the configuration 'not there'",
        ),
        ({"data": {"shuffle_rows": 400}}, "data.shuffle_rows: the checkpoint has 500, the configuration 400; step 20"),
        ({"data": {"train": ["part-0.parquet"]}}, r"data.train: the checkpoint has 3 file\(s\), the configuration 1"),
        (
            {"data": {"train": ["part-0.parquet", "part-2.parquet", "part-1.parquet"]}},
            "data.train: file 2 is 'part-1.parquet' of .* bytes in the checkpoint, 'part-2.parquet' of",
        ),
    ],
)
def test_a_contradiction_names_field_and_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    _interrupted(folder, "other", 20)
    config = configuration(folder, "other", **_SECTIONS)
    for section, values in sections.items():
        config[section] = {**config[section], **values} if isinstance(values, dict) else values
    with pytest.raises(ConfigError, match=f"--resume from .*step-00000020: .*{message}"):
        run([job(config, "RESUME")])


def test_between_epochs_the_files_may_change_and_rates_at_any_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next day's data (FC 95); what differs is told."""
    _interrupted(folder, "days")
    one_epoch = {**_SECTIONS["train"], "epochs": 1}
    config = configuration(folder, "days", 70, **{**_SECTIONS, "train": one_epoch})
    run([job({**config, "checkpoint": {}})])
    next_day = {**config["data"], "train": [str(folder / "part-1.parquet")]}
    rates = {**config["train"], "epochs": 2, "dense_optimizer": {"kind": "adam", "learning_rate": 5.0}}
    losses = folder / "days.json"
    with caplog.at_level(logging.INFO):
        run([job({**config, "data": next_day, "train": rates, "checkpoint": {}}, "RESUME", losses)])
    assert "differs from before: data.train: the checkpoint has 3 file(s), the configuration 1; " in caplog.text
    assert "train.dense_optimizer.learning_rate: the checkpoint has 0.01, the configuration 5.0" in caplog.text
    assert "begin anew" not in caplog.text  # at the beginning of an epoch
    values = json.loads(losses.read_text())
    assert len(values) == 13 and max(values) > 2.0  # 800 rows, and the rate that makes the loss jump


def test_a_damaged_checkpoint_is_passed_over_and_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = _interrupted(folder, "damaged", 20, 40, 60)
    (checkpoints / "step-00000060" / "manifest.json").write_text("{")
    part = next((checkpoints / "step-00000040" / "rows" / "item").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    run([job(configuration(folder, "damaged", **_SECTIONS), "RESUME")])
    assert caplog.text.count("passed over") == 2 and f"{part} is damaged" in caplog.text
    whole = folder / "runs/whole/checkpoints"
    for step in (40, 60, 70):  # the damaged ones are replaced as the run comes by
        assert_same_bits(checkpoints / f"step-{step:08d}", whole / f"step-{step:08d}")
    _interrupted(folder, "damaged", 20)
    (checkpoints / "step-00000020" / "dense.npz").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoint\(s\) in .* can be read \(step-00000020\)"):
        run([job(configuration(folder, "damaged", **_SECTIONS), "RESUME")])


def test_keep_leaves_the_newest_and_a_finished_run_has_nothing_to_train(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = _interrupted(folder, "kept")
    (checkpoints / "step-5.removed").mkdir(parents=True)
    once = {**_SECTIONS["train"], "epochs": 1}
    config = configuration(
        folder, "kept", 70, **{**_SECTIONS, "train": once}, checkpoint={"every_steps": 19, "keep": 2}
    )
    run([job({**config, "data": {**config["data"], "eval": config["data"]["train"]}})])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000019", "step-00000038"]
    # Step 38 is the last of the epoch: it is saved once, and is said to be the beginning of the next.
    manifest = json.loads((checkpoints / "step-00000038/manifest.json").read_text())
    assert manifest["progress"] == {"step": 38, "epoch": 1, "step_in_epoch": 0}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run([job({**config, "data": {**config["data"], "eval": config["data"]["train"]}}, "RESUME")])
    assert "all is trained already" in caplog.text
    report = json.loads((folder / "runs/kept/report.json").read_text())
    assert (report["first_step"], report["steps"], report["samples"]) == (38, 38, 0)
    assert 0.3 < report["eval_metrics"]["auc"] < 1
    run([job(configuration(folder, "kept", 40, **_SECTIONS), "RESUME")])
    assert_same_bits(checkpoints / "step-00000040", folder / "runs/whole/checkpoints/step-00000040")


def test_saves_by_wall_clock(folder: Path) -> None:
    checkpoints = _interrupted(folder, "minutes")
    run(
        [
            job(
                configuration(
                    folder, "minutes", **{**_SECTIONS, "checkpoint": {"every_minutes": 0.0005, "at_end": False}}
                )
            )
        ]
    )
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints.iterdir()]
    assert steps and max(steps) <= 70


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    checkpoints = _interrupted(folder, "typed", 60)
    path = folder / "typed.yaml"
    path.write_text(yaml.safe_dump(configuration(folder, "typed", **_SECTIONS)))
    assert cli.main(["train", str(path)]) == 2
    assert "--resume goes on from it, --overwrite removes them" in capsys.readouterr().err
    assert cli.main(["train", str(path), "--resume"]) == 0
    assert "trained 10 steps" in capsys.readouterr().out
    assert_same_bits(checkpoints / "step-00000070", folder / "runs/whole/checkpoints/step-00000070")
    with pytest.raises(SystemExit):
        cli.main(["train", str(path), "--resume", "--overwrite"])
