"""When the stages of a step ran, for `--profile`, as far as Python runs them; tf_ops/core/stage_clock.h has the others.

    with stage_clock.span("waiting"):
        ...
    for batch in stage_clock.iterate("read", batches): ...

Off (the usual case) a span costs a function call. On, spans are kept with the name of the pipeline's thread that they
ran in. Times are nanoseconds of CLOCK_MONOTONIC, as in C++.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: The threads of the pipeline; the last one also runs whatever no pipeline takes over.
THREADS = ("Data-Loader", "Host-Manager", "GPU-Worker")


class Span(NamedTuple):
    """A stage's run: its name, begin and end in ns, and the pipeline's thread, one of THREADS."""

    stage: str
    begin_ns: int
    end_ns: int
    thread: str


_on = False
_spans: list[Span] = []
_open: set[_Open] = set()
_nothing = contextlib.nullcontext()
_local = threading.local()  # thread: which one of THREADS this is


class _Open:
    """A span that runs. Each object is entered once."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        self._thread = _this_thread()
        self._begin_ns = time.monotonic_ns()
        _open.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.discard(self)
        if _on:
            _spans.append(self.until(time.monotonic_ns()))

    def until(self, end_ns: int) -> Span:
        return Span(self._stage, self._begin_ns, end_ns, self._thread)


def _this_thread() -> str:
    known: str | None = getattr(_local, "thread", None)
    if known is None:
        name = threading.current_thread().name
        known = next((thread for thread in THREADS if name == f"hvd_ctr {thread}"), THREADS[-1])
        _local.thread = known
    return known


def start() -> None:
    """From now on spans are kept."""
    global _on
    _spans.clear()
    _on = True


def stop() -> None:
    """From now on spans are not kept; forgets those that nobody took."""
    global _on
    _on = False
    _spans.clear()


def on() -> bool:
    """Whether spans are kept."""
    return _on


def take(*, with_running: bool = False) -> list[Span]:
    """The spans that ended since the last call, and on demand those that run, as if they ended now."""
    now = time.monotonic_ns()
    count = len(_spans)  # other threads append meanwhile
    taken = _spans[:count]
    del _spans[:count]
    return [*taken, *(span.until(now) for span in list(_open))] if with_running else taken


def span(stage: str) -> contextlib.AbstractContextManager[None]:
    """Keeps its `with` block as a run of the stage."""
    return _Open(stage) if _on else _nothing


def call(stage: str, function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments), as a run of the stage."""
    with span(stage):
        return function(*arguments)


def record(stage: str, begin_ns: int, end_ns: int) -> None:
    """Keeps a run of the stage in this thread."""
    if _on:
        _spans.append(Span(stage, begin_ns, end_ns, _this_thread()))


def iterate(stage: str, iterator: Iterator[T]) -> Iterator[T]:
    """The iterator's items; making each is a run of the stage."""
    while True:
        with span(stage):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
