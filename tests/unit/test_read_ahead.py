"""Reading ahead by a thread, and gzip with and without the fast library."""

from __future__ import annotations

import gzip
import importlib
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from hvd_ctr.data import gzip_files
from hvd_ctr.data.ahead import read_ahead
from hvd_ctr.data.line_source import LineSource


class Numbers:
    """Counts from 0, and notes what happens."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.made = 0
        self.threads: set[int] = set()
        self.closed = False

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self.last):
                self.threads.add(threading.get_ident())
                self.made += 1
                yield number
            raise OSError("torn")
        finally:
            self.closed = True


def test_items_come_in_order_one_ahead_and_the_error_in_its_place() -> None:
    numbers = Numbers(4)
    seen = []
    with pytest.raises(OSError, match="torn"):
        for item in read_ahead(numbers.items()):
            seen.append(item)
            assert numbers.made <= len(seen) + 1
    assert seen == [0, 1, 2, 3] and numbers.closed
    assert len(numbers.threads) == 1 and threading.get_ident() not in numbers.threads


def test_no_thread_is_left() -> None:
    def names() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("hvd_ctr-read")]

    numbers = Numbers(100)
    items = read_ahead(numbers.items())
    assert next(items) == 0 and len(names()) == 1
    items.close()
    assert numbers.closed and numbers.made <= 2 and names() == []
    assert list(read_ahead(iter_of(3))) == [0, 1, 2] and names() == []


def iter_of(count: int) -> Generator[int, None, None]:
    yield from range(count)


def test_lines_that_are_left_unread_close_their_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("1\n" * 1000)
    blocks = LineSource([str(path), str(tmp_path / "a.tsv")], 64).blocks()
    assert next(blocks).first_line == 1
    blocks.close()  # type: ignore[attr-defined]  # a generator
    assert not [t for t in threading.enumerate() if t.name.startswith("hvd_ctr-read")]


@pytest.fixture
def python_gzip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """gzip_files as it is where isal is not installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        importlib.reload(gzip_files)
        yield
    importlib.reload(gzip_files)
    assert gzip_files._gzip.__name__ == "isal.igzip"


def lines_of(path: Path) -> list[bytes]:
    return [
        block.text.numpy()[begin:end]
        for block in LineSource([str(path)], 100).blocks()
        for begin, end in zip(block.begins, block.ends, strict=True)
    ]


def test_python_gzip_reads_and_writes_the_same(tmp_path: Path, python_gzip: None) -> None:
    assert gzip_files._gzip is gzip
    path = tmp_path / "a.gz"
    text = b"".join(b"line %d\n" % i for i in range(1000))
    with open(path, "wb") as raw, gzip_files.writer(raw) as stream:
        stream.write(text)
    assert gzip.decompress(path.read_bytes()) == text
    assert lines_of(path) == text.splitlines()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"a\.gz: the compressed file is cut short"):
        lines_of(path)
    path.write_bytes(path.read_bytes()[:40] + bytes(300))
    with pytest.raises(ValueError, match=r"a\.gz: the compressed file is damaged"):
        lines_of(path)
