"""Eviction policies of the cache in plain Python, written from the rules in the documentation (docs/config.md).

Slow and obvious: a dictionary of cached keys that is sorted anew for every batch. A batch is the list of its distinct
keys in the order in which the cache sees them; its own keys are never evicted, and nothing is pinned.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

Batches = Sequence[Sequence[int]]


@dataclasses.dataclass
class Tally:
    """Distinct keys of all batches that were cached, or not, and keys evicted."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)


@dataclasses.dataclass
class _Row:
    last_use: int = 0
    uses: int = 0
    used_again: bool = False  # clock: since it was loaded or the hand passed


class _Cache:
    """What all policies share; `victims` is the policy."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: dict[int, _Row] = {}
        self.tally = Tally()
        self.time = 0

    def victims(self, count: int, batch: set[int], step: int) -> list[int]:
        """The `count` keys that leave."""
        allowed = [key for key in self.rows if key not in batch]
        return sorted(allowed, key=lambda key: self.rank(key, step))[:count]

    def rank(self, key: int, step: int) -> tuple[int, ...]:
        """The smallest leaves first."""
        raise NotImplementedError

    def place(self, keys: list[int], victims: list[int]) -> None:
        """Keys that are loaded; the first ones take the places of the victims."""

    def after(self, batch: Sequence[int]) -> None:
        """The end of a batch."""

    def run(self, batches: Batches) -> Tally:
        for step, batch in enumerate(batches):
            wanted = set(batch)
            missing = [key for key in batch if key not in self.rows]
            victims = self.victims(max(0, len(self.rows) + len(missing) - self.slots), wanted, step)
            for key in victims:
                del self.rows[key]
            self.place(missing, victims)
            self.tally.hits += len(batch) - len(missing)
            self.tally.misses += len(missing)
            self.tally.evictions += len(victims)
            for key in batch:
                row = self.rows.setdefault(key, _Row())
                row.used_again = row.uses > 0
                row.uses += 1
                self.time += 1
                row.last_use = self.time
            self.after(batch)
        return self.tally


class _Lru(_Cache):
    def rank(self, key: int, step: int) -> tuple[int, ...]:
        return (self.rows[key].last_use,)


class _Lfu(_Cache):
    """Fewest uses since it was loaded; halved, rounding up, at the end of the batch with the 16 x slots-th use."""

    since_halving = 0

    def rank(self, key: int, step: int) -> tuple[int, ...]:
        return (self.rows[key].uses, self.rows[key].last_use)

    def after(self, batch: Sequence[int]) -> None:
        self.since_halving += len(batch)
        if self.since_halving >= 16 * self.slots:
            self.since_halving = 0
            for row in self.rows.values():
                row.uses = (row.uses + 1) // 2


class _Clock(_Cache):
    """A ring of places; the hand takes rows that were not used again and gives the others a second chance."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.ring: list[int | None] = [None] * slots
        self.hand = 0

    def victims(self, count: int, batch: set[int], step: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            key = self.ring[self.hand]
            self.hand = (self.hand + 1) % self.slots
            if key is None or key in batch or key in found:
                continue
            if self.rows[key].used_again:
                self.rows[key].used_again = False
            else:
                found.append(key)
        return found

    def place(self, keys: list[int], victims: list[int]) -> None:
        where = {key: place for place, key in enumerate(self.ring) if key is not None}
        places = [where[key] for key in victims]
        places += [place for place, key in enumerate(self.ring) if key is None]
        for key, place in zip(keys, places, strict=False):
            self.ring[place] = key


class _Freq(_Cache):
    """Smallest count; starts with the most frequent keys."""

    def __init__(self, slots: int, counts: Mapping[int, int]) -> None:
        super().__init__(slots)
        self.counts = counts
        for key in sorted(counts, key=lambda key: (-counts[key], key))[:slots]:
            self.time += 1
            self.rows[key] = _Row(last_use=self.time)

    def rank(self, key: int, step: int) -> tuple[int, ...]:
        return (self.counts.get(key, 0), self.rows[key].last_use)


class _Lookahead(_Cache):
    """Knows this batch and the next `window` - 1. window None: all to come, which is Belady's optimum."""

    def __init__(self, slots: int, batches: Batches, window: int | None) -> None:
        super().__init__(slots)
        self.uses_at: dict[int, list[int]] = defaultdict(list)
        for step, batch in enumerate(batches):
            for key in batch:
                self.uses_at[key].append(step)
        self.end = len(batches)
        self.window = window

    def rank(self, key: int, step: int) -> tuple[int, ...]:
        steps = self.uses_at[key]
        after = bisect.bisect_right(steps, step)
        next_use = steps[after] if after < len(steps) else self.end
        known = self.end if self.window is None else min(self.end, step + self.window)
        if next_use >= known:
            return (0, 0, self.rows[key].last_use)
        return (1, -next_use, self.rows[key].last_use)


def simulate(
    policy: str, slots: int, batches: Batches, *, counts: Mapping[int, int] | None = None, window: int = 8
) -> Tally:
    """Hits, misses and evictions of a policy, or of "belady", the fewest misses that any policy can have.

    Args:
        policy: lru, lfu, clock, freq, lookahead or belady.
        slots: keys that fit.
        batches: distinct keys of each batch, at most `slots`.
        counts: of freq; the cache starts with the keys of the largest ones.
        window: of lookahead, in batches.
    """
    caches = {
        "lru": lambda: _Lru(slots),
        "lfu": lambda: _Lfu(slots),
        "clock": lambda: _Clock(slots),
        "freq": lambda: _Freq(slots, counts or {}),
        "lookahead": lambda: _Lookahead(slots, batches, window),
        "belady": lambda: _Lookahead(slots, batches, None),
    }
    return caches[policy]().run(batches)
