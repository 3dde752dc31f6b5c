"""How much of reading and host work does the pipeline hide? Three stages that each take 20 ms, with and without a
pipeline.

    python benchmarks/pipeline_overlap.py                      # one rank
    ./launch/mpirun.sh -np 2 python benchmarks/pipeline_overlap.py

Prints the mean step time per depth over 5 repeats of 40 steps (median of the repeats, range in brackets) and whether
the trained rows are the same bits. With perfect overlap a step takes as long as its longest stage, 20 ms; without,
their sum, 60 ms.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.config import CacheConfig, FeatureConfig, TableConfig
from hvd_ctr.embedding.sharded_embedding import BatchFacts, Staged
from hvd_ctr.embedding.step_context import StepContext
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs

STAGE_SECONDS = 0.020
STEPS, WARM_STEPS, REPEATS, BATCH = 40, 5, 5, 64


def facts_of(ids: np.ndarray) -> BatchFacts:
    return BatchFacts(np.int64(len(ids)), np.float64(len(ids)))


def run(depth: int, name: str) -> tuple[float, bytes]:
    """Mean seconds per step after warm-up, and the bits of the trained rows."""
    layer = MixCacheEmbedding([FeatureConfig("f", table=TableConfig("t", dim=8))], CacheConfig(slots=4096), name=name)
    layer.build(None)
    (group,) = layer.sharded.groups
    prefetch = group.prefetch

    def slow_prefetch(received):
        time.sleep(STAGE_SECONDS)  # Host-Manager
        return prefetch(received)

    group.prefetch = slow_prefetch

    def batches():
        generator = np.random.default_rng(comms.current().rank)
        for _ in range(STEPS):
            time.sleep(STAGE_SECONDS)  # Data-Loader
            yield generator.integers(0, 1000, (BATCH, 1))

    def train(ids, staged) -> None:
        facts = BatchFacts(tf.shape(ids, tf.int64)[0], tf.cast(tf.shape(ids)[0], tf.float64))
        with tf.GradientTape() as tape, StepContext(tape, facts, dict(zip([group], staged, strict=True))) as context:
            value = tf.reduce_sum(layer(ids))
        context.backward(tape.gradient(value, context.watched_rows), tf.constant(1.0))

    def in_turn(ids) -> tuple[Staged, ...]:
        """The first two stages without a pipeline."""
        (prepared,) = layer.prepare(ids, facts_of(ids))
        return (Staged(prepared, group.prefetch(group.input_dist(prepared))),)

    compiled = None

    def step(ids, staged) -> None:
        nonlocal compiled
        time.sleep(STAGE_SECONDS)  # GPU-Worker
        if compiled is None:
            specs = tensor_specs((tf.constant(ids), tuple(staged)))
            compiled = tf.function(train, input_signature=list(specs), autograph=False)
        compiled(ids, tuple(staged))

    def empty() -> np.ndarray:
        return np.zeros((0, 1), np.int64)

    if depth == 0:
        stream = ((ids, in_turn(ids)) for ids in batches())
    else:
        stream = Pipeline(comms.current(), [layer], batches(), lambda ids: Inputs([ids], facts_of(ids)), empty, depth)
    begin = 0.0
    for number, (ids, staged) in enumerate(stream):
        if number == WARM_STEPS:
            begin = time.perf_counter()
        step(ids, staged)
    seconds = (time.perf_counter() - begin) / (STEPS - WARM_STEPS)
    return seconds, layer.get_rows("t", np.arange(1000)).tobytes()


def main() -> None:
    comm = comms.init()
    results, bits = {}, set()
    for depth in (0, 1, 2, 4):
        times = []
        for repeat in range(REPEATS):
            seconds, rows = run(depth, f"overlap_{depth}_{repeat}")
            times.append(1e3 * seconds)
            bits.add(rows)
        results[depth] = [min(times), statistics.median(times), max(times)]
    if comm.rank == 0:
        print(
            f"{comm.size} rank(s); stages of {1e3 * STAGE_SECONDS:.0f} ms; same bits at every depth: {len(bits) == 1}"
        )
        for depth, (low, median, high) in results.items():
            print(f"depth {depth}: {median:6.2f} ms/step ({low:.2f} .. {high:.2f})")
        print(json.dumps({"ranks": comm.size, "ms_per_step": results, "same_bits": len(bits) == 1}))


if __name__ == "__main__":
    main()
