"""The ids of a run as numbers of occurrences: how many different rows a batch needs, and how long ago each was needed.

    stream = IdStream.of_counts([("item", counts)], lines=1e6, batch=4096, share=1 / ranks)
    stream.unique()                       # K, working keys of a batch
    stream.seen(10)                       # different rows in 10 batches

Model: the order of the samples is random, as after a shuffle; the c occurrences of an id lie anywhere in the n batches
of an epoch, so it is absent from a window of x batches with probability (1 - x / n)^c. That is exact for the
expectation over all orders, and unlike independent draws it knows that an id that occurs once does not come again in
this epoch. The next epoch is a new order of the same ids. Ranks own ids by hash: each has a random share of every
class of counts.

Symbols: C classes of ids with (nearly) equal count, T tables, n batches of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Counts up to this have a class each, larger ones share a class with those up to 2 % larger.
_EXACT_COUNTS = 64
_CLASS_WIDTH = 1.02


@dataclasses.dataclass(frozen=True)
class IdCounts:
    """How often the ids of a table occur in an epoch.

    Attributes:
        counts: (n) occurrences, > 0.
        ids: (n) how many ids occur that often each.
    """

    counts: Floats
    ids: Floats

    @classmethod
    def of(cls, counts: NDArray[Any]) -> IdCounts:
        """From the occurrences of each id."""
        counts = np.asarray(counts, np.float64)
        values, ids = np.unique(counts[counts > 0], return_counts=True)
        return cls(values, ids.astype(np.float64))

    @property
    def distinct(self) -> float:
        """Different ids."""
        return float(self.ids.sum())

    @property
    def occurrences(self) -> float:
        """Of all ids."""
        return float(np.sum(self.counts * self.ids))

    def completed(self, occurrences: float, max_error: float) -> IdCounts:
        """Counts that a sketch kept, each low by at most max_error, made to have that many occurrences in all.

        A frequent id was there at every purge of the sketch, so its count is low by nearly max_error; what is left then
        are ids that are not listed. They go on with the power law of the last listed ones; once it falls below 1, the
        rest are ids that occur once. An estimate, no bound.
        """
        if max_error <= 0 or not len(self.counts) or occurrences <= self.occurrences:
            return self
        raised = min(max_error, (occurrences - self.occurrences) / self.distinct)
        counts = self.counts + raised
        left = occurrences - float(np.sum(counts * self.ids))
        if left < 1:
            return IdCounts(counts, self.ids)
        order = np.argsort(-counts)
        ranks = np.cumsum(self.ids[order])
        last, listed = float(counts[order[-1]]), float(ranks[-1])
        earlier = float(np.interp(listed / 10, ranks, counts[order]))
        slope = max(0.3, np.log10(max(earlier / last, 1.0)))
        # Parts of the law in which ranks grow by 5 %.
        edges = listed * 1.05 ** np.arange(400)
        tail_counts = last * (np.sqrt(edges[1:] * edges[:-1]) / listed) ** -slope
        tail_ids = np.diff(edges)
        keep = tail_counts >= 1
        tail_counts, tail_ids = tail_counts[keep], tail_ids[keep]
        before = np.cumsum(tail_counts * tail_ids) - tail_counts * tail_ids
        tail_ids = np.clip((left - before) / tail_counts, 0.0, tail_ids)
        left -= float(np.sum(tail_counts * tail_ids))
        parts = np.concatenate([counts, tail_counts, [1.0]]), np.concatenate([self.ids, tail_ids, [max(left, 0.0)]])
        there = parts[1] > 0
        return IdCounts(parts[0][there], parts[1][there])


@dataclasses.dataclass(frozen=True)
class IdStream:
    """Ids by class.

    Attributes:
        counts: (C) occurrences of each id of the class in an epoch, > 0.
        ids: (C) ids of the class; a rank's share need not be whole.
        tables: (C) int64, table of the class.
        table_count: T.
        batches: n.
    """

    counts: Floats
    ids: Floats
    tables: NDArray[np.int64]
    table_count: int
    batches: float

    @classmethod
    def of_counts(cls, tables: Sequence[IdCounts], lines: float, batch: float, share: float = 1.0) -> IdStream:
        """From the counts of each table's ids.

        Args:
            tables: per table.
            lines: samples of an epoch.
            batch: samples of a batch, those of all ranks.
            share: part of the ids that is meant, 1 / W for those of one rank.
        """
        parts = [_classes(table) for table in tables]
        return cls(
            counts=np.concatenate([part.counts for part in parts]),
            ids=np.concatenate([part.ids for part in parts]) * share,
            tables=np.repeat(np.arange(len(parts)), [len(part.counts) for part in parts]),
            table_count=len(parts),
            batches=max(1.0, lines / batch),
        )

    def shared(self, share: float) -> IdStream:
        """A random part of the ids."""
        return dataclasses.replace(self, ids=self.ids * share)

    def absent(self, window: Any, less: float = 0.0) -> Floats:
        """Probability (..., C) that an id is in none of `window` (..., C or 1) batches; `less`: of its occurrences are
        known to be elsewhere.
        """
        outside = np.clip(1.0 - np.asarray(window, np.float64) / self.batches, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            result: Floats = np.exp(np.maximum(self.counts - less, 1e-3) * np.maximum(np.log(outside), -1e9))
        return result

    def rows(self) -> float:
        """Different ids of an epoch."""
        return float(self.ids.sum())

    def unique(self) -> float:
        """Different ids of a batch: K."""
        return self.seen(1)

    def unique_spread(self) -> float:
        """Standard deviation of the different ids of a batch, at most."""
        used = 1.0 - self.absent(1)
        return float(np.sqrt(np.sum(self.ids * used * (1.0 - used))))

    def seen(self, window: float) -> float:
        """Different ids of `window` batches in a row, within an epoch."""
        return float(np.sum(self.ids * (1.0 - self.absent(window))))

    def held(self, position: float, later: bool, window: Any) -> Floats:
        """Different ids (C) of the `window` (scalar or C) batches up to and with number `position` of an epoch.
        `later`: it is not the first one, so the window may reach into the epoch before.
        """
        inside = np.minimum(window, position + 1)
        absent = self.absent(inside)
        if later:
            absent = absent * self.absent(np.maximum(window - inside, 0))
        result: Floats = self.ids * (1.0 - absent)
        return result

    def missing(self, position: float, later: bool, window: Any) -> Floats:
        """Ids (C) of batch number `position` of an epoch that are in none of the `window` batches before it."""
        inside = np.minimum(window, position)
        missing = self.absent(inside) - self.absent(inside + 1)
        if later:
            missing = missing * self.absent(np.maximum(window - inside, 0))
        result: Floats = self.ids * missing
        return result

    def by_table(self, values: Floats) -> Floats:
        """Sums (T) of values (C)."""
        sums: Floats = np.bincount(self.tables, values, minlength=self.table_count).astype(np.float64)
        return sums


def _classes(table: IdCounts) -> IdCounts:
    """One entry per class, by falling count."""
    order = np.argsort(table.counts, kind="stable")
    values, ids = table.counts[order], table.ids[order]
    if not len(values):
        return table
    large = np.floor(np.log(np.maximum(values / _EXACT_COUNTS, 1.0)) / np.log(_CLASS_WIDTH)).astype(np.int64)
    number = np.where(values <= _EXACT_COUNTS, np.arange(len(values)), len(values) + large)
    _, which = np.unique(number, return_inverse=True)
    total = np.bincount(which, ids).astype(np.float64)
    mean = np.bincount(which, values * ids) / total
    falling = np.argsort(-mean)
    return IdCounts(mean[falling], total[falling])
