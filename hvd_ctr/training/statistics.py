"""Statistics of a run: the caches' counters, traffic between the ranks, and how long the stages waited, for one rank or
over all.

    before = collect(model, all_ranks=True)     # collective
    ...
    after = collect(model, all_ranks=True)
    per_step(before, after)                     # scalars for TensorBoard

A collection is {"tables": {name: counters}, "total": counters, "exchange": {kind: counters}, "waited_seconds": {stage:
seconds}, "ranks": W or 1}. The cache's counters are described in hvd_ctr/embedding/counters.py, those of "exchange" in
hvd_ctr/traffic.py: they are the process', not one embedding's. "waited_seconds" are those of `Pipeline`: how long each
stage stood still because another was not ready, over all pipelines of the model. Over the ranks they are summed;
divide by "ranks" for the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import keras

from hvd_ctr import comm as comms
from hvd_ctr.embedding import counters
from hvd_ctr.embedding.counters import Stats
from hvd_ctr.traffic import COUNTERS, KINDS
from hvd_ctr.training.train_step import embedding_layers

STAGES = ("Data-Loader", "Host-Manager", "GPU-Worker")
#: Kinds of traffic that every training step has.
_STEP_KINDS = ("keys", "rows", "gradients", "dense")


class _Waits(Protocol):
    waited_seconds: dict[str, float]


class StageWaits:
    """Seconds that the stages waited, over all pipelines followed."""

    def __init__(self) -> None:
        self._pipelines: list[Mapping[str, float]] = []

    def follow(self, pipeline: _Waits) -> None:
        """Counts a pipeline from now on, also after its end."""
        self._pipelines.append(pipeline.waited_seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far."""
        return {stage: sum(waits[stage] for waits in self._pipelines) for stage in STAGES}


def collect(model: keras.Model, waits: StageWaits, *, all_ranks: bool = False) -> Stats:
    """The statistics of this rank, or over all ranks (collective, the same on each)."""
    mine = {
        **counters.merged([layer.cache_stats() for layer in embedding_layers(model)]),
        "exchange": comms.current().traffic(),
        "waited_seconds": waits.seconds(),
        "ranks": 1,
    }
    return over_ranks(comms.current().allgather_object(mine)) if all_ranks else mine


def over_ranks(parts: Sequence[Stats]) -> Stats:
    """Collections of single ranks as one."""
    return {
        **counters.over_ranks(parts),
        "exchange": {
            kind: {counter: sum(part["exchange"][kind][counter] for part in parts) for counter in COUNTERS}
            for kind in KINDS
        },
        "waited_seconds": {stage: sum(part["waited_seconds"][stage] for part in parts) for stage in STAGES},
        "ranks": len(parts),
    }


def epoch_logs(before: Stats, after: Stats) -> dict[str, float]:
    """What Keras' logs get of one epoch, over all ranks: hit rate of the cache (0 .. 1), rows evicted, bytes moved
    between device and host tier and, in training steps, between ranks, and the seconds that training waited for rows
    (mean of the ranks; 0 without a pipeline).
    """
    total = _difference(before["total"], after["total"])
    moved = _sent_bytes(before, after)
    return {
        "cache_hit_rate": counters.hit_rate(total),
        "cache_evictions": float(total["evictions"]),
        "device_host_bytes": float(total["device_host_bytes"]),
        "exchange_bytes": float(sum(moved[kind] for kind in _STEP_KINDS)),
        "gpu_worker_wait_seconds": _waited(before, after)["GPU-Worker"],
    }


def per_step(before: Stats, after: Stats) -> dict[str, float]:
    """Scalars of the steps between two collections over all ranks, for TensorBoard. Rows and bytes are those of all
    ranks per step, waits the mean of the ranks.
    """
    total = _difference(before["total"], after["total"])
    steps = max(total["steps"], 1)
    scalars = {
        "cache/hit_rate": counters.hit_rate(total),
        "cache/pinned_peak_rows": float(after["total"]["pinned_peak"]),
    }
    for counter in ("requested", "unique", "evictions", "write_backs"):
        scalars[f"cache/{counter}_rows_per_step"] = total[counter] / steps
    for path in ("device_host", "host_disk"):
        scalars[f"bytes_per_step/{path}"] = total[f"{path}_bytes"] / steps
    moved = _sent_bytes(before, after)
    for kind in _STEP_KINDS:
        scalars[f"bytes_per_step/{kind}"] = moved[kind] / steps
    for stage, seconds in _waited(before, after).items():
        scalars[f"wait_seconds_per_step/{stage}"] = seconds / steps
    return scalars


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _sent_bytes(before: Stats, after: Stats) -> dict[str, int]:
    return {
        kind: after["exchange"][kind]["sent_bytes"] - before["exchange"][kind]["sent_bytes"]
        for kind in after["exchange"]
    }


def _waited(before: Stats, after: Stats) -> dict[str, float]:
    waited = _difference(before["waited_seconds"], after["waited_seconds"])
    return {stage: seconds / after["ranks"] for stage, seconds in waited.items()}
