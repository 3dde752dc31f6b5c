"""A profile adds up, covers all ranks, and changes no bit of what is trained."""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ctr
from hvd_ctr import stage_clock
from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, TableConfig
from hvd_ctr.config.profile import ProfileOptions
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.training import profiler as profilers
from hvd_ctr.training import stage_times
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from hvd_ctr.training.profiler import Profiler
from tests.support.hybrid import exported, logits_model, share, unique_name

_STEPS, _GB, _FEATURES = 14, 256, 6


@pytest.fixture
def folder(comm: Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all ranks, not made yet."""
    mine = str(tmp_path_factory.mktemp("profile") / "run") if comm.rank == 0 else None
    return Path(comm.broadcast_object(mine))


def _model(steps_per_execution: int = 1) -> tuple[hvd_ctr.HybridModel, hvd_ctr.MixCacheEmbedding]:
    """Tables of two dims: two groups, whose exchanges are in flight together. The cache evicts."""
    features = [FeatureConfig(f"f{i}", table=TableConfig(f"t{i}", dim=8 if i < 4 else 4)) for i in range(_FEATURES)]
    layer = hvd_ctr.MixCacheEmbedding(
        features, CacheConfig(slots=1500, policy="lru"), seed=4, name=unique_name("profiled")
    )
    ids, numbers = keras.Input((_FEATURES,), dtype="int64", name="ids"), keras.Input((3,), name="numbers")
    rows = layer({f"f{i}": ids[:, i] for i in range(_FEATURES)})
    logits = logits_model(keras.layers.Concatenate()(list(rows.values())), numbers)
    model = hvd_ctr.HybridModel({"ids": ids, "numbers": numbers}, logits)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, steps_per_execution=steps_per_execution)
    return model, layer


def _data(comm: Comm) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """This rank's part of the global batches, one after the other."""
    generator = np.random.default_rng(5)
    mine = np.concatenate([share(comm, np.arange(_GB)) + _GB * step for step in range(_STEPS)])
    ids = generator.integers(0, 900, (_STEPS * _GB, _FEATURES))
    numbers = generator.random((_STEPS * _GB, 3), np.float32)
    labels = (generator.random((_STEPS * _GB, 1)) < 0.4).astype(np.float32)
    return {"ids": ids[mine], "numbers": numbers[mine]}, labels[mine]


def _fit(comm: Comm, depth: int, *callbacks: keras.callbacks.Callback, steps_per_execution: int = 1) -> Any:
    """The bits of weights and rows after one epoch."""
    model, layer = _model(steps_per_execution)
    x, y = _data(comm)
    batch = len(share(comm, np.arange(_GB)))
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, pipeline_depth=depth, callbacks=list(callbacks))
    tables = {table: exported(layer.sharded, comm, table) for table in layer.sharded.table_names}
    rows = {(t, i): (row.tobytes(), s.tobytes()) for t, found in tables.items() for i, (row, s) in found.items()}
    return rows, [weight.tobytes() for weight in model.get_weights()]


def _figures(comm: Comm, folder: Path) -> dict[str, Any]:
    return comm.broadcast_object(json.loads((folder / "profile.json").read_text()) if comm.rank == 0 else None)


@pytest.mark.parametrize("depth", [0, 2])
def test_fit_with_a_profile_trains_the_same_bits(comm: Comm, folder: Path, depth: int) -> None:
    expected = _fit(comm, depth)
    assert _fit(comm, depth, hvd_ctr.ProfileCallback(folder, "5:10")) == expected
    figures = _figures(comm, folder)
    assert (figures["steps"], figures["ranks"], figures["lost_events"]) == ([5, 10], comm.size, 0)
    threads = figures["threads"]
    # Medians: on a busy machine any moment of a single step may last for milliseconds.
    assert threads["GPU-Worker"]["other"]["median_ms"] <= 0.05 * figures["step_ms"]["median_ms"]
    for stages in threads.values():
        assert sum(values["share"] for values in stages.values()) == pytest.approx(1)
    on_the_path = {"launch", "lookup", "pool", "forward", "backward", "pool gradient", "segment sum", "update"}
    assert {*on_the_path, "dense update"} <= threads["GPU-Worker"].keys()
    assert figures["collectives"].keys() == stage_times.COLLECTIVES
    for values in figures["collectives"].values():
        assert 0 <= values["exposed_ms"] <= values["in_flight_ms"] + 1e-9
    if depth:
        assert {"key exchange", "plan", "host I/O", "waiting"} <= threads["Host-Manager"].keys()
        assert {"dedupe", "partition", "read", "waiting"} <= threads["Data-Loader"].keys()
        assert not {"dedupe", "plan", "key exchange"} & threads["GPU-Worker"].keys()
        if comm.rank == 0:
            _check_files(folder, comm.size)
        comm.barrier()
    else:
        assert threads.keys() == {"GPU-Worker"}
        assert {"dedupe", "partition", "plan", "host I/O"} <= threads["GPU-Worker"].keys()


def _check_files(folder: Path, ranks: int) -> None:
    _check_trace(json.loads((folder / "trace.json").read_text())["traceEvents"], ranks)
    assert "Profile of steps 5 to 10" in (folder / "profile.txt").read_text()
    (file,) = (folder / "tensorboard").iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(file)))
    steps = {event.step for event in events for value in event.summary.value if value.tag == "profile_ms/step"}
    assert steps == set(range(5, 11))


