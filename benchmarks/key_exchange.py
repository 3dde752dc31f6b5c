"""Which transport should the Host-Manager's key exchange take, beside a step that trains with Horovod: Horovod's
alltoall, or an alltoallv of mpi4py on a communicator of its own?

    ./launch/mpirun.sh -np 2 python benchmarks/key_exchange.py

Each round runs 60 steps per variant, the variants in turn: the main thread computes (two matrix products, about the
dense tower at B=4096) and does the row exchange, the gradient exchange and the dense allreduce of a step; a second
thread exchanges the keys of later batches, at most two ahead. Printed: median over the rounds of ms per step and of
ms per key exchange, and the ratio of the step times.
"""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvd_ctr import comm as comms

ROUNDS, STEPS, WARM, AHEAD = 9, 60, 10, 2
KEYS, DIM, DENSE = 19_200, 16, 14_000  # per rank: unique keys at B=4096, floats of a row, dense weights


def horovod_exchange(comm: comms.Comm) -> Callable[[], None]:
    words = tf.constant(np.arange(KEYS, dtype=np.int64))
    splits = tf.constant(np.bincount(np.arange(KEYS) % comm.size, minlength=comm.size).astype(np.int32))
    return lambda: comm.alltoall(words, splits, "benchmark.keys")[0].numpy()


def mpi_exchange(comm: comms.Comm) -> Callable[[], None]:
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Dup()
    words = np.arange(KEYS, dtype=np.int64)
    counts = np.bincount(np.arange(KEYS) % comm.size, minlength=comm.size).astype(np.int32)

    def exchange() -> None:
        theirs = np.empty(comm.size, np.int32)
        own.Alltoall(counts, theirs)
        received = np.empty(int(theirs.sum()), np.int64)
        own.Alltoallv((words, counts), (received, theirs))

    return exchange


def make_step(comm: comms.Comm) -> Callable[[], None]:
    rows, dense = tf.random.normal([KEYS, DIM]), tf.random.normal([DENSE])
    splits = tf.constant(np.bincount(np.arange(KEYS) % comm.size, minlength=comm.size).astype(np.int32))
    left, right = tf.random.normal([4096, 429]), tf.random.normal([429, 256])

    @tf.function(autograph=False)
    def step(rows: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        received, back = comm.alltoall(rows, splits, "benchmark.rows")
        product = tf.matmul(left + received[0, 0], right)
        product = tf.matmul(left, product, transpose_a=True)
        gradients, _ = comm.alltoall(received + product[0, 0], back, "benchmark.gradients")
        (total,) = comm.allreduce_sum([dense + product[0, 0]], "benchmark.dense")
        return gradients[0, 0] + total[0]

    return lambda: step(rows, dense).numpy()


def measure(step: Callable[[], None], exchange: Callable[[], None]) -> tuple[float, float]:
    """(ms per step, ms per exchange) of one round."""
    ready: queue.Queue[float] = queue.Queue(AHEAD)

    def manage() -> None:
        for _ in range(WARM + STEPS):
            begin = time.perf_counter()
            exchange()
            ready.put(time.perf_counter() - begin)

    thread = threading.Thread(target=manage)
    thread.start()
    took, begin = [], 0.0
    for number in range(WARM + STEPS):
        if number == WARM:
            begin = time.perf_counter()
        took.append(ready.get())
        step()
    seconds = time.perf_counter() - begin
    thread.join()
    return 1e3 * seconds / STEPS, 1e3 * statistics.median(took[WARM:])


def main() -> None:
    comm = comms.init()
    step = make_step(comm)
    variants = {"Horovod": horovod_exchange(comm), "MPI, own communicator": mpi_exchange(comm)}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, exchange in variants.items():
            comm.barrier()
            rounds[name].append(measure(step, exchange))
    if comm.rank == 0:
        medians = {
            name: [statistics.median(values) for values in zip(*found, strict=True)] for name, found in rounds.items()
        }
        for name, (per_step, per_exchange) in medians.items():
            print(f"{name:24}{per_step:8.2f} ms/step{per_exchange:8.2f} ms/exchange")
        ratio = medians["Horovod"][0] / medians["MPI, own communicator"][0]
        print(f"step time, Horovod / own communicator: {ratio:.3f}")
        print(json.dumps({"ranks": comm.size, "medians": medians, "rounds": rounds}))


if __name__ == "__main__":
    main()
