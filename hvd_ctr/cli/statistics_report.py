"""The statistics of a run as lines of text: what the cache did per table, what moved where, who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_ctr.embedding import counters

_COLUMNS = (
    ("requested", "lookups"),
    ("unique", "unique rows"),
    ("hit_rate", "hit rate"),
    ("evictions", "evictions"),
    ("write_backs", "write-backs"),
    ("host_rows", "rows"),
)
_KINDS = ("keys", "rows", "gradients", "dense")


def lines(statistics: Mapping[str, Any]) -> list[str]:
    """A table of the tables and a few lines of totals.

    Args:
        statistics: over all ranks, see hvd_ctr/training/statistics.py.
    """
    total, ranks = statistics["total"], statistics["ranks"]
    return [
        *_table(statistics),
        f"moved: device-host {byte_text(total['device_host_bytes'])}, host-disk {byte_text(total['host_disk_bytes'])}, "
        f"between ranks {byte_text(sum(kind['sent_bytes'] for kind in statistics['exchange'].values()))}",
        _exchange_line(statistics),
        "waiting, mean of the ranks: "
        + ", ".join(f"{stage} {seconds / ranks:.1f} s" for stage, seconds in statistics["waited_seconds"].items()),
        f"pinned at most: {total['pinned_peak']:,} rows on one rank",
    ]


def _table(statistics: Mapping[str, Any]) -> list[str]:
    rows = [["cache", *(title for _, title in _COLUMNS)]]
    total = {"total": statistics["total"]} if len(statistics["tables"]) > 1 else {}
    for name, row in {**statistics["tables"], **total}.items():
        rated = {**row, "hit_rate": f"{100 * counters.hit_rate(row):.2f} %"}
        rows.append([name, *(_number(rated[counter]) for counter, _ in _COLUMNS)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _number(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _exchange_line(statistics: Mapping[str, Any]) -> str:
    """Bytes and calls of a training step, per kind. The dense gradients are one call of each rank and step; the tables'
    steps would include those before a resume.
    """
    steps = max(statistics["exchange"]["dense"]["calls"] / statistics["ranks"], 1)
    parts = []
    for kind in _KINDS:
        moved = statistics["exchange"][kind]
        calls = moved["calls"] / steps / statistics["ranks"]
        parts.append(f"{kind} {byte_text(moved['sent_bytes'] / steps)} in {calls:.1f} calls")
    return f"between ranks per step, all ranks together: {', '.join(parts)}"


def byte_text(count: float) -> str:
    """ "3.21 GiB": bytes with the largest unit that leaves at least 1."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"
