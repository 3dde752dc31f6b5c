"""What does `--profile` cost while it records? Blocks of steps with and without, in turn, on one model.

    python benchmarks/profile_overhead.py                       # one rank
    MLP=32 ./launch/mpirun.sh -np 2 python benchmarks/profile_overhead.py

The workload is that of `hvd-ctr bench train-step`, by the same environment variables; STEPS (20) is a block's length. A
pair of blocks gives one ratio; the median of PAIRS (15) counts. The processor's time is shown beside the clock's: on a
shared machine it varies less. Blocks with a profile run the step that was traced with marks and call the profiler after
every step; comparing clocks and writing files, once per run, is not part of it. Prints a table and one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench import train_step
from hvd_ctr.config.profile import ProfileOptions
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.ops import stage_ops
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from hvd_ctr.training.profiler import Profiler

PAIRS = int(os.environ.get("PAIRS", "15"))
DEPTHS = (0, 2)


class Stepper:
    """One model and its two steps, the plain one and the one with marks."""

    def __init__(self, workload: train_step.Workload, depth: int) -> None:
        self._comm = comms.current()
        keras.utils.set_random_seed(1)
        self._model = train_step.build(workload)
        self._model.synchronise()
        arrays = train_step.make_batches(workload, self._comm.rank)
        batches = [tuple(map(tf.constant, batch)) for batch in zip(*arrays, strict=True)]
        endless: Iterator[Any] = itertools.cycle(batches)
        self._pipeline: Pipeline[Any] | None = None
        self._stream: Iterator[Any] = ((batch, ()) for batch in endless)
        if depth:
            rows = workload.batch
            facts = BatchFacts(np.int64(rows), np.float64(rows))
            self._pipeline = Pipeline(
                self._comm, self._model.embeddings, endless, lambda b: Inputs([b[0]], facts), lambda: batches[0], depth
            )
            self._stream = iter(self._pipeline)
        self._steps: dict[bool, Any] = {}

    def run(self, steps: int, profiler: Profiler | None) -> tuple[float, float]:
        """ms per step by the clock, and of the processor over all threads of this process."""
        marked = profiler is not None
        stage_ops.insert_marks(marked)
        self._comm.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for number in range(1, steps + 1):
            (ids, dense, labels), staged = next(self._stream)
            if marked not in self._steps:
                self._steps[marked] = self._compiled((ids, dense, labels, tuple(staged)))
            self._steps[marked](ids, dense, labels, tuple(staged))
            if profiler is not None:
                profiler.step(number)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return 1e3 * seconds / steps, 1e3 * cpu / steps

    def _compiled(self, example: Any) -> Any:
        def step(ids: Any, dense: Any, labels: Any, staged: Any) -> Any:
            inputs = {"dense_features": dense, "ids": ids}
            return self._model.hybrid_step(inputs, labels[:, None], staged=staged).loss

        return tf.function(step, input_signature=list(tensor_specs(example)), autograph=False)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()


def compare(workload: train_step.Workload, depth: int, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """By the clock ("wall") and of the processor ("cpu"): medians of ms per step without and with a profile, and of the
    pairs' ratios.
    """
    stepper = Stepper(workload, depth)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(-1, PAIRS):
        for marked in (False, True) if pair % 2 else (True, False):
            if marked:
                # Compares the ranks' clocks before the block, gathers and writes after it.
                with Profiler(comms.current(), folder, ProfileOptions(1, steps + 1)) as profiler:
                    elapsed = stepper.run(steps, profiler)
            else:
                elapsed = stepper.run(steps, None)
            if pair >= 0:  # the first pair traces
                times[marked].append(elapsed)
    stepper.close()
    found = {}
    for clock, name in enumerate(("wall", "cpu")):
        off, on = ([block[clock] for block in times[marked]] for marked in (False, True))
        ratios = sorted(with_it / without for with_it, without in zip(on, off, strict=True))
        found[name] = {
            "off_ms": statistics.median(off),
            "on_ms": statistics.median(on),
            "ratio": statistics.median(ratios),
            "ratio_quarter": ratios[len(ratios) // 4],
            "ratio_three_quarters": ratios[-1 - len(ratios) // 4],
        }
    return found


def main() -> None:
    comm = comms.init()
    workload = train_step.Workload.from_environment({"WARM": "0", "STEPS": "20", **os.environ})
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for depth in DEPTHS:
            results[depth] = compare(workload, depth, workload.steps, Path(folder))
    if comm.rank == 0:
        print(f"{comm.size} rank(s), B={workload.batch}, D={workload.dim}, MLP={list(workload.mlp)}, {PAIRS} pairs")
        print(f"{'pipeline depth':<22}{'without':>12}{'with':>12}{'with / without':>16} (middle half)")
        for depth, clocks in results.items():
            for clock, values in clocks.items():
                half = f"({values['ratio_quarter']:.3f} .. {values['ratio_three_quarters']:.3f})"
                times = f"{values['off_ms']:>9.3f} ms{values['on_ms']:>9.3f} ms{values['ratio']:>16.3f}"
                print(f"{depth} {clock:<20}{times} {half}", flush=True)
        print(json.dumps({"ranks": comm.size, "batch": workload.batch, "mlp": workload.mlp, "depths": results}))


if __name__ == "__main__":
    main()
