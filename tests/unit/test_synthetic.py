"""The data generator: shape, frequencies, teacher, formats, and what happens to files that are there already."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hvd_ctr.config import CRITEO_DENSE_NAMES, CRITEO_SPARSE_NAMES, HEX_MISSING_ID, DataConfig, SynthConfig
from hvd_ctr.data import Batch, open_reader, synthetic
from hvd_ctr.data.batch import concatenate
from hvd_ctr.data.criteo_text import MAX_COUNT, format_lines
from hvd_ctr.data.teacher import Teacher, exact_auc, log_loss


def config(folder: Path, **changes: object) -> SynthConfig:
    values = {"out_dir": str(folder), "train_rows": 3000, "eval_rows": 1000, "scale": 1e-4, "files": 3} | changes
    return SynthConfig.model_validate(values)


def read_all(data: DataConfig, split: str) -> tuple[Batch, dict[str, int]]:
    reader = open_reader(data, split, rank=0, size=1, global_batch=512, seed=1)  # type: ignore[arg-type]
    return concatenate(list(reader.epoch(0))), reader.counts()


def test_text_gzip_and_parquet_hold_the_same_samples(tmp_path: Path) -> None:
    reports = {
        "tsv": synthetic.generate(config(tmp_path / "tsv")),
        "gz": synthetic.generate(config(tmp_path / "gz", gzip=True)),
        "parquet": synthetic.generate(config(tmp_path / "parquet", format="parquet")),
    }
    columns = {
        "dense": [{"name": n} for n in CRITEO_DENSE_NAMES],
        "sparse": [{"name": n, "missing_id": HEX_MISSING_ID} for n in CRITEO_SPARSE_NAMES],
    }
    for split, rows in (("train", 3000), ("eval", 1000)):
        batches = []
        for kind, report in reports.items():
            data = {
                "format": "parquet" if kind == "parquet" else "criteo",
                split: [str(tmp_path / kind / f"{split}-*")],
                "columns": columns if kind == "parquet" else None,
                "shuffle_rows": 0,
            }
            batch, counts = read_all(DataConfig.model_validate(data), split)
            assert len(batch) == counts["lines"] == rows
            batches.append(batch)
            assert report.auc == reports["tsv"].auc
        for other in batches[1:]:
            np.testing.assert_array_equal(other.ids, batches[0].ids)
            np.testing.assert_array_equal(other.labels, batches[0].labels)
            np.testing.assert_array_max_ulp(other.dense, batches[0].dense, 1)
    assert (tmp_path / "gz" / "train-001.tsv.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert (
        gzip.decompress((tmp_path / "gz" / "train-001.tsv.gz").read_bytes())
        == (tmp_path / "tsv" / "train-001.tsv").read_bytes()
    )
    assert pq.ParquetFile(tmp_path / "parquet" / "train-000.parquet").schema_arrow.names[:3] == ["label", "I1", "I2"]


def test_fields_are_like_criteo(tmp_path: Path) -> None:
    synthetic.generate(config(tmp_path, train_rows=20000, files=1, strip_rate=0.5))
    text = (tmp_path / "train-000.tsv").read_text().splitlines()
    fields = [line.split("\t") for line in text]
    widths = Counter(len(f) for f in fields)
    assert set(widths) <= set(range(30, 41)) and 0.1 < 1 - widths[40] / 20000 < 0.4
    full = [f + [""] * (40 - len(f)) for f in fields]
    empty = np.array([[not value for value in f] for f in full])
    assert abs(empty.mean() - 0.14) < 0.01
    assert empty[:, 0].sum() == 0 and abs(empty[:, 12].mean() - 0.76) < 0.03 and abs(empty[:, 33].mean() - 0.44) < 0.03
    counts = [int(f[2]) for f in full if f[2]]
    assert min(counts) == -3 and max(counts) > 1000
    assert all(len(value) in (0, 8) for f in full for value in f[14:])
    share = np.mean([f[0] == "1" for f in full])
    assert abs(share - 0.25) < 0.02
    data = DataConfig(train=(str(tmp_path / "train-000.tsv"),))
    counted = read_all(data, "train")[1]
    assert counted["stripped"] == 20000 - widths[40] and counted["rows"] == 20000


def test_cardinalities_and_frequencies(tmp_path: Path) -> None:
    source = synthetic.SampleSource(config(tmp_path, scale=1e-3))
    assert source.cardinalities[2] == 10131 and source.cardinalities[8] == 3 and len(source.cardinalities) == 26
    ids = np.concatenate([source.chunk("train", 0, i, 32768).ids for i in range(4)])
    for f, cardinality in enumerate(source.cardinalities):
        values, counts = np.unique(ids[:, f], return_counts=True)
        assert len(values) <= cardinality and (len(values) == cardinality or cardinality > 500)
        assert values.min() >= 0 and values.max() < 1 << 32
    counts = np.sort(np.unique(ids[:, 2], return_counts=True)[1])[::-1]
    exact = np.arange(1.0, 10132) ** -0.1
    expected = (exact[:-1] - exact[1:]) / (1 - exact[-1] * (10132 / 10131) ** -0.1)
    np.testing.assert_allclose(counts[:5] / len(ids), expected[:5], rtol=0.1)
    assert np.ptp(ids[:, 2]) > 1 << 31, "hot ids are not spread"


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.1, 2.0])
def test_power_law_ranks_stay_in_range(exponent: float) -> None:
    edges = np.array([0.0, 1e-12, 0.5, 1 - 1e-16])
    for cardinality in (1, 3, 1000, 10**9):
        ranks = synthetic.power_law_ranks(edges, cardinality, exponent)
        assert ranks.min() == 0 == ranks[0] and ranks.max() <= cardinality - 1
    ranks = synthetic.power_law_ranks((np.arange(100000) + 0.5) / 100000, 100, exponent)
    counts = np.bincount(ranks, minlength=100)
    assert (np.diff(counts) <= 1).all() and counts.min() > 0
    edges_of = np.arange(1, 102.0)
    cdf = np.log(edges_of) if exponent == 1.0 else (edges_of ** (1 - exponent) - 1) / (1 - exponent)
    np.testing.assert_allclose(counts / 100000, np.diff(cdf) / cdf[-1], atol=2e-5)


def test_spreading_is_a_bijection() -> None:
    ranks = np.arange(1 << 18)
    ids = synthetic.spread_ids(ranks, 3)
    assert len(np.unique(ids)) == len(ranks)
    assert (ids != synthetic.spread_ids(ranks, 4)).mean() > 0.99


def test_data_depend_on_the_seed_only(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthetic.generate(config(tmp_path / name, seed=seed))
        contents.append([(tmp_path / name / f"{f}.tsv").read_bytes() for f in ("train-000", "train-001", "eval-000")])
    assert contents[0] == contents[1] and contents[0] != contents[2]
    assert len(set(contents[0])) == 3, "two files hold the same samples"


def test_the_teacher_is_as_good_as_it_says(tmp_path: Path) -> None:
    report = synthetic.generate(config(tmp_path, eval_rows=50000, scale=1e-3))
    assert 0.80 < report.auc < 0.84
    assert abs(report.positive_share - 0.25) < 0.01
    assert 0 < report.normalized_entropy < 0.85
    source = synthetic.SampleSource(config(tmp_path, scale=1e-3))
    chunks = [source.chunk("eval", 0, i, 32768) for i in range(4)]
    probabilities = np.concatenate([c.probabilities for c in chunks])
    labels = np.concatenate([c.labels for c in chunks])
    assert abs(exact_auc(probabilities, labels) - report.auc) < 0.01
    for low in np.arange(0, 1, 0.1):
        inside = (probabilities >= low) & (probabilities < low + 0.1)
        if inside.sum() > 500:
            expected, spread = probabilities[inside].mean(), 0.5 / math.sqrt(inside.sum())
            assert abs(labels[inside].mean() - expected) < 4 * spread
    noise = synthetic.generate(config(tmp_path / "noise", teacher_strength=0, eval_rows=20000))
    assert abs(noise.auc - 0.5) < 0.02


def test_hot_ids_alone_explain_much_of_the_label(tmp_path: Path) -> None:
    """A naive Bayes over the ids' click rates, without pairs or counts, is far above chance and below the teacher."""
    source = synthetic.SampleSource(config(tmp_path, scale=1e-3))
    train = [source.chunk("train", 0, i, 32768) for i in range(6)]
    test = [source.chunk("eval", 0, i, 32768) for i in range(2)]
    ids, labels = np.concatenate([c.ids for c in train]), np.concatenate([c.labels for c in train])
    ids_test, labels_test = np.concatenate([c.ids for c in test]), np.concatenate([c.labels for c in test])
    scores = np.zeros(len(labels_test))
    for f in range(26):
        values, inverse = np.unique(np.concatenate([ids[:, f], ids_test[:, f]]), return_inverse=True)
        seen = np.bincount(inverse[: len(ids)], minlength=len(values))
        clicks = np.bincount(inverse[: len(ids)], labels, minlength=len(values))
        rate = (clicks + 0.25 * 20) / (seen + 20)
        scores += np.log(rate / (1 - rate))[inverse[len(ids) :]]
    auc = exact_auc(scores, labels_test)
    best = exact_auc(np.concatenate([c.probabilities for c in test]), labels_test)
    assert 0.66 < auc < best


