"""What does FactorizedDense save over a Dense on expanded rows, and up to which share of distinct rows does it pay?

    python benchmarks/first_layer.py                                 # B=4096 16384, D=16 64, units 32 256, one core
    python benchmarks/first_layer.py --units 1024 --dim 16 --batch 4096

Forward and backward of a tower's first layer, from the distinct rows of a batch to their gradients and the kernel's, on
one thread; ids of the workload that other trainers are compared on. `plain` expands the rows, multiplies and adds up
the gradients of equal rows. For each share the number of features that are factored is given, too. All variants of a
case run in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import median
from hvd_ctr.bench.train_step import Workload, make_batches
from hvd_ctr.ops import factorized_ops, pooling_ops

_COLUMNS = 13


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 16384], help="B")
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64], help="D")
    parser.add_argument("--units", type=int, nargs="+", default=[32, 256], help="H")
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.2, 0.35, 0.5, 0.75], help="max_share")
    parser.add_argument("--scale", type=float, default=0.25, help="of the tables' cardinalities")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5, help="per round and variant")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args()


# ---- in the worker ----


def layer(share: float | None, row_of_id: Any, rows: Any, beside: Any, kernel: Any, bias: Any) -> Any:
    """The layer with ReLU; without a share the plain one."""
    if share is not None:
        return factorized_ops.factorized_dense(rows, row_of_id, beside, kernel, bias, relu=True, max_share=share)
    ids, features = tf.reshape(row_of_id, [-1]), int(row_of_id.shape[1])
    inputs = pooling_ops.pool_rows(rows, ids, beside=pooling_ops.Beside(beside, features))
    return tf.nn.relu(tf.matmul(inputs, kernel) + bias)


def both_ways(share: float | None, row_of_id: Any, inputs: list[Any], calls: int) -> Callable[[], float]:
    """A variant: ms per forward and backward pass."""

    @tf.function(autograph=False)
    def run(rows: Any, beside: Any, kernel: Any, bias: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([rows, kernel, bias])
            outputs = layer(share, row_of_id, rows, beside, kernel, bias)
        return tape.gradient(outputs, [rows, kernel, bias], upstream)

    def variant() -> float:
        run(*inputs)
        begin = time.perf_counter()
        for _ in range(calls):
            gradients = run(*inputs)
        float(gradients[0][0, 0])
        return 1e3 * (time.perf_counter() - begin) / calls

    return variant


def measure_case(settings: dict[str, Any]) -> dict[str, Any]:
    """ms of each round by variant, and factored features by share."""
    comms.current()
    batch, dim, units = settings["batch"], settings["dim"], settings["units"]
    ids = make_batches(Workload(scale=settings["scale"], batch=batch, steps=1, warm=0), 0)[0][0]
    features = ids.shape[1]
    keys = ids * features + np.arange(features)
    distinct, row_of_id = np.unique(keys, return_inverse=True)
    row_of_id = tf.constant(row_of_id.reshape(ids.shape).astype(np.int32))
    generator = np.random.default_rng(1)
    shapes = ((len(distinct), dim), (batch, _COLUMNS), (_COLUMNS + features * dim, units), (units,), (batch, units))
    inputs = [tf.constant(generator.normal(size=shape).astype(np.float32)) for shape in shapes]
    variants = {"plain": both_ways(None, row_of_id, inputs, settings["calls"])}
    factored = {}
    for share in settings["share"]:
        variants[str(share)] = both_ways(share, row_of_id, inputs, settings["calls"])
        factored[str(share)] = int(tf.size(factorized_ops.factor_plan(row_of_id, inputs[0], share).factored))
    return {"ms": measure.interleaved(variants, settings["rounds"]), "factored": factored}


# ---- in front ----


def main() -> None:
    options = parse()
    cases, rows = [], []
    for batch in options.batch:
        for dim in options.dim:
            for units in options.units:
                settings = {**vars(options), "batch": batch, "dim": dim, "units": units}
                found = measure.launch(__file__, 1, settings, one_core_each=True)
                plain = found["ms"]["plain"]
                cells = []
                for share in map(str, options.share):
                    ratio = median([a / b for a, b in zip(plain, found["ms"][share], strict=True)])
                    cells.append(f"{ratio:.2f} ({found['factored'][share]})")
                rows.append([f"{batch}, {dim}, {units}", measure.with_range(plain), *cells])
                cases.append({"batch": batch, "dim": dim, "units": units, **found})
    print("\none core; forward and backward; plain / factorized (features factored of 26), by max_share")
    print(measure.table(["B, D, units", "plain, ms (range)", *(f"{share:g}" for share in options.share)], rows))
    measure.write_json(options.json, {"cases": cases})


if __name__ == "__main__":
    measure.serve(measure_case) or main()
