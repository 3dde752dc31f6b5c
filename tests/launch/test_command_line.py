"""`hvd-ctr` end to end: train, evaluate and predict on files, at several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvd_ctr.config import SynthConfig
from hvd_ctr.data import synthetic
from tests.support.checkpoints import read_checkpoint
from tests.support.run_ranks import REPOSITORY, RanksResult, run_ranks

pytestmark = pytest.mark.ranks
pytest.importorskip("horovod.tensorflow", reason="several ranks need Horovod")

_EVAL_ROWS = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a config of exactly 50 steps."""
    base = tmp_path_factory.mktemp("command_line")
    synthetic.generate(
        SynthConfig(out_dir=str(base / "data"), train_rows=12_800, eval_rows=_EVAL_ROWS, files=3, scale=1e-4)
    )
    config = {
        "name": "small",
        "data": {
            "train": [str(base / "data/train-*.tsv")],
            "eval": [str(base / "data/eval-*.tsv")],
            "predict": [str(base / "data/eval-*.tsv")],
            "predict_has_label": True,
            "shuffle_rows": 3000,
        },
        "model": {"name": "deepfm", "hidden": [16]},
        "embedding": {"dim": 4, "optimizer": {"kind": "adagrad", "learning_rate": 0.02}, "cache": {"slots": 4000}},
        "train": {"global_batch": 256, "dense_optimizer": {"kind": "sgd", "learning_rate": 0.1}, "log_every_steps": 10},
    }
    (base / "config.yaml").write_text(yaml.safe_dump(config))
    return base


def _command(folder: Path, ranks: int, *arguments: str, timeout_seconds: float = 120.0) -> RanksResult:
    command, *rest = arguments
    return run_ranks(
        ["-m", "hvd_ctr", command, str(folder / "config.yaml"), *rest],
        ranks,
        timeout_seconds=timeout_seconds,
        working_directory=folder,
    )


def _train(folder: Path, ranks: int, name: str, *settings: str) -> Path:
    overrides = [text for setting in (f"name={name}", *settings) for text in ("--set", setting)]
    result = _command(folder, ranks, "train", *overrides)
    assert result.exit_code == 0, result.report()
    return folder / "runs" / name


def _checkpoint(run_dir: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[int, np.ndarray]]]:
    """Dense arrays, and per table id -> row and state, read with numpy and pyarrow alone."""
    (directory,) = (run_dir / "checkpoints").iterdir()
    return read_checkpoint(directory)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[int, Path]:
    return {ranks: _train(folder, ranks, f"ranks_{ranks}") for ranks in (1, 2, 4)}


def test_any_number_of_ranks_trains_alike(runs: dict[int, Path]) -> None:
    """50 steps of the command line: weights, rows and optimizer state equal up to the order of float sums."""
    dense, tables = _checkpoint(runs[1])
    for ranks in (2, 4):
        other_dense, other_tables = _checkpoint(runs[ranks])
        for name, value in dense.items():
            np.testing.assert_allclose(other_dense[name], value, rtol=0, atol=1e-6, err_msg=f"{name} at {ranks} ranks")
        assert other_tables.keys() == tables.keys()
        for table, rows in tables.items():
            assert other_tables[table].keys() == rows.keys()
            for row_id, values in rows.items():
                np.testing.assert_allclose(other_tables[table][row_id], values, rtol=0, atol=1e-6, err_msg=table)
    reports = [json.loads((run / "report.json").read_text()) for run in runs.values()]
    assert [r["steps"] for r in reports] == [50, 50, 50] and [r["samples"] for r in reports] == [12_800] * 3
    aucs = [r["eval_metrics"]["auc"] for r in reports]
    assert aucs == pytest.approx([reports[0]["eval_metrics"]["auc"]] * 3, abs=1e-4)
    assert all(r["counts"]["train"]["rows"] == 12_800 for r in reports)


