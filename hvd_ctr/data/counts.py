"""How often each id of each table occurs, in bounded memory: exact while it fits, else the most frequent ids.

counter = IdCounter(tables=2, max_ids=1_000_000)
counter.add(0, ids)                     # occurrences, in any order and number
ids, counts = counter.result(0)         # by falling count, then by id

Exact counts are sorted arrays: 16 bytes per distinct id, twice that while they grow, and the occurrences of the last
batches. Beyond `max_ids` distinct ids of all tables together they move into a frequent-items sketch (Misra-Gries with
purges, Anderson et al., IMC 2017; library datasketches) of up to `max_ids` / 4 ids of all tables, at about 100 bytes
per id: every count it gives is low by at most `max_error`, and no id that occurs more often than that is missing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

#: Distinct ids that are counted exactly unless the caller says otherwise: about 0.6 GB.
DEFAULT_MAX_IDS = 1 << 24
#: Below this the sketch would have no room.
MIN_MAX_IDS = 32

# Occurrences that are collected before they are sorted and counted.
_PENDING = 1 << 22
# A sketch of 2^n places keeps up to this share of them.
_SKETCH_LOAD = 0.75


class IdCounter:
    """Counts of (table, id).

    Args:
        tables: number of tables.
        max_ids: distinct ids, over all tables, up to which counts are exact; at least MIN_MAX_IDS.
    """

    def __init__(self, tables: int, max_ids: int = DEFAULT_MAX_IDS) -> None:
        if max_ids < MIN_MAX_IDS:
            raise ValueError(f"IdCounter: received max_ids {max_ids}; allowed: {MIN_MAX_IDS} or more")
        self._max_ids = max_ids
        self._ids: list[Ids] = [np.zeros(0, np.int64) for _ in range(tables)]
        self._counts: list[Ids] = [np.zeros(0, np.int64) for _ in range(tables)]
        self._pending: list[list[tuple[Ids, Ids | None]]] = [[] for _ in range(tables)]
        self._pending_size = 0
        self._sketch: Any = None
        self._earlier_error = 0

    @property
    def tables(self) -> int:
        """Number of tables."""
        return len(self._ids)

    @property
    def exact(self) -> bool:
        """Whether all counts are exact."""
        self._settle()
        return self._sketch is None and self._earlier_error == 0

    @property
    def max_error(self) -> int:
        """Most by which a count can be too low; an id that does not appear at all does not occur more often than
        this.
        """
        self._settle()
        if self._sketch is None:
            return self._earlier_error
        # The sketch has no accessor for its offset; an item it has never seen has it as upper bound.
        return self._earlier_error + int(self._sketch.get_upper_bound(-1))

    def add(self, table: int, ids: Ids, counts: Ids | None = None) -> None:
        """Adds occurrences.

        Args:
            table: 0 .. tables-1.
            ids: (n) int64, >= 0, in any order and number.
            counts: (n) int64, >= 1, occurrences of each; None: one each.
        """
        self._pending[table].append((np.array(ids), None if counts is None else np.array(counts)))
        self._pending_size += len(ids)
        if self._pending_size >= _PENDING:
            self._settle()

    def add_error(self, error: int) -> None:
        """What was added was itself low by up to `error`."""
        self._earlier_error += error

    def result(self, table: int) -> tuple[Ids, Ids]:
        """ids (n) and counts (n) of one table, by falling count, equal counts by id."""
        self._settle()
        ids, counts = self._ids[table], self._counts[table]
        if self._sketch is not None:
            ids, counts = self._from_sketch(table)
        order = np.lexsort((ids, -counts))
        return ids[order], counts[order]

    def _settle(self) -> None:
        """Counts what is pending."""
        for table, parts in enumerate(self._pending):
            if not parts:
                continue
            ids, counts = _count(parts)
            parts.clear()
            if self._sketch is None:
                self._ids[table], self._counts[table] = _merge(self._ids[table], self._counts[table], ids, counts)
                if sum(len(known) for known in self._ids) > self._max_ids:
                    self._start_sketch()
            else:
                self._feed(table, ids, counts)
        self._pending_size = 0

    def _start_sketch(self) -> None:
        import datasketches

        self._sketch = datasketches.frequent_items_sketch(
            max(3, math.floor(math.log2(self._max_ids / 4 / _SKETCH_LOAD)))
        )
        for table in range(self.tables):
            ids, counts = self._ids[table], self._counts[table]
            self._ids[table] = self._counts[table] = np.zeros(0, np.int64)
            self._feed(table, ids, counts)

    def _feed(self, table: int, ids: Ids, counts: Ids) -> None:
        """One Python integer per (table, id): id * tables + table."""
        update, tables = self._sketch.update, self.tables
        for key, count in zip(ids.tolist(), counts.tolist(), strict=True):
            update(key * tables + table, count)

    def _from_sketch(self, table: int) -> tuple[Ids, Ids]:
        import datasketches

        kind = datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES
        rows = [
            (item // self.tables, low)
            for item, _, low, _ in self._sketch.get_frequent_items(kind)
            if item % self.tables == table
        ]
        array = np.array(rows, np.int64).reshape(-1, 2)
        return array[:, 0], array[:, 1]


def _count(parts: list[tuple[Ids, Ids | None]]) -> tuple[Ids, Ids]:
    """Distinct ids, ascending, and how often they occur."""
    ids = np.concatenate([part for part, _ in parts])
    if all(counts is None for _, counts in parts):
        distinct, occurrences = np.unique(ids, return_counts=True)
        return distinct, occurrences.astype(np.int64)
    counts = np.concatenate([np.ones(len(part), np.int64) if given is None else given for part, given in parts])
    distinct, inverse = np.unique(ids, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, inverse, counts)
    return distinct, sums


def _merge(ids: Ids, counts: Ids, new_ids: Ids, new_counts: Ids) -> tuple[Ids, Ids]:
    """Two ascending lists of distinct ids with counts -> one."""
    place = np.searchsorted(ids, new_ids)
    known = np.zeros(len(new_ids), np.bool_)
    inside = place < len(ids)
    known[inside] = ids[place[inside]] == new_ids[inside]
    counts = counts.copy()
    counts[place[known]] += new_counts[known]
    return np.insert(ids, place[~known], new_ids[~known]), np.insert(counts, place[~known], new_counts[~known])
