"""`hvd-ctr plan`: what it prints, its JSON, its findings and its exit code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hvd_ctr import cli
from hvd_ctr.cli import plan
from hvd_ctr.cli.plan_findings import Finding, Machine, size
from hvd_ctr.config import ConfigError, TrainConfig
from hvd_ctr.embedding.id_counts import write_counts

REPOSITORY = Path(__file__).resolve().parents[2]
_LINES = 20_000
_ROOMY = Machine(64 * 10**9, 60 * 10**9, 10**12)


@pytest.fixture
def counts_file(tmp_path: Path) -> str:
    """Counts of two features, one id per line each."""
    path = tmp_path / "counts.parquet"
    generator = np.random.default_rng(1)
    parts = []
    for name, exponent in (("a", 1.3), ("b", 1.6)):
        ids, counts = np.unique(generator.zipf(exponent, _LINES).clip(max=10**6), return_counts=True)
        parts.append((name, ids, counts.astype(np.int64)))
    write_counts(path, parts, {"lines": str(_LINES), "max_error": "0"})
    return str(path)


def _config(counts: str | None = None, **embedding: Any) -> TrainConfig:
    cache = {"slots": 3000, "policy": "lru", "counts": counts, **embedding.pop("cache", {})}
    return TrainConfig.model_validate(
        {
            "data": {"format": "parquet", "columns": {"sparse": [{"name": "a"}, {"name": "b"}]}, "shuffle_rows": 0},
            "model": {"name": "dcnv2", "hidden": [8], "cross_layers": 1},
            "embedding": {"dim": 8, "cache": cache, **embedding},
            "train": {"global_batch": 500, "epochs": 2},
        }
    )


def _findings(config: TrainConfig, machine: Machine = _ROOMY, **arguments: Any) -> dict[str, Finding]:
    return {finding.field: finding for finding in plan.make_plan(config, machine=machine, **arguments).findings}


def test_quickstart_without_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", str(REPOSITORY / "configs/quickstart.yaml"), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "26 tables" in printed and "B per row" in printed and "1,000,000,000" in printed
    assert "hvd-ctr count" in printed and "GB" in printed and "keys received (R)" in printed


def test_tables_and_json_with_counts(counts_file: str, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(_config().model_dump(mode="json")))
    written = tmp_path / "plan.json"
    arguments = ["plan", str(config), "--ranks", "4", "--ranks-per-host", "2", "--counts", counts_file]
    assert cli.main([*arguments, "--json", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "expected hit rate" in printed and "by slots:" in printed and "everything fits" not in printed
    assert cli.main([*arguments, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["groups"] == json.loads(written.read_text())["groups"]
    assert (figures["ranks"], figures["steps"], figures["counts"]["lines"]) == (4, 80, _LINES)
    (group,) = figures["groups"]
    assert group["from_counts"] and group["all_ranks"]["device_bytes"] == 4 * group["device_bytes"]
    rows = pq.read_table(counts_file).num_rows
    assert group["all_ranks"]["rows"] == pytest.approx(rows)
    assert [table["name"] for table in group["tables"]] == ["a", "b"]
    assert 0.5 < group["hit_rate"] < 1
    # Of four ranks each owns a quarter: 3000 slots are too many.
    assert any(f["field"] == "embedding.cache.slots" and not f["fatal"] for f in figures["findings"])


def test_counts_are_found_in_the_run_folder(counts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.make_plan(_config()).counted is None
    Path("runs/run").mkdir(parents=True)
    Path(counts_file).rename("runs/run/counts.parquet")
    found = plan.make_plan(_config()).counted
    assert found is not None and found.path == "runs/run/counts.parquet"


def test_dense_weights_are_those_of_the_model() -> None:
    config = _config()
    features = plan.assemble.model_features(config)
    # x (16): cross layer 16*16+16, tower 16*8+8, logit over both 24 (+1).
    assert plan.dense_weights(config, features) in (433, 432)


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcnv2", "dlrm"])
def test_every_model_can_be_planned(name: str) -> None:
    config = _config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
    assert plan.make_plan(config).dense_weights > 20


def test_too_few_slots_cannot_work(counts_file: str) -> None:
    found = _findings(_config(counts_file, cache={"slots": 50}))["embedding.cache.slots"]
    assert found.fatal and "largest batches need" in found.text
    assert plan.plan(_config(counts_file, cache={"slots": 50})) == 1
    enough = _findings(_config(counts_file, cache={"slots": found.value})).get("embedding.cache.slots")
    assert enough is None or not enough.fatal
    # Room for one batch, not for three.
    waits = _findings(_config(counts_file, cache={"slots": found.value}))["embedding.cache.slots"]
    assert "fetching ahead will wait" in waits.text
    assert "embedding.cache.slots" not in _findings(_config(counts_file, cache={"slots": waits.value}))


def test_budgets_of_the_host_tier(counts_file: str, tmp_path: Path) -> None:
    field = "embedding.host.ram_bytes"
    small = _findings(_config(counts_file, host={"kind": "ram", "ram_bytes": 100_000}))[field]
    assert small.fatal
    assert field not in _findings(_config(counts_file, host={"kind": "ram", "ram_bytes": small.value}))
    disk = {"kind": "disk", "path": str(tmp_path)}
    least = _findings(_config(counts_file, host={**disk, "ram_bytes": 200_000}))[field]
    assert least.fatal and "at least" in least.text
    assert field not in _findings(_config(counts_file, host={**disk, "ram_bytes": least.value}))
    missing = _config(counts_file, host={"kind": "disk", "path": str(tmp_path / "gone"), "ram_bytes": 10**7})
    assert "is no folder" in _findings(missing)["embedding.host.path"].text
    large = _config(None, rows=10**9, host={**disk, "ram_bytes": 10**9}, cache={"slots": 10**6})
    short = _findings(large)[field]
    assert "index of" in short.text
    enough = _config(None, rows=10**9, host={**disk, "ram_bytes": short.value}, cache={"slots": 10**6})
    assert field not in _findings(enough)
    full = Machine(64 * 10**9, 60 * 10**9, 10**6)
    assert "larger disk" in _findings(large, full)["embedding.host.path"].text


def test_memory_of_the_machine(counts_file: str) -> None:
    little = Machine(2 * 10**9, 10**9, None)
    config = _config(counts_file, cache={"slots": 20_000_000})
    found = plan.make_plan(config, machine=little).findings
    assert any(finding.fatal and "are available" in finding.text for finding in found)
    assert not any("are available" in finding.text for finding in _findings(_config(counts_file)).values())
    # Upper bounds alone are no reason to refuse.
    bounds = _findings(_config(None, rows=10**9), little)["embedding.host.kind"]
    assert not bounds.fatal and bounds.value == "disk"


def test_ranks_of_one_host_share_memory(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("HVD_CTR_TRANSPORT", raising=False)
    config = _config()
    one = plan.make_plan(config, machine=_ROOMY)
    two = plan.make_plan(config, ranks=2, machine=_ROOMY)
    apart = plan.make_plan(config, ranks=2, ranks_per_host=1, machine=_ROOMY)
    assert one.memory.shared == apart.memory.shared == 0
    # Half of the keys of 8 bytes, rows and gradients of 32, two slots each with a quarter of room; the channels' names.
    keys = two.groups[0].traffic.local_keys
    assert two.memory.shared == pytest.approx(2.5 * keys / 2 * (8 + 32 + 32) + 230_000, rel=0.1)
    assert two.rank_bytes() > two.memory.shared + sum(group.memory.host_bytes for group in two.groups)
    plan.plan_report.show(two)
    assert "exchange with the other ranks, shared memory" in capsys.readouterr().out
    assert plan.as_json(two)["rank_bytes"]["shared"] == two.memory.shared
    monkeypatch.setenv("HVD_CTR_TRANSPORT", "horovod")
    assert plan.make_plan(config, ranks=2, machine=_ROOMY).memory.shared == 0
    monkeypatch.setenv("HVD_CTR_TRANSPORT", "pigeon")
    with pytest.raises(ConfigError, match="HVD_CTR_TRANSPORT must be one of auto"):
        plan.make_plan(config, ranks=2, machine=_ROOMY)


def test_gpu_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = _config(cache={"slots": 1_000_000})
    monkeypatch.setenv("HVD_CTR_GPU", "0")
    here = plan.make_plan(config, ranks=2)
    monkeypatch.setenv("HVD_CTR_GPU", "1")
    there = plan.make_plan(config, ranks=2)
    assert here.gpu_bytes() == 0 and there.gpu_bytes() > 64e6
    # A row and its state: 16 floats.
    assert there.groups[0].memory.device_bytes == 64e6
    device = sum(group.memory.device_bytes for group in here.groups)
    assert there.rank_bytes() < here.rank_bytes() - device
    # Keys alone go over shared memory; what is on GPUs goes over NCCL.
    assert 0 < there.memory.shared < here.memory.shared
    plan.plan_report.show(there)
    printed = capsys.readouterr().out
    assert "cached rows on GPUs" in printed and "GPU memory of one rank" in printed and "GPU, rank" in printed
    plan.plan_report.show(here)
    printed = capsys.readouterr().out
    assert "cached rows in RAM" in printed and "GPU" not in printed
    figures = plan.as_json(there)
    assert figures["rank_bytes"]["total_gpu"] == there.gpu_bytes() and figures["machine"]["rows_on_gpu"]
    little = Machine(2 * 10**9, 10**8, None, rows_on_gpu=True)
    (short,) = (f for f in plan.make_plan(config, machine=little).findings if "are available" in f.text)
    assert "use more machines" in short.text and "slots" not in short.field
    monkeypatch.setenv("HVD_CTR_GPU", "yes")
    with pytest.raises(ConfigError, match="HVD_CTR_GPU is 'yes', allowed: 0, 1"):
        plan.make_plan(config)


def test_arguments_and_counts_that_cannot_be_used(counts_file: str, tmp_path: Path) -> None:
    for arguments in ({"ranks": 0}, {"ranks": 2, "ranks_per_host": 3}):
        with pytest.raises(ConfigError, match="--ranks"):
            plan.make_plan(_config(), **arguments)
    with pytest.raises(ConfigError, match="--counts .*none.parquet: no such file"):
        plan.make_plan(_config(), counts_file=str(tmp_path / "none.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet")
    with pytest.raises(ConfigError, match="cannot be read as a Parquet file"):
        plan.make_plan(_config(), counts_file=str(tmp_path / "bad.parquet"))
    freq = _config(str(tmp_path / "later.parquet"), cache={"policy": "freq"})
    missing = _findings(freq)["embedding.cache.counts"]
    assert missing.fatal and "hvd-ctr count" in missing.text


def test_counts_of_another_tool_and_of_a_sketch(tmp_path: Path) -> None:
    path = str(tmp_path / "other.parquet")
    pq.write_table(pa.table({"table": ["a"] * 3 + ["b"], "id": [1, 2, 3, 9], "count": [5000, 3000, 2000, 10000]}), path)
    made = plan.make_plan(_config(), counts_file=path)
    assert made.counted is not None and made.counted.lines == 10_000 and made.groups[0].rows == 4
    ids = np.arange(200)
    write_counts(
        Path(path),
        [(name, ids, np.maximum(1, 30_000 // (ids + 1)).astype(np.int64)) for name in "ab"],
        {"lines": "300000", "max_error": "100"},
    )
    made = plan.make_plan(_config(), counts_file=path)
    assert made.groups[0].rows is not None and made.groups[0].rows > 1000
    assert any("estimated from the rest" in finding.text for finding in made.findings)
    write_counts(Path(path), [("a", ids, ids + 1)], {"lines": "1000", "max_error": "0"})
    partial = plan.make_plan(_config(), counts_file=path)
    assert not partial.groups[0].exact
    assert any("no counts of table(s) b" in finding.text for finding in partial.findings)


def test_only_one_process_of_a_job_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(_config().model_dump(mode="json")))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    level = logging.getLogger().level
    try:
        assert cli.main(["plan", str(config)]) == 0
    finally:
        logging.getLogger().setLevel(level)  # Ranks other than 0 keep quiet.
    assert capsys.readouterr().out == ""


def test_sizes_have_units() -> None:
    assert [size(value) for value in (12, 1500, 2.5e6, 3.2e11, 4e12)] == [
        "12 B",
        "1.50 kB",
        "2.50 MB",
        "320 GB",
        "4.00 TB",
    ]