def _check_trace(events: list[dict[str, Any]], ranks: int) -> None:
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == sorted(stage_clock.THREADS * ranks) and {pid for pid, _ in tracks} == set(
        range(ranks)
    )
    complete = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == tracks.keys()
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in complete)
    for track in tracks:
        stages = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == track and e["cat"] == "stage"
        )
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(stages))  # one after the other
    steps = [[e for e in complete if e["cat"] == "step" and e["pid"] == rank] for rank in range(ranks)]
    assert [[e["name"] for e in mine] for mine in steps] == [[f"step {i}" for i in range(5, 11)]] * ranks
    for same in zip(
        *steps, strict=True
    ):  # the clocks agree: a step cannot end on one rank before it has begun on another
        assert max(e["ts"] for e in same) < min(e["ts"] + e["dur"] for e in same)
    begun = [e["id"] for e in events if e["ph"] == "b"]
    assert len(set(begun)) == len(begun) > 0 and sorted(begun) == sorted(e["id"] for e in events if e["ph"] == "e")


@pytest.mark.parametrize("depth", [0, 2])
def test_stages_add_up_to_the_step_as_measured_from_outside(comm: Comm, folder: Path, depth: int) -> None:
    model, layer = _model()
    model.synchronise()
    x, y = _data(comm)
    rows = len(share(comm, np.arange(_GB)))

    def batches() -> Any:
        for step in range(_STEPS):
            part = slice(step * rows, (step + 1) * rows)
            yield {"ids": tf.constant(x["ids"][part]), "numbers": tf.constant(x["numbers"][part])}, tf.constant(y[part])

    def inputs_of(batch: Any) -> Inputs:
        ids = batch[0]["ids"]
        return Inputs(
            [{f"f{i}": ids[:, i] for i in range(_FEATURES)}], BatchFacts(np.int64(len(ids)), np.float64(len(ids)))
        )

    stream: Any = ((batch, ()) for batch in batches())
    if depth:
        stream = Pipeline(comm, [layer], batches(), inputs_of, lambda: next(batches()), depth)
    compiled, measured = None, []
    with Profiler(comm, folder, ProfileOptions(4, _STEPS - 1)) as profiler:
        begin = time.perf_counter()
        for number, (batch, staged) in enumerate(stream, start=1):
            if compiled is None:
                specs = tensor_specs((*batch, tuple(staged)))
                compiled = tf.function(
                    lambda x, y, staged: model.hybrid_step(x, y, staged=staged).loss,
                    input_signature=list(specs),
                    autograph=False,
                )
            compiled(*batch, tuple(staged))
            measured.append(time.perf_counter() - begin)
            profiler.step(number)
            begin = time.perf_counter()
    everyone = np.array(comm.allgather_object(measured[3:-1]))
    if comm.rank == 0:
        profile = profiler.profile
        assert profile is not None
        for rank, seconds in zip(profile.ranks, everyone, strict=True):
            stages = rank.stage_ms("GPU-Worker")
            # Medians: a rank may lose its core for milliseconds between the two readings of the clock.
            assert 0.95 <= np.median(stages.sum(axis=1) / (1e3 * seconds)) <= 1.05
            assert 0.95 <= np.median(stages[:, :-1].sum(axis=1) / (1e3 * seconds)) <= 1.05
    comm.barrier()


def test_steps_of_an_execution_and_a_run_that_ends_early(comm: Comm, folder: Path) -> None:
    _fit(comm, 2, hvd_ctr.ProfileCallback(folder, "6:100"), steps_per_execution=2)
    assert _figures(comm, folder)["steps"] == [7, _STEPS]  # whole executions


def test_a_run_that_ends_before_the_first_profiled_step(
    comm: Comm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvd_ctr"), Profiler(comm, folder, ProfileOptions(5, 9)) as profiler:
        profiler.step(1)
        assert stage_clock.on()
    assert not stage_clock.on() and not folder.exists()
    assert ("no step was profiled: the run ended after 1 steps" in caplog.text) == (comm.rank == 0)


def test_a_profile_from_the_first_step_on(comm: Comm, folder: Path) -> None:
    with Profiler(comm, folder, ProfileOptions(1, 1)) as profiler:
        profiler.step(1)
        profiler.step(2)
    assert _figures(comm, folder)["steps"] == [1, 1]
    with Profiler(comm, folder / "none", ProfileOptions(1, 1)):
        pass
    assert not (folder / "none").exists()


def test_clocks_of_other_hosts_are_aligned(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profilers._clock_offset_ns(comm) == 0
    real = time.monotonic_ns
    monkeypatch.setattr(profilers, "_clock_of_host", lambda: f"host {comm.rank}")
    monkeypatch.setattr(profilers.time, "monotonic_ns", lambda: real() + 10**15 * comm.rank)
    assert abs(profilers._clock_offset_ns(comm) - 10**15 * comm.rank) < 10**9


def test_tensorflow_s_profiler(comm: Comm, folder: Path) -> None:
    with Profiler(comm, folder, ProfileOptions(2, 3, stages=False, tensorflow=True)) as profiler:
        for number in range(1, 5):
            tf.reduce_sum(tf.ones([8]))
            profiler.step(number)
    comm.barrier()
    assert len(list(folder.rglob("*.xplane.pb"))) == 1
    assert not (folder / "profile.json").exists()
