"""Saving and going on in Keras' fit, at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.training.checkpoint import CheckpointError, Progress
from tests.support.hybrid import exported, logits_model, share, unique_name

_ROWS = 96


@pytest.fixture
def folder(comm: Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all ranks."""
    mine = str(tmp_path_factory.mktemp("callback")) if comm.rank == 0 else None
    return Path(comm.broadcast_object(mine))


def _model() -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    keras.utils.set_random_seed(3)
    table = TableConfig("item", dim=3, optimizer=SparseOptimizerConfig(kind="adam", learning_rate=0.05))
    features = [FeatureConfig(f"f{i}", table=table) for i in range(2)]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=200), seed=2, name=unique_name("called_back"))
    ids, numbers = keras.Input((2,), dtype="int64", name="ids"), keras.Input((2,), name="numbers")
    vectors = keras.layers.Dropout(0.3)(layer(ids))
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(vectors, numbers))
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.7)
    model.compile(keras.optimizers.Adam(rate), keras.losses.BinaryCrossentropy(from_logits=True))
    return model, layer


def _fit(comm: Comm, model: hvd_ctr.HybridModel, epochs: int, **arguments: Any) -> list[float]:
    generator = np.random.default_rng(1)
    mine = share(comm, np.arange(_ROWS))
    x = {"ids": generator.integers(0, 60, (_ROWS, 2))[mine], "numbers": generator.random((_ROWS, 2), np.float32)[mine]}
    y = (generator.random((_ROWS, 1)) < 0.4).astype(np.float32)[mine]
    batch = -(-len(mine) // 6)
    history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return [float(loss) for loss in history.history["loss"]]


def test_fit_goes_on_as_if_never_interrupted(comm: Comm, folder: Path) -> None:
    """Also dropout's numbers and the schedule of the learning rate (FC 81)."""
    whole, whole_layer = _model()
    saving = hvd_ctr.CheckpointCallback(folder, every_steps=4, every_epochs=1, keep=2)
    expected = _fit(comm, whole, 4)
    first, _ = _model()
    assert hvd_ctr.load_checkpoint(first, folder, missing_ok=True) == Progress()
    losses = _fit(comm, first, 2, callbacks=[saving])
    steps = int(first.optimizer.iterations)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{step:08d}" for step in (steps // 4 * 4, steps)] or steps % 4 == 0, names
    second, second_layer = _model()
    progress = hvd_ctr.load_checkpoint(second, folder)
    assert progress == Progress(steps, 2, 0)
    losses += _fit(comm, second, 4, initial_epoch=progress.epoch)
    assert losses == expected
    left, right = exported(whole_layer.sharded, comm, "item"), exported(second_layer.sharded, comm, "item")
    assert left.keys() == right.keys()
    for row_id, (row, state) in left.items():
        np.testing.assert_array_equal(right[row_id][0], row)
        np.testing.assert_array_equal(right[row_id][1], state)


def test_steps_within_an_epoch_are_told(comm: Comm, folder: Path) -> None:
    model, _ = _model()
    _fit(comm, model, 2, callbacks=[hvd_ctr.CheckpointCallback(folder, every_steps=5)])
    per_epoch = int(model.optimizer.iterations) // 2
    other, _ = _model()
    assert hvd_ctr.load_checkpoint(other, folder / "step-00000005", optimizer=False) == Progress(5, 0, 5)
    newest = (2 * per_epoch) // 5 * 5
    other, _ = _model()
    assert hvd_ctr.load_checkpoint(other, folder) == Progress(newest, 1, newest - per_epoch)


def test_refusals(comm: Comm, folder: Path) -> None:
    with pytest.raises(ValueError, match="set every_steps, every_epochs or both"):
        hvd_ctr.CheckpointCallback(folder)
    with pytest.raises(ValueError, match="keep must be at least 1, received 0"):
        hvd_ctr.CheckpointCallback(folder, every_steps=1, keep=0)
    model, _ = _model()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        hvd_ctr.load_checkpoint(model, folder)
