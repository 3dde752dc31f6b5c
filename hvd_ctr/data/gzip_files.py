"""gzip streams: by ISA-L (package isal), which inflates several times as fast as zlib; where that is not installed, by
Python's own gzip. The data is the same.
"""

from __future__ import annotations

import gzip
import io
import zlib
from types import ModuleType
from typing import Any, BinaryIO

_gzip: ModuleType
_zlib: ModuleType
try:
    from isal import igzip as _gzip
    from isal import isal_zlib as _zlib
except ImportError:
    _gzip, _zlib = gzip, zlib

MAGIC = b"\x1f\x8b"
#: What reading a damaged stream raises; one that is cut short raises EOFError.
DAMAGED: tuple[type[Exception], ...] = (gzip.BadGzipFile, _zlib.error, zlib.error)

Stream = Any  # a GzipFile of either module


def reader(raw: io.FileIO) -> Stream:
    """A stream of the decompressed bytes."""
    return _gzip.GzipFile(fileobj=raw, mode="rb")


def writer(raw: BinaryIO) -> Stream:
    """A stream that compresses, quickly rather than well."""
    return _gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1)
