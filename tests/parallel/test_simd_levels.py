"""Training gives the same bits on every level of vector instructions that this processor has (HVD_CTR_SIMD forces one;
the C++ tests compare kernel by kernel).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.ops import native
from tests.support.hybrid import embedding, exported, share, step

_STEPS, _GB, _HOT = 12, 96, 3
_KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")


@pytest.fixture
def _level_of_the_process() -> Iterator[None]:
    before = native.simd_level()
    yield
    native.force_simd_level(before)


def _train(comm: Comm, dim: int) -> dict[str, np.ndarray]:
    """Bits of all rows with state, and of what the last step looked up; by table, in the order of ids."""
    tables = [
        TableConfig(kind, dim=dim, optimizer=SparseOptimizerConfig(kind=kind, l2=0.01), initializer=initializer)
        for kind, initializer in zip(_KINDS, ("uniform", "normal", "uniform", "constant", "normal"), strict=True)
    ]
    combiners = ("sum", "mean", "sqrtn", "sum", "mean")
    features = [
        FeatureConfig(table.name, table=table, length=_HOT, combiner=combiner, padding_id=0)
        for table, combiner in zip(tables, combiners, strict=True)
    ]
    layer = embedding(features, slots=1 << 12, seed=9)
    generator = np.random.default_rng(4)
    results: dict[str, np.ndarray] = {}
    for _ in range(_STEPS):
        ids = generator.zipf(1.3, (_GB, len(tables), _HOT)).clip(max=700) - 1
        mine = share(comm, ids)
        inputs = {table.name: tf.constant(mine[:, t]) for t, table in enumerate(tables)}
        outputs = step(layer, inputs, lambda looked_up: sum(tf.reduce_sum(x**2) for x in looked_up.values()))
    results["looked up"] = np.concatenate([np.asarray(outputs[kind]).ravel() for kind in _KINDS])
    for table in tables:
        rows = exported(layer.sharded, comm, table.name)
        results[table.name] = np.concatenate([np.concatenate(rows[row_id]) for row_id in sorted(rows)])
    return results


@pytest.mark.parametrize("dim", [5, 16, 64])
def test_all_levels_give_the_same_bits(comm: Comm, dim: int, _level_of_the_process: None) -> None:
    levels = native.SIMD_LEVELS[: native.SIMD_LEVELS.index(native.best_simd_level()) + 1]
    results = []
    for level in levels:
        native.force_simd_level(level)
        assert native.simd_level() == level
        results.append(_train(comm, dim))
    for level, result in zip(levels[1:], results[1:], strict=True):
        for name, values in result.items():
            assert values.tobytes() == results[0][name].tobytes(), f"{name} on level {level}"
