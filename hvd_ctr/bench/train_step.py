"""`hvd-ctr bench train-step`: samples/s of the train step on the workload that other trainers are compared on.

26 categorical features with Criteo-Kaggle's cardinalities times SCALE, power-law ids (exponent 1.1) spread over the
table, 13 dense features, one MLP, Adagrad with learning rate 0.05 on rows and dense weights, synchronous steps. By
environment: SCALE (0.25), DIM (16), BATCH per rank (4096), STEPS timed (60), WARM steps before (15), MLP ("256,128"),
SLOTS per rank (2,097,152), DEPTH of the pipeline (0: none), FACTORIZED (1: the first layer is a FactorizedDense; 0: a
plain Dense on the expanded rows). Ids depend on the rank only, as in the comparison's own
generator; they are made beforehand, so reading is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr import comm as comms
from hvd_ctr.bench.stepper import ReadyRows, Stepper
from hvd_ctr.config import CacheConfig, FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.config.profile import ProfileOptions
from hvd_ctr.data.synthetic import CRITEO_CARDINALITIES
from hvd_ctr.layers import FactorizedDense, MixCacheEmbedding
from hvd_ctr.training.hybrid_model import HybridModel
from hvd_ctr.training.profiler import Profiler

_EXPONENT = 1.1
_LEARNING_RATE = 0.05
_SEED = 7
_DENSE = 13


@dataclasses.dataclass(frozen=True)
class Workload:
    """The workload's knobs; units: rows, floats, samples, steps."""

    scale: float = 0.25
    dim: int = 16
    batch: int = 4096
    steps: int = 60
    warm: int = 15
    mlp: tuple[int, ...] = (256, 128)
    slots: int = 1 << 21
    depth: int = 0
    factorized: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Workload:
        """Reads the knobs; raises ValueError naming a variable that is no number."""
        parsers: dict[str, Callable[[str], Any]] = {
            "scale": float,
            "mlp": lambda text: tuple(int(width) for width in text.split(",")),
            "factorized": lambda text: bool(int(text)),
        }
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = environment.get(field.name.upper())
            if text is not None:
                try:
                    values[field.name] = parsers.get(field.name, int)(text)
                except ValueError:
                    raise ValueError(
                        f"environment variable {field.name.upper()}: received {text!r}, needs numbers"
                    ) from None
        return cls(**values)

    @property
    def cardinalities(self) -> list[int]:
        """Rows per table."""
        return [max(3, int(cardinality * self.scale)) for cardinality in CRITEO_CARDINALITIES]


def power_law_ids(rng: np.random.Generator, count: int, cardinality: int) -> NDArray[np.int64]:
    """(count) int64: popularity ranks by inverse CDF of x^-1.1 on [1, cardinality], spread over the table by a
    bijection.
    """
    exponent = 1 - _EXPONENT
    x = (1 - rng.random(count) * (1 - cardinality**exponent)) ** (1 / exponent)
    popularity = np.minimum(x.astype(np.int64) - 1, cardinality - 1).clip(0)
    spread: NDArray[np.int64] = popularity * stride_over(cardinality) % cardinality
    return spread


def stride_over(cardinality: int) -> int:
    """Multiplied by this, modulo the cardinality, numbers spread over a table without two falling together."""
    stride = int(cardinality * 0.6180339887) | 1
    while math.gcd(stride, cardinality) != 1:
        stride += 1
    return stride


