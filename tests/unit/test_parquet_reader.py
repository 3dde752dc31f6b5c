"""Parquet: columns by name, types, defaults, bad values, dealing, and equality with the text format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_ctr.config import (
    CRITEO_DENSE_NAMES,
    CRITEO_SPARSE_NAMES,
    DEFAULT_MISSING_ID,
    HEX_MISSING_ID,
    DataConfig,
    ParquetSchemaConfig,
)
from hvd_ctr.data import Batch, open_reader
from hvd_ctr.data.reader import Reader
from hvd_ctr.data.schema import columns_of, hex_values

COLUMNS: dict[str, Any] = {"label": "click", "dense": [{"name": "age"}], "sparse": [{"name": "user"}]}


def save(path: Path, row_group_size: int | None = None, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def numbered(path: Path, first: int, count: int, **more: Any) -> Path:
    rows = np.arange(first, first + count)
    return save(path, row_group_size=10, user=rows, age=rows * 1.0, click=rows % 2, **more)


def reader(
    paths: Sequence[Path],
    columns: Mapping[str, Any] = COLUMNS,
    split: str = "eval",
    rank: int = 0,
    size: int = 1,
    batch: int = 1024,
    **data: Any,
) -> Reader:
    values = {"format": "parquet", "columns": columns, split: [str(p) for p in paths], **data}
    config = DataConfig.model_validate(values)
    return open_reader(config, split, rank=rank, size=size, global_batch=batch, seed=1)  # type: ignore[arg-type]


def only(r: Reader) -> Batch:
    (batch,) = r.epoch(0)
    return batch


def test_columns_are_found_by_name_and_others_ignored(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", note=["x", "y"], user=[5, 6], click=[1, 0], age=[-3.0, 1e9], label=[9, 9])
    batch = only(reader([path]))
    assert batch.labels.tolist() == [1, 0] and batch.ids.tolist() == [[5], [6]] and batch.rows.tolist() == [0, 1]
    np.testing.assert_array_equal(batch.dense, np.array([[-math.log1p(3)], [math.log1p(1e9)]], np.float32))
    assert (batch.dense.dtype, batch.ids.dtype, batch.labels.dtype) == ("f4", "i8", "f4")


def test_ids_keep_63_bits_and_nulls_have_their_own_id(tmp_path: Path) -> None:
    large = [0, 2**31, 2**53 + 1, 2**62 + 1, 2**63 - 2, -5, None]
    path = save(
        tmp_path / "a.parquet",
        click=[0] * 7,
        age=[0] * 7,
        user=pa.array(large, pa.int64()),
        item=pa.array([1, None, 3, None, 5, 6, 7], pa.uint32()),
    )
    columns = {**COLUMNS, "sparse": [{"name": "user"}, {"name": "item", "missing_id": 0}]}
    batch = only(reader([path], columns))
    assert batch.ids[:, 0].tolist() == [*large[:-1], DEFAULT_MISSING_ID]
    assert batch.ids[:, 1].tolist() == [1, 0, 3, 0, 5, 6, 7]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64(), pa.bool_()])
def test_integer_columns_of_any_width(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array([1, 0]).cast(kind)
    path = save(tmp_path / "a.parquet", click=array, age=array, user=array)
    batch = only(reader([path]))
    assert batch.ids.tolist() == [[1], [0]] and batch.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(batch.dense, np.array([[math.log1p(1)], [0]], np.float32))


def test_files_may_differ_in_type_and_encoding(tmp_path: Path) -> None:
    columns = {"label": "click", "sparse": [{"name": "user"}, {"name": "city", "kind": "string"}]}
    paths = [
        save(tmp_path / "a.parquet", click=[0.0], user=pa.array([7], pa.int32()), city=["Bonn"]),
        save(
            tmp_path / "b.parquet",
            click=[1],
            user=pa.array([7], pa.uint64()),
            city=pa.array(["Bonn"]).dictionary_encode(),
        ),
        save(tmp_path / "c.parquet", click=[True], user=pa.array([7]), city=pa.array([b"Bonn"], pa.large_binary())),
    ]
    batch = only(reader(paths, columns))
    assert batch.labels.tolist() == [0, 1, 1]
    assert len({tuple(row) for row in batch.ids.tolist()}) == 1


def test_strings_are_hashed_alike_everywhere(tmp_path: Path) -> None:
    texts = ["Bonn", "", None, "Köln", "Bonn", "a" * 1000]
    path = save(tmp_path / "a.parquet", click=[0] * 6, city=texts)
    columns = {"label": "click", "sparse": [{"name": "city", "kind": "string"}]}
    ids = only(reader([path], columns)).ids[:, 0]

    def slow_hash(text: bytes) -> int:
        """HashBytes of tf_ops/core/hash.h with seed 0, shifted right by one."""
        full = (1 << 64) - 1

        def mix(x: int) -> int:
            x = (x + 0x9E3779B97F4A7C15) & full
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & full
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & full
            return x ^ (x >> 31)

        h = 0xCBF29CE484222325 ^ mix(0)
        for byte in text:
            h = ((h ^ byte) * 0x100000001B3) & full
        return mix(h) >> 1

    expected = [DEFAULT_MISSING_ID if not t else slow_hash(t.encode()) for t in texts]
    assert ids.tolist() == expected
    assert len(set(expected)) == 4 and min(expected) >= 0


def test_hex_columns(tmp_path: Path) -> None:
    texts = ["00000000", "7fffffff", "80000000", "FFFFFFFF", "a", "", None, "123456789", "12g4", "-1"]
    path = save(tmp_path / "a.parquet", click=[0] * len(texts), site=texts)
    columns = {"label": "click", "sparse": [{"name": "site", "kind": "hex"}]}
    r = reader([path], columns)
    batch = only(r)
    assert batch.ids[:, 0].tolist() == [0, 2**31 - 1, 2**31, 2**32 - 1, 10, HEX_MISSING_ID, HEX_MISSING_ID]
    assert r.counts() | {"bad_hex": 3, "lines": 10, "rows": 7} == r.counts()
    with pytest.raises(ValueError, match=r"a.parquet:8: column 'site' is not of 1 to 8 hexadecimal digits"):
        only(reader([path], columns, bad_lines="error"))


def test_hex_values_against_int() -> None:
    rng = np.random.default_rng(0)
    texts = [f"{v:x}" for v in rng.integers(0, 1 << 32, 200)] + [f"{v:X}" for v in rng.integers(0, 300, 50)] + [""]
    offsets = np.cumsum([0, *(len(t) for t in texts)])
    values, bad = hex_values("".join(texts).encode(), offsets)
    assert values.tolist() == [int(t, 16) if t else 0 for t in texts] and not bad.any()
    assert hex_values(b"", np.zeros(3, np.int64))[0].tolist() == [0, 0]


def test_dense_values_are_finite_and_monotone(tmp_path: Path) -> None:
    values = [-1e30, -3.0, -2.0, -1.0, None, 0.0, 0.5, 1e9]
    columns = {"label": "click", "dense": [{"name": "age"}, {"name": "raw", "transform": "none", "default": -1.5}]}
    path = save(tmp_path / "a.parquet", click=[0] * 8, age=values, raw=values)
    dense = only(reader([path], columns)).dense
    assert np.isfinite(dense).all() and (np.diff(dense[:, 0]) >= 0).all() and dense[4, 0] == 0
    assert dense[:, 1].tolist() == [np.float32(-1.5 if v is None else v) for v in values]


def test_values_that_are_not_finite_are_reported_with_their_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ages = pa.array([1.0, math.nan, math.inf, 2.0, -math.inf], from_pandas=False)
    path = save(tmp_path / "a.parquet", click=[0] * 5, age=ages, user=range(5))
    r = reader([path])
    assert only(r).ids[:, 0].tolist() == [0, 3]
    assert r.counts()["non_finite"] == 3 and r.counts()["rows"] == 2
    assert any("a.parquet:2: column 'age' is not a finite number" in m for m in caplog.messages)


def test_labels_other_than_0_and_1_and_too_large_ids_are_bad(tmp_path: Path) -> None:
    clicks = pa.array([0, 1, 2, None, 1, 0])
    users = pa.array([1, 2, 3, 4, 2**63, 2**63 - 1], pa.uint64())
    path = save(tmp_path / "a.parquet", click=clicks, age=[0] * 6, user=users)
    r = reader([path])
    assert only(r).ids[:, 0].tolist() == [1, 2, 2**63 - 1]
    assert (r.counts()["bad_label"], r.counts()["bad_integer"]) == (2, 1)
    with pytest.raises(ValueError, match=r"a.parquet:3: column 'click' is not 0 or 1"):
        only(reader([path], bad_lines="error"))


def test_a_column_absent_from_one_file(tmp_path: Path) -> None:
    paths = [
        save(tmp_path / "1.parquet", click=[0], user=[1], f7=[11], score=[3.0], city=["x"]),
        save(tmp_path / "2.parquet", click=[1], user=[2]),
        save(tmp_path / "3.parquet", click=[0], user=[3], f7=[13], score=[5.0], city=["z"]),
    ]
    sparse = [{"name": "user"}, {"name": "f7", "default": 99}, {"name": "city", "kind": "string", "default": "x"}]
    columns = {"label": "click", "dense": [{"name": "score", "default": 4, "transform": "none"}], "sparse": sparse}
    batch = only(reader(paths, columns))
    assert batch.ids[:, 1].tolist() == [11, 99, 13] and batch.dense[:, 0].tolist() == [3, 4, 5]
    assert batch.ids[0, 2] == batch.ids[1, 2] != batch.ids[2, 2]
    without = {**columns, "sparse": [{"name": "user"}, {"name": "f7"}]}
    for rank in range(2):
        with pytest.raises(ValueError, match=r"2.parquet: column 'f7' is missing; the file has click, user"):
            reader(paths, without, rank=rank, size=2)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", [1.5], "column 'user' has type double; expected an integer"),
        ("user", ["7"], "column 'user' has type string; expected an integer"),
        ("age", ["7"], "column 'age' has type string; expected a number"),
        ("click", [[1]], "column 'click' has type list<element: int64>; expected a number, 0 or 1"),
    ],
)
def test_columns_of_unfit_type_are_refused(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    path = save(tmp_path / "a.parquet", **({"click": [0], "age": [1.0], "user": [1]} | {column: values}))
    with pytest.raises(ValueError, match=message):
        reader([path])


def test_columns_without_any_value(tmp_path: Path) -> None:
    """Arrow's type null, which writers choose for a column of nulls: every cell is a missing one."""
    kinds = {"i": "int", "h": "hex", "s": "string"}
    columns = {
        "label": "click",
        "dense": [{"name": "age"}, {"name": "price", "default": 2.0, "transform": "none"}],
        "sparse": [{"name": name, "kind": kind} for name, kind in kinds.items()]
        + [{"name": "own", "missing_id": 7, "default": 3}],
    }
    names = ("age", "price", *kinds, "own")
    path = save(tmp_path / "null.parquet", click=[0, 1], **{name: pa.nulls(2) for name in names})
    batch = only(reader([path], columns))
    missing = [DEFAULT_MISSING_ID, HEX_MISSING_ID, DEFAULT_MISSING_ID, 7]
    assert batch.ids.tolist() == [missing, missing] and batch.dense.tolist() == [[0.0, 2.0]] * 2
    full = save(tmp_path / "full.parquet", click=[1], age=[0.0], price=[1.5], i=[4], h=["ff"], s=["a"], own=[9])
    batch = only(reader([path, full], columns))
    assert batch.ids[:, :2].tolist() == [missing[:2], missing[:2], [4, 255]] and batch.dense[2, 1] == 1.5


