"""Statistics as text and scalars: units, differences between two collections, sums over ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_ctr.cli import statistics_report
from hvd_ctr.embedding import counters
from hvd_ctr.traffic import COUNTERS, KINDS
from hvd_ctr.training import statistics


def _group(scale: int, record_bytes: int = 100) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    table = {"requested": 50, "unique": 40, "hits": 30, "misses": 10, "evictions": 6, "write_backs": 5, "loads": 10}
    table |= {"invalid_ids": 3, "host_rows": 1000}
    group = {"steps": 4, "pinned_peak": 7, "disk_rows_read": 2, "disk_rows_written": 1}
    scaled = {name: value * scale for name, value in table.items()}
    return {f"t{scale}": scaled}, {**group, "record_bytes": record_bytes}


def _collection(scale: int = 1, ranks: int = 1) -> dict[str, Any]:
    stats = counters.of_groups([_group(1), _group(2, 8)])
    for row in [*stats["tables"].values(), stats["total"]]:
        row.update({name: value * scale for name, value in row.items() if name != "hit_rate"})
    exchange = {
        kind: dict(zip(COUNTERS, (8 * scale, 4096 * scale * (i + 1), 0), strict=True)) for i, kind in enumerate(KINDS)
    }
    waited = {stage: 0.5 * scale * (i + 1) for i, stage in enumerate(statistics.STAGES)}
    return {**stats, "exchange": exchange, "waited_seconds": waited, "ranks": ranks}


def test_bytes_follow_from_each_groups_rows() -> None:
    stats = counters.of_groups([_group(1), _group(2, 8)])
    assert [row["device_host_bytes"] for row in stats["tables"].values()] == [15 * 100, 30 * 8]
    total = stats["total"]
    assert (total["device_host_bytes"], total["host_disk_bytes"]) == (1740, 3 * 100 + 3 * 8)
    assert (total["steps"], total["pinned_peak"], total["unique"], total["hit_rate"]) == (4, 14, 120, 0.75)
    assert "record_bytes" not in total


def test_ranks_add_up_but_for_maxima() -> None:
    parts = [_collection(), _collection(3)]
    everyone = statistics.over_ranks(parts)
    assert everyone["tables"]["t2"]["requested"] == 400 and everyone["tables"]["t2"]["invalid_ids"] == 18
    total = everyone["total"]
    assert (total["steps"], total["pinned_peak"], total["invalid_ids"], total["hit_rate"]) == (12, 42, 27, 0.75)
    assert everyone["exchange"]["rows"] == {"calls": 32, "sent_bytes": 4 * 8192, "received_bytes": 0}
    assert everyone["waited_seconds"] == {"Data-Loader": 2.0, "Host-Manager": 4.0, "GPU-Worker": 6.0}
    assert everyone["ranks"] == 2


def test_scalars_are_of_the_steps_in_between() -> None:
    scalars = statistics.per_step(_collection(), _collection(3, ranks=2))
    assert scalars["cache/hit_rate"] == 0.75
    assert scalars["cache/evictions_rows_per_step"] == 2 * 18 / 8
    assert scalars["bytes_per_step/device_host"] == 2 * 1740 / 8
    assert scalars["bytes_per_step/gradients"] == 2 * 3 * 4096 / 8
    assert scalars["wait_seconds_per_step/GPU-Worker"] == pytest.approx(3.0 / 2 / 8)
    logs = statistics.epoch_logs(_collection(), _collection(3, ranks=2))
    assert logs == {
        "cache_hit_rate": 0.75,
        "cache_evictions": 36.0,
        "device_host_bytes": 3480.0,
        "exchange_bytes": 2.0 * 4096 * (1 + 2 + 3 + 4),
        "gpu_worker_wait_seconds": 1.5,
    }
    nothing = statistics.per_step(_collection(), _collection())
    assert nothing["cache/hit_rate"] == 0.0 and nothing["bytes_per_step/keys"] == 0.0


def test_the_report_has_units() -> None:
    assert statistics_report.lines(_collection(2, ranks=2)) == [
        "cache  lookups  unique rows  hit rate  evictions  write-backs   rows",
        "t1         100           80   75.00 %         12           10  2,000",
        "t2         200          160   75.00 %         24           20  4,000",
        "total      300          240   75.00 %         36           30  6,000",
        "moved: device-host 3.40 KiB, host-disk 648 B, between ranks 168.00 KiB",
        "between ranks per step, all ranks together: keys 1.00 KiB in 1.0 calls, rows 2.00 KiB in 1.0 calls, "
        "gradients 3.00 KiB in 1.0 calls, dense 4.00 KiB in 1.0 calls",
        "waiting, mean of the ranks: Data-Loader 0.5 s, Host-Manager 1.0 s, GPU-Worker 1.5 s",
        "pinned at most: 28 rows on one rank",
    ]
    resumed = _collection(2, ranks=2)
    resumed["total"]["steps"] += 100  # before this process; what moved is of its own steps
    assert statistics_report.lines(resumed) == statistics_report.lines(_collection(2, ranks=2))
    assert statistics_report.byte_text(1023) == "1,023 B"
    assert statistics_report.byte_text(3 * 2**40) == "3.00 TiB"