def test_report_and_profile_tell_what_cache_and_exchanges_did(folder: Path) -> None:
    result = _command(
        folder,
        2,
        "train",
        "--set",
        "name=reported",
        "--set",
        "train.max_steps=20",
        "--set",
        "embedding.exchange=allgather",
        "--profile-steps",
        "8:15",
    )
    assert result.exit_code == 0, result.report()
    for text in (
        "write-backs",
        "moved: device-host ",
        "per step, all ranks together: keys ",
        "GPU-Worker ",
        " rows on one",
    ):
        assert text in result.outputs[0], result.report()
    run = folder / "runs" / "reported"
    report = json.loads((run / "report.json").read_text())
    total, ranks = report["statistics"]["total"], report["statistics_of_ranks"]
    assert total["steps"] == 20 and total["unique"] == total["hits"] + total["misses"]
    assert total["host_rows"] == report["rows"] == sum(rank["total"]["host_rows"] for rank in ranks)
    assert total["device_host_bytes"] == sum(
        row["device_host_bytes"] for row in report["statistics"]["tables"].values()
    )
    assert report["statistics"]["exchange"]["gradients"]["calls"] == 2 * 2 * 20  # sizes and rows, of both ranks
    assert report["statistics"]["waited_seconds"]["GPU-Worker"] > 0
    (events,) = (run / "tensorboard").iterdir()
    for tag in ("train/loss", "cache/hit_rate", "bytes_per_step/gradients", "wait_seconds_per_step/Host-Manager"):
        assert tag.encode() in events.read_bytes(), tag
    assert b"profile_ms/Data-Loader/parse" in events.read_bytes()
    profile = json.loads((run / "profile" / "profile.json").read_text())
    assert (profile["steps"], profile["ranks"], profile["lost_events"]) == ([8, 15], 2, 0)
    assert {"read", "parse", "dedupe", "partition"} <= profile["threads"]["Data-Loader"].keys()
    assert {"lookup", "forward", "backward", "update"} <= profile["threads"]["GPU-Worker"].keys()
    assert (run / "profile" / "profile.txt").read_text().strip() in "\n".join(result.outputs)
    tracks = [
        e for e in json.loads((run / "profile" / "trace.json").read_text())["traceEvents"] if "thread_name" in e["name"]
    ]
    assert len(tracks) == 2 * 3


def test_a_small_lfu_cache_gives_the_same_bits(folder: Path, runs: dict[int, Path]) -> None:
    small = _train(folder, 2, "small_cache", "embedding.cache.slots=1200", "embedding.cache.policy=lfu")
    report = json.loads((small / "report.json").read_text())
    dense, tables = _checkpoint(runs[2])
    other_dense, other_tables = _checkpoint(small)
    assert report["hit_rate"] < json.loads((runs[2] / "report.json").read_text())["hit_rate"]
    for name, value in dense.items():
        np.testing.assert_array_equal(other_dense[name], value)
    for table, rows in tables.items():
        for row_id, values in rows.items():
            np.testing.assert_array_equal(other_tables[table][row_id], values)