def test_pairs_and_missing_fields_in_the_teacher() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (4000, 26))
    missing = np.zeros(ids.shape, np.bool_)
    dense = rng.normal(size=(4000, 13)).astype(np.float32)
    teacher = Teacher(1, 1.0, ids, missing, dense)
    first = teacher.probabilities(ids, missing, dense)
    assert abs(first.mean() - 0.25) < 1e-6
    np.testing.assert_array_equal(first, Teacher(1, 1.0, ids, missing, dense).probabilities(ids, missing, dense))
    assert np.abs(first - Teacher(2, 1.0, ids, missing, dense).probabilities(ids, missing, dense)).max() > 0.1
    # The effect of feature 5 depends on feature 8: their pair is one of the teacher's.
    logit = np.log(first / (1 - first))
    fixed = np.repeat(ids[:1], 25, axis=0)
    fixed[:, 5], fixed[:, 8] = np.repeat(np.arange(5), 5), np.tile(np.arange(5), 5)
    grid = teacher.probabilities(fixed, missing[:25], dense[:1].repeat(25, axis=0)).reshape(5, 5)
    grid = np.log(grid / (1 - grid))
    interaction = grid - grid.mean(axis=0) - grid.mean(axis=1, keepdims=True) + grid.mean()
    assert np.abs(interaction).max() > 0.05 * logit.std()
    hidden = missing.copy()
    hidden[:, 3] = True
    changed = teacher.probabilities(np.where(hidden, ids + 7, ids), hidden, dense)
    np.testing.assert_array_equal(changed, teacher.probabilities(ids, hidden, dense))


