"""Lines of plain or gzip text files, read in large blocks, the next one ahead by a thread.

A block holds whole lines only: what follows the last newline is carried over to the next block, and at a file's end an
unfinished line is a line. Two files never share a line. Compression is told from the first two bytes, not from the
name.

    for block in LineSource(paths, block_bytes=8 << 20).blocks():
        reader_ops.parse_criteo(block.text, block.begins, block.ends, has_label=True)
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ctr.data import gzip_files
from hvd_ctr.data.ahead import read_ahead
from hvd_ctr.ops import reader_ops

# A text line is some hundred bytes; without a limit a binary file would be read whole, block after block, before it
# fails.
MAX_LINE_BYTES = 1 << 20
_NEWLINE = 10


@dataclass(frozen=True)
class LineBlock:
    """n whole lines of one file: line i is text[begins[i]:ends[i]], without its newline.

    text: string scalar tensor of text_bytes bytes, made once for all ops that read it.
    begins, ends: (n,) int64, byte offsets. first_line: 1-based number in the file of line 0.
    """

    text: Any
    text_bytes: int
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    path: str
    first_line: int

    def __len__(self) -> int:
        """Number of lines n."""
        return len(self.begins)

    def split(self, lines: int) -> tuple[LineBlock, LineBlock]:
        """The first `lines` lines and the others, sharing the text."""
        return (
            replace(self, begins=self.begins[:lines], ends=self.ends[:lines]),
            replace(self, begins=self.begins[lines:], ends=self.ends[lines:], first_line=self.first_line + lines),
        )


class LineSource:
    """The lines of some files, in order, read once."""

    def __init__(self, paths: Sequence[str], block_bytes: int) -> None:
        """block_bytes: size of one read, after decompression."""
        self._paths = tuple(paths)
        self._block_bytes = block_bytes
        self._sizes = [os.path.getsize(path) for path in self._paths]
        self._bytes_read = 0

    def fraction_read(self) -> float:
        """Share of the files' bytes (compressed ones as they are) read so far, 0 .. 1."""
        return min(1.0, self._bytes_read / max(1, sum(self._sizes)))

    def blocks(self) -> Iterator[LineBlock]:
        """The lines in blocks of about block_bytes.

        Raises ValueError naming the file when its compressed data is cut short or damaged, or a line exceeds 1 MiB.
        """
        with contextlib.closing(read_ahead(self._blocks())) as blocks:
            for block, bytes_read in blocks:
                self._bytes_read = bytes_read
                yield block
        self._bytes_read = sum(self._sizes)

    def _blocks(self) -> Generator[tuple[LineBlock, int], None, None]:
        """Blocks, and the files' bytes read up to their ends."""
        before = 0
        for path, size in zip(self._paths, self._sizes, strict=True):
            with open_text(path) as (raw, stream):
                for block in self._file(path, stream):
                    yield block, before + raw.tell()
            before += size

    def _file(self, path: str, stream: io.FileIO | gzip_files.Stream) -> Iterator[LineBlock]:
        line = 1
        rest = b""
        while True:
            data = _read(stream, self._block_bytes, path)
            text = rest + data
            tensor = reader_ops.text_tensor(text)
            offsets = reader_ops.split_lines(tensor, final=not data)
            begins, ends = offsets[:-1], offsets[1:]
            if len(begins):
                ends = ends - (np.frombuffer(text, np.uint8)[ends - 1] == _NEWLINE)
                yield LineBlock(tensor, len(text), begins, ends, path, line)
                line += len(begins)
            rest = text[offsets[-1] :]
            if not data:
                return
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}:{line}: a line is longer than {MAX_LINE_BYTES} bytes; expected text with one sample a line"
                )


@contextlib.contextmanager
def open_text(path: str) -> Iterator[tuple[io.FileIO, io.FileIO | gzip_files.Stream]]:
    """The file itself, and the stream of its text: decompressed if it is a gzip file."""
    with open(path, "rb", buffering=0) as raw:
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        compressed = raw.read(len(gzip_files.MAGIC)) == gzip_files.MAGIC
        raw.seek(0)
        yield raw, gzip_files.reader(raw) if compressed else raw


def _read(stream: io.FileIO | gzip_files.Stream, block_bytes: int, path: str) -> bytes:
    try:
        data: bytes = stream.read(block_bytes)
        return data
    except EOFError as error:
        raise ValueError(f"{path}: the compressed file is cut short; copy it again") from error
    except gzip_files.DAMAGED as error:
        raise ValueError(f"{path}: the compressed file is damaged ({error}); copy it again") from error
