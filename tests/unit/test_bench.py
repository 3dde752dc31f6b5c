"""What the benchmarks measure with: tables, medians, steps, and the stand-in for the embedding."""

import itertools
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.stepper import ReadyRows, Stepper
from hvd_ctr.bench.train_step import Workload, embedding_steps
from hvd_ctr.comm import LocalComm
from hvd_ctr.training.hybrid_model import HybridModel

WORKLOAD = Workload(scale=1e-4, dim=4, batch=16, steps=6, warm=0, mlp=(4,), slots=4096)


def test_interleaved_runs_every_variant_once_per_round_and_turns_the_order():
    comms.init()
    order = []
    variants = {name: lambda name=name: float(len(order.append(name) or order)) for name in "ab"}
    found = measure.interleaved(variants, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_table_is_markdown_with_aligned_columns():
    assert measure.table(["x", "ms"], [["a", 1], ["bb", 22.5]]).splitlines() == [
        "| x  |   ms |",
        "| -- | ---: |",
        "| a  |    1 |",
        "| bb | 22.5 |",
    ]


@pytest.mark.parametrize(("value", "at_least", "holds"), [(1.0, False, True), (1.2, False, False), (1.2, True, True)])
def test_must_says_whether_the_bound_is_kept(value, at_least, holds):
    must = measure.Must("ratio", value, 1.1, at_least)
    assert must.holds is holds
    assert str(must).endswith("yes" if holds else "NO")


def test_ready_rows_get_gradients_and_train_the_tower_like_plain_keras():
    comms.init()
    rows = tf.constant(np.random.default_rng(0).random((8, 6), np.float32))
    labels = tf.constant(np.arange(8)[:, None] % 2, tf.float32)

    def tower(inputs, x):
        return HybridModel({"rows": inputs}, keras.layers.Dense(1, kernel_initializer="ones")(x))

    def ours():
        inputs = keras.Input((6,), name="rows")
        model = tower(inputs, ReadyRows(name="ready")(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    steps = Stepper(ours, itertools.repeat(({"rows": rows}, labels)))
    steps.run(3)

    inputs = keras.Input((6,), name="rows")
    plain = keras.Model({"rows": inputs}, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    for _ in range(3):
        kernel = plain.trainable_variables[0].numpy()[:, 0]  # before the last step
        error = plain({"rows": rows}).numpy() - labels.numpy()
        plain.train_on_batch({"rows": rows}, labels)
    for mine, other in zip(steps.model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-5)
    seen = float(steps.model.get_layer("ready").seen)
    np.testing.assert_allclose(seen, 2 * error[0, 0] / 8 * kernel[0], rtol=1e-5)


def test_the_pipeline_changes_no_loss_and_the_communicator_is_put_back():
    comm = comms.init()
    losses = []
    for depth in (0, 2):
        steps = embedding_steps(WORKLOAD, depth, LocalComm())
        steps.run(3)
        steps.close()
        losses.append(steps.loss)
    assert losses[0] == losses[1]
    assert comms.current() is comm


def test_bench_train_step_prints_the_rate(monkeypatch):
    environment = {**{f.upper(): str(v) for f, v in (("scale", 1e-4), ("batch", 16), ("steps", 2), ("warm", 1))}}
    environment |= {"MLP": "4", "SLOTS": "4096", "DEPTH": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "hvd_ctr", "bench", "train-step"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s=" in done.stdout and "depth=1" in done.stdout


def test_written_figures_tell_machine_and_date(tmp_path):
    measure.write_json(str(tmp_path / "figures.json"), {"ratio": 1.5})
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ratio"] == 1.5
    assert set(figures["machine"]) == {"processor", "cores", "commit", "date"}
