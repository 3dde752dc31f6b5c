"""Checkpoints at any number of ranks: what is saved is what is restored (FC 22, 23, 52, 62, 89, 92, 96, 98)."""

from __future__ import annotations

import json
import resource
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
from hvd_ctr.training.checkpoint import CheckpointError, DamagedCheckpointError, Progress
from hvd_ctr.training.save_timer import SaveTimer
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


@pytest.mark.parametrize(
    "damage",
    ["no manifest", "byte", "missing", "schema", "keys", "rows", "column", "outside", "dim"],
)
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
        elif damage == "rows":  # a manifest and files that are whole, but do not fit each other
            manifest["tables"]["item"]["rows"] += 1
            (path / "manifest.json").write_text(json.dumps(manifest))
        elif damage == "column":
            manifest["tables"]["item"]["columns"].append("age")
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
        "rows": "found an owner",
        "column": r"table 'item' has column\(s\) age, which this version does not know",
    }
    with pytest.raises(
        CheckpointError, match={**named, "outside": "outside the checkpoint", "dim": "dim 3"}[damage]
    ) as caught:
        checkpoint.load(path, target, [target_layer.sharded])
    # Only these are passed over on --resume.
    damaged = damage in ("no manifest", "byte", "missing", "keys")
    assert isinstance(caught.value, DamagedCheckpointError) == damaged
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


def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_checkpoint_before(comm: Comm, folder: Path) -> None:
    """The last rank cannot write its rows (a limit of file size stands in for the full disk); training could go on."""
    model, layer = _model(kind="sgd")
    _run(comm, model, 0, 1)
    path = _save(folder, model, layer, 1)
    layer.sharded.import_rows("item", np.arange(60_000), np.zeros((60_000, 3), np.float32))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=rf"writing .*step-00000002.* failed on rank {comm.size - 1}: OSError"
        ):
            _save(folder, model, layer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    comm.barrier()
    assert [entry.name for entry in folder.iterdir()] == [path.name]
    assert len(_run(comm, model, 1, 1)) == 1
    assert _save(folder, model, layer, 2) == checkpoint.latest(folder)


def test_a_folder_that_only_rank_0_sees_is_an_error_on_all_ranks(
    comm: Comm, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """FC 99."""
    if comm.size == 1:
        pytest.skip("needs several ranks")
    model, layer = _model()
    path = _save(folder, model, layer, 1)
    own = folder if comm.rank == 0 else tmp_path_factory.mktemp("own")
    with pytest.raises(CheckpointError, match="file system that all ranks share"):
        checkpoint.save(own / "step-00000002", model, [layer.sharded], Progress(2, 0, 2))
    for name in () if comm.rank == 0 else ("rows/item", "rows/a%2Fb%20.."):
        (own / "step-00000003.incomplete" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="rank 0 does not see"):
        checkpoint.save(own / "step-00000003", model, [layer.sharded], Progress(3, 0, 3))
    comm.barrier()
    target, target_layer = _model()
    with pytest.raises(DamagedCheckpointError, match="failed on rank 1: .*has no manifest"):
        checkpoint.load(own / path.name, target, [target_layer.sharded])


def test_random_numbers_go_on_where_they_were(comm: Comm, folder: Path) -> None:
    """Dropout's seed generator and the scale of the tables' learning rates (FC 81) belong to the state."""

    def build() -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
        keras.utils.set_random_seed(7)
        table = TableConfig("item", dim=3, optimizer=SparseOptimizerConfig(kind="adagrad", learning_rate=0.05))
        layer = hvd_ctr.MixCacheEmbedding(
            [FeatureConfig(f"f{i}", table=table) for i in range(2)], CacheConfig(slots=200), name=unique_name("dropped")
        )
        ids, numbers = keras.Input((2,), dtype="int64", name="ids"), keras.Input((2,), name="numbers")
        dropped = keras.layers.Dropout(0.5)(layer(ids))
        model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(dropped, numbers))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
        model.synchronise()
        return model, layer

    model, layer = build()
    model.embedding_learning_rate_scale.assign(0.25)
    _run(comm, model, 0, 5)
    path = _save(folder, model, layer, 5)
    expected = _run(comm, model, 5, 5)
    restored, restored_layer = build()
    checkpoint.load(path, restored, [restored_layer.sharded])
    assert float(restored.embedding_learning_rate_scale) == 0.25
    assert _run(comm, restored, 5, 5) == expected


def test_a_model_without_weights_yet_is_refused(comm: Comm, folder: Path) -> None:
    """FC 93: not a silent load of the rows alone."""
    model, layer = _model()
    path = _save(folder, model, layer, 0)

    class Lazy(hvd_ctr.HybridModel):
        def __init__(self) -> None:
            super().__init__()
            self.rows = hvd_ctr.MixCacheEmbedding(layer.features, CacheConfig(slots=96), name=unique_name("lazy"))

        def call(self, inputs):
            return logits_model(self.rows(inputs["ids"]), inputs["numbers"])

    lazy = Lazy()
    with pytest.raises(CheckpointError, match="has no weights yet"):
        checkpoint.load(path, lazy, [lazy.rows.sharded])


def test_another_optimizer_or_layer_is_named(comm: Comm, folder: Path) -> None:
    model, layer = _model()
    path = _save(folder, model, layer, 0)
    other, other_layer = _model()
    other.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    with pytest.raises(CheckpointError, match="dense variable.s. that the model has not: optimizer/"):
        checkpoint.load(path, other, [other_layer.sharded])


def test_rank_0_decides_when_a_save_by_clock_is_due(comm: Comm) -> None:
    """The other ranks' clocks stand still or run away; all save at the same steps."""
    now = [0.0]
    timer = SaveTimer(comm, 30.0, lambda: now[0] if comm.rank == 0 else 1e6 * comm.rank * now[0])
    due = []
    for step in range(300):
        now[0] += 0.5
        if timer.due():
            due.append(step)
            timer.restart()
    assert len(due) == 5 and comm.allgather_object(due) == [due] * comm.size
