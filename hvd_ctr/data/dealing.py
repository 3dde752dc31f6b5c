"""Which rank reads which row: a function of the data, the seed and the epoch, never of how many files or readers
there are.

The rows of an epoch form one stream: the files in order (seeded order when shuffling), cut into windows, each window
in a seeded order. Global batch t is the next `global_batch` rows of that stream, across window borders. Rank r of W
takes the r-th contiguous slice, so the ranks' slices are disjoint and their union is the batch, for every W. The last
batch holds what is left and is dealt the same way: some ranks may get no row, but all ranks see the same number of
batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Purposes of the random streams, so that no two draw the same numbers.
_FILE_ORDER = 1
_WINDOW_ORDER = 2


class Window(ABC):
    """Consecutive rows of the stream, held raw; only the rows a rank takes are parsed (Reader._take)."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""


@dataclass(frozen=True)
class Piece:
    """Positions (n,) of one window that belong to a batch."""

    window: Window
    positions: NDArray[np.int64]


def rank_slice(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Begin and end of rank's part of `rows` rows: sizes differ by one at most, longer ones first."""
    share, longer = divmod(rows, size)
    begin = rank * share + min(rank, longer)
    return begin, begin + share + (rank < longer)


def file_order(seed: int, epoch: int, files: int) -> NDArray[np.int64]:
    """Order (files,) in which a shuffled epoch reads its files."""
    return _generator(seed, epoch, _FILE_ORDER, 0).permutation(files)


def window_order(seed: int, epoch: int, window: int, rows: int) -> NDArray[np.int64]:
    """Order (rows,) of the rows of a shuffled epoch's window."""
    return _generator(seed, epoch, _WINDOW_ORDER, window).permutation(rows)


def _generator(seed: int, epoch: int, purpose: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, purpose, index])))


def deal(pieces: Iterable[Piece], global_batch: int, rank: int, size: int) -> Iterator[list[Piece]]:
    """Cuts the stream into global batches and yields this rank's slice of each, an empty list where it has no row."""
    pending: deque[Piece] = deque()
    held = 0
    for piece in pieces:
        pending.append(piece)
        held += len(piece.positions)
        while held >= global_batch:
            yield _slice(_pop(pending, global_batch), *rank_slice(global_batch, rank, size))
            held -= global_batch
    if held:
        yield _slice(list(pending), *rank_slice(held, rank, size))


def _pop(pending: deque[Piece], rows: int) -> list[Piece]:
    """Takes the first `rows` rows off the queue."""
    out: list[Piece] = []
    while rows:
        piece = pending.popleft()
        if len(piece.positions) > rows:
            pending.appendleft(Piece(piece.window, piece.positions[rows:]))
            piece = Piece(piece.window, piece.positions[:rows])
        out.append(piece)
        rows -= len(piece.positions)
    return out


def _slice(pieces: list[Piece], begin: int, end: int) -> list[Piece]:
    """Rows begin .. end-1 of the concatenated pieces."""
    out: list[Piece] = []
    for piece in pieces:
        positions = piece.positions[max(begin, 0) : max(end, 0)]
        if len(positions):
            out.append(Piece(piece.window, positions))
        begin -= len(piece.positions)
        end -= len(piece.positions)
    return out