def test_a_dictionary_of_nulls_is_a_column_without_values() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int32()), pa.nulls(0))
    schema = ParquetSchemaConfig.model_validate({"label": "click", "sparse": [{"name": "user"}]})
    label, user = columns_of(schema, has_label=True)
    assert user.accepts(array.type) and user.convert(array).to_pylist() == [None, None]
    assert user.convert(array).type == pa.int64() and not label.accepts(array.type)


def test_a_label_column_without_any_value_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", click=pa.nulls(2), age=[1.0, 2.0], user=[1, 2])
    with pytest.raises(ValueError, match="column 'click' has type null; expected a number, 0 or 1"):
        reader([path])


def test_an_epoch_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", click=[2, 3, 4], age=[1.0] * 3, user=[1, 2, 3])
    for rank in range(4):
        with pytest.raises(ValueError, match=r"all 3 lines were refused \(3 bad_label\), none is left to use, of: "):
            list(reader([path], rank=rank, size=4).epoch(0))


def test_files_that_are_not_parquet_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as Parquet"):
        reader([tmp_path / "a.parquet"])
    good = numbered(tmp_path / "b.parquet", 0, 5000)
    data = bytearray(good.read_bytes())
    data[4:2000] = bytes(1996)
    good.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"b.parquet: cannot read the Parquet data after row 0"):
        list(reader([good]).epoch(0))


