"""Progress of a run on rank 0: a bar on a terminal, a log line now and then elsewhere; TensorBoard scalars in the
run folder.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger("hvd_ctr")
_SECONDS_BETWEEN_LINES = 10.0


def format_values(values: dict[str, float]) -> str:
    """ "loss 0.4513 | auc 0.7702 | 412,345 samples/s | hit 98.1 %": numbers with their units."""
    parts = []
    for name, value in values.items():
        if name == "samples_per_second":
            parts.append(f"{value:,.0f} samples/s")
        elif name == "hit_rate":
            parts.append(f"hit {100 * value:.1f} %")
        elif name == "of_data":
            parts.append(f"{100 * value:.1f} % of the data")
        else:
            parts.append(f"{name} {value:.4f}")
    return " | ".join(parts)


class ProgressReport:
    """Shows where a loop stands. On ranks other than 0 every method does nothing.

    Args:
        what: "train", "evaluate", "predict".
        rank: this rank.
        log_dir: folder for TensorBoard scalars, or None.
    """

    def __init__(self, what: str, rank: int, log_dir: Path | None = None) -> None:
        self._what, self._active = what, rank == 0
        self._writer: Any = (
            tf.summary.create_file_writer(str(log_dir)) if self._active and log_dir is not None else None
        )
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> ProgressReport:
        if self._active and sys.stderr.isatty():
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[position]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"),
                console=Console(stderr=True),
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=None, position="", values="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def position(self, text: str, fraction: float | None) -> None:
        """Where the loop is; fraction of the whole done, 0 .. 1, None while unknown."""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, position=text, completed=fraction or 0.0, total=None if fraction is None else 1.0
            )

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Figures at a global step for TensorBoard only, under their full names."""
        if self._writer is not None:
            with self._writer.as_default(step=step):
                for name, value in scalars.items():
                    tf.summary.scalar(name, value)

    def values(self, step: int, values: dict[str, float], text: str, always: bool = False) -> None:
        """New figures at a global step: bar, TensorBoard, and without a terminal a log line at most every 10 s (or
        `always`).
        """
        if not self._active:
            return
        self.scalars(step, {f"{self._what}/{name}": value for name, value in values.items()})
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, values=format_values(values))
        due = time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES
        if always or (self._bar is None and due):
            self._last_line = time.monotonic()
            logger.info("%s %s | %s", self._what, text, format_values(values))
