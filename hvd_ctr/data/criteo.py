"""Reader of Criteo display-advertising files: label, 13 integer counts and 26 hexadecimal categories a line, between
tabs.

Any field may be empty: an empty count gives 0, an empty category its own id 2^32 (HEX_MISSING_ID). Lines whose
trailing empty fields were cut off are whole (counted as `stripped`), CRLF is accepted. The parsing is in
tf_ops/core/criteo_parser.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hvd_ctr.config import CRITEO_DENSE_NAMES, CRITEO_SPARSE_NAMES
from hvd_ctr.data.batch import Batch
from hvd_ctr.data.dealing import Piece, Window
from hvd_ctr.data.line_source import LineBlock, LineSource
from hvd_ctr.data.reader import Dealing, FaultLog, Reader
from hvd_ctr.ops import reader_ops

_LOG = logging.getLogger(__name__)

# Lines at the start of a file that tell whether it is of the expected form.
_SAMPLE_LINES = 1000

#: Names and meanings by the parser's fault number (LineFault in criteo_parser.h); 0 is a good line.
FAULTS: tuple[tuple[str, str], ...] = (
    ("good", ""),
    ("too_many_fields", "more fields than label, 13 integers and 26 categories"),
    ("bad_label", "the label is not 0 or 1"),
    ("bad_integer", "one of the 13 integer fields is not an integer of 64 bits"),
    ("bad_hex", "one of the 26 categories is not of 1 to 8 hexadecimal digits"),
    ("too_few_fields", "the line holds a label and nothing else"),
    ("blank", "the line is blank"),
)


# By whether a label was expected.
_LABEL_MISMATCH = {
    True: "have no label: 39 fields (13 integers, 26 categories) and not 40; data.train and data.eval need a label, "
    "for data.predict set data.predict_has_label: false",
    False: "have a label: 40 fields (label, 13 integers, 26 categories) and not 39; set data.predict_has_label: true",
}


class CriteoReader(Reader):
    """One rank's view of Criteo files, plain or gzip."""

    def __init__(
        self,
        paths: Sequence[str],
        dealing: Dealing,
        bad_lines: Literal["skip", "error"],
        *,
        has_label: bool,
        block_bytes: int,
    ) -> None:
        super().__init__(paths, dealing, FaultLog(bad_lines, [name for name, _ in FAULTS[1:]]))
        self._has_label = has_label
        self._block_bytes = block_bytes
        self._source = LineSource(paths, block_bytes)

    @property
    def shape(self) -> tuple[int, int]:
        """13 dense values, 26 features."""
        return len(CRITEO_DENSE_NAMES), len(CRITEO_SPARSE_NAMES)

    def _fraction_of_input(self) -> float:
        return self._source.fraction_read()

    def _windows(self, paths: Sequence[str]) -> Iterator[Window]:
        first_row = 0
        self._source = LineSource(paths, self._block_bytes)
        for blocks in _group(self._checked(self._source.blocks()), self._dealing.shuffle_rows):
            rows = sum(len(b) for b in blocks)
            yield _LineWindow(blocks, first_row)
            first_row += rows

    def _take(self, pieces: Sequence[Piece]) -> Batch:
        windows = [cast(_LineWindow, piece.window) for piece in pieces]
        starts = np.cumsum([0, *(w.text_bytes for w in windows)])
        parsed = reader_ops.parse_criteo(
            [text for w in windows for text in w.texts],
            np.concatenate([w.begins[p.positions] + at for w, p, at in zip(windows, pieces, starts, strict=False)]),
            np.concatenate([w.ends[p.positions] + at for w, p, at in zip(windows, pieces, starts, strict=False)]),
            has_label=self._has_label,
        )
        self._faults.counts["stripped"] += int(np.count_nonzero(parsed.stripped))
        rows = np.concatenate([p.positions + w.first_row for w, p in zip(windows, pieces, strict=True)])
        batch = Batch(parsed.dense, parsed.ids, parsed.labels, None, rows)
        good = parsed.faults == 0
        if good.all():
            return batch
        begin = 0
        for window, piece in zip(windows, pieces, strict=True):
            end = begin + len(piece.positions)
            self._report(window, piece.positions, parsed.faults[begin:end])
            begin = end
        return batch.select(good)

    def _report(self, window: _LineWindow, positions: NDArray[np.int64], faults: NDArray[np.int32]) -> None:
        for fault in np.unique(faults[faults != 0]):
            name, meaning = FAULTS[fault]
            bad = positions[faults == fault]
            self._faults.bad(name, window.place(int(bad[0])), meaning, len(bad))

    def _checked(self, blocks: Iterator[LineBlock]) -> Iterator[LineBlock]:
        """The blocks; the first of each file is looked at as a whole, by every rank alike.

        Raises ValueError when most of its lines are refused with the configured label and most are good without (or
        the other way round): such files would be skipped line by line, or scored shifted by one field.
        """
        for block in blocks:
            if block.first_line == 1:
                self._check_form(block)
            yield block

    def _check_form(self, block: LineBlock) -> None:
        sample = slice(0, _SAMPLE_LINES)
        begins, ends = block.begins[sample], block.ends[sample]
        lines = int(np.count_nonzero(ends > begins))  # blank ones tell nothing
        as_configured = self._good_lines(block, begins, ends, self._has_label)
        if 2 * as_configured >= max(1, lines):
            return
        if 2 * self._good_lines(block, begins, ends, not self._has_label) > lines:
            raise ValueError(f"{block.path}: most of the first {lines:,} lines {_LABEL_MISMATCH[self._has_label]}")
        if lines and as_configured == 0:
            _LOG.warning("%s: none of the first %d lines can be parsed; is it a Criteo file?", block.path, lines)

    @staticmethod
    def _good_lines(block: LineBlock, begins: NDArray[np.int64], ends: NDArray[np.int64], has_label: bool) -> int:
        faults = reader_ops.parse_criteo(block.text, begins, ends, has_label=has_label).faults
        return int(np.count_nonzero(faults == 0))


