"""`hvd-ctr count` on any number of ranks equals numpy's counts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_ctr.cli import count as command
from hvd_ctr.comm import Comm
from hvd_ctr.config import TrainConfig
from hvd_ctr.data.counts import IdCounter
from hvd_ctr.ops import id_ops

_ROWS = 5000


@pytest.fixture
def folder(comm: Comm, tmp_path: Path) -> Iterator[Path]:
    """A folder that all ranks see, which rank 0 fills."""
    shared = Path(comm.broadcast_object(str(tmp_path)))
    if comm.rank == 0:
        generator = np.random.default_rng(3)
        for part in range(3):
            columns = {f"s{i}": generator.zipf(1.3, _ROWS).clip(max=2**63 - 1) for i in range(4)}
            columns["label"] = generator.integers(0, 2, _ROWS)
            pq.write_table(pa.table(columns), shared / f"train-{part}.parquet")
    comm.barrier()
    yield shared
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(shared, ignore_errors=True)


def _config(folder: Path) -> TrainConfig:
    """Four columns: s0 any id; s1 ids below 1000; s2 hashed to 100 rows; s3 shares the table of s0."""
    return TrainConfig.model_validate(
        {
            "data": {
                "format": "parquet",
                "train": [str(folder / "train-*.parquet")],
                "columns": {"sparse": [{"name": f"s{i}"} for i in range(4)]},
            },
            "embedding": {
                "dim": 4,
                "tables": {"s1": {"rows": 1000, "invalid_ids": "skip"}, "s2": {"rows": 100, "hash_ids": True}},
                "shared": {"s3": "s0"},
            },
            "train": {"global_batch": 700},
            "run_dir": str(folder / "run"),
        }
    )


def _expected(folder: Path) -> dict[str, dict[int, int]]:
    files = [pq.read_table(path) for path in sorted(folder.glob("train-*"))]
    data = {f"s{i}": np.concatenate([file[f"s{i}"].to_numpy() for file in files]) for i in range(4)}
    ids = {
        "s0": np.concatenate([data["s0"], data["s3"]]),
        "s1": data["s1"][data["s1"] < 1000],
        "s2": id_ops.hash_to_range(data["s2"], 100).numpy(),
    }
    return {
        name: dict(zip(*(values.tolist() for values in np.unique(column, return_counts=True)), strict=True))
        for name, column in ids.items()
    }


def _file(path: Path) -> dict[str, dict[int, int]]:
    tables: dict[str, dict[int, int]] = {}
    for row in pq.read_table(path).to_pylist():
        assert row["id"] not in tables.setdefault(row["table"], {}), "an id stands twice"
        tables[row["table"]][row["id"]] = row["count"]
    return tables


def test_counts_equal_numpys(comm: Comm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.count(_config(folder)) == 0
    printed = capsys.readouterr().out
    path = folder / "run" / "counts.parquet"
    assert _file(path) == _expected(folder)
    counts = pq.read_table(path).to_pylist()
    for table in ("s0", "s1", "s2"):
        column = [row["count"] for row in counts if row["table"] == table]
        assert column == sorted(column, reverse=True)
    if comm.rank == 0:
        assert "all counts are exact" in printed and f"counted {3 * _ROWS:,} lines on {comm.size} rank(s)" in printed
        assert "invalid ids left out" in printed
    else:
        assert printed == ""


def test_bounded_counts_keep_the_most_frequent(comm: Comm, folder: Path) -> None:
    output = folder / "top.parquet"
    assert command.count(_config(folder), str(output), max_ids=400) == 0
    found, truth = _file(output), _expected(folder)
    error = int(pq.read_schema(output).metadata[b"hvd_ctr.max_error"])
    assert 0 < error < 4 * 3 * _ROWS / 20
    for table, counts in truth.items():
        for row_id, count in found.get(table, {}).items():
            assert counts[row_id] - error <= count <= counts[row_id]
        assert {row_id for row_id, count in counts.items() if count > error} <= set(found.get(table, {}))


def test_counts_are_gathered_in_chunks(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different numbers of ids, one with none; few ids at a time."""
    monkeypatch.setattr(command, "_EXCHANGE_ROWS", 7)
    counter = IdCounter(2)
    mine = np.arange(5 * comm.rank)
    counter.add(1, mine)
    counter.add(0, np.full(3, 9))
    command.gather_on_rank_0(comm, counter)
    if comm.rank == 0:
        ids, counts = counter.result(1)
        expected = np.concatenate([np.arange(5 * rank) for rank in range(comm.size)])
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict(
            zip(*(values.tolist() for values in np.unique(expected, return_counts=True)), strict=True)
        )
        assert [values.tolist() for values in counter.result(0)] == [[9], [3 * comm.size]]
        assert counter.exact
