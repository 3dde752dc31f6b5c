"""What do the fused interactions save over the same in TensorFlow's operations, and what share of a step do they have?

    python benchmarks/interactions.py                       # B=4096, F=26, D=16, one core

Forward and backward of the interaction of all pairs (DLRM), of the factorization machine and of three cross layers (DCN
V2, 13 + F D columns; not fused, since products of matrices take nearly all of it), on one thread, and the whole step on
one rank of DLRM, with the towers that `hvd-ctr` has by default. DeepFM's factorization machine works on distinct rows.
All run in turn.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import Must, median
from hvd_ctr.bench.stepper import Stepper
from hvd_ctr.config import CacheConfig, FeatureConfig, ModelConfig, TableConfig
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.layers.interactions import CrossNetV2
from hvd_ctr.models import build_model, row_dim
from hvd_ctr.ops import interaction_ops
from hvd_ctr.training.hybrid_model import HybridModel

DENSE = 13
FORMS = {
    "all pairs": (interaction_ops.dot_pairs, interaction_ops.plain_dot_pairs),
    "factorization machine": (interaction_ops.pair_sum, interaction_ops.plain_pair_sum),
}
STEPS = {"all pairs": "dlrm"}  # The model with the interaction.


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096, help="B")
    parser.add_argument("--features", type=int, default=26, help="F")
    parser.add_argument("--dim", type=int, default=16, help="D")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10, help="per round and form")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args()


# ---- in the worker ----


def both_ways(function: Callable[[Any], Any], inputs: Any, calls: int) -> Callable[[], float]:
    """A variant: ms per forward and backward pass."""

    @tf.function(autograph=False)
    def run(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(inputs)
        return outputs, tape.gradient(outputs, inputs, tf.ones_like(outputs))

    def variant() -> float:
        run(inputs)
        begin = time.perf_counter()
        for _ in range(calls):
            run(inputs)
        return 1e3 * (time.perf_counter() - begin) / calls

    return variant


def step(name: str, settings: dict[str, Any]) -> Stepper:
    """Steps of a whole model on this rank."""
    config = ModelConfig(name=name)
    batch, count = settings["batch"], settings["features"]
    dim = row_dim(config, settings["dim"])
    features = [FeatureConfig(f"f{i}", table=TableConfig(f"f{i}", dim=dim, rows=1000)) for i in range(count)]

    def build() -> HybridModel:
        embedding = MixCacheEmbedding(features, CacheConfig(slots=1 << 16), name=f"embedding_{name}")
        model = HybridModel(*build_model(config, features, DENSE, embedding))
        model.compile("adagrad", keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    rng = np.random.default_rng(7)
    x = {
        "dense_features": tf.constant(rng.random((batch, DENSE), np.float32)),
        "ids": tf.constant(rng.integers(0, 1000, (batch, count))),
    }
    return Stepper(build, itertools.repeat((x, tf.zeros([batch, 1]))))


def measure_all(settings: dict[str, Any]) -> dict[str, list[float]]:
    """ms of each round, by variant."""
    comms.current()
    vectors = tf.random.normal([settings["batch"], settings["features"], settings["dim"]], seed=1)
    variants: dict[str, Callable[[], float]] = {}
    for name, (fused, plain) in FORMS.items():
        variants[f"{name} fused"] = both_ways(fused, vectors, settings["calls"])
        variants[f"{name} plain"] = both_ways(plain, vectors, settings["calls"])
        if name in STEPS:
            variants[f"{name} step"] = step(STEPS[name], settings).timed(max(1, settings["calls"] // 5), 1)
    columns = DENSE + settings["features"] * settings["dim"]
    cross = CrossNetV2(layers=3)
    cross.build((None, columns))
    wide = tf.random.normal([settings["batch"], columns], seed=1)
    variants["dcnv2 layers"] = both_ways(cross.call, wide, max(1, settings["calls"] // 5))

    def products(x: Any) -> Any:
        for kernel in cross.kernels:
            x = tf.matmul(x, kernel.value)
        return x

    variants["dcnv2 products"] = both_ways(products, wide, max(1, settings["calls"] // 5))
    return measure.interleaved(variants, settings["rounds"])


# ---- in front ----


def main() -> None:
    options = parse()
    found = measure.launch(__file__, 1, dict(vars(options)), one_core_each=True)
    rows, musts = [], []
    for name in FORMS:
        fused, plain = (found[f"{name} {form}"] for form in ("fused", "plain"))
        ratio = median([b / a for a, b in zip(fused, plain, strict=True)])
        shares = ["", "", ""]
        if name in STEPS:
            whole = found[f"{name} step"]
            share = median([a / b for a, b in zip(fused, whole, strict=True)])
            before = median([b / (w + b - a) for a, b, w in zip(fused, plain, whole, strict=True)])
            shares = [f"{measure.with_range(whole)} ({STEPS[name]})", f"{100 * share:.1f} %", f"{100 * before:.1f} %"]
        rows.append([name, *(measure.with_range(times) for times in (fused, plain)), f"{ratio:.2f}", *shares])
        musts.append(str(Must(f"{name}, TensorFlow's operations / fused", ratio, 1.3, at_least=True)))
    layers, products = found["dcnv2 layers"], found["dcnv2 products"]
    bound = median([a / b for a, b in zip(layers, products, strict=True)])
    print(f"\nB={options.batch}, F={options.features}, D={options.dim}, one core; forward and backward, ms (range)")
    head = ["interaction", "fused", "TensorFlow's operations", "ratio", "whole step", "share fused", "share before"]
    print(measure.table(head, rows))
    print(
        f"three cross layers: {measure.with_range(layers)} ms, their products of matrices alone "
        f"{measure.with_range(products)} ms: no fusion can gain more than {bound:.2f}x"
    )
    print("\n".join(musts))
    measure.write_json(options.json, {"ms": found, "musts": musts})


if __name__ == "__main__":
    measure.serve(measure_all) or main()