def make_batches(workload: Workload, rank: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """ids (steps, B, 26) int64, dense (steps, B, 13) float32, labels (steps, B) float32 for warm + timed steps."""
    rng = np.random.default_rng(_SEED + 1000 * rank)
    steps, batch = workload.warm + workload.steps, workload.batch
    columns = [
        power_law_ids(rng, steps * batch, cardinality).reshape(steps, batch) for cardinality in workload.cardinalities
    ]
    dense = rng.random((steps, batch, _DENSE), dtype=np.float32)
    labels = (rng.random((steps, batch)) < 0.25).astype(np.float32)
    return np.stack(columns, axis=2), dense, labels


def build(workload: Workload) -> HybridModel:
    """Embeddings of 26 tables beside the dense features, into the MLP."""
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=_LEARNING_RATE)
    features = [
        FeatureConfig(f"C{i + 1}", table=TableConfig(f"C{i + 1}", dim=workload.dim, rows=rows, optimizer=optimizer))
        for i, rows in enumerate(workload.cardinalities)
    ]
    dense_input = keras.Input((_DENSE,), name="dense_features")
    ids = keras.Input((len(features),), dtype="int64", name="ids")
    embedding = MixCacheEmbedding(features, CacheConfig(slots=workload.slots), name="embedding")
    inputs = {"dense_features": dense_input, "ids": ids}
    if not workload.factorized:
        return _compiled(inputs, embedding(ids, dense=dense_input), workload.mlp)
    first = FactorizedDense(workload.mlp[0], activation="relu", name="first")
    return _compiled(inputs, first(embedding(ids, factored=True), dense=dense_input), workload.mlp[1:])


def dense_only(workload: Workload) -> HybridModel:
    """The same tower on ready-made rows (B, 13 + 26 D), with gradients for them: what no embedding can be faster
    than.
    """
    columns = _DENSE + len(workload.cardinalities) * workload.dim
    inputs = keras.Input((columns,), name="rows")
    return _compiled({"rows": inputs}, ReadyRows(name="ready")(inputs), workload.mlp)


def _compiled(inputs: dict[str, Any], x: Any, widths: Sequence[int]) -> HybridModel:
    for width in widths:
        x = keras.layers.Dense(width, activation="relu")(x)
    model = HybridModel(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adagrad(_LEARNING_RATE), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def embedding_steps(workload: Workload, depth: int, comm: comms.Comm | None = None) -> Stepper:
    """Steps of the model on this rank's batches."""
    ids, dense, labels = make_batches(workload, comms.current().rank)
    numbers = itertools.cycle(range(len(ids)))  # the pipeline asks for more than are trained
    # As tensors, as a reader hands them over: reading is free here.
    ready = [
        tf.nest.map_structure(tf.constant, ({"dense_features": dense[s], "ids": ids[s]}, labels[s, :, None]))
        for s in range(len(ids))
    ]
    batches = (ready[s] for s in numbers)
    keras.utils.set_random_seed(_SEED)
    return Stepper(lambda: build(workload), batches, depth, comm)


def dense_steps(workload: Workload) -> Stepper:
    """Steps of the dense-only ceiling, on one batch again and again."""
    rng = np.random.default_rng(_SEED)
    columns = _DENSE + len(workload.cardinalities) * workload.dim
    rows = tf.constant(rng.random((workload.batch, columns), dtype=np.float32))
    labels = tf.constant((rng.random((workload.batch, 1)) < 0.25).astype(np.float32))
    keras.utils.set_random_seed(_SEED)
    return Stepper(lambda: dense_only(workload), itertools.repeat(({"rows": rows}, labels)))


def main(workload: Workload, profile: ProfileOptions | None = None) -> int:
    """Runs the workload and prints one line on rank 0; profiles some steps on demand."""
    comm = comms.init()
    steps = embedding_steps(workload, workload.depth)
    with contextlib.ExitStack() as stack:
        if profile is not None:
            steps.profiler = stack.enter_context(Profiler(comm, Path("profile-train-step"), profile))
        steps.run(workload.warm)
        milliseconds = steps.run(workload.steps)
    if comm.rank == 0:
        rate = 1e3 * workload.batch * comm.size / milliseconds
        stats = steps.model.embeddings[0].cache_stats()["total"]
        print(
            f"hvd_ctr ranks={comm.size} batch={workload.batch} dim={workload.dim} mlp={list(workload.mlp)} "
            f"depth={workload.depth} samples/s={rate:.0f} ms/step={milliseconds:.2f} loss={steps.loss:.4f} "
            f"hit_rate={stats['hit_rate']:.3f}",
            flush=True,
        )
    steps.close()
    return 0
