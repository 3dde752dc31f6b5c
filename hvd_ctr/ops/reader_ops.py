"""Ops of the readers, on NumPy arrays: lines of a text, Criteo TSV, hashes of strings. Eager only.

Results are read-only views of the op's outputs: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr.ops import native

Tensor = Any

for _op in ("SplitLines", "ParseCriteo", "HashStrings"):
    tf.no_gradient(f"HvdCtr{_op}")


class CriteoLines(NamedTuple):
    """Result of `parse_criteo`, n lines.

    Attributes:
        labels: (n) float32; 0 without a label.
        dense: (n, 13) float32, sign(v) log1p(|v|); 0 where missing.
        ids: (n, 26) int64, 0 .. 2^32-1; 2^32 where missing.
        faults: (n) int32, LineFault of tf_ops/core/criteo_parser.h; not 0: the line was refused, its other values are
            zeros.
        stripped: (n) bool, the line was good but lacked trailing empty fields.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    faults: NDArray[np.int32]
    stripped: NDArray[np.bool_]


def text_tensor(text: bytes) -> Tensor:
    """`text` as a string scalar: converted once, it can be passed to the ops below many times without a copy."""
    return tf.constant(text, tf.string)


def split_lines(text: bytes | Tensor, *, final: bool) -> NDArray[np.int64]:
    """Offsets of line starts in a text.

    Args:
        text: bytes, or a string scalar from `text_tensor`.
        final: True: a rest without a newline is a line, too.

    Returns:
        (lines+1) int64; line i with its newline is text[offsets[i]:offsets[i+1]]; the last offset is where the
        unfinished rest begins.
    """
    return np.asarray(native.ops().hvd_ctr_split_lines(text=text, final=final))


def parse_criteo(
    text: bytes | Tensor | Sequence[Tensor], begins: NDArray[np.int64], ends: NDArray[np.int64], *, has_label: bool
) -> CriteoLines:
    """Parses lines of Criteo's display-advertising TSV: label, 13 integers, 26 hexadecimal categories.

    Args:
        text: bytes, or a string scalar from `text_tensor`; or a list of such scalars, taken as one text.
        begins: (n) int64, line i is text[begins[i]:ends[i]], without its newline.
        ends: (n) int64.
        has_label: False: the lines have no label (39 fields).

    Raises:
        tf.errors.InvalidArgumentError: a line lies outside the text, or in two of a list.
    """
    texts = text if isinstance(text, Sequence) and not isinstance(text, bytes) else [text]
    result = native.ops().hvd_ctr_parse_criteo(texts=texts, begins=begins, ends=ends, has_label=has_label)
    return CriteoLines(*(np.asarray(part) for part in result))


def hash_strings(data: bytes | Tensor, offsets: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """64-bit hashes of strings as ids: the same on every host, process and run.

    Args:
        data: all strings one after another.
        offsets: (n+1) int64, string i is data[offsets[i]:offsets[i+1]].
        seed: -2^63 .. 2^63-1.

    Returns:
        (n) int64, 0 .. 2^63-1.

    Raises:
        tf.errors.InvalidArgumentError: offsets do not ascend within data.
    """
    return np.asarray(native.ops().hvd_ctr_hash_strings(data=data, offsets=offsets, seed=seed))
