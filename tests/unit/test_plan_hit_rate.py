"""Hit rates that a plan expects against simulations of the policies, and what they are made of against brute force."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from hvd_ctr.embedding import policy_replay
from hvd_ctr.embedding.disk_traffic import disk_traffic
from hvd_ctr.embedding.hit_rate import CachePolicy, Prediction, predict
from hvd_ctr.embedding.id_stream import IdCounts, IdStream
from hvd_ctr.embedding.policy_replay import predict_by_replay
from tests.support.policy_simulation import simulate

_IDS, _BATCH, _STEPS = 40_000, 256, 120
_WINDOW = 8


@functools.cache
def _data(exponent: float, epochs: int = 1) -> np.ndarray:
    """ids (steps, B), power law; later epochs are the same samples in another order."""
    generator = np.random.default_rng(7)
    shares = np.cumsum(np.arange(1, _IDS + 1) ** -exponent)
    ids = generator.permutation(_IDS)[np.searchsorted(shares, generator.random(_STEPS * _BATCH) * shares[-1])]
    return np.concatenate([ids, *(generator.permutation(ids) for _ in range(epochs - 1))]).reshape(-1, _BATCH)


def _batches(data: np.ndarray) -> list[list[int]]:
    return [list(dict.fromkeys(batch.tolist())) for batch in data]


@functools.cache
def _counts(exponent: float) -> np.ndarray:
    return np.unique(_data(exponent), return_counts=True)[1]


def _stream(exponent: float) -> IdStream:
    return IdStream.of_counts([IdCounts.of(_counts(exponent))], _STEPS * _BATCH, _BATCH)


def _expected(exponent: float, policy: str, slots: int, steps: float = _STEPS) -> Prediction:
    cache = CachePolicy(policy, slots, _WINDOW, depth=1 if policy == "lookahead" else 0)
    return (predict_by_replay if policy == "lfu" else predict)(_stream(exponent), cache, steps)


@pytest.mark.parametrize("policy", ["lru", "clock", "lfu", "freq", "lookahead"])
@pytest.mark.parametrize("exponent", [1.1, 0.8])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_within_two_points_of_the_simulation(policy: str, exponent: float, share: float) -> None:
    data = _data(exponent)
    ids, counts = np.unique(data, return_counts=True)
    slots = max(int(share * len(ids)), *(len(batch) for batch in _batches(data)))
    frequencies = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    tally = simulate(policy, slots, _batches(data), counts=frequencies, window=_WINDOW)
    expected = _expected(exponent, policy, slots)
    assert expected.hit_rate() == pytest.approx(tally.hit_rate, abs=0.02)
    assert expected.uses.sum() == pytest.approx(tally.hits + tally.misses, rel=0.01)
    if policy in ("lru", "lookahead") and share >= 0.1:
        assert expected.hit_rate() == pytest.approx(tally.hit_rate, abs=0.01)


@pytest.mark.parametrize("policy", ["lru", "clock", "freq", "lookahead", "lfu"])
def test_several_epochs_and_a_part_of_one(policy: str) -> None:
    data = _data(1.1, 3)
    ids, counts = np.unique(data[:_STEPS], return_counts=True)
    frequencies = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    slots = len(ids) // 4
    for steps in (3 * _STEPS, _STEPS // 4):
        tally = simulate(policy, slots, _batches(data[:steps]), counts=frequencies, window=_WINDOW)
        assert _expected(1.1, policy, slots, steps).hit_rate() == pytest.approx(tally.hit_rate, abs=0.02)


def test_a_cache_that_holds_all_rows_misses_first_uses_only() -> None:
    rows = len(_counts(1.1))
    for policy in ("lru", "clock", "lookahead", "lfu"):
        expected = _expected(1.1, policy, rows, 2 * _STEPS)
        assert expected.misses.sum() == pytest.approx(rows, rel=0.01), policy
    assert _expected(1.1, "freq", rows).misses.sum() == 0
    assert _expected(1.1, "lru", rows).created.sum() == pytest.approx(rows, rel=1e-6)


def test_lookahead_without_a_pipeline_is_lru() -> None:
    lru, slots = _expected(1.1, "lru", 2000).hit_rate(), 2000
    assert predict(_stream(1.1), CachePolicy("lookahead", slots, 8, depth=0), _STEPS).hit_rate() == lru
    assert predict(_stream(1.1), CachePolicy("lookahead", slots, 1, depth=2), _STEPS).hit_rate() == lru
    assert _expected(1.1, "lookahead", slots).hit_rate() > lru + 0.01


def test_lfu_has_no_formula_and_is_replayed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="lfu has no formula"):
        predict(_stream(1.1), CachePolicy("lfu", 100), _STEPS)
    slots = len(_counts(1.1)) // 10
    whole = _expected(1.1, "lfu", slots).hit_rate()
    cache = CachePolicy("lfu", slots)
    assert predict_by_replay(_stream(1.1), cache, _STEPS, most_uses=8000).hit_rate() == pytest.approx(whole, abs=0.02)
    batches: list[int] = []
    prefetch = policy_replay._prefetch
    monkeypatch.setattr(
        policy_replay, "_prefetch", lambda handle, ids: (batches.append(len(ids)), prefetch(handle, ids))[1]
    )
    long = predict_by_replay(_stream(1.1), cache, 20 * _STEPS, most_steps=200)
    assert len(batches) <= 200
    assert abs(long.hit_rate() - whole) < 0.1


def test_keys_of_a_batch_and_of_a_window() -> None:
    data, stream = _data(1.1), _stream(1.1)
    distinct = np.array([len(np.unique(batch)) for batch in data])
    assert stream.unique() == pytest.approx(distinct.mean(), rel=0.01)
    assert stream.unique_spread() == pytest.approx(distinct.std(), rel=0.5)
    windows = [len(np.unique(data[first : first + 10])) for first in range(0, 110, 10)]
    assert stream.seen(10) == pytest.approx(np.mean(windows), rel=0.01)
    assert stream.seen(_STEPS) == pytest.approx(len(_counts(1.1)))
    # A rank owns every second id.
    assert stream.shared(0.5).unique() == stream.unique() / 2


def test_tables_are_told_apart() -> None:
    often, seldom = np.full(50, 400), np.full(4000, 1)
    stream = IdStream.of_counts([IdCounts.of(often), IdCounts.of(seldom)], 4000, 100)
    rates = predict(stream, CachePolicy("lru", 300), 40).table_hit_rates()
    assert rates[0] > 0.95 and rates[1] < 0.01
    cached = stream.by_table(predict(stream, CachePolicy("lru", 300), 40).cached)
    assert cached[0] == pytest.approx(50, abs=1) and cached.sum() == pytest.approx(300, rel=0.02)


def test_a_sketch_is_completed_to_its_mass() -> None:
    exact = IdCounts.of(_counts(1.1))
    error = 6
    kept = _counts(1.1)[_counts(1.1) > 2 * error] - error
    completed = IdCounts.of(kept).completed(exact.occurrences, error)
    assert completed.occurrences == pytest.approx(exact.occurrences, rel=0.02)
    assert len(kept) < 0.1 * exact.distinct
    assert completed.distinct == pytest.approx(exact.distinct, rel=0.3)
    lines = _STEPS * _BATCH
    rates = [
        predict(IdStream.of_counts([counts], lines, _BATCH), CachePolicy("lru", 2000), _STEPS).hit_rate()
        for counts in (exact, completed)
    ]
    assert rates[1] == pytest.approx(rates[0], abs=0.05)
    assert exact.completed(exact.occurrences, 0) is exact


def _second_level(data: np.ndarray, slots: int, room: int) -> tuple[int, int]:
    """Rows loaded that existed, and of them those not in RAM: LRU on the device, the clock of RecordCache behind it."""
    device: dict[int, None] = {}
    where: dict[int, int] = {}
    rows, hot, free, hand = [-1] * room, [False] * room, list(range(room)), 0
    known: set[int] = set()
    loads = reads = 0
    for batch in _batches(data):
        wanted = set(batch)
        missing = [key for key in batch if key not in device]
        spare = max(0, len(device) + len(missing) - slots)
        for key in [key for key in device if key not in wanted][:spare]:
            del device[key]
            known.add(key)
            if key not in where:
                while not free:
                    if not hot[hand]:
                        del where[rows[hand]]
                        free.append(hand)
                    hot[hand] = False
                    hand = (hand + 1) % room
                where[key] = free.pop()
                rows[where[key]] = key
            hot[where[key]] = True
        for key in missing:
            loads += key in known
            reads += key in known and key not in where
            if key in where:
                hot[where[key]] = False
        for key in batch:
            device.pop(key, None)
            device[key] = None
    return loads, reads


@pytest.mark.parametrize(("slots", "room"), [(500, 500), (1000, 3000), (2000, 2000)])
def test_rows_read_from_disk(slots: int, room: int) -> None:
    loads, reads = _second_level(_data(1.1), slots, room)
    expected = disk_traffic(_expected(1.1, "lru", slots), slots, lambda rows: room)
    assert expected.device_loads == pytest.approx(loads, rel=0.03)
    assert expected.hit_rate() == pytest.approx(1 - reads / loads, abs=0.02)


def test_nothing_is_read_from_disk_while_rows_fit_into_ram() -> None:
    expected = disk_traffic(_expected(1.1, "lru", 1000), 1000, lambda rows: float("inf"))
    assert (expected.reads, expected.written, expected.hit_rate()) == (0, 0, 1)
