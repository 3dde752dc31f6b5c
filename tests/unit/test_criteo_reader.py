"""Criteo text: every rule of the format against a slow parser, dealing to ranks, shuffle, gzip, bad lines."""

from __future__ import annotations

import gzip
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_ctr.config import HEX_MISSING_ID, DataConfig
from hvd_ctr.data import Batch, dealing, open_reader
from hvd_ctr.data.criteo import FAULTS
from hvd_ctr.data.line_source import MAX_LINE_BYTES, LineSource
from hvd_ctr.data.reader import Reader

DENSE, SPARSE = 13, 26


def slow_parse(line: str) -> tuple[float, list[float], list[int]]:
    """Oracle for good lines: one field after the other, in plain Python."""
    fields = line.rstrip("\r\n").split("\t")
    fields += [""] * (1 + DENSE + SPARSE - len(fields))
    dense = [math.copysign(math.log1p(abs(int(f))), int(f)) if f else 0.0 for f in fields[1 : 1 + DENSE]]
    return float(fields[0]), dense, [int(f, 16) if f else HEX_MISSING_ID for f in fields[1 + DENSE :]]


def line(label: str = "0", row: int = 0, dense: dict[int, str] | None = None, ids: dict[int, str] | None = None) -> str:
    """A full line whose last id is the row's number, so that every sample can be told apart."""
    counts = [(dense or {}).get(i, str(i)) for i in range(DENSE)]
    values = [(ids or {}).get(i, f"{i:08x}") for i in range(SPARSE - 1)]
    return "\t".join([label, *counts, *values, f"{row:08x}"])


def write_rows(path: Path, first: int, count: int, end: str = "\n") -> Path:
    path.write_bytes("".join(line(str(i % 2), i) + end for i in range(first, first + count)).encode())
    return path


def reader(
    paths: Sequence[Path | str],
    split: str = "eval",
    rank: int = 0,
    size: int = 1,
    batch: int = 8,
    seed: int = 1,
    **data: object,
) -> Reader:
    config = DataConfig.model_validate({split: [str(p) for p in paths], **data})
    return open_reader(config, split, rank=rank, size=size, global_batch=batch, seed=seed)  # type: ignore[arg-type]


def sample_numbers(batches: Iterator[Batch]) -> list[list[int]]:
    return [b.ids[:, -1].tolist() for b in batches]


def all_ranks(paths: Sequence[Path], size: int, epoch: int = 0, **kwargs: object) -> list[list[list[int]]]:
    """Sample numbers by rank and batch."""
    return [sample_numbers(reader(paths, rank=r, size=size, **kwargs).epoch(epoch)) for r in range(size)]  # type: ignore[arg-type]


def joined(by_rank: list[list[list[int]]]) -> list[list[int]]:
    """The global batches: the ranks' slices one after another."""
    assert len({len(batches) for batches in by_rank}) == 1, "ranks see different numbers of batches"
    return [sum(parts, []) for parts in zip(*by_rank, strict=True)]


def test_every_field_kind_against_the_slow_parser(tmp_path: Path) -> None:
    lines = [
        line("1", 7),
        line("0", 8, {0: "-3", 1: "-2", 2: "-1", 3: "0", 4: "", 5: "1000000000", 6: "-0", 7: "4095", 8: "4096"}),
        line("0", 9, ids={0: "00000000", 1: "7fffffff", 2: "80000000", 3: "ffffffff", 4: "", 5: "A", 6: "AbCdEf01"}),
        line("1", 10, dict.fromkeys(range(DENSE), ""), dict.fromkeys(range(SPARSE - 1), "")),
        "\t".join(line("0", 11).split("\t")[:30]),
        "\t".join(line("0", 12).split("\t")[:14]),
    ]
    path = tmp_path / "a.tsv"
    path.write_bytes("\n".join(lines).encode())
    r = reader([path])
    (batch,) = r.epoch(0)
    expected = [slow_parse(text) for text in lines]
    np.testing.assert_array_equal(batch.labels, np.array([e[0] for e in expected], np.float32))
    np.testing.assert_array_equal(batch.ids, np.array([e[2] for e in expected], np.int64))
    np.testing.assert_allclose(batch.dense, np.array([e[1] for e in expected]), rtol=2e-7, atol=0)
    assert batch.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert (batch.dense.dtype, batch.ids.dtype, batch.labels.dtype, batch.rows.dtype) == ("f4", "i8", "f4", "i8")
    assert r.counts() == {"lines": 6, "rows": 6, "stripped": 2} | {name: 0 for name, _ in FAULTS[1:]}
    assert np.isfinite(batch.dense).all()
    counts = batch.dense[1]
    assert counts[0] < counts[1] < counts[2] < counts[3] == counts[4] == counts[6] < counts[7] < counts[8] < counts[5]


