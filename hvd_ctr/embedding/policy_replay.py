"""Hit rate of a policy that has no formula (lfu): the policy itself on a stream that is drawn from the counts.

A cache of one float per row, with its slots and the ids scaled down alike (spatial sampling, Waldspurger et al., FAST
2015): every k-th id in the order of counts takes part, so that all counts are met in their shares. Batches keep their
number, and each id its occurrences.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.hit_rate import CachePolicy, Prediction, equal_horizon, lru_horizon, predict, with_horizon
from hvd_ctr.embedding.id_stream import IdStream
from hvd_ctr.ops import id_ops, mix_cache_ops

#: Uses of rows, and batches, that are replayed at most: a few seconds.
MOST_USES = 2_000_000
MOST_STEPS = 10_000

_TABLE = TableConfig("replayed", dim=1, optimizer=SparseOptimizerConfig(kind="sgd"))
_FEATURE = FeatureConfig("replayed", table=_TABLE)
_SEED = 1


def predict_by_replay(
    stream: IdStream,
    cache: CachePolicy,
    steps: float,
    *,
    most_uses: int = MOST_USES,
    most_steps: int = MOST_STEPS,
) -> Prediction:
    """Hits and misses of a run, by class and table those of the LRU cache with as many hits.

    Of a long run several batches are replayed as one while they are small beside the cache, and then its first part
    only. What carries over is the horizon, the batches within which a row must come again to hit.
    """
    if stream.rows() <= cache.slots:
        return predict(stream, dataclasses.replace(cache, policy="lru"), steps)
    joined = _joined(stream, cache, steps, most_steps)
    coarse = dataclasses.replace(stream, batches=stream.batches / joined)
    steps_all = max(1, round(steps / joined))
    replayed = min(steps_all, most_steps)
    scale = max(1.0, coarse.unique() * replayed / most_uses)
    misses, uses = _run(_Sample(coarse, scale), cache, replayed, scale)
    share = misses / max(uses, 1)
    if joined == 1 and steps_all == replayed:
        return equal_horizon(stream, share * stream.unique() * steps, steps)
    window = equal_horizon(coarse, share * coarse.unique() * replayed, replayed).horizon
    return with_horizon(stream, lru_horizon(float(window[0]) * joined), steps)


def _joined(stream: IdStream, cache: CachePolicy, steps: float, most_steps: int) -> int:
    """Batches to take as one."""
    joined = max(1, math.ceil(steps / most_steps))
    while joined > 1 and stream.seen(joined) > cache.slots / 8:
        joined = max(1, joined // 2)
    return joined


class _Sample:
    """Every scale-th id, by falling count."""

    def __init__(self, stream: IdStream, scale: float) -> None:
        order = np.argsort(-stream.counts, kind="stable")
        ends = np.cumsum(stream.ids[order])
        places = np.arange(scale / 2, ends[-1], scale)
        counts = stream.counts[order][np.searchsorted(ends, places)]
        self._generator = np.random.default_rng(_SEED)
        self.counts = np.maximum(1, np.floor(counts + self._generator.random(len(counts)))).astype(np.int64)
        self.batches = max(1, round(stream.batches))

    def epoch(self) -> list[NDArray[np.int64]]:
        """Distinct ids of each batch in the order of their first occurrence."""
        often = self.counts > self.batches / 8
        rare_ids = np.repeat(np.flatnonzero(~often), self.counts[~often])
        pairs = [np.stack([self._generator.integers(0, self.batches, len(rare_ids)), rare_ids])]
        for key in np.flatnonzero(often).tolist():
            used = -np.expm1(self.counts[key] * np.log1p(-1 / self.batches)) if self.batches > 1 else 1.0
            there = np.flatnonzero(self._generator.random(self.batches) < used)
            pairs.append(np.stack([there, np.full(len(there), key)]))
        batch, key = np.concatenate(pairs, axis=1)
        code = np.unique(batch * len(self.counts) + key)
        batch, key = np.divmod(code, len(self.counts))
        # The first of m occurrences anywhere in the batch.
        place = 1.0 - self._generator.random(len(key)) ** (self.batches / np.maximum(self.counts[key], self.batches))
        key = key[np.lexsort((place, batch))]
        return np.split(key, np.searchsorted(batch, np.arange(1, self.batches)))


def _run(sample: _Sample, cache: CachePolicy, steps: int, scale: float) -> tuple[int, int]:
    """Misses and uses, in the sample's ids."""
    batches: list[NDArray[np.int64]] = []
    while len(batches) < steps:
        batches += sample.epoch()
    batches = batches[:steps]
    slots = max(1, round(cache.slots / scale))
    # The sample's batches differ more in size than the whole's.
    batches = [batch[:slots] for batch in batches]
    most = max(len(batch) for batch in batches)
    handle = mix_cache_ops.create(
        mix_cache_ops.MixCacheSpec(
            name="plan",
            dim=1,
            slots=slots,
            tables=[_TABLE],
            features=["replayed"],
            feature_tables=[0],
            policy=cache.policy,
        )
    )
    depth = cache.depth if (cache.depth + 1) * most <= slots else 0
    tickets: list[tf.Tensor] = []
    for batch in batches:
        if len(tickets) > depth:
            mix_cache_ops.release(handle, tickets.pop(0))
        tickets.append(_prefetch(handle, batch))
    counters = mix_cache_ops.stats(handle, ["replayed"])[0]["replayed"]
    return counters["misses"], counters["unique"]


def _prefetch(handle: tf.Tensor, ids: NDArray[np.int64]) -> tf.Tensor:
    prepared = id_ops.prepare_batch(
        tf.constant(ids[:, None]),
        feature_splits=None,
        batch_rows=len(ids),
        weight_sum=float(len(ids)),
        tables=[_TABLE],
        features=[_FEATURE],
        feature_tables=[0],
        world_size=1,
    )
    return mix_cache_ops.prefetch(handle, prepared.send, prepared.send_splits).ticket
