"""The tier behind the cache changes no bit: rows in memory, and rows on disk with room in memory for a part of them."""

from __future__ import annotations

import gc
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.training import checkpoint
from hvd_ctr.training.checkpoint import Progress
from tests.support.hybrid import exported, logits_model, share, unique_name

_GB, _DIM, _SLOTS, _RAM_BYTES, _IDS = 512, 64, 1200, 1 << 20, 12000
_TABLES = ("item", "user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this rank."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def _disk(folder: Path, **fields) -> HostConfig:
    return HostConfig(**{"kind": "disk", "path": str(folder), "ram_bytes": _RAM_BYTES, **fields})


def _model(host: HostConfig) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    kinds = {"item": "adagrad", "user": "sgd"}
    tables = [
        TableConfig(name, dim=_DIM, optimizer=SparseOptimizerConfig(kind=kinds[name], learning_rate=0.05))
        for name in _TABLES
    ]
    features = [FeatureConfig(table.name, table=table) for table in tables]
    layer = hvd_ctr.MixCacheEmbedding(features, CacheConfig(slots=_SLOTS), seed=4, name=unique_name("tier"), host=host)
    ids, numbers = keras.Input((2,), dtype="int64", name="ids"), keras.Input((2,), name="numbers")
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits_model(layer(ids), numbers))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    model.synchronise()
    return model, layer


def _train(comm: Comm, model: hvd_ctr.HybridModel, first: int, steps: int) -> list[float]:
    """Trains global batches first .. first+steps-1; returns this rank's losses."""
    run = tf.function(lambda x, y: model.hybrid_step(x, y).loss, reduce_retracing=True, autograph=False)
    losses = []
    for number in range(first, first + steps):
        generator = np.random.default_rng(number)
        ids = np.where(
            generator.random((_GB, 2)) < 0.3,
            generator.integers(0, 100, (_GB, 2)),
            2**40 + generator.integers(0, _IDS, (_GB, 2)),
        )
        numbers = generator.random((_GB, 2), np.float32)
        labels = (generator.random((_GB, 1)) < 0.4).astype(np.float32)
        mine = share(comm, np.arange(_GB))
        losses.append(
            float(
                run({"ids": tf.constant(ids[mine]), "numbers": tf.constant(numbers[mine])}, tf.constant(labels[mine]))
            )
        )
    return losses


def _bits(comm: Comm, model: hvd_ctr.HybridModel, layer: hvd_ctr.MixCacheEmbedding) -> bytes:
    """Dense weights, all rows and their state."""
    parts = [np.asarray(weight).tobytes() for weight in model.weights]
    for table in _TABLES:
        rows = exported(layer.sharded, comm, table)
        parts += [entry.tobytes() for row_id in sorted(rows) for entry in rows[row_id]]
    return b"".join(parts)


@pytest.mark.parametrize("direct_io", [True, False])
def test_disk_tier_equals_ram_tier_bit_for_bit(comm: Comm, folder: Path, direct_io: bool) -> None:
    ram_model, ram_layer = _model(HostConfig())
    disk_model, disk_layer = _model(_disk(folder, direct_io=direct_io))
    assert _train(comm, disk_model, 0, 25) == _train(comm, ram_model, 0, 25)
    total = disk_layer.cache_stats()["total"]
    # The file was really used. Each rank owns a W-th of the rows, and has the whole budget for them.
    assert total["disk_rows_read"] > 50 // comm.size and total["disk_rows_written"] > 2000 // comm.size
    assert total["disk_bytes"] > _RAM_BYTES // comm.size
    record_bytes = 2 * _DIM * 4  # Adagrad, the larger state of the two tables.
    assert total["host_disk_bytes"] == (total["disk_rows_read"] + total["disk_rows_written"]) * record_bytes
    assert ram_layer.cache_stats()["total"]["disk_bytes"] == 0
    ids = np.concatenate([np.arange(100), 2**40 + np.arange(0, _IDS, 7)])
    for table in _TABLES:
        np.testing.assert_array_equal(
            disk_layer.get_rows(table, ids[comm.rank :]), ram_layer.get_rows(table, ids[comm.rank :])
        )
    assert _bits(comm, disk_model, disk_layer) == _bits(comm, ram_model, ram_layer)
    # Reading and exporting changed nothing.
    assert _train(comm, disk_model, 25, 5) == _train(comm, ram_model, 25, 5)
    assert _bits(comm, disk_model, disk_layer) == _bits(comm, ram_model, ram_layer)


