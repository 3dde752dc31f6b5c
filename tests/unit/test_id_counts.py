"""Counting ids: exact and in bounded memory, and the file of counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_ctr import cli
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.data import counts as counting
from hvd_ctr.data.counts import DEFAULT_MAX_IDS, IdCounter
from hvd_ctr.embedding.id_counts import read_counts, write_counts
from tests.support.hybrid import unique_name

MAX_ID = 2**63 - 1


def by_count(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distinct, counts = np.unique(ids, return_counts=True)
    order = np.lexsort((distinct, -counts))
    return distinct[order], counts[order]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many merges instead of one."""
    monkeypatch.setattr(counting, "_PENDING", 500)


@pytest.mark.usefixtures("small_chunks")
def test_exact_counts_equal_numpy_for_every_table() -> None:
    generator = np.random.default_rng(1)
    streams = [generator.zipf(1.3, 9000).clip(max=4000), np.array([0, MAX_ID, MAX_ID - 1, 0, MAX_ID] * 40)]
    counter = IdCounter(3)
    for part in np.array_split(streams[0], 37):
        counter.add(0, part)
    for part in np.array_split(streams[1], 11):
        counter.add(1, part, np.ones(len(part), np.int64))
    for table, stream in enumerate(streams):
        for found, expected in zip(counter.result(table), by_count(stream), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert len(counter.result(2)[0]) == 0
    assert counter.exact and counter.max_error == 0


@pytest.mark.usefixtures("small_chunks")
def test_weighted_counts_add_up() -> None:
    counter = IdCounter(1)
    for _ in range(300):
        counter.add(0, np.array([5, 7, 5]), np.array([2, 10, 1]))
    counter.add(0, np.array([7]))
    ids, counts = counter.result(0)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {5: 900, 7: 3001}


def test_the_callers_array_may_change_afterwards() -> None:
    ids = np.array([1, 2], np.int64)
    counter = IdCounter(1)
    counter.add(0, ids)
    ids[:] = 9
    assert counter.result(0)[0].tolist() == [1, 2]


@pytest.mark.usefixtures("small_chunks")
def test_beyond_max_ids_the_most_frequent_stay_within_the_stated_error() -> None:
    generator = np.random.default_rng(2)
    streams = [generator.zipf(1.2, 60_000).clip(max=MAX_ID), 2**62 + generator.zipf(1.5, 20_000).clip(max=10**6)]
    counter = IdCounter(2, max_ids=2000)
    for table, stream in enumerate(streams):
        for part in np.array_split(stream, 50):
            counter.add(table, part)
    assert not counter.exact
    error = counter.max_error
    assert 0 < error < 80_000 / 100
    kept = 0
    for table, stream in enumerate(streams):
        ids, counts = counter.result(table)
        kept += len(ids)
        assert np.all(np.diff(counts) <= 0)
        truth = dict(zip(*(values.tolist() for values in by_count(stream)), strict=True))
        for row_id, low in zip(ids.tolist(), counts.tolist(), strict=True):
            assert truth[row_id] - error <= low <= truth[row_id]
        assert {row_id for row_id, count in truth.items() if count > error} <= set(ids.tolist())
    assert kept <= 500


def test_errors_of_parts_add_up() -> None:
    counter = IdCounter(1)
    counter.add(0, np.array([1]))
    counter.add_error(3)
    counter.add_error(4)
    assert not counter.exact and counter.max_error == 7
    with pytest.raises(ValueError, match=r"received max_ids 31; allowed: 32"):
        IdCounter(1, 31)


def test_the_command_line_names_the_default() -> None:
    with pytest.raises(SystemExit):
        cli.main(["count", "--help"])
    assert DEFAULT_MAX_IDS == 16_777_216  # the help says so


# ---- the file ----


def written(path: Path) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    for table, ids, counts in read_counts(path, ["a", "b"]):
        found[table].update(zip(ids.tolist(), counts.tolist(), strict=True))
    return found


def test_the_file_holds_tables_in_order_and_is_read_by_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "counts.parquet"
    many = np.arange(1_200_000)
    parts = [
        ("a", np.array([MAX_ID, 2]), np.array([9, 4])),
        ("other", many, many + 1),
        ("b", np.array([7]), np.array([1])),
    ]
    write_counts(path, parts, {"lines": "12"})
    assert written(path) == {"a": {MAX_ID: 9, 2: 4}, "b": {7: 1}}
    assert sum(len(ids) for _, ids, _ in read_counts(path, ["other"])) == len(many)
    file = pq.read_table(path)
    assert file.schema.names == ["table", "id", "count"]
    assert file.column("table").unique().to_pylist() == ["a", "other", "b"]
    assert pq.read_schema(path).metadata[b"hvd_ctr.lines"] == b"12"
    assert [p.name for p in path.parent.iterdir()] == ["counts.parquet"]


def test_a_file_of_another_tool_is_read(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    columns = {
        "count": pa.array([4, 5], pa.int32()),
        "more": ["x", "y"],
        "table": ["b", "a"],
        "id": pa.array([1, 2], pa.uint32()),
    }
    pq.write_table(pa.table(columns), path)
    assert written(path) == {"a": {2: 5}, "b": {1: 4}}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"table": ["a"], "id": [1]}, r"column\(s\) count missing.*hvd-ctr count"),
        ({"table": ["a"], "id": [1], "count": pa.array([None], pa.int64())}, "a null in"),
        ({"table": ["a"], "id": [-1], "count": [1]}, "negative"),
        ({"table": ["a"], "id": [1], "count": [-1]}, "negative"),
        ({"table": ["a"], "id": ["x"], "count": [1]}, "cannot be read"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    path = tmp_path / "counts.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        list(read_counts(path, ["a"]))


def test_missing_and_damaged_files_are_errors_that_name_them(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    with pytest.raises(ValueError, match=f"{path}: cannot be read"):
        list(read_counts(path, ["a"]))
    path.write_bytes(b"not Parquet")
    with pytest.raises(ValueError, match=f"{path}: cannot be read"):
        list(read_counts(path, ["a"]))


# ---- the policy freq ----


def test_freq_needs_a_file_and_the_window_has_bounds() -> None:
    with pytest.raises(ValueError, match="hvd-ctr count"):
        CacheConfig(policy="freq")
    for window in (-1, 65):
        with pytest.raises(ValueError, match="window"):
            CacheConfig(window=window)


def test_a_layer_with_freq_starts_with_the_most_frequent_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hvd_ctr.layers import MixCacheEmbedding

    path = tmp_path / "counts.parquet"
    write_counts(path, [("t", np.array([5, 6, 7, 8]), np.array([40, 30, 20, 10]))], {})
    table = TableConfig("t", dim=2, optimizer=SparseOptimizerConfig(kind="sgd"))
    features = [FeatureConfig("f", table=table), FeatureConfig("g", table=TableConfig("unknown", dim=2))]
    layer = MixCacheEmbedding(features, CacheConfig(slots=3, policy="freq", counts=str(path)), name=unique_name("freq"))
    with caplog.at_level("INFO", logger="hvd_ctr"):
        layer.build(None)
    assert "has no counts of table unknown" in caplog.text
    stats = layer.cache_stats()["tables"]
    assert (stats["t"]["cached_rows"], stats["t"]["created"], stats["unknown"]["cached_rows"]) == (3, 0, 0)
    assert [len(chunk.ids) for chunk in layer.sharded.export_rows("t")] == [0]
