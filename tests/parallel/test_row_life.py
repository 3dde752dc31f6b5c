"""Rows that come late and go: min_count, max_idle_steps, max_rows. Eviction is not deletion.

W ranks with any cache, tier and pipeline depth have the rows, values, counts and last steps of the dense reference.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr.comm import Comm
from hvd_ctr.config import HostConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.training.pipeline import Inputs, Pipeline
from tests.support import row_life_stream as stream
from tests.support.hybrid import exported, needed_slots, share


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this rank."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_the_stream_tests_something() -> None:
    reference = stream.reference()
    for table in stream.TABLES:
        seen = {
            i
            for f, feature in enumerate(stream.FEATURES)
            if feature.table is table
            for i in np.unique(stream.global_ids()[:, :, f])
        }
        rows = {i for name, i in reference.records if name == table.name}
        assert (rows != seen) == table.tracks_rows, table.name
        assert len(rows) > 30
    assert any(reference.counts[key] < 4 for key in reference.counts if key[0] == "late")


@pytest.mark.parametrize(
    ("size", "depth", "disk"),
    [("tiny", 0, False), ("tiny", 2, True), ("big", 0, True), ("big", 2, False)],
)
def test_any_ranks_cache_tier_and_depth_equal_the_reference(
    comm: Comm, folder: Path, size: str, depth: int, disk: bool
) -> None:
    needed = max(comm.allgather_object(needed_slots(stream.make_layer(1).sharded, stream.global_ids())))
    host = HostConfig(kind="disk", path=str(folder), ram_bytes=1 << 20) if disk else None
    layer = stream.make_layer(needed if size == "tiny" else 4096, host)
    stream.train(comm, layer, range(stream.STEPS), depth)
    stream.assert_equals(layer, comm, stream.reference())
    stats = layer.cache_stats()
    assert stats["total"]["pinned_slots"] == 0
    told = layer.sharded.report_row_life()
    assert told["few"]["deleted_max_rows"] > 0 and told["few"]["deleted_idle"] == told["few"]["not_admitted"] == 0
    assert told["idle"]["deleted_idle"] > 0 and told["late"]["not_admitted"] > 0
    assert told["late"]["waiting_ids"] == sum(
        count < 4 for (name, _), count in stream.reference().counts.items() if name == "late"
    )


def test_deletions_and_refusals_are_logged_once_by_rank_0(comm: Comm, caplog: pytest.LogCaptureFixture) -> None:
    layer = stream.make_layer(4096)
    stream.train(comm, layer, range(30))
    with caplog.at_level(logging.INFO, logger="hvd_ctr"):
        told = layer.sharded.report_row_life()
        layer.sharded.report_row_life()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("table ")]
    assert len(lines) == (4 if comm.rank == 0 else 0)
    if comm.rank == 0:
        (line,) = [line for line in lines if line.startswith("table both:")]
        assert f"{told['both']['deleted_idle']} idle rows deleted" in line
        assert f"{told['both']['deleted_max_rows']} beyond max_rows" in line


def test_evaluation_counts_nothing(comm: Comm) -> None:
    """Unseen ids and ids that wait have their initial value, and looking at them changes nothing."""
    layer, untouched = stream.make_layer(4096), stream.make_layer(4096)
    stream.train(comm, layer, range(5))
    waiting = sorted(i for (name, i), n in stream.reference(5).counts.items() if name == "late" and n < 4)
    before = stream.known(layer, comm, "late")
    for _ in range(5):
        rows = layer.get_rows("late", waiting)
    np.testing.assert_array_equal(rows, untouched.get_rows("late", waiting))
    assert stream.known(layer, comm, "late") == before
    assert untouched.cache_stats()["total"]["waiting_ids"] == 0


def test_batches_that_are_released_untrained_count_nothing(comm: Comm) -> None:
    """The end of a run drops prefetched batches."""
    layer = stream.make_layer(4096)
    mine = [share(comm, ids) for ids in stream.global_ids()[:20]]
    with Pipeline(
        comm,
        [layer],
        iter(mine),
        lambda ids: Inputs([ids], BatchFacts(np.int64(len(ids)), np.float64(len(ids)))),
        lambda: np.zeros((0, len(stream.FEATURES)), np.int64),
        4,
    ) as pipeline:
        for step, (ids, staged) in enumerate(pipeline):
            stream.train_step(layer, ids, step, staged)
            if step == 8:
                break
    stream.assert_equals(layer, comm, stream.reference(9))


def test_fit_sweeps_inside_the_graph_at_any_depth(comm: Comm) -> None:
    """The collective of a sweep runs in one branch of the compiled step, beside the pipeline's key exchanges."""
    ids = np.stack([share(comm, batch) for batch in stream.global_ids()])
    labels = (ids[:, :, :1] % 2).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    outcomes = []
    for depth in (0, 2):
        layer = stream.make_layer(400)
        inputs = keras.Input((len(stream.FEATURES),), dtype="int64")
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Flatten()(layer(inputs)))
        model = hvd_ctr.HybridModel(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit(data, epochs=2, verbose=0, pipeline_depth=depth)
        told = layer.sharded.report_row_life()
        assert told["few"]["deleted_max_rows"] > 0 and told["idle"]["deleted_idle"] > 0
        rows = [exported(layer.sharded, comm, table.name) for table in stream.TABLES]
        assert len(rows[2]) <= 90  # step 120 is a multiple of 4: a sweep came last
        outcomes.append(
            [np.asarray(weight).tobytes() for weight in model.weights]
            + [(i, *(part.tobytes() for part in table[i])) for table in rows for i in sorted(table)]
            + [told]
        )
    assert outcomes[0] == outcomes[1]