def test_a_budget_in_ram_that_suffices_changes_nothing(comm: Comm) -> None:
    free_model, free_layer = _model(HostConfig())
    tight_model, tight_layer = _model(HostConfig(ram_bytes=32 << 20))
    assert _train(comm, tight_model, 0, 8) == _train(comm, free_model, 0, 8)
    assert _bits(comm, tight_model, tight_layer) == _bits(comm, free_model, free_layer)


@pytest.mark.parametrize("to_disk", [True, False])
def test_a_checkpoint_restores_into_the_other_tier(
    comm: Comm, folder: Path, tmp_path_factory: pytest.TempPathFactory, to_disk: bool
) -> None:
    shared = Path(comm.broadcast_object(str(tmp_path_factory.mktemp("tiers")) if comm.rank == 0 else None))
    hosts = [HostConfig(), _disk(folder)] if to_disk else [_disk(folder), HostConfig()]
    model, layer = _model(hosts[0])
    _train(comm, model, 0, 15)
    path = checkpoint.save(shared / "step-00000015", model, [layer.sharded], Progress(15, 1, 15))
    expected = _train(comm, model, 15, 5)
    other_model, other_layer = _model(hosts[1])
    assert checkpoint.load(path, other_model, [other_layer.sharded]) == Progress(15, 1, 15)
    assert _train(comm, other_model, 15, 5) == expected
    assert _bits(comm, other_model, other_layer) == _bits(comm, model, layer)


def test_a_full_disk_on_one_rank_is_one_error_on_all_and_rows_can_be_saved(comm: Comm, folder: Path) -> None:
    """Rank 0 cannot write more than 1 MB to a file. All ranks fail alike; then every row can still be exported."""
    model, layer = _model(_disk(folder))
    _train(comm, model, 0, 3)
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    steps = 0
    try:
        if comm.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, kept[1]))
        with pytest.raises(tf.errors.ResourceExhaustedError, match="on rank 0: cannot write .*rank0of.*File too large"):
            for steps in range(3, 100):
                _train(comm, model, steps, 1)
        saved = {
            table: np.concatenate([chunk.rows for chunk in layer.sharded.export_rows(table)])
            for table in layer.sharded.table_names
        }
    finally:
        # The memory that the ranks share is a file as well, to the limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(set(comm.allgather_object(steps))) == 1
    # A second model without limits, on the same batches: what the first one has of it is the same.
    reference_model, reference_layer = _model(HostConfig())
    _train(comm, reference_model, 0, steps)
    assert _bits(comm, model, layer) == _bits(comm, reference_model, reference_layer)
    for table, rows in saved.items():
        again = np.concatenate([chunk.rows for chunk in layer.sharded.export_rows(table)])
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(again, axis=0))


def test_files_are_named_by_layer_and_rank_and_removed(comm: Comm, folder: Path) -> None:
    stem = unique_name("files")
    features = [FeatureConfig(name, table=TableConfig(name, dim=dim)) for name, dim in (("item", 4), ("user", 8))]
    sharded = hvd_ctr.ShardedEmbedding(features, CacheConfig(slots=8), comm, name=stem, host=_disk(folder))
    names = {f"{stem}.dim{dim}.rank{comm.rank}of{comm.size}.rows" for dim in (4, 8)}
    assert {path.name for path in folder.iterdir()} == names
    with pytest.raises(OSError, match=f"{stem}.*rows is in use"):
        hvd_ctr.ShardedEmbedding(features, CacheConfig(slots=8), comm, name=stem, host=_disk(folder))
    assert {path.name for path in folder.iterdir()} == names
    del sharded
    gc.collect()
    assert not list(folder.iterdir())


def test_a_tier_that_cannot_be_made_is_named(comm: Comm, folder: Path) -> None:
    features = [FeatureConfig("item", table=TableConfig("item", dim=4))]
    with pytest.raises(OSError, match="absent.*No such file or directory.*embedding.host.path"):
        hvd_ctr.ShardedEmbedding(features, CacheConfig(slots=8), comm, host=_disk(folder / "absent"))
    with pytest.raises(ValueError, match=r"embedding.host.ram_bytes is 1000; .* need at least \d+"):
        hvd_ctr.ShardedEmbedding(features, CacheConfig(slots=8), comm, host=_disk(folder, ram_bytes=1000))


def test_the_tier_is_part_of_the_layers_configuration(folder: Path) -> None:
    features = [FeatureConfig("item", table=TableConfig("item", dim=4))]
    layer = hvd_ctr.MixCacheEmbedding(features, name=unique_name("copied"), host=_disk(folder))
    assert hvd_ctr.MixCacheEmbedding.from_config(layer.get_config()).host == _disk(folder)