def test_exact_auc_and_log_loss() -> None:
    rng = np.random.default_rng(1)
    scores, labels = rng.integers(0, 10, 200).astype(float), rng.random(200) < 0.3
    positive, negative = scores[labels], scores[~labels]
    wins = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    assert exact_auc(scores, labels) == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-12)
    assert math.isnan(exact_auc(scores, np.zeros(200, np.bool_)))
    expected = -np.mean([math.log(0.8), math.log(0.7)])
    assert log_loss(np.array([0.8, 0.3]), np.array([True, False])) == pytest.approx(expected)


def test_lines_are_formatted_like_a_slow_writer() -> None:
    rng = np.random.default_rng(2)
    n = 500
    labels = rng.random(n) < 0.5
    counts = rng.integers(-20, 20, (n, 13)) * 10 ** rng.integers(0, 6, (n, 13))
    counts[0], counts[1] = MAX_COUNT, -MAX_COUNT
    ids = rng.integers(0, 1 << 32, (n, 26))
    count_missing, id_missing = rng.random((n, 13)) < 0.3, rng.random((n, 26)) < 0.5
    id_missing[2], count_missing[2] = True, True
    strip = rng.random(n) < 0.5
    strip[2] = True
    lines = []
    for i in range(n):
        values = ["" if id_missing[i, f] else f"{ids[i, f]:08x}" for f in range(26)]
        last = max((f for f in range(26) if values[f]), default=0)
        fields = [str(int(labels[i])), *("" if count_missing[i, j] else str(counts[i, j]) for j in range(13))]
        lines.append("\t".join(fields + (values[: last + 1] if strip[i] else values)) + "\n")
    assert format_lines(labels, counts, count_missing, ids, id_missing, strip).decode() == "".join(lines)


def test_a_second_run_keeps_finished_data_and_replaces_other_data(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = synthetic.generate(config(tmp_path), lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1] == (4000, 4000)
    before = (tmp_path / "train-000.tsv").stat().st_mtime_ns
    assert synthetic.generate(config(tmp_path)) == first == synthetic.read_report(tmp_path)
    assert (tmp_path / "train-000.tsv").stat().st_mtime_ns == before
    (tmp_path / "train-002.tsv").unlink()
    assert synthetic.read_report(tmp_path) is None
    assert synthetic.generate(config(tmp_path)) == first
    synthetic.generate(config(tmp_path, files=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval-000.tsv", "teacher.json", "train-000.tsv"]
    values = json.loads((tmp_path / "teacher.json").read_text())
    assert values["auc"] == synthetic.read_report(tmp_path).auc and values["config"]["files"] == 1  # type: ignore[union-attr]


def test_an_interrupted_run_is_not_taken_for_finished(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.generate(config(tmp_path), stop)
    assert synthetic.read_report(tmp_path) is None
    assert "best reachable" in str(synthetic.generate(config(tmp_path)))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b'{"complete": true}', b"3"])
def test_a_broken_report_is_named_and_does_without(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = synthetic.generate(config(tmp_path))
    (tmp_path / "teacher.json").write_bytes(content)
    assert synthetic.read_report(tmp_path) is None
    (message,) = caplog.messages
    assert "teacher.json: not a report of the generator" in message
    assert synthetic.generate(config(tmp_path)) == first == synthetic.read_report(tmp_path)


@pytest.mark.parametrize(
    "change", [{"auc": "high"}, {"auc": None}, {"eval_files": "eval-000.tsv"}, {"train_files": [1]}]
)
def test_a_report_with_wrong_values_is_broken(tmp_path: Path, change: dict[str, object]) -> None:
    synthetic.generate(config(tmp_path))
    path = tmp_path / "teacher.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert synthetic.read_report(tmp_path) is None


def test_files_of_others_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "train-000.tsv").write_text("mine")
    with pytest.raises(ValueError, match=r"holds train-000.tsv, which was not made here"):
        synthetic.generate(config(tmp_path))
    assert (tmp_path / "train-000.tsv").read_text() == "mine"
