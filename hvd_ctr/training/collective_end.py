"""How what all ranks use together ends: collectively, or, after an error, without the others.

class Recorder(CollectiveEnd):
    def close(self): ...        # collective: all ranks come to it
    def abandon(self): ...      # after an exception

with Recorder() as recorder:
    ...
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self", bound="CollectiveEnd")


class CollectiveEnd(abc.ABC):
    """A context manager that is closed at the end of its block, and abandoned by an exception: then the ranks are no
    longer in step, and one that waited for the others might wait for ever.
    """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it. Collective."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Ends it without waiting for anything: the process is to end."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
