"""Long work that ranks do each for itself, such as writing files: errors reach all, and nobody is taken for dead.

Ranks that are done wait for the others in a collective, and a rank that has not joined it for
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (60) ends the job. So every few seconds all ranks exchange a word, also those that
are done. A rank's work comes as an iterator, of pieces that take seconds at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from hvd_ctr.comm import Comm

_SECONDS_BETWEEN_WORDS = 5.0


def work_together(
    comm: Comm, pieces: Iterator[Any], describe: Callable[[Exception], Any]
) -> tuple[list[Any], Exception | None]:
    """Exhausts each rank's iterator; stops on all ranks soon after one has failed. Collective.

    Args:
        comm: the communicator.
        pieces: this rank's work.
        describe: an exception -> what the other ranks are told, JSON-able and not None.

    Returns:
        What each rank tells of its failure, None for the others, the same on all ranks; and this rank's exception.
    """
    failure: Exception | None = None
    done = False
    while True:
        begin = time.monotonic()
        while not done and time.monotonic() - begin < _SECONDS_BETWEEN_WORDS:
            try:
                next(pieces)
            except StopIteration:
                done = True
            except Exception as error:  # every kind must reach the other ranks, which would wait for ever
                done, failure = True, error
        words = comm.allgather_object([done, None if failure is None else describe(failure)])
        reports = [report for _, report in words]
        if all(done for done, _ in words) or any(report is not None for report in reports):
            return reports, failure
