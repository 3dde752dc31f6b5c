"""What a disk tier reads and writes: the second-level cache in RAM behind the device cache, from the counts of ids.

The second level (tf_ops/core/disk_host_store.h) holds rows that left the device. A row is stored hot; the hand of a
clock makes a hot row cold and takes a cold one to the file; loading a row to the device makes its copy cold, storing
it again makes it hot. With P batches for a turn of the hand, a row that is stored anew just behind the hand stays 2 P,
and one that is stored again over its copy P to 2 P. It is read from the file if it comes again later than that. P
follows from the sum of all rows' time in RAM, as the horizon of the device cache does (hit_rate.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from hvd_ctr.embedding.hit_rate import Prediction, epochs_of, solve
from hvd_ctr.embedding.id_stream import Floats, IdStream

_ROUNDS = 40
_STRIDE = 16  # Positions of an epoch between two looks at the room in RAM.
# Of a segment whose space is given back, the part that is still needed: the file is kept at twice what is needed, and
# the emptiest segment is taken, for which use = (1 - part) / -log(part) (Desnoyers, SYSTOR 2012).
_MOVED = 0.2032
# Points and weights of an integral over [0, 1].
_POINTS = (np.arange(8) + 0.5) / 8
_WEIGHTS = np.full(8, 1 / 8)


@dataclasses.dataclass(frozen=True)
class DiskTraffic:
    """Rows, summed over the batches of a run.

    Attributes:
        reads: read from the file, for the device or to move them inside it.
        written: written to the file, the final flush and those moved inside it included.
        appended: of them, not moved.
        last_reads: of the last batch.
        last_writes: of the last batch.
        device_loads: rows that existed and were loaded to the device, from RAM or file.
        found: of them, those that were in RAM.
    """

    reads: float
    written: float
    appended: float
    last_reads: float
    last_writes: float
    device_loads: float
    found: float

    def hit_rate(self) -> float:
        """Share of the loaded rows that were in RAM."""
        return self.found / self.device_loads if self.device_loads else 1.0


def disk_traffic(prediction: Prediction, slots: float, ram_rows: Callable[[float], float]) -> DiskTraffic:
    """Reads and writes of a run.

    Args:
        prediction: of the device cache.
        slots: its slots.
        ram_rows: rows that exist -> rows that the second level has room for (its index takes room from it).
    """
    whole = prediction.stream
    stream = dataclasses.replace(whole, ids=whole.ids * (1.0 - prediction.resident))
    sums = _Sums()
    state: _SecondLevel | None = None
    room = float("inf")
    for epoch in epochs_of(whole, prediction.steps):
        for number, (position, weight) in enumerate(zip(epoch.positions.tolist(), epoch.weights.tolist(), strict=True)):
            missing = stream.missing(position, epoch.later, prediction.horizon)
            new = np.zeros_like(missing) if epoch.later else stream.missing(position, False, np.inf)
            again = np.maximum(missing - new, 0.0)
            sums.misses += weight * float(missing.sum())
            sums.loads += weight * float(again.sum())
            if sums.misses < slots:
                continue
            rows = whole.rows() if epoch.later else whole.seen(position + 1)
            rows -= slots * float(new.sum()) / max(float(missing.sum()), 1e-300)
            if state is None or number % _STRIDE == 0:
                room = ram_rows(rows)
                state = _SecondLevel.of(stream, prediction, room)
            if sums.stored < room:
                sums.stored += weight * float(new.sum())  # Nothing leaves RAM before it is full.
                continue
            read = np.clip(stream.missing(position, epoch.later, state.window) - new, 0.0, again)
            sums.add(weight, float(read.sum()), float(np.sum(missing - again * (1.0 - state.anew))), rows, room)
    # The final flush stores what is on the device; few of those rows have a copy in RAM.
    appended = max(0.0, sums.stored + min(slots, whole.rows()) - ram_rows(whole.rows()))
    return DiskTraffic(
        reads=sums.reads + sums.moved,
        written=appended + sums.moved,
        appended=appended,
        last_reads=sums.last_reads,
        last_writes=sums.last_writes,
        device_loads=sums.loads,
        found=sums.loads - sums.reads,
    )


@dataclasses.dataclass
class _Sums:
    """So far, in rows; `stored` in RAM without a copy there, `moved` inside the file."""

    misses: float = 0.0
    loads: float = 0.0
    stored: float = 0.0
    reads: float = 0.0
    moved: float = 0.0
    last_reads: float = 0.0
    last_writes: float = 0.0

    def add(self, weight: float, read: float, stored: float, rows: float, room: float) -> None:
        """Batches with RAM full: rows read, and stored without a copy in RAM, in each; rows that exist, and have room
        there.
        """
        in_file = self.stored - room
        moved = stored * _MOVED / (1.0 - _MOVED) if in_file > 2 * (rows - room) else 0.0
        self.reads += weight * read
        self.stored += weight * stored
        self.moved += weight * moved
        self.last_reads, self.last_writes = read + moved, stored + moved


@dataclasses.dataclass(frozen=True)
class _SecondLevel:
    """The steady state of the cache in RAM.

    Attributes:
        window: (C) batches after which a row that comes again is read from the file.
        anew: (C) share of the stores of rows that existed which find no copy in RAM.
    """

    window: Floats
    anew: Floats

    @classmethod
    def of(cls, stream: IdStream, prediction: Prediction, room: float) -> _SecondLevel:
        """The state with room for that many rows."""
        turn = solve(lambda turn: cls._at(stream, prediction, turn)[0], room, 4 * stream.batches)
        return cls._at(stream, prediction, turn)[1]

    @classmethod
    def _at(cls, stream: IdStream, prediction: Prediction, turn: float) -> tuple[float, _SecondLevel]:
        """Rows in RAM when a turn of the hand takes that many batches, and the state then."""
        leaves = np.asarray(prediction.evict_after, np.float64)
        at_store = np.maximum(stream.absent(leaves, less=1.0), 1e-300)
        misses = stream.missing(stream.batches, False, prediction.horizon)
        on_device = stream.ids * (1.0 - stream.absent(leaves)) / np.maximum(misses, 1e-300)
        turn = max(turn, 1e-6)
        copy_stays = np.clip(1.0 - on_device / turn, 0.0, 1.0)
        # Rows of a batch leave RAM before those that it needs are looked up.
        gone_new = stream.absent(leaves + np.maximum(2 * turn - 1, 0.0), less=1.0) / at_store
        gone_again = np.zeros_like(gone_new)
        for point, weight in zip(_POINTS.tolist(), _WEIGHTS.tolist(), strict=True):
            gone_again += weight * stream.absent(leaves + np.maximum((1 + point) * turn - 1, 0.0), less=1.0) / at_store
        found = 1.0 - gone_new
        for _ in range(_ROUNDS):
            kept = copy_stays * found
            found = 1.0 - ((1.0 - kept) * gone_new + kept * gone_again)
        kept = copy_stays * found
        life = (2.0 - 0.5 * kept) * turn
        waiting = np.zeros_like(life)
        for point, weight in zip(_POINTS.tolist(), _WEIGHTS.tolist(), strict=True):
            waiting += weight * life * stream.absent(leaves + point * life, less=1.0) / at_store
        short = np.minimum(on_device, turn)
        rows = misses * (waiting + found * (short - short**2 / (2 * turn)))
        absent = np.clip(at_store * (1.0 - found), 1e-300, 1.0)
        others = np.maximum(stream.counts - 1.0, 1e-3)
        window = stream.batches * -np.expm1(np.log(absent) / others)
        return float(rows.sum()), cls(np.maximum(window, prediction.horizon), 1.0 - kept)