def test_count_then_train_with_freq_gives_the_same_bits(folder: Path, runs: dict[int, Path]) -> None:
    """The cache starts with the most frequent rows; the model and its rows are those of any other policy."""
    result = _command(folder, 2, "count", "--output", str(folder / "counts.parquet"))
    assert result.exit_code == 0, result.report()
    assert "counted 12,800 lines on 2 rank(s)" in result.outputs[0], result.report()
    settings = ["embedding.cache.slots=1200", "embedding.cache.policy=freq", "embedding.cache.counts=counts.parquet"]
    trained = _train(folder, 2, "freq", *settings)
    dense, tables = _checkpoint(runs[2])
    other_dense, other_tables = _checkpoint(trained)
    for name, value in dense.items():
        np.testing.assert_array_equal(other_dense[name], value)
    assert {table: rows.keys() for table, rows in tables.items()} == {
        table: rows.keys() for table, rows in other_tables.items()
    }
    for table, rows in tables.items():
        for row_id, values in rows.items():
            np.testing.assert_array_equal(other_tables[table][row_id], values)
    # Reading needs no counts.
    (folder / "counts.parquet").unlink()
    overrides = [text for setting in ("name=freq", *settings) for text in ("--set", setting)]
    result = _command(folder, 1, "evaluate", *overrides)
    assert result.exit_code == 0, result.report()
    result = _command(folder, 2, "train", *overrides, "--overwrite")
    assert list(trained.glob("checkpoints/step-*")), "removed for a run that could not begin"
    assert result.exit_code == 1 and "counts.parquet: cannot be read" in result.all_output(), result.report()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_serves_any_number(folder: Path, runs: dict[int, Path], ranks: int) -> None:
    """evaluate and predict at other numbers of ranks give the training run's figures, one score per line in input
    order.
    """
    trained = json.loads((runs[2] / "report.json").read_text())["eval_metrics"]
    result = _command(folder, ranks, "evaluate", "--set", "name=ranks_2")
    assert result.exit_code == 0, result.report()
    assert f"{trained['log_loss']:.5f}" in result.outputs[0], result.report()
    assert all(output == "" for output in result.outputs[1:]), result.report()
    output = folder / f"scores_{ranks}.txt"
    result = _command(folder, ranks, "predict", "--set", "name=ranks_2", "--output", str(output))
    assert result.exit_code == 0, result.report()
    scores = np.loadtxt(output)
    labels = np.loadtxt(folder / "data/eval-000.tsv", delimiter="\t", usecols=0)
    assert len(scores) == _EVAL_ROWS
    loss = -np.mean(np.where(labels > 0, np.log(scores), np.log1p(-scores)))
    assert loss == pytest.approx(trained["log_loss"], abs=1e-5)


def test_predict_keeps_a_line_for_lines_it_cannot_read(folder: Path, runs: dict[int, Path]) -> None:
    lines = (folder / "data/eval-000.tsv").read_text().splitlines()[:20]
    lines[3] = lines[3].replace("\t", "\tx", 1)
    lines[19] = ""
    test_file = folder / "odd.tsv"
    test_file.write_text("\n".join(lines) + "\n")
    output = folder / "odd_scores.txt"
    settings = ["--set", "name=ranks_2", "--set", f"data.predict=[{test_file}]", "--set", "train.global_batch=7"]
    result = _command(folder, 2, "predict", *settings, "--output", str(output))
    assert result.exit_code == 0, result.report()
    scores = np.loadtxt(output)
    assert len(scores) == 20
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(scores)), [3, 19])


def test_a_cache_too_small_ends_all_ranks_with_one_message(folder: Path) -> None:
    result = _command(
        folder, 2, "train", "--set", "embedding.cache.slots=100", "--set", "name=too_small", timeout_seconds=60
    )
    assert not result.timed_out and result.exit_code != 0, result.report()
    assert result.all_output().count("embedding.cache.slots") == 1, result.report()
    for word in ("mix_cache", "100 slots", "table"):
        assert word in result.all_output()
    assert "Traceback" not in result.all_output(), result.report()


def test_a_bad_line_under_error_policy_ends_all_ranks_with_file_and_line(folder: Path) -> None:
    lines = (folder / "data/train-000.tsv").read_text().splitlines()[:600]
    lines[500] = "7" + lines[500][1:]
    bad = folder / "bad.tsv"
    bad.write_text("\n".join(lines) + "\n")
    settings = [f"data.train=[{bad}]", "data.bad_lines=error", "data.shuffle_rows=0", "name=bad"]
    result = _command(folder, 2, "train", *[text for s in settings for text in ("--set", s)], timeout_seconds=60)
    assert not result.timed_out and result.exit_code != 0, result.report()
    assert result.all_output().count("bad.tsv:501") == 1, result.report()


def test_unknown_keys_are_refused_once_with_the_nearest(folder: Path) -> None:
    result = _command(folder, 2, "train", "--set", "train.global_bach=1")
    assert result.exit_code == 2, result.report()
    assert result.all_output().count("did you mean 'global_batch'") == 1, result.report()


def test_a_config_missing_on_one_rank_is_said_by_that_rank(folder: Path, tmp_path: Path) -> None:
    """Rank 1 runs on a host without the file."""
    script = (
        "import os, sys; from hvd_ctr.cli import main; rank = os.environ['OMPI_COMM_WORLD_RANK'];"
        f"sys.exit(main(['train', {str(folder / 'config.yaml')!r} if rank == '0' else 'gone.yaml']))"
    )
    result = run_ranks(["-c", script], 2, timeout_seconds=60, working_directory=tmp_path)
    assert not result.timed_out and result.exit_code != 0, result.report()
    assert result.all_output().count("hvd-ctr: rank 1: gone.yaml: cannot read the configuration") == 1, result.report()


