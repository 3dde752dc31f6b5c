"""Reading ahead: the next item of an iterator is made by a thread while the present one is used.

for block in read_ahead(blocks_of(path)): ...
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """The items in their order, one of them made ahead; an error comes where its item would.

    Closing the result (or leaving it to be collected) waits for the item under way and closes `items`.
    """
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvd_ctr-read") as thread:
        coming = thread.submit(next, items, end)
        try:
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]  # not `end`, so an Item
        finally:
            # Not while the thread is in it.
            thread.submit(items.close).result()