def test_hex_ids_are_exact_and_missing_has_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(line(ids={0: "00000000", 1: "7fffffff", 2: "80000000", 3: "ffffffff", 4: ""}) + "\n")
    (batch,) = reader([path]).epoch(0)
    assert batch.ids[0, :5].tolist() == [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32]


def test_crlf_blank_last_line_and_missing_last_newline_change_nothing(tmp_path: Path) -> None:
    plain = list(reader([write_rows(tmp_path / "plain.tsv", 0, 20)]).epoch(0))
    write_rows(tmp_path / "crlf.tsv", 0, 20, end="\r\n")
    open_end = (tmp_path / "plain.tsv").read_bytes()[:-1]
    (tmp_path / "open.tsv").write_bytes(open_end)
    (tmp_path / "blank.tsv").write_bytes(open_end + b"\n\n")
    for name, blank in (("crlf.tsv", 0), ("open.tsv", 0), ("blank.tsv", 1)):
        r = reader([tmp_path / name])
        batches = list(r.epoch(0))
        for expected, actual in zip(plain, batches, strict=True):
            np.testing.assert_array_equal(expected.ids, actual.ids)
            np.testing.assert_array_equal(expected.dense, actual.dense)
        assert r.counts()["blank"] == blank and r.counts()["rows"] == 20


