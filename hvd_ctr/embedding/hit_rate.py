"""Expected hit rate of a cache, from the counts of ids: no trace and no simulation (lfu is replayed: policy_replay.py).

    prediction = predict(stream, CachePolicy("lookahead", slots=100_000, window=8, depth=2), steps=3000)
    prediction.hit_rate()                 # of the working keys of all batches, as MixCacheStats counts: hits / unique

Every policy is described by a horizon: a row hits if it was used in the last x batches. Che's approximation (Che et
al., 2002; Fricker et al., 2012), with a batch as unit of time and the counts' own law of windows (id_stream.py):

    lru        x is the number of batches whose different rows fill the cache:  seen(x) = S.
    lookahead  rows that one of the next v = window - 1 batches needs are kept besides, the others leave v batches
               earlier. So a row hits when it comes again within x batches, but takes a slot for the last v of them
               only if it does:  seen(x) - v * misses(x) = S.  Where the rows of the next batches alone do not fit, v
               is less.
    clock      a row is judged once per turn of the hand, after P batches, and stays if it was used meanwhile; then it
               is away until its next use. P follows from the sum of all rows' shares of time. What a row's share means
               as a horizon of its own gives its hits also while the cache fills.
    freq       the most frequent rows are always there, from the start on; the slots left hold the others of the last
               batches, those that are planned and those that are pinned by the batches in flight.

The start counts: until the cache is full nothing leaves, and the first use of a row is a miss (but for freq). A
prediction is of the whole run: the first epoch, and later ones, whose first batches still find rows of the epoch
before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_ctr.embedding.id_stream import Floats, IdStream

# Batches of an epoch that are looked at; in between the rates change little.
_POSITIONS = 160


@dataclasses.dataclass(frozen=True)
class CachePolicy:
    """What decides which rows are cached.

    Attributes:
        policy: lru, clock, lfu, freq or lookahead.
        slots: S.
        window: batches that lookahead knows, the planned one included.
        depth: batches whose rows are fetched ahead; 0: no pipeline, and lookahead is lru.
    """

    policy: str
    slots: float
    window: int = 0
    depth: int = 0

    def known_ahead(self) -> int:
        """Batches after the planned one that lookahead knows."""
        return max(0, self.window - 1) if self.policy == "lookahead" and self.depth > 0 else 0


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch's batches: numbers (P), how many each stands for (P), whether it is the first epoch."""

    positions: Floats
    weights: Floats
    later: bool


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Sums over all batches of a run, per class of ids (C).

    Attributes:
        stream: the classes.
        uses: working keys.
        misses: of them not cached.
        created: of the misses, rows that were never used before.
        cached: rows in the cache at the end.
        horizon: (C) batches within which a row must come again to hit, in the steady state.
        evict_after: (C) batches from its last use until a row leaves that does not come again.
        resident: (C) share of the class that never leaves.
        steps: batches.
        steady_misses: (C) misses of the last batch.
    """

    stream: IdStream
    uses: Floats
    misses: Floats
    created: Floats
    cached: Floats
    horizon: Floats
    evict_after: Floats
    resident: Floats
    steps: float
    steady_misses: Floats

    def hit_rate(self) -> float:
        """Hits / working keys over the run."""
        return 1.0 - float(self.misses.sum() / self.uses.sum()) if self.uses.sum() else 0.0

    def table_hit_rates(self) -> Floats:
        """hit_rate of each table (T); nan for a table without ids."""
        with np.errstate(invalid="ignore"):
            rates: Floats = 1.0 - self.stream.by_table(self.misses) / self.stream.by_table(self.uses)
        return rates

    def steady_hit_rate(self) -> float:
        """Of the last batch."""
        return 1.0 - float(self.steady_misses.sum()) / max(self.stream.unique(), 1e-300)


def epochs_of(stream: IdStream, steps: float) -> list[Epoch]:
    """The epochs of a run of that many batches. All but the first are alike and become one, with larger weights."""
    n = stream.batches
    epochs = [_epoch(min(n, steps), False, 1.0)]
    full, rest = divmod(max(0.0, steps - n), n)
    if full >= 1:
        epochs.append(_epoch(n, True, full))
    if rest > 1e-9 * n:
        epochs.append(_epoch(rest, True, 1.0))
    return epochs


def _epoch(batches: float, later: bool, times: float) -> Epoch:
    whole = int(np.ceil(batches - 1e-9))
    if whole <= _POSITIONS:
        positions = np.arange(whole, dtype=np.float64)
        weights = np.ones(whole)
    else:
        # The first batches differ most.
        edges = np.unique(np.concatenate([np.arange(24), np.geomspace(24, batches, _POSITIONS - 24)]))
        positions, weights = (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)
    return Epoch(positions, weights * times * batches / weights.sum(), later)


def predict(stream: IdStream, cache: CachePolicy, steps: float) -> Prediction:
    """Hits and misses of a run.

    Args:
        stream: ids of the rank, with its number of batches per epoch.
        cache: policy and slots; lfu has no formula, see policy_replay.
        steps: batches of the run.

    Raises:
        ValueError: lfu.
    """
    if cache.policy == "lfu":
        raise ValueError("the hit rate of lfu has no formula; replay it (hvd_ctr.embedding.policy_replay)")
    horizons: dict[str, Callable[[], _Horizon]] = {
        "lru": lambda: _recency(stream, cache),
        "lookahead": lambda: _recency(stream, cache),
        "clock": lambda: _clock(stream, cache),
        "freq": lambda: _frequency(stream, cache),
    }
    return with_horizon(stream, horizons[cache.policy](), steps)


@dataclasses.dataclass(frozen=True)
class _Horizon:
    """A policy's horizon.

    Attributes:
        of: (position, later) -> batches, scalar or (C).
        evict_after: as in Prediction.
        resident: (C) share of the class that never leaves and was there from the start.
        warm: position in the first epoch -> (C) share that was there from the start and is still, of the rows that
            were not used before.
    """

    of: Callable[[float, bool], Any]
    evict_after: Any
    resident: Any = 0.0
    warm: Callable[[float], Any] = lambda position: 0.0


def lru_horizon(window: float) -> _Horizon:
    """The horizon of an LRU cache that holds the rows of that many batches."""
    return _Horizon(lambda position, later: window, window)


def with_horizon(stream: IdStream, horizon: _Horizon, steps: float) -> Prediction:
    """Sums up a run."""
    uses, misses, created = np.zeros_like(stream.ids), np.zeros_like(stream.ids), np.zeros_like(stream.ids)
    used = stream.ids * (1.0 - stream.absent(1))
    last, last_window, last_later = misses, horizon.of(0.0, False), False
    for epoch in epochs_of(stream, steps):
        for position, weight in zip(epoch.positions.tolist(), epoch.weights.tolist(), strict=True):
            last_window, last_later = horizon.of(position, epoch.later), epoch.later
            moving = 1.0 - horizon.resident
            if not epoch.later:
                moving = moving * (1.0 - horizon.warm(position))
            last = moving * stream.missing(position, epoch.later, last_window)
            uses, misses = uses + weight * used, misses + weight * last
            if not epoch.later:
                created = created + weight * moving * stream.missing(position, False, np.inf)
    shape = np.ones_like(stream.ids)
    cached = stream.ids * horizon.resident + (1.0 - horizon.resident) * stream.held(
        float(epochs_of(stream, steps)[-1].positions[-1]), last_later, horizon.evict_after
    )
    return Prediction(
        stream=stream,
        uses=uses,
        misses=misses,
        created=created,
        cached=cached,
        horizon=last_window * shape,
        evict_after=horizon.evict_after * shape,
        resident=horizon.resident * shape,
        steps=steps,
        steady_misses=last,
    )


def _recency(stream: IdStream, cache: CachePolicy) -> _Horizon:
    """lru and lookahead."""
    ahead = cache.known_ahead()
    if stream.rows() <= cache.slots:
        return lru_horizon(2 * stream.batches)  # Nothing ever leaves.

    def balance(position: float, later: bool) -> tuple[float, float]:
        """Batches within which a row hits, and how many of them it may be in no batch that is known."""

        def fill(window: float) -> float:
            spare = min(float(ahead), max(0.0, window - 1.0))
            misses = np.sum(stream.missing(position, later, window)) if spare else 0.0
            return float(np.sum(stream.held(position, later, window))) - spare * float(misses)

        window = solve(fill, cache.slots, 2 * stream.batches)
        return window, min(float(ahead), max(0.0, window - 1.0))

    steady, spare = balance(stream.batches, False)
    # In a later epoch's first batches the window reaches into the epoch before.
    points = np.linspace(0.0, min(steady, stream.batches), 9)
    windows = np.array([balance(point, True)[0] for point in points])
    return _Horizon(
        lambda position, later: float(np.interp(position, points, windows)) if later else steady,
        max(steady - spare, 0.0),
    )


def _clock(stream: IdStream, cache: CachePolicy) -> _Horizon:
    if stream.rows() <= cache.slots:
        return lru_horizon(2 * stream.batches)
    used = 1.0 - stream.absent(1)
    again = 1.0 - stream.absent(1, less=1.0)  # Given one use, the chance of one in another batch.

    def leaves(turn: float) -> Floats:
        """1 / batches that a row stays: a turn, and more if it is used. At later turns the batch counts in which the
        hand passes: its rows are passed by whatever they did before, and are used once more.
        """
        first, next_turn = stream.absent(turn, less=1.0), stream.absent(turn + 1, less=1.0)
        return next_turn / (max(turn, 1e-9) * (next_turn + 1.0 - first))

    turn = solve(lambda turn: float(np.sum(stream.ids * used / (again + leaves(turn)))), cache.slots, stream.batches)
    rate = leaves(turn)
    absent = np.clip(rate / (again + rate), 1e-300, 1.0)
    others = np.maximum(stream.counts - 1.0, 1e-3)
    window = stream.batches * -np.expm1(np.log(absent) / others)
    return _Horizon(lambda position, later: window, window)


def _frequency(stream: IdStream, cache: CachePolicy) -> _Horizon:
    """The most frequent rows stay, the others pass through within depth + 1 batches. Of rows with the least count that
    is kept, the slots left hold those that were used last.
    """
    if stream.rows() <= cache.slots:
        return _Horizon(lambda position, later: 2 * stream.batches, 2 * stream.batches, np.ones_like(stream.ids))
    passing = float(cache.depth + 1)
    passes = stream.held(stream.batches, False, passing)

    def needed(count: float) -> float:
        """Slots with all rows of at least that count kept."""
        kept = stream.counts >= count
        return float(np.sum(np.where(kept, stream.ids, passes)))

    values = np.unique(stream.counts)[::-1]
    full = int(np.searchsorted([needed(value) for value in values.tolist()], cache.slots, side="right"))
    border = stream.counts == values[min(full, len(values) - 1)]
    resident = np.where(stream.counts > values[min(full, len(values) - 1)], 1.0, 0.0)
    left = cache.slots - float(np.sum(np.where(border, 0.0, np.where(resident > 0, stream.ids, passes))))
    if left <= 0:  # Not even the rows that pass through fit.
        everything = np.ones_like(border)
        border, resident, left = everything, np.zeros_like(resident), cache.slots
    window = solve(lambda x: float(np.sum(stream.held(stream.batches, False, x)[border])), left, 2 * stream.batches)
    windows = np.where(border, window, min(passing, window))

    def warm(position: float) -> Floats:
        """What is left of the rows of the border that the cache began with: those used since take their places."""
        unused = np.where(border, stream.ids * stream.absent(position), 0.0)
        used = float(np.sum(np.where(border, stream.ids - unused, 0.0)))
        share = np.clip((left - used) / max(float(unused.sum()), 1e-300), 0.0, 1.0)
        return np.where(border, share, 0.0)

    return _Horizon(lambda position, later: windows, windows, resident, warm)


def solve(function: Callable[[float], float], value: float, most: float) -> float:
    """x in [0, most] where the growing function has the value; most where it stays below."""
    low, high = 0.0, most
    if function(high) <= value:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
        if high - low < 1e-9 * most:
            break
    return (low + high) / 2


def equal_horizon(stream: IdStream, misses: float, steps: float) -> Prediction:
    """The LRU cache with as many misses: what is known of a policy without a formula, by class."""

    def hits(window: float) -> float:
        return -float(with_horizon(stream, lru_horizon(window), steps).misses.sum())

    window = solve(hits, -misses, 2 * stream.batches)
    return with_horizon(stream, lru_horizon(window), steps)
