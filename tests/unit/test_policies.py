"""Every eviction policy of the cache against its simulation in plain Python, on one Zipf stream at 2 % cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.ops import id_ops, mix_cache_ops
from tests.support.policy_simulation import Tally, simulate

_IDS, _BATCH, _STEPS, _SLOTS = 100_000, 4096, 100, 2_000
_TABLE = TableConfig("t", dim=1, optimizer=SparseOptimizerConfig(kind="sgd"))
_POLICIES = ("lru", "lfu", "clock", "freq", "lookahead")


@functools.cache
def _stream() -> np.ndarray:
    """ids (steps, B): share of the k-th most frequent id ~ k^-1.2, frequent ids spread over the id space."""
    generator = np.random.default_rng(0)
    shares = np.cumsum(np.arange(1, _IDS + 1) ** -1.2)
    ranks = np.searchsorted(shares, generator.random((_STEPS, _BATCH)) * shares[-1])
    return generator.permutation(_IDS)[ranks].astype(np.int64)


@functools.cache
def _batches() -> list[list[int]]:
    """Distinct ids of each batch in order of first occurrence."""
    return [list(dict.fromkeys(ids.tolist())) for ids in _stream()]


@functools.cache
def _counts() -> dict[int, int]:
    ids, counts = np.unique(_stream(), return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def _prepare(ids: np.ndarray, error_text: str = "") -> id_ops.PreparedIds:
    return id_ops.prepare_batch(
        tf.constant(ids[:, None]),
        feature_splits=None,
        batch_rows=len(ids),
        weight_sum=float(len(ids)),
        error_text=error_text,
        tables=[_TABLE],
        features=[FeatureConfig("f", table=_TABLE)],
        feature_tables=[0],
        world_size=1,
    )


def _cache(policy: str, slots: int = _SLOTS, window: int = 8) -> Any:
    return mix_cache_ops.create(
        mix_cache_ops.MixCacheSpec(
            name="c",
            dim=1,
            slots=slots,
            tables=[_TABLE],
            features=["f"],
            feature_tables=[0],
            policy=policy,
            window=window,
        )
    )


@functools.cache
def _measured(policy: str, window: int = 8) -> Tally:
    """The cache itself: prefetch and release every batch; lookahead is told of as many batches as it takes."""
    handle = _cache(policy, window=window)
    if policy == "freq":
        ids, counts = (np.array(values, np.int64) for values in zip(*_counts().items(), strict=True))
        assert mix_cache_ops.set_frequencies(handle, 0, ids, counts) == 0
        assert mix_cache_ops.warm_start(handle) == _SLOTS
    prepared = [_prepare(ids) for ids in _stream()]
    announced = 0
    for batch in prepared:
        while announced < _STEPS and mix_cache_ops.announce(
            handle, prepared[announced].send, prepared[announced].send_splits
        ):
            announced += 1
        mix_cache_ops.release(handle, mix_cache_ops.prefetch(handle, batch.send, batch.send_splits).ticket)
    assert (announced == _STEPS) == (policy == "lookahead" and window > 0)
    counters = mix_cache_ops.stats(handle, ["t"])[0]["t"]
    return Tally(counters["hits"], counters["misses"], counters["evictions"])


@functools.cache
def _simulated(policy: str, window: int = 8) -> Tally:
    return simulate(policy, _SLOTS, _batches(), counts=_counts(), window=window)


@pytest.mark.parametrize("policy", _POLICIES)
def test_the_cache_does_what_the_simulation_does(policy: str) -> None:
    assert _measured(policy) == _simulated(policy)
    assert _measured(policy).evictions > 0


@pytest.mark.parametrize("window", [0, 1, 3, 64])
def test_lookahead_with_any_window_equals_its_simulation(window: int) -> None:
    assert _measured("lookahead", window) == _simulated("lookahead", window)


def test_lookahead_without_announcements_is_lru() -> None:
    assert _measured("lookahead", 0) == _measured("lru")
    assert _measured("lookahead", 1) == _measured("lru")  # knows only the batch itself


def test_hit_rates_keep_their_order() -> None:
    rate = {policy: _measured(policy).hit_rate for policy in _POLICIES}
    assert rate["freq"] >= rate["lfu"] >= rate["lru"] - 0.01, rate
    assert rate["clock"] >= rate["lru"] - 0.01, rate


def test_lookahead_comes_near_the_optimum() -> None:
    best = _simulated("belady").hit_rate
    assert best - 0.02 <= _measured("lookahead").hit_rate <= best
    # freq starts with a full cache, which the optimum computed from an empty one does not.
    assert all(_measured(policy).hit_rate <= best for policy in ("lru", "lfu", "clock", "lookahead"))
    assert _simulated("lookahead", 2).hit_rate < _simulated("lookahead").hit_rate


# ---- the ops ----


def test_announce_leaves_errors_to_the_prefetch() -> None:
    handle = _cache("lookahead", slots=8)
    good, bad = _prepare(np.array([1, 2])), _prepare(np.array([], np.int64), error_text="file.tsv:7 is torn")
    assert not mix_cache_ops.announce(handle, bad.send, bad.send_splits)
    assert mix_cache_ops.announce(handle, good.send, good.send_splits)
    with pytest.raises(tf.errors.InternalError, match="file.tsv:7 is torn"):
        mix_cache_ops.prefetch(handle, bad.send, bad.send_splits)


def test_ended_announcements_make_room_for_others() -> None:
    handle = _cache("lookahead", slots=8, window=1)
    first, second = _prepare(np.array([1, 2])), _prepare(np.array([3]))
    assert mix_cache_ops.announce(handle, first.send, first.send_splits)
    assert not mix_cache_ops.announce(handle, second.send, second.send_splits)
    mix_cache_ops.end_announcements(handle)
    assert mix_cache_ops.announce(handle, second.send, second.send_splits)


def test_announce_checks_its_splits() -> None:
    batch = _prepare(np.array([1, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="received_splits has 1 entries with sum 3"):
        mix_cache_ops.announce(_cache("lookahead", slots=8), batch.send, tf.constant([3]))


def test_announce_in_a_function_runs_in_program_order() -> None:
    handle = _cache("lookahead", slots=8, window=1)
    batch = _prepare(np.array([1, 2]))

    @tf.function
    def step() -> tuple[Any, Any]:
        first = mix_cache_ops.announce(handle, batch.send, batch.send_splits)
        mix_cache_ops.release(handle, mix_cache_ops.prefetch(handle, batch.send, batch.send_splits).ticket)
        return first, mix_cache_ops.announce(handle, batch.send, batch.send_splits)

    assert [bool(noted) for noted in step()] == [True, True]


def test_frequencies_belong_to_freq() -> None:
    ids, counts = np.array([1]), np.array([1])
    with pytest.raises(tf.errors.FailedPreconditionError, match="embedding.cache.policy to freq"):
        mix_cache_ops.set_frequencies(_cache("lru", slots=8), 0, ids, counts)
    with pytest.raises(tf.errors.InvalidArgumentError, match="table 1 does not exist"):
        mix_cache_ops.set_frequencies(_cache("freq", slots=8), 1, ids, counts)
    with pytest.raises(tf.errors.InvalidArgumentError, match="count -1"):
        mix_cache_ops.set_frequencies(_cache("freq", slots=8), 0, ids, -counts)
    assert mix_cache_ops.warm_start(_cache("lru", slots=8)) == 0
