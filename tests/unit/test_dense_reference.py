"""The NumPy oracle against hand-computed cases, Keras' dense optimizers, and the C++ ops bit for bit."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.ops import id_ops, mix_cache_ops
from tests.support.dense_reference import DenseReference, hash_to_range, initial_row, lane_sum

MAX_ID = (1 << 63) - 1
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]


def table(
    kind: str = "sgd", dim: int = 1, initializer: str = "constant", scale: float = 0.0, **options: Any
) -> TableConfig:
    optimizer = SparseOptimizerConfig(kind=kind, **{"learning_rate": 1.0, **options})
    return TableConfig("t", dim=dim, initializer=initializer, init_scale=scale, optimizer=optimizer)


# ------------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("epsilon", [0.0, 1e-7])
def test_duplicates_are_summed_before_adagrad(epsilon: float) -> None:
    """FC 8: one by one the change would be -1.64353."""
    reference = DenseReference([table("adagrad", epsilon=epsilon)])
    reference.next_step()
    reference.apply("t", [5, 5], [[1.0], [1.0]])
    np.testing.assert_allclose(reference.lookup("t", [5]), [[-0.98773]], atol=1e-5)
    np.testing.assert_allclose(reference.state("t", 5, "accumulator"), [4.1], rtol=1e-6)


@pytest.mark.parametrize(("correction", "change"), [("global", -0.0639), ("row", -0.1)])
def test_bias_correction_of_a_late_row(correction: str, change: float) -> None:
    """FC 18: row 1 is touched in steps 1-3, row 2 in step 3 only."""
    reference = DenseReference([table("adam", learning_rate=0.1, bias_correction=correction)])
    for ids in ([1], [1], [1, 2]):
        reference.next_step()
        reference.apply("t", ids, np.ones((len(ids), 1)))
    np.testing.assert_allclose(reference.lookup("t", [2]), [[change]], atol=5e-5)
    np.testing.assert_allclose(reference.lookup("t", [1]), [[-0.3]], atol=1e-4)


def test_l2_decays_touched_rows_only() -> None:
    """FC 21: present in step 1 of 10, decayed once."""
    reference = DenseReference([table("sgd", scale=2.0, learning_rate=0.5, l2=0.1)])
    for step in range(1, 11):
        assert reference.next_step() == step
        reference.apply("t", [7] if step == 1 else [8], [[0.0]])
    np.testing.assert_allclose(reference.lookup("t", [7]), [[2.0 * (1 - 0.5 * 0.1)]], rtol=1e-6)
    np.testing.assert_allclose(reference.lookup("t", [8]), [[2.0 * 0.95**9]], rtol=1e-6)


def test_rowwise_adagrad_uses_the_mean_square() -> None:
    reference = DenseReference([table("rowwise_adagrad", dim=4, learning_rate=0.5, epsilon=0.0)])
    reference.next_step()
    reference.apply("t", [0], [[1.0, -2.0, 3.0, 0.0]])
    np.testing.assert_allclose(reference.lookup("t", [0])[0], -0.5 * np.array([1, -2, 3, 0]) / np.sqrt(3.6), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_gradient_on_zero_state_is_not_nan(kind: str) -> None:
    reference = DenseReference([table(kind, scale=1.5, epsilon=0.0, initial_accumulator=0.0)])
    reference.next_step()
    reference.apply("t", [3], [[0.0]])
    np.testing.assert_array_equal(reference.lookup("t", [3]), [[1.5]])


def test_lookup_changes_nothing_and_apply_checks_its_arguments() -> None:
    reference = DenseReference([table("adagrad", initializer="uniform", scale=1.0)])
    reference.lookup("t", [1, 2, 3])
    assert not reference.records
    with pytest.raises(ValueError, match="next_step"):
        reference.apply("t", [1], [[1.0]])
    reference.next_step()
    with pytest.raises(ValueError, match="need gradients"):
        reference.apply("t", [1, 2], [[1.0]])
    with pytest.raises(ValueError, match="outside"):
        reference.lookup("t", [-1])
    with pytest.raises(ValueError, match="unique"):
        DenseReference([table(), table()])


def test_dropped_and_hashed_ids() -> None:
    skip = TableConfig("skip", dim=1, rows=4, invalid_ids="skip", initializer="constant", init_scale=1.0)
    hashed = TableConfig("hashed", dim=1, rows=2, hash_ids=True, initializer="constant", init_scale=1.0)
    reference = DenseReference([skip, hashed])
    np.testing.assert_array_equal(reference.lookup("skip", [3, 4, -1]), [[1.0], [0.0], [0.0]])
    reference.next_step()
    reference.apply("skip", [4, -1], [[1.0], [1.0]])
    reference.apply("hashed", list(range(-50, 50)), np.ones((100, 1)))
    assert set(reference.records) == {("hashed", 0), ("hashed", 1)}


def test_lane_sum_adds_every_value() -> None:
    for dim in (1, 3, 15, 16, 17, 100, 2049):
        assert lane_sum(np.arange(1, dim + 1, dtype=np.float64)) == dim * (dim + 1) / 2


# ------------------------------------------------------------------------------------------------ against Keras


def keras_optimizer(kind: str) -> tuple[Any, dict[str, Any]]:
    """A Keras optimizer and the same options for a table."""
    if kind == "sgd":
        return keras.optimizers.SGD(0.1), {"learning_rate": 0.1}
    if kind == "adagrad":
        options = {"learning_rate": 0.1, "initial_accumulator": 0.2, "epsilon": 1e-3}
        return keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.2, epsilon=1e-3), options
    if kind == "adam":
        return keras.optimizers.Adam(0.05, 0.8, 0.95, 1e-4), {
            "learning_rate": 0.05,
            "beta1": 0.8,
            "beta2": 0.95,
            "epsilon": 1e-4,
        }
    optimizer = keras.optimizers.Ftrl(
        0.3,
        learning_rate_power=-0.5 if kind == "ftrl" else -0.6,
        l1_regularization_strength=0.05,
        l2_regularization_strength=0.02,
    )
    options = {"learning_rate": 0.3, "l1": 0.05, "l2": 0.02, "learning_rate_power": -0.5 if kind == "ftrl" else -0.6}
    return optimizer, options


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "ftrl", "ftrl power -0.6"])
def test_equals_keras_when_every_row_is_touched(kind: str, dtype: Any) -> None:
    """Then lazy and dense are the same thing. Row-wise Adagrad has no counterpart in Keras: see the case by hand."""
    optimizer, options = keras_optimizer(kind)
    reference = DenseReference([table(kind.split()[0], 5, "uniform", 0.5, **options)], seed=1, dtype=dtype)
    ids = np.array([0, 3, 2**40, MAX_ID])
    variable = keras.Variable(reference.lookup("t", ids).astype(np.float32))
    optimizer.build([variable])
    generator = np.random.default_rng(0)
    for _ in range(20):
        gradients = generator.normal(size=(4, 5)).astype(np.float32)
        reference.next_step()
        reference.apply("t", ids, gradients)
        optimizer.apply([tf.constant(gradients)], [variable])
    moved = np.abs(reference.lookup("t", ids) - DenseReference([reference.tables["t"]], 1).lookup("t", ids))
    assert moved.max() > 0.05
    np.testing.assert_allclose(reference.lookup("t", ids), keras.ops.convert_to_numpy(variable), rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_of_one_column_is_adagrad() -> None:
    tables = [table(kind, 1, "uniform", 0.5, learning_rate=0.1) for kind in ("adagrad", "rowwise_adagrad")]
    one, other = (DenseReference([config]) for config in tables)
    generator = np.random.default_rng(0)
    for _ in range(5):
        gradients = generator.normal(size=(2, 1))
        for reference in (one, other):
            reference.next_step()
            reference.apply("t", [4, 9], gradients)
    np.testing.assert_array_equal(one.lookup("t", [4, 9]), other.lookup("t", [4, 9]))


# ------------------------------------------------------------------------------------------ against the C++ ops


@pytest.mark.parametrize("initializer", ["constant", "uniform", "normal"])
@pytest.mark.parametrize("seed", [0, 1234567890123])
def test_first_values_have_the_bits_of_the_ops(initializer: str, seed: int) -> None:
    config = TableConfig("käse", dim=37, initializer=initializer, init_scale=0.3)
    ids = np.array([0, 1, 2**31, 2**53 + 1, MAX_ID, *range(100, 400)])
    rows = np.stack([initial_row(config, seed, int(i)) for i in ids])
    np.testing.assert_array_equal(rows, id_ops.initial_rows(tf.constant(ids), config, seed).numpy())


def test_hashed_ids_are_those_of_the_ops() -> None:
    ids = np.array([0, 1, -1, -(2**63), MAX_ID, *range(1000)])
    for rows in (1, 1000, 2**40):
        expected = [hash_to_range(int(i), rows) for i in ids]
        assert id_ops.hash_to_range(tf.constant(ids), rows).numpy().tolist() == expected


@pytest.mark.parametrize("dim", [1, 7, 16, 100])
@pytest.mark.parametrize("options", [{}, {"bias_correction": "row", "l1": 0.01, "l2": 0.02}], ids=["plain", "options"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_dtype", list(mix_cache_ops.ROW_TYPES))
def test_trained_rows_have_the_bits_of_the_ops(row_dtype: str, kind: str, options: dict[str, Any], dim: int) -> None:
    """One rank, a cache so small that rows are evicted with their state, distinct ids per step, a varying rate."""
    config = table(kind, dim, "uniform", 0.1, **{"learning_rate": 0.05, **options})
    reference = DenseReference([config], seed=9, row_dtype=row_dtype)
    spec = mix_cache_ops.MixCacheSpec(
        name="cache",
        dim=dim,
        slots=4,
        row_dtype=row_dtype,
        tables=[config],
        features=["f"],
        feature_tables=[0],
        rank=0,
        world_size=1,
        seed=9,
    )
    handle = mix_cache_ops.create(spec)
    generator = np.random.default_rng(3)
    for step in range(1, 9):
        ids = generator.choice(10, 4, replace=False)
        gradients = generator.normal(size=(4, dim)).astype(np.float32)
        rows = _train(handle, config, ids, gradients, scale=1.0 / step)
        np.testing.assert_array_equal(rows, reference.lookup("t", ids))
        reference.next_step()
        reference.apply("t", ids, gradients, learning_rate_scale=1.0 / step)
    for i in range(10):
        rows = _train(handle, config, np.array([i]), np.zeros((1, dim), np.float32), scale=0.0)
        np.testing.assert_array_equal(rows, reference.lookup("t", [i]))


def _train(handle: Any, config: TableConfig, ids: Any, gradients: Any, scale: float) -> Any:
    """One step of one rank on distinct ids; the rows (n, D) before it."""
    prepared = id_ops.prepare_batch(
        tf.constant(ids[:, None], tf.int64),
        feature_splits=None,
        batch_rows=len(ids),
        weight_sum=tf.constant(float(len(ids)), tf.float64),
        error_text="",
        tables=[config],
        features=[FeatureConfig("f", table=config)],
        feature_tables=[0],
        world_size=1,
    )
    ticket = mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits)
    rows, splits = mix_cache_ops.lookup(handle, ticket.ticket, config.dim)
    rows = mix_cache_ops.check_rows(rows, splits, prepared.row_splits)
    order = np.ravel(prepared.virtual_ids)
    grouped = np.empty_like(gradients)
    grouped[order] = gradients
    mix_cache_ops.apply(handle, ticket.ticket, grouped, scale)
    return rows.numpy()[order]


def test_rows_come_late_and_go_by_hand() -> None:
    """min_count 2; idle after 2 steps; at most 2 rows; a sweep every other step."""
    options = {"min_count": 2, "max_idle_steps": 2, "max_rows": 2, "sweep_every_steps": 2}
    reference = DenseReference([table().model_copy(update=options)])

    def train(*ids: int) -> dict[int, float]:
        reference.next_step()
        reference.apply("t", ids, np.ones((len(ids), 1)))
        reference.sweep()
        return {i: float(record.row[0]) for (_, i), record in reference.records.items()}

    assert train(1, 2, 2) == {2: -2.0}  # 2 occurs twice in its first batch, 1 waits
    assert train(1, 3, 3) == {1: -1.0, 3: -2.0}  # 3 rows; 2 is the longest untrained
    assert train(4, 4) == {1: -1.0, 3: -2.0, 4: -2.0}  # no sweep
    assert train(5) == {4: -2.0}  # 1 and 3 are of one step: with both of them 3 rows would remain
    assert train(1, 1) == {4: -2.0, 1: -2.0}  # anew
    assert train(6) == {1: -2.0}  # 4 is idle for 3 steps
    assert ("t", 5) in reference.counts
    assert train(6) == {1: -2.0, 6: -1.0}
    assert train(7) == {6: -1.0}
    assert ("t", 5) not in reference.counts  # waited for too long