def test_only_rank_0_makes_data(folder: Path, tmp_path: Path) -> None:
    settings = [f"synth.out_dir={tmp_path / 'made'}", "synth.train_rows=50", "synth.eval_rows=50", "synth.files=1"]
    result = _command(
        folder, 2, "synth", *[text for s in settings for text in ("--set", s)], "--set", "synth.scale=1e-4"
    )
    assert result.exit_code == 0, result.report()
    assert "50 rows to train on" in result.outputs[0] and result.outputs[1] == "", result.report()
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["eval-000.tsv", "teacher.json", "train-000.tsv"]


def test_scores_for_a_missing_folder_fail_before_the_work(folder: Path, runs: dict[int, Path]) -> None:
    output = str(folder / "gone" / "scores.txt")
    result = _command(folder, 2, "predict", "--set", "name=ranks_2", "--output", output)
    assert result.exit_code == 2, result.report()
    assert result.all_output().count(f"the folder {folder / 'gone'} does not exist") == 1, result.report()


def test_files_without_a_good_line_end_all_ranks_before_anything_is_saved(folder: Path, runs: dict[int, Path]) -> None:
    bad = folder / "commas.tsv"
    bad.write_text((folder / "data/train-000.tsv").read_text().replace("\t", ","))
    for command, settings in {
        "train": [f"data.train=[{bad}]", "name=commas"],
        "evaluate": [f"data.eval=[{bad}]", "name=ranks_2"],
        "predict": [f"data.predict=[{bad}]", "name=ranks_2"],
    }.items():
        arguments = [text for s in settings for text in ("--set", s)]
        if command == "predict":
            arguments += ["--output", str(folder / "commas.txt")]
        result = _command(folder, 2, command, *arguments, timeout_seconds=60)
        assert not result.timed_out and result.exit_code != 0, result.report()
        assert result.all_output().count("lines were refused") == 1, result.report()
        assert "commas.tsv" in result.all_output(), result.report()
    assert not list((folder / "runs" / "commas").glob("checkpoints/*"))
    assert not list(folder.glob("commas.txt*"))


def test_criteo_lines_with_stripped_fields_all_count(folder: Path) -> None:
    """The kind of lines real files have: 40, 38 and 29 fields, the last without a newline; five epochs on 2 ranks."""
    generator = np.random.default_rng(1)
    lines = []
    for number in range(299):
        label = number % 3 == 0
        sparse = [f"{generator.integers(0, 50) + 1000 * (i == 0) * label:08x}" for i in range(26)]
        fields = [str(int(label)), *(str(generator.integers(-3, 50)) for _ in range(13)), *sparse]
        lines.append("\t".join(fields[: (40, 38, 29)[number % 3]]))
    path = folder / "stripped.tsv"
    path.write_text("\n".join(lines))
    run = _train(
        folder,
        2,
        "stripped",
        f"data.train=[{path}]",
        f"data.eval=[{path}]",
        "train.epochs=5",
        "train.global_batch=64",
        "embedding.optimizer.initial_accumulator=0.001",
    )
    report = json.loads((run / "report.json").read_text())
    assert report["counts"]["train"]["lines"] == report["counts"]["train"]["rows"] == 299
    assert report["counts"]["train"]["stripped"] == 2 * 299 // 3
    assert report["samples"] == 5 * 299 and report["steps"] == 25
    assert report["eval_metrics"]["log_loss"] < 0.63


def test_help_shows_an_example_for_each_command() -> None:
    from hvd_ctr.cli import _EXAMPLES, _parser

    for command, example in _EXAMPLES.items():
        subparser = next(a for a in _parser()._actions if a.choices).choices[command]
        assert example.split(" --set")[0] in " ".join(subparser.format_help().split())
    assert (REPOSITORY / "configs" / "quickstart.yaml").is_file()
