"""Rows stored as float16 or bfloat16: every way on which a row reaches a reader gives the same bits, cached or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import ConfigError, FeatureConfig, SparseOptimizerConfig, TableConfig, load_config
from hvd_ctr.ops import id_ops, mix_cache_ops
from tests.support.dense_reference import DenseReference, round_to

_DIM, _IDS = 5, np.arange(40)
_NARROW = ("float16", "bfloat16")


def _table(kind: str = "adagrad", **fields: Any) -> TableConfig:
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.1)
    return TableConfig("t", dim=_DIM, initializer="normal", init_scale=0.3, optimizer=optimizer, **fields)


def _cache(row_dtype: str, slots: int, table: TableConfig) -> Any:
    spec = mix_cache_ops.MixCacheSpec(
        name="cache",
        dim=_DIM,
        slots=slots,
        row_dtype=row_dtype,
        tables=[table],
        features=["f"],
        feature_tables=[0],
        seed=4,
    )
    return mix_cache_ops.create(spec)


def _prepared(ids: np.ndarray, table: TableConfig) -> Any:
    return id_ops.prepare_batch(
        tf.constant(ids[:, None], tf.int64),
        feature_splits=None,
        batch_rows=len(ids),
        weight_sum=float(len(ids)),
        tables=[table],
        features=[FeatureConfig("f", table=table)],
        feature_tables=[0],
        world_size=1,
    )


def _read(handle: Any, ids: np.ndarray, table: TableConfig) -> np.ndarray:
    prepared = _prepared(ids, table)
    rows = mix_cache_ops.read(handle, prepared.send, prepared.send_splits, _DIM).rows
    return rows.numpy()[np.ravel(prepared.virtual_ids)]


def _lookup(handle: Any, ids: np.ndarray, table: TableConfig, gradients: np.ndarray | None = None) -> np.ndarray:
    """Rows (n, D) of distinct ids (n) through the cache; trains them where there are gradients (n, D)."""
    prepared = _prepared(ids, table)
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
    order = np.ravel(prepared.virtual_ids)
    rows = mix_cache_ops.lookup(handle, ticket, _DIM)[0].numpy()[order]
    if gradients is None:
        mix_cache_ops.release(handle, ticket)
    else:
        mix_cache_ops.apply(handle, ticket, gradients[np.argsort(order)], 1.0)
    return rows


def _exported(handle: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids (n) ascending, rows (n, D), state (n, s)."""
    chunk = mix_cache_ops.export_rows(handle, 0, 0, 1000)
    order = np.argsort(chunk.ids)
    return chunk.ids[order], chunk.rows[order], chunk.state[order]


@pytest.mark.parametrize("row_dtype", _NARROW)
def test_first_values_are_rounded_whether_cached_or_made_for_a_reader(row_dtype: str) -> None:
    table = _table()
    handle = _cache(row_dtype, 64, table)
    expected = round_to(row_dtype, id_ops.initial_rows(tf.constant(_IDS), table, 4).numpy())
    np.testing.assert_array_equal(_read(handle, _IDS, table), expected)
    np.testing.assert_array_equal(_lookup(handle, _IDS, table), expected)
    np.testing.assert_array_equal(_read(handle, _IDS, table), expected)
    assert (expected != id_ops.initial_rows(tf.constant(_IDS), table, 4).numpy()).any()
    assert len(_exported(handle)[0]) == 0


@pytest.mark.parametrize("slots", [5, 64])
@pytest.mark.parametrize("row_dtype", _NARROW)
def test_training_reading_and_exporting_equal_the_reference(row_dtype: str, slots: int) -> None:
    """With 5 slots rows come and go; with 64 all stay. Rows that stay below min_count are seen, never trained."""
    table = _table(min_count=2)
    handle, reference = _cache(row_dtype, slots, table), DenseReference([table], seed=4, row_dtype=row_dtype)
    generator = np.random.default_rng(1)
    for _ in range(25):
        ids = generator.choice(_IDS, 5, replace=False)
        gradients = generator.normal(size=(5, _DIM)).astype(np.float32)
        np.testing.assert_array_equal(_lookup(handle, ids, table, gradients), reference.lookup("t", ids))
        reference.next_step()
        reference.apply("t", ids, gradients)
        np.testing.assert_array_equal(_read(handle, _IDS, table), reference.lookup("t", _IDS))
    ids, rows, state = _exported(handle)
    assert ids.tolist() == sorted(i for _, i in reference.records)
    np.testing.assert_array_equal(rows, reference.lookup("t", ids))
    np.testing.assert_array_equal(state, [reference.state("t", i, "accumulator") for i in ids.tolist()])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("row_dtype", _NARROW)
def test_rows_of_another_type_are_rounded_on_import_and_their_state_is_not(row_dtype: str, cached: bool) -> None:
    table = _table()
    handle = _cache(row_dtype, 64, table)
    if cached:
        _lookup(handle, _IDS, table)
    generator = np.random.default_rng(2)
    rows, state = (generator.uniform(0.1, 3, (len(_IDS), _DIM)).astype(np.float32) for _ in range(2))
    rows[3, 2] = 1e5
    assert mix_cache_ops.import_rows(handle, 0, _IDS, rows, state) == 0
    expected = round_to(row_dtype, rows)
    assert np.isinf(expected[3, 2]) == (row_dtype == "float16")
    for _ in range(2):  # Before and after they were on the device.
        np.testing.assert_array_equal(_read(handle, _IDS, table), expected)
        ids, exported, exported_state = _exported(handle)
        np.testing.assert_array_equal(ids, _IDS)
        np.testing.assert_array_equal(exported, expected)
        np.testing.assert_array_equal(exported_state, state)
        np.testing.assert_array_equal(_lookup(handle, _IDS, table), expected)
    # What was exported is the same rows again anywhere, float32 caches too.
    for other in ("float32", row_dtype):
        target = _cache(other, 3, table)
        mix_cache_ops.import_rows(target, 0, ids, exported, exported_state)
        np.testing.assert_array_equal(_read(target, _IDS, table), expected)


def test_small_updates_are_lost_in_bfloat16() -> None:
    """What the documentation says: a step of 1/512 of a row of 1 is below half a unit in the last place."""
    optimizer = SparseOptimizerConfig(kind="sgd", learning_rate=1.0)
    table = TableConfig("t", dim=_DIM, initializer="constant", init_scale=1.0, optimizer=optimizer)
    gradients = np.full((len(_IDS), _DIM), 2.0**-9, np.float32)
    for row_dtype, value in (("float32", 1 - 2.0**-9), ("float16", 1 - 2.0**-9), ("bfloat16", 1.0)):
        handle = _cache(row_dtype, 64, table)
        _lookup(handle, _IDS, table, gradients)
        np.testing.assert_array_equal(_read(handle, _IDS, table), np.full((len(_IDS), _DIM), value, np.float32))


def test_an_unknown_type_is_a_configuration_error(tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("embedding:\n  cache:\n    row_dtype: float8\n")
    with pytest.raises(ConfigError, match="embedding.cache.row_dtype.*'float8'.*'float32', 'float16' or 'bfloat16'"):
        load_config(str(path))
