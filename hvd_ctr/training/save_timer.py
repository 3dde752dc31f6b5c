"""When a checkpoint by wall clock is due, the same answer on all ranks.

Clocks differ between hosts, so rank 0's alone decides, and the others must learn of it at a step that all know
beforehand. An exchange in every step would cost each of them a round over the network, and riding along with another
collective (the log line, an evaluation) would tie the save to settings made for other reasons. So rank 0 answers two
questions at once: is a save due, and after how many steps shall we ask again? It measures the step time and asks about
every 2 s, or when the save will be due, if that is sooner: one small broadcast (below 1 ms) in 2 s, at steps that all
ranks know. A save then comes late by a step; where steps have just become n times slower, by n times 2 s at most.
Without `every_minutes` there is no timer and no exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvd_ctr.comm import Comm

_SECONDS_BETWEEN_QUESTIONS = 2.0


class SaveTimer:
    """Counts a period of wall clock in training steps.

    Args:
        comm: the communicator.
        seconds: the period, above 0.
        clock: seconds; only rank 0's is read.
    """

    def __init__(self, comm: Comm, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._comm, self._seconds, self._clock = comm, seconds, clock
        self._steps_left = 1  # until the next question
        self._steps_since = 0  # since the last one
        self._begin = self._asked = clock()

    def due(self) -> bool:
        """To be called once after every step, on all ranks; whether all are to save now. Collective at some steps."""
        self._steps_since += 1
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        due, self._steps_left = self._comm.broadcast_object(self._answer() if self._comm.rank == 0 else None)
        self._steps_since = 0
        return bool(due)

    def restart(self) -> None:
        """A checkpoint was written: the period begins anew."""
        self._begin = self._clock()

    def _answer(self) -> tuple[bool, int]:
        now = self._clock()
        step_seconds = max((now - self._asked) / self._steps_since, 1e-9)
        self._asked = now
        left = self._begin + self._seconds - now
        wait = min(self._seconds if left <= 0 else left, _SECONDS_BETWEEN_QUESTIONS)
        return left <= 0, max(1, int(wait / step_seconds))
