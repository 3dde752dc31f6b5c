"""Checkpoints of tables with min_count, max_idle_steps and max_rows: occurrences and last steps are restored."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pytest

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import TableConfig
from hvd_ctr.training import checkpoint
from hvd_ctr.training.checkpoint import CheckpointError, Progress
from tests.support import row_life_stream as stream
from tests.support.hybrid import exported

_HALF = 31


@pytest.fixture
def folder(comm: Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all ranks."""
    mine = str(tmp_path_factory.mktemp("life")) if comm.rank == 0 else None
    return Path(comm.broadcast_object(mine))


def _dense() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _save(folder: Path, layer: hvd_ctr.MixCacheEmbedding) -> Path:
    return checkpoint.save(folder / f"step-{_HALF:08d}", _dense(), [layer.sharded], Progress(_HALF, 0, _HALF))


def _columns(path: Path, table: str, kind: str) -> pa.Table:
    parts = sorted((path / "rows" / table).glob(f"{kind}-*.arrow"))
    return pa.concat_tables([pa.ipc.open_file(part).read_all() for part in parts]).sort_by("id")


def test_interrupted_and_resumed_equals_the_reference(comm: Comm, folder: Path) -> None:
    layer = stream.make_layer(4096)
    stream.train(comm, layer, range(_HALF), depth=2)
    path = _save(folder, layer)
    restored = stream.make_layer(200)
    checkpoint.load(path, _dense(), [restored.sharded])
    stream.assert_equals(restored, comm, stream.reference(_HALF))
    stream.train(comm, restored, range(_HALF, stream.STEPS), depth=2)
    stream.assert_equals(restored, comm, stream.reference())


def test_columns_are_readable_with_pyarrow_alone(comm: Comm, folder: Path) -> None:
    layer = stream.make_layer(4096)
    stream.train(comm, layer, range(_HALF))
    path, reference = _save(folder, layer), stream.reference(_HALF)
    for table in stream.TABLES:
        rows = _columns(path, table.name, "part")
        assert rows.schema.names == ["id", "row", "state", *(["count", "last_step"] if table.tracks_rows else [])]
        assert rows["id"].to_pylist() == sorted(i for name, i in reference.records if name == table.name)
        assert bool(list((path / "rows" / table.name).glob("waiting-*"))) == (table.min_count > 1)
    waiting = _columns(path, "late", "waiting")
    wanted = {i: n for (name, i), n in reference.counts.items() if name == "late" and n < 4}
    assert dict(zip(waiting["id"].to_pylist(), waiting["count"].to_pylist(), strict=True)) == wanted
    assert waiting["last_step"].to_pylist() == [reference.last_steps["late", i] for i in sorted(wanted)]


def test_rows_of_a_checkpoint_without_the_columns_are_rows_just_trained(comm: Comm, folder: Path) -> None:
    """One of a version, or of a configuration, that kept no occurrences."""
    plain = [TableConfig(t.name, dim=t.dim, optimizer=t.optimizer) for t in stream.TABLES]
    layer = stream.make_layer(4096, tables=plain)
    stream.train(comm, layer, range(_HALF))
    path = _save(folder, layer)
    restored = stream.make_layer(4096)
    checkpoint.load(path, _dense(), [restored.sharded])
    for table in stream.TABLES:
        rows = exported(layer.sharded, comm, table.name)
        assert exported(restored.sharded, comm, table.name).keys() == rows.keys()
        if table.tracks_rows:
            known = stream.known(restored, comm, table.name)
            assert known == dict.fromkeys(rows, (table.min_count, _HALF, True))


def test_for_scoring_only_the_rows_are_loaded(comm: Comm, folder: Path) -> None:
    layer = stream.make_layer(4096)
    stream.train(comm, layer, range(_HALF))
    scorer = stream.make_layer(4096)
    checkpoint.load(_save(folder, layer), _dense(), [scorer.sharded], optimizer=False)
    assert scorer.cache_stats()["total"]["waiting_ids"] == 0
    ids = np.arange(0, 600)
    np.testing.assert_array_equal(scorer.get_rows("late", ids), layer.get_rows("late", ids))


def test_a_missing_file_of_waiting_ids_is_named(comm: Comm, folder: Path) -> None:
    layer = stream.make_layer(4096)
    stream.train(comm, layer, range(3))
    path = _save(folder, layer)
    if comm.rank == 0:
        min((path / "rows" / "late").glob("waiting-*")).unlink()
    comm.barrier()
    with pytest.raises(CheckpointError, match="waiting-00000-of.*is missing"):
        checkpoint.load(path, _dense(), [stream.make_layer(4096).sharded])


def test_keras_files_hold_occurrences_too(comm: Comm, tmp_path: Path) -> None:
    if comm.size > 1:
        pytest.skip("Keras files are written by one process")

    def model(layer: hvd_ctr.MixCacheEmbedding) -> keras.Model:
        ids = keras.Input((len(layer.features),), dtype="int64")
        return keras.Model(ids, keras.layers.Flatten()(layer(ids)))

    layer, restored = stream.make_layer(4096), stream.make_layer(100)
    saved, loaded = model(layer), model(restored)
    stream.train(comm, layer, range(_HALF))
    saved.save_weights(tmp_path / "a.weights.h5")
    loaded.load_weights(tmp_path / "a.weights.h5")
    stream.assert_equals(restored, comm, stream.reference(_HALF))
