"""What all readers share: one rank's batches of an epoch, the counts, and what to do about a bad line.

Every rank yields the same number of batches. A rank's part of a batch may be shorter than planned (bad lines are
dealt like others and then left out) or have no sample at all.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvd_ctr import stage_clock
from hvd_ctr.data.batch import Batch
from hvd_ctr.data.dealing import Piece, Window, deal, file_order, window_order

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dealing:
    """How a reader deals rows. rank < size; limit: first rows of the stream only; shuffle_rows 0: input order."""

    rank: int
    size: int
    global_batch: int
    seed: int
    shuffle_rows: int
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"reader: received rank {self.rank} of {self.size}; allowed: 0 .. {self.size - 1}")
        if self.global_batch < 1:
            raise ValueError(
                f"reader: received global_batch {self.global_batch}; allowed: 1 or more (train.global_batch)"
            )


class FaultLog:
    """Counts of one epoch, and what to do about a bad line: skip and count it, or stop."""

    def __init__(self, policy: Literal["skip", "error"], names: Sequence[str]) -> None:
        self._policy = policy
        self._names = tuple(names)
        self.counts: Counter[str] = Counter()
        self.quiet = False  # counts only: for lines that another rank reports
        self.reset()

    def reset(self) -> None:
        """Starts the counts of an epoch; every name is present, with 0."""
        self.counts = Counter(dict.fromkeys(("lines", "rows", "stripped", *self._names), 0))

    def bad(self, name: str, place: str, detail: str, count: int) -> None:
        """`count` bad lines of one kind, the first of which is at `place` (file:line).

        Raises ValueError under the policy `error`.
        """
        if self._policy == "error":
            raise ValueError(
                f"{place}: {detail}; correct the file, or set data.bad_lines: skip to leave such lines out"
            )
        if self.counts[name] == 0 and not self.quiet:
            _LOG.warning("%s: %s; the line is left out, more of this kind are counted only", place, detail)
        self.counts[name] += count


class Reader(ABC):
    """One rank's view of the files of a split."""

    def __init__(self, paths: Sequence[str], dealing: Dealing, faults: FaultLog) -> None:
        self.paths = tuple(paths)
        self._dealing = dealing
        self._faults = faults
        self._rows_read = 0  # of the running epoch's stream, over all ranks
        self._rows_dealt = 0

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """X dense values and F features per sample."""

    @abstractmethod
    def _windows(self, paths: Sequence[str]) -> Iterator[Window]:
        """The rows of the files in order; all windows but the last hold shuffle_rows rows when that is not 0."""

    @abstractmethod
    def _take(self, pieces: Sequence[Piece]) -> Batch:
        """Parses the rows of one or more pieces, in order; bad rows are left out and counted."""

    @abstractmethod
    def _fraction_of_input(self) -> float:
        """Share of the files that the running epoch's windows came from, 0 .. 1."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's part of every global batch of the epoch, from batch `first_step` on (the skipped are read, not
        parsed).

        Starts the counts anew. Raises ValueError for files that cannot be read or hold no line, for a bad line under
        data.bad_lines: error, and at the end of an epoch without one good line on any rank, on every rank.
        """
        return (batch for batch in self.steps(epoch, first_step) if batch is not None)

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[Batch | None]:
        """As `epoch`, with a None for each skipped batch: a sign of life, since to skip most of an epoch takes long."""
        self._faults.reset()
        self._rows_read = self._rows_dealt = 0
        d = self._dealing
        pieces_of_steps = deal(self._stream(epoch), d.global_batch, d.rank, d.size)
        for step, pieces in enumerate(stage_clock.iterate("read", pieces_of_steps)):
            self._rows_dealt = min(self._rows_dealt + d.global_batch, self._rows_read)
            yield stage_clock.call("parse", self._parse, pieces) if step >= first_step else None
        if first_step == 0 and self._faults.counts["rows"] == 0:
            self._require_a_good_row(epoch)

    def _require_a_good_row(self, epoch: int) -> None:
        """Reads the epoch of all ranks up to its first good row: this rank may have had none by chance, and every rank
        must come to the same answer without asking the others.
        """
        own, rows = self._faults.counts, self._rows_read
        try:
            self._faults.reset()
            self._faults.quiet = True
            self._rows_read = 0
            if any(len(self._take([piece])) for piece in self._stream(epoch)):
                return
            reasons = ", ".join(f"{count:,} {name}" for name, count in self._faults.counts.items() if count)
        finally:
            self._faults.counts, self._rows_read = own, rows
            self._faults.quiet = False
        raise ValueError(
            f"all {rows:,} lines were refused ({reasons}), none is left to use, of: {', '.join(self.paths)}; check "
            "that the files are of data.format and of the configured columns"
        )

    def counts(self) -> dict[str, int]:
        """Of this rank, in the epoch begun last: lines dealt, rows (good lines), stripped lines, bad lines by kind."""
        return dict(self._faults.counts)

    def fraction_read(self) -> float:
        """Share of the running epoch's rows dealt so far, 0 .. 1; an estimate from the files' sizes for text."""
        if not self._rows_read:
            return 0.0
        if self._dealing.limit is not None and self._rows_dealt >= self._dealing.limit:
            return 1.0
        return self._fraction_of_input() * self._rows_dealt / self._rows_read

    def _parse(self, pieces: Sequence[Piece]) -> Batch:
        counts = self._faults.counts
        counts["lines"] += sum(len(p.positions) for p in pieces)
        batch = self._take(pieces) if pieces else Batch.empty(*self.shape)
        counts["rows"] += len(batch)
        return batch

    def _stream(self, epoch: int) -> Iterator[Piece]:
        d = self._dealing
        paths: Sequence[str] = self.paths
        if d.shuffle_rows:
            paths = [paths[i] for i in file_order(d.seed, epoch, len(paths))]
        for index, window in enumerate(self._windows(paths)):
            rows = len(window) if d.limit is None else min(len(window), d.limit - self._rows_read)
            order = window_order(d.seed, epoch, index, rows) if d.shuffle_rows else np.arange(rows, dtype=np.int64)
            self._rows_read += rows
            yield Piece(window, order)
            if d.limit is not None and self._rows_read == d.limit:
                return
        if self._rows_read == 0:
            raise ValueError(f"the files hold no line: {', '.join(self.paths)}")