BAD_LINES = {
    "too_many_fields": line() + "\t00",
    "bad_label": line(label="2"),
    "bad_integer": line(dense={3: "1.5"}),
    "bad_hex": line(ids={3: "xyz"}),
    "too_few_fields": "1",
    "blank": "",
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_line_is_counted_and_named_once(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bad.tsv"
    lines = [line(row=0), BAD_LINES[fault], line(row=2), BAD_LINES[fault], line(row=4)]
    path.write_text("\n".join(lines) + "\n")
    r = reader([path])
    with caplog.at_level(logging.WARNING):
        (batch,) = r.epoch(0)
    assert batch.ids[:, -1].tolist() == [0, 2, 4]
    assert batch.rows.tolist() == [0, 2, 4]
    counts = r.counts()
    assert counts[fault] == 2 and counts["lines"] == 5 and counts["rows"] == 3
    assert sum(counts[name] for name, _ in FAULTS[1:]) == 2
    assert [f"{path}:2" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(
        ValueError, match=rf"bad.tsv:2: {FAULTS[[n for n, _ in FAULTS].index(fault)][1]}.*data.bad_lines: skip"
    ):
        list(reader([path], bad_lines="error").epoch(0))


def test_the_line_number_of_an_error_holds_across_blocks_files_and_shuffle(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.tsv", 0, 50)
    text = (tmp_path / "a.tsv").read_text().splitlines()
    text[37] = "broken"
    (tmp_path / "b.tsv").write_text("\n".join(text))
    for shuffle_rows in (0, 7, 1000):
        r = reader(
            [tmp_path / "a.tsv", tmp_path / "b.tsv"],
            "train",
            block_bytes=1000,
            bad_lines="error",
            shuffle_rows=shuffle_rows,
        )
        with pytest.raises(ValueError, match=r"b.tsv:38: "):
            list(r.epoch(0))


def test_files_without_label(tmp_path: Path) -> None:
    rows = [line("1", i).split("\t", 1)[1] for i in range(10)]
    path = tmp_path / "test.tsv"
    path.write_text("\n".join(rows))
    batches = list(reader([path], "predict", batch=4).epoch(0))
    assert [b.rows.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert np.concatenate([b.ids for b in batches])[:, -1].tolist() == list(range(10))
    assert not np.concatenate([b.labels for b in batches]).any()
    labelled = write_rows(tmp_path / "labelled.tsv", 0, 10)
    again = list(reader([labelled], "predict", batch=4, predict_has_label=True).epoch(0))
    np.testing.assert_array_equal(again[2].ids, batches[2].ids)
    assert reader([labelled], "predict").counts()["lines"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_files_with_and_without_label_are_told_apart(tmp_path: Path, rank: int) -> None:
    """On every rank, also where a rank's own lines are few."""
    labelled = write_rows(tmp_path / "labelled.tsv", 0, 9)
    with open(labelled, "a") as file:
        file.write("broken\n\n")
    with pytest.raises(
        ValueError, match=r"labelled.tsv: most of the first 10 lines have a label: 40 .*has_label: true"
    ):
        list(reader([labelled], "predict", rank=rank, size=2).epoch(0))
    bare = tmp_path / "bare.tsv"
    lines = [line(row=i, dense={0: str(i)}, ids={0: "68fd1e64"}).split("\t", 1)[1] for i in range(9)]
    bare.write_text("\n".join(["oops", *lines, ""]))
    for split in ("train", "eval", "predict"):
        r = reader([bare], split, rank=rank, size=2, predict_has_label=True)
        with pytest.raises(ValueError, match=r"bare.tsv: most of the first 10 lines have no label: .*has_label: false"):
            list(r.epoch(0))
    good = write_rows(tmp_path / "good.tsv", 0, 9)
    with pytest.raises(ValueError, match=r"bare.tsv: most"):
        list(reader([good, bare], rank=rank, size=2).epoch(0))


def test_an_odd_line_is_no_sign_of_a_label(tmp_path: Path) -> None:
    path = tmp_path / "test.tsv"
    rows = [line("1", i).split("\t", 1)[1] for i in range(3)]
    path.write_text("\n".join([rows[0], line("1", 7), rows[1], line("1", 8), rows[2]]))
    r = reader([path], "predict")
    assert [len(b) for b in r.epoch(0)] == [3] and r.counts()["too_many_fields"] == 2


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_epoch_without_a_good_line_is_an_error_on_every_rank(
    tmp_path: Path, rank: int, size: int, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    commas = tmp_path / "commas.tsv"
    commas.write_text(line().replace("\t", ",") + "\n" + line(label="7") + "\n")
    r = reader([commas], split, rank=rank, size=size, batch=1)
    with pytest.raises(ValueError, match=r"all 2 lines were refused \(.*2 bad_label\).*commas.tsv; check"):
        list(r.epoch(0))
    assert r.counts()["lines"] <= 2
    assert any("commas.tsv: none of the first 2 lines can be parsed" in m for m in caplog.messages)
    # One good line anywhere is enough, whoever has it.
    with open(commas, "a") as file:
        file.write(line(row=5) + "\n")
    mixed = [reader([commas], split, rank=k, size=size, batch=1, shuffle_rows=2) for k in range(size)]
    numbers = [sample_numbers(m.epoch(0)) for m in mixed]
    assert sorted(n for by_batch in numbers for batch in by_batch for n in batch) == [5]
    assert [sum(m.counts()[name] for m in mixed) for name in ("lines", "rows", "bad_label")] == [3, 1, 2]
    assert all(m.fraction_read() == 1.0 for m in mixed)


def test_a_good_line_beyond_the_limit_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "late.tsv"
    path.write_text("\n".join([line(label="2"), line(label="3"), line(row=5)]))
    with pytest.raises(ValueError, match="all 2 lines were refused"):
        list(reader([path], eval_rows=2).epoch(0))
    assert [len(b) for b in reader([path], eval_rows=3).epoch(0)] == [1]


def test_gzip_is_read_whatever_its_name_and_gives_the_same_batches(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "a.tsv", 0, 300)
    data = plain.read_bytes()
    (tmp_path / "a.gz").write_bytes(gzip.compress(data))
    (tmp_path / "odd.tsv").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    for name in ("a.gz", "odd.tsv"):
        for block_bytes in (100, 1 << 20):
            pairs = zip(
                reader([plain]).epoch(0), reader([tmp_path / name], block_bytes=block_bytes).epoch(0), strict=True
            )
            for expected, actual in pairs:
                np.testing.assert_array_equal(expected.ids, actual.ids)
                np.testing.assert_array_equal(expected.dense, actual.dense)
                np.testing.assert_array_equal(expected.rows, actual.rows)


def test_a_cut_or_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(write_rows(tmp_path / "a.tsv", 0, 3000).read_bytes())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.gz: the compressed file is cut short"):
        list(reader([tmp_path / "cut.gz"]).epoch(0))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    (tmp_path / "bad.gz").write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match=r"bad.gz: the compressed file is (damaged|cut short)"):
        list(reader([tmp_path / "bad.gz"]).epoch(0))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.eval: '.*none-\*' matches no file"):
        reader([tmp_path / "none-*"])
    with pytest.raises(ValueError, match="data.eval: no files given"):
        reader([])
    with pytest.raises(ValueError, match="is a folder"):
        reader([tmp_path])
    (tmp_path / "empty.tsv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"hold no line: .*empty.tsv"):
        list(reader([tmp_path / "empty.tsv"]).epoch(0))
    (tmp_path / "long.tsv").write_bytes(b"0" * (MAX_LINE_BYTES + 2000))
    with pytest.raises(ValueError, match=r"long.tsv:1: a line is longer than 1048576 bytes"):
        list(reader([tmp_path / "long.tsv"], block_bytes=1000).epoch(0))
    with pytest.raises(ValueError, match=r"received rank 2 of 2; allowed: 0 .. 1"):
        reader([write_rows(tmp_path / "a.tsv", 0, 1)], rank=2, size=2)
    with pytest.raises(ValueError, match=r"global_batch 0"):
        reader([tmp_path / "a.tsv"], batch=0)


def test_patterns_are_sorted_and_a_file_is_read_once(tmp_path: Path) -> None:
    for name, first in (("b.tsv", 10), ("a.tsv", 0), ("c.tsv", 20)):
        write_rows(tmp_path / name, first, 10)
    r = reader([tmp_path / "c.tsv", tmp_path / "*.tsv"], batch=100)
    assert sample_numbers(r.epoch(0)) == [[*range(20, 30), *range(20)]]


@pytest.mark.parametrize("shuffle_rows", [0, 1, 17, 1000])
def test_the_same_global_batches_for_every_number_of_ranks(tmp_path: Path, shuffle_rows: int) -> None:
    paths = [write_rows(tmp_path / f"{i}.tsv", first, n) for i, (first, n) in enumerate([(0, 53), (53, 1), (54, 47)])]
    kwargs = {"split": "train", "batch": 10, "shuffle_rows": shuffle_rows, "block_bytes": 1500}
    alone = joined(all_ranks(paths, 1, **kwargs))
    assert [len(b) for b in alone] == [10] * 10 + [1]
    assert sorted(sum(alone, [])) == list(range(101))
    assert (sum(alone, []) == list(range(101))) == (shuffle_rows == 0)
    for size in (2, 3, 4):
        by_rank = all_ranks(paths, size, **kwargs)
        assert joined(by_rank) == alone
        for r, batches in enumerate(by_rank):
            assert [len(b) for b in batches[:10]] == [10 // size + (r < 10 % size)] * 10
            assert len(batches[10]) == (1 if r == 0 else 0)


def test_one_file_feeds_more_ranks_than_samples(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 3)
    by_rank = all_ranks([path], 4, batch=8)
    assert by_rank == [[[0]], [[1]], [[2]], [[]]]
    (nothing,) = reader([path], rank=3, size=4).epoch(0)
    assert nothing.dense.shape == (0, 13) and nothing.ids.shape == (0, 26) and nothing.rows.shape == (0,)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 0),
    size=st.integers(1, 5),
    batch=st.integers(1, 50),
    shuffle_rows=st.integers(0, 60),
    block_bytes=st.integers(64, 3000),
    bad=st.sets(st.integers(0, 100), max_size=5),
)
def test_every_sample_is_dealt_exactly_once(
    tmp_path: Path, files: list[int], size: int, batch: int, shuffle_rows: int, block_bytes: int, bad: set[int]
) -> None:
    paths, first = [], 0
    for i, count in enumerate(files):
        path = tmp_path / f"{i}.tsv"
        rows = range(first, first + count)
        path.write_text("".join(("bad" if n in bad else line("0", n)) + "\n" for n in rows))
        paths.append(path)
        first += count
    kwargs = {"split": "train", "batch": batch, "shuffle_rows": shuffle_rows, "block_bytes": block_bytes}
    readers = [reader(paths, rank=r, size=size, **kwargs) for r in range(size)]  # type: ignore[arg-type]
    by_rank = [sample_numbers(r.epoch(3)) for r in readers]
    assert len({len(batches) for batches in by_rank}) == 1 and len(by_rank[0]) == -(-first // batch)
    seen = [n for batches in by_rank for numbers in batches for n in numbers]
    assert sorted(seen) == [n for n in range(first) if n not in bad]
    assert sum(r.counts()["lines"] for r in readers) == first
    assert sum(r.counts()["bad_label"] for r in readers) == len([n for n in bad if n < first])


def test_shuffle_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{i}.tsv", 100 * i, 100) for i in range(3)]

    def order(seed: int, epoch: int, block_bytes: int = 1 << 20) -> list[int]:
        r = reader(paths, "train", batch=64, shuffle_rows=90, seed=seed, block_bytes=block_bytes)
        return sum(sample_numbers(r.epoch(epoch)), [])

    first = order(1, 0)
    assert order(1, 0, block_bytes=500) == first
    others = [order(1, 1), order(2, 0), order(2, 1)]
    assert all(sorted(o) == list(range(300)) and o != first for o in others)
    assert len({tuple(o) for o in [first, *others]}) == 4
    by_file = {tuple(n // 100 for n in order(1, e)[:90]) for e in range(8)}
    assert len({files[0] for files in by_file}) > 1, "the order of the files never changes"
    again = reader(paths, "train", batch=64, shuffle_rows=90)
    assert sum(sample_numbers(again.epoch(1)), []) == others[0], "a second epoch depends on the first"


def test_rows_of_a_shuffled_epoch_are_positions_in_its_stream(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 100)
    batches = list(reader([path], "train", batch=32, shuffle_rows=50).epoch(0))
    for b in batches:
        np.testing.assert_array_equal(b.rows, b.ids[:, -1])


def test_starting_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{i}.tsv", 100 * i, 100) for i in range(2)]
    kwargs = {"split": "train", "batch": 30, "shuffle_rows": 64, "rank": 1, "size": 2}
    whole = sample_numbers(reader(paths, **kwargs).epoch(2))  # type: ignore[arg-type]
    r = reader(paths, **kwargs)  # type: ignore[arg-type]
    assert sample_numbers(r.epoch(2, first_step=4)) == whole[4:]
    assert r.counts()["lines"] == sum(len(b) for b in whole[4:])


def test_eval_rows_limits_the_rows_over_all_ranks(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 100)
    for size in (1, 3):
        by_rank = all_ranks([path], size, batch=16, eval_rows=37, block_bytes=700)
        assert sum(joined(by_rank), []) == list(range(37))


def test_counts_start_anew_and_the_fraction_grows_to_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 100)
    r = reader([path], "train", batch=8, shuffle_rows=24, block_bytes=1000)
    assert r.fraction_read() == 0.0
    for epoch in range(2):
        fractions = []
        for _ in r.epoch(epoch):
            fractions.append(r.fraction_read())
        assert fractions == sorted(fractions) and 0 < fractions[0] < 0.2
        assert fractions[-1] == 1.0
        assert r.counts()["lines"] == r.counts()["rows"] == 100


def test_line_source_keeps_lines_whole(tmp_path: Path) -> None:
    texts = ["", "a", "\n", "a\nbb\n\nccc", "x" * 300 + "\n" + "y"]
    for i, text in enumerate(texts):
        (tmp_path / str(i)).write_text(text)
    for block_bytes in (1, 2, 3, 64):
        source = LineSource([str(tmp_path / str(i)) for i in range(len(texts))], block_bytes)
        found: dict[str, list[str]] = {}
        for block in source.blocks():
            lines = found.setdefault(Path(block.path).name, [])
            assert block.first_line == len(lines) + 1
            lines += [block.text.numpy()[b:e].decode() for b, e in zip(block.begins, block.ends, strict=True)]
        assert found == {"1": ["a"], "2": [""], "3": ["a", "bb", "", "ccc"], "4": ["x" * 300, "y"]}
        assert source.fraction_read() == 1.0


def test_rank_slices_cover_the_batch() -> None:
    for rows in range(20):
        for size in range(1, 7):
            slices = [dealing.rank_slice(rows, r, size) for r in range(size)]
            assert slices[0][0] == 0 and slices[-1][1] == rows
            assert all(a[1] == b[0] for a, b in zip(slices, slices[1:], strict=False))
            lengths = [e - b for b, e in slices]
            assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_batches_of_unequal_parts_are_refused() -> None:
    good = Batch.empty(2, 3)
    assert good.empty_like().ids.shape == (0, 3)
    with pytest.raises(ValueError, match="different lengths"):
        Batch(np.zeros((1, 2), np.float32), good.ids, good.labels, None, good.rows)