def test_files_to_score_need_no_label(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", user=[5, 6], age=[1, 2])
    batch = only(reader([path], split="predict"))
    assert batch.ids.tolist() == [[5], [6]] and batch.labels.tolist() == [0, 0]
    with pytest.raises(ValueError, match="column 'click' is missing"):
        reader([path], split="predict", predict_has_label=True)


def test_no_row_group_is_dropped_on_two_ranks(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.parquet", 0, 43)
    assert pq.ParquetFile(path).num_row_groups == 5
    by_rank = [[b.ids[:, 0].tolist() for b in reader([path], rank=r, size=2, batch=16).epoch(0)] for r in range(2)]
    assert [len(b) for b in by_rank[0]] == [8, 8, 6] and [len(b) for b in by_rank[1]] == [8, 8, 5]
    assert sorted(n for batches in by_rank for b in batches for n in b) == list(range(43))


@pytest.mark.parametrize("shuffle_rows", [0, 1, 13, 1000])
def test_the_same_global_batches_for_every_number_of_ranks(tmp_path: Path, shuffle_rows: int) -> None:
    paths = [numbered(tmp_path / f"{i}.parquet", first, n) for i, (first, n) in enumerate([(0, 53), (53, 1), (54, 47)])]

    def batches(rank: int, size: int) -> list[list[int]]:
        r = reader(paths, split="train", rank=rank, size=size, batch=10, shuffle_rows=shuffle_rows)
        fractions, out = [], []
        for b in r.epoch(5):
            out.append(b.ids[:, 0].tolist())
            fractions.append(r.fraction_read())
        assert fractions == sorted(fractions) and fractions[-1] == 1.0
        return out

    alone = batches(0, 1)
    assert sorted(sum(alone, [])) == list(range(101)) and [len(b) for b in alone] == [10] * 10 + [1]
    for size in (2, 3, 4):
        by_rank = [batches(r, size) for r in range(size)]
        assert [sum(parts, []) for parts in zip(*by_rank, strict=True)] == alone


def test_text_and_parquet_give_equal_batches(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    n = 1000
    labels = rng.integers(0, 2, n)
    counts = [[None if rng.random() < 0.2 else int(v) for v in np.exp(rng.normal(2, 3, n)) - 3] for _ in range(13)]
    ids = [[None if rng.random() < 0.2 else int(v) for v in rng.integers(0, 1 << 32, n)] for _ in range(26)]
    lines = []
    for i in range(n):
        fields = [str(labels[i]), *("" if c[i] is None else str(c[i]) for c in counts)]
        lines.append("\t".join([*fields, *("" if c[i] is None else f"{c[i]:08x}" for c in ids)]))
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    table = {"label": labels, "other": labels[::-1]}
    table |= dict(zip(CRITEO_DENSE_NAMES, (pa.array(c) for c in counts), strict=True))
    table |= dict(zip(CRITEO_SPARSE_NAMES, (pa.array(c) for c in ids), strict=True))
    names = rng.permutation(list(table))
    pq.write_table(pa.table({name: table[name] for name in names}), tmp_path / "a.parquet", row_group_size=77)
    columns = {
        "dense": [{"name": name} for name in CRITEO_DENSE_NAMES],
        "sparse": [{"name": name, "missing_id": HEX_MISSING_ID} for name in CRITEO_SPARSE_NAMES],
    }
    text = DataConfig(train=(str(tmp_path / "a.tsv"),), shuffle_rows=300)
    for rank in range(2):
        from_text = open_reader(text, "train", rank=rank, size=2, global_batch=128, seed=1)
        from_parquet = reader([tmp_path / "a.parquet"], columns, "train", rank, 2, 128, shuffle_rows=300)
        for expected, actual in zip(from_text.epoch(1), from_parquet.epoch(1), strict=True):
            np.testing.assert_array_equal(actual.ids, expected.ids)
            np.testing.assert_array_equal(actual.labels, expected.labels)
            np.testing.assert_array_equal(actual.rows, expected.rows)
            np.testing.assert_array_equal(actual.dense, expected.dense)
