"""Writes samples as Criteo text, a chunk at a time: lines are laid out in fixed columns, then unused places dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_COUNT_CHARS = 8  # sign and 7 digits
_HEX_CHARS = 8
_TAB, _NEWLINE, _ZERO, _MINUS = b"\t\n0-"
MAX_COUNT = 10 ** (_COUNT_CHARS - 1) - 1

_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def format_lines(
    labels: NDArray[np.bool_],
    counts: NDArray[np.int64],
    count_missing: NDArray[np.bool_],
    ids: NDArray[np.int64],
    id_missing: NDArray[np.bool_],
    strip: NDArray[np.bool_],
) -> bytes:
    """Lines of label, counts (n, X) of at most MAX_COUNT, ids (n, F) below 2^32 as 8 hex digits; missing fields are
    empty.

    strip: (n,) lines whose trailing empty fields are cut off.
    """
    n, dense = counts.shape
    features = ids.shape[1]
    hex_at = 2 + dense * (_COUNT_CHARS + 1)
    width = hex_at + features * (_HEX_CHARS + 1)
    chars = np.full((n, width), _TAB, np.uint8)
    used = np.ones((n, width), np.bool_)
    chars[:, 0] = _ZERO + labels
    shape = (n, dense, _COUNT_CHARS + 1)
    _put_counts(chars[:, 2:hex_at].reshape(shape), used[:, 2:hex_at].reshape(shape), counts, count_missing)
    shape = (n, features, _HEX_CHARS + 1)
    pairs = _HEX_PAIRS[ids.astype(">u4").view(np.uint8)].view(np.uint8)
    chars[:, hex_at:].reshape(shape)[:, :, :_HEX_CHARS] = pairs.reshape(n, features, _HEX_CHARS)
    hex_used = used[:, hex_at:].reshape(shape)
    hex_used[:, :, :_HEX_CHARS] &= ~id_missing[:, :, None]
    # Field f of a stripped line goes with the tab before it, unless a later field has a value.
    trailing = np.logical_and.accumulate(id_missing[:, ::-1], axis=1)[:, ::-1] & strip[:, None]
    hex_used[:, :-1, _HEX_CHARS] &= ~trailing[:, 1:]
    chars[:, -1] = _NEWLINE
    return chars[used].tobytes()


def _put_counts(
    chars: NDArray[np.uint8], used: NDArray[np.bool_], counts: NDArray[np.int64], missing: NDArray[np.bool_]
) -> None:
    """Decimal digits of counts (n, X), right-aligned in chars (n, X, width+1), whose last place is the tab's."""
    rest = np.abs(counts).astype(np.uint32)
    for place in range(_COUNT_CHARS - 1, 0, -1):
        above = rest // np.uint32(10)
        chars[:, :, place] = _ZERO + (rest - above * np.uint32(10))
        used[:, :, place] = (rest > 0) & ~missing
        rest = above
    units = _COUNT_CHARS - 1
    used[:, :, units] = ~missing
    used[:, :, 0] = (counts < 0) & ~missing
    chars[:, :, 0] = _MINUS