def _group(blocks: Iterator[LineBlock], rows: int) -> Iterator[list[LineBlock]]:
    """Blocks regrouped so that each group but the last has `rows` lines; rows 0: each block by itself."""
    group: list[LineBlock] = []
    missing = rows
    for block in blocks:
        if rows == 0:
            yield [block]
            continue
        while len(block) >= missing:
            head, block = block.split(missing)
            yield [*group, head]
            group, missing = [], rows
        if len(block):
            group.append(block)
            missing -= len(block)
    if group:
        yield group


class _LineWindow(Window):
    """The raw text of a window's lines; it lives until its last batch is parsed.

    texts: string scalars, taken as one text of text_bytes bytes in which line i is [begins[i], ends[i]).
    """

    def __init__(self, blocks: Sequence[LineBlock], first_row: int) -> None:
        starts = np.cumsum([0, *(b.text_bytes for b in blocks)])
        self.texts = [b.text for b in blocks]
        self.text_bytes = int(starts[-1])
        self.begins = np.concatenate([b.begins + start for b, start in zip(blocks, starts, strict=False)])
        self.ends = np.concatenate([b.ends + start for b, start in zip(blocks, starts, strict=False)])
        self.first_row = first_row
        self._first_positions = np.cumsum([0, *(len(b) for b in blocks)])
        self._places = [(b.path, b.first_line) for b in blocks]

    def __len__(self) -> int:
        return len(self.begins)

    def place(self, position: int) -> str:
        """file:line of a line of the window."""
        index = int(np.searchsorted(self._first_positions, position, side="right")) - 1
        path, first_line = self._places[index]
        return f"{path}:{first_line + position - int(self._first_positions[index])}"
