"""Checkpoints at any number of ranks: what is saved is what is restored (FC 22, 23, 52, 62, 89, 92, 96, 98)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.training import checkpoint
from hvd_ctr.training.checkpoint import CheckpointError, Progress
from tests.support.hybrid import exported, logits_model, share, unique_name

_GB = 48


@pytest.fixture
def folder(comm: Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all ranks."""
    mine = str(tmp_path_factory.mktemp("checkpoint")) if comm.rank == 0 else None
    return Path(comm.broadcast_object(mine))


def _model(slots: int = 96, kind: str = "adam", dim: int = 3) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.05)
    tables = [TableConfig(name, dim=dim, optimizer=optimizer) for name in ("item", "a/b ..")]
    features = [FeatureConfig(f"f{i}", table=table) for i, table in enumerate(tables)]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=slots), seed=2, name=unique_name("saved"))
    ids, numbers = keras.Input((2,), dtype="int64", name="ids"), keras.Input((2,), name="numbers")
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(layer(ids), numbers))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


def _run(comm: Comm, model: hvd_ctr.HybridModel, first: int, steps: int) -> list[float]:
    """Trains global batches first .. first+steps-1; returns the global losses."""
    run = tf.function(model.hybrid_step, reduce_retracing=True, autograph=False)
    losses = []
    for number in range(first, first + steps):
        generator = np.random.default_rng(number)
        ids, numbers = generator.integers(0, 60, (_GB, 2)), generator.random((_GB, 2), np.float32)
        labels = (generator.random((_GB, 1)) < 0.4).astype(np.float32)
        mine = share(comm, np.arange(_GB))
        result = run({"ids": tf.constant(ids[mine]), "numbers": tf.constant(numbers[mine])}, tf.constant(labels[mine]))
        local = float(result.loss) * float(result.global_loss_weight)
        losses.append(sum(comm.allgather_object(local)))
    return losses


def _save(folder: Path, model, layer, step: int) -> Path:
    return checkpoint.save(folder / f"step-{step:08d}", model, [layer.sharded], Progress(step, 1, 2))


@pytest.mark.parametrize("slots", [96, 500])
def test_training_goes_on_as_if_never_interrupted(comm: Comm, folder: Path, slots: int) -> None:
    """FC 22, 52: also into a cache smaller than the table, bit for bit on the same ranks."""
    model, layer = _model()
    _run(comm, model, 0, 10)
    path = _save(folder, model, layer, 10)
    expected = _run(comm, model, 10, 10)
    restored, restored_layer = _model(slots)
    assert checkpoint.load(path, restored, [restored_layer.sharded]) == Progress(10, 1, 2)
    assert set(restored_layer.sharded.steps().values()) == {10}
    assert _run(comm, restored, 10, 10) == expected
    for table in ("item", "a/b .."):
        left, right = exported(layer.sharded, comm, table), exported(restored_layer.sharded, comm, table)
        assert left.keys() == right.keys()
        for row_id, (row, state) in left.items():
            np.testing.assert_array_equal(right[row_id][0], row)
            np.testing.assert_array_equal(right[row_id][1], state)


def test_rows_are_readable_with_pyarrow_alone(comm: Comm, folder: Path) -> None:
    """FC 89, 92, 96: each row once, with its own value."""
    model, layer = _model(kind="sgd")
    ids = np.arange(1000)
    rows = np.stack([ids, ids + 0.5, -ids], axis=1).astype(np.float32)
    layer.sharded.import_rows("item", ids, rows)
    path = _save(folder, model, layer, 0)
    parts = sorted((path / "rows" / "item").glob("*.arrow"))
    assert len(parts) == comm.size
    table = pa.concat_tables([pa.ipc.open_file(part).read_all() for part in parts]).sort_by("id")
    np.testing.assert_array_equal(table["id"], ids)
    np.testing.assert_array_equal(np.array(table["row"].to_pylist()), rows)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sum(info["rows"] for info in manifest["files"].values() if info.get("table") == "item") == 1000


def test_without_optimizer_state_rows_start_fresh_state(comm: Comm, folder: Path) -> None:
    """FC 23, 24: loading for scoring."""
    model, layer = _model()
    _run(comm, model, 0, 3)
    path = _save(folder, model, layer, 3)
    scorer, scorer_layer = _model(kind="ftrl")
    checkpoint.load(path, scorer, [scorer_layer.sharded], optimizer=False)
    saved, loaded = exported(layer.sharded, comm, "item"), exported(scorer_layer.sharded, comm, "item")
    assert saved.keys() == loaded.keys()
    for row_id, (row, _) in saved.items():
        np.testing.assert_array_equal(loaded[row_id][0], row)
        np.testing.assert_allclose(loaded[row_id][1][:3], 0.1)  # FTRL's first accumulator
    with pytest.raises(CheckpointError, match="trained with adam, the model uses ftrl"):
        checkpoint.load(path, scorer, [scorer_layer.sharded])


@pytest.mark.parametrize("damage", ["no manifest", "byte", "missing", "schema", "keys", "outside", "dim"])
def test_a_damaged_checkpoint_is_a_named_error_on_all_ranks(comm: Comm, folder: Path, damage: str) -> None:
    model, layer = _model()
    _run(comm, model, 0, 2)
    path = _save(folder, model, layer, 2)
    part = next((path / "rows").glob("item/*.arrow"))
    if comm.rank == 0:
        manifest = json.loads((path / "manifest.json").read_text())
        if damage == "no manifest":
            (path / "manifest.json").unlink()
        elif damage == "byte":
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 1
            part.write_bytes(data)
        elif damage == "missing":
            part.unlink()
        elif damage == "schema":
            (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
        elif damage == "keys":
            del manifest["written_at"]
            (path / "manifest.json").write_text(json.dumps(manifest))
        elif damage == "outside":
            manifest["files"]["../../outside"] = {"sha256": "", "bytes": 0}
            (path / "manifest.json").write_text(json.dumps(manifest))
    comm.barrier()
    target, target_layer = _model(dim=4 if damage == "dim" else 3)
    named = {
        "no manifest": "not a checkpoint",
        "byte": "damaged",
        "missing": "missing",
        "schema": "schema 99",
        "keys": "lacks written_at",
    }
    with pytest.raises(CheckpointError, match={**named, "outside": "outside the checkpoint", "dim": "dim 3"}[damage]):
        checkpoint.load(path, target, [target_layer.sharded])
    if damage == "no manifest":
        assert checkpoint.latest(folder) is None


def test_an_interrupted_save_leaves_the_last_checkpoint(comm: Comm, folder: Path) -> None:
    model, layer = _model()
    path = _save(folder, model, layer, 1)
    if comm.rank == 0:
        shutil.copytree(path, folder / "step-00000002.incomplete")
        (folder / "step-00000002.incomplete" / "manifest.json").unlink()
    comm.barrier()
    assert checkpoint.latest(folder) == path
    assert _save(folder, model, layer, 2) == checkpoint.latest(folder)
    assert not (folder / "step-00000002.incomplete").exists()
