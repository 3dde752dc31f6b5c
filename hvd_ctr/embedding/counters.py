"""The counters of the cache: what `cache_stats()` returns, and how they add up over groups and ranks. This is the one
place that says what they mean; those of the traffic between ranks are described in hvd_ctr/traffic.py.

All count from the creation of the tables on. Units are in the names; a counter without one counts rows (= keys).

Per table and in total, summed over the ranks except where said:

* `requested`: lookups that reached the owners. A rank de-duplicates its batch before it asks, so an id counts once per
  rank and step, however often the batch holds it.
* `unique`: rows that a step worked on at their owner, each once however many ranks asked: `hits` + `misses`.
* `hits`, `misses`: of these, in a device slot already when the batch was prefetched, or not.
* `created`: of the misses, rows that did not exist yet.
* `loads`: rows moved into device slots: the misses, the warm start, and imports over a cached row.
* `evictions`: rows that left their slot for others. `write_backs`: rows written to the host tier, by evictions (of rows
  that were updated since they were loaded) and flushes.
* `device_host_bytes`: (`loads` + `write_backs`) x bytes of a row with its optimizer state, as it is moved.
* `invalid_ids`: ids left out under `invalid_ids: skip`. Every rank counts those of all ranks: no sum over ranks.
* `host_rows`, `cached_rows`: rows in the host tier and in device slots now.
* `not_admitted`: of `unique`, rows whose gradients were dropped because their ids had not occurred min_count times.
  `waiting_ids`: such ids now. `deleted_idle`, `deleted_max_rows`: rows deleted because of max_idle_steps and max_rows.

In total only:

* `steps`: row-optimizer steps; the largest of groups and ranks. `hit_rate`: hits / unique, 0 .. 1.
* `foreign_keys`: keys that another rank owns, 0 in a correct run.
* `pinned_slots`: slots held by batches in flight now. `pinned_peak`: the most there ever were; over the ranks the
  largest.
* `device_bytes`, `host_bytes`, `disk_bytes`: what the tiers occupy now.
* `disk_rows_read`, `disk_rows_written`: records read from and written to the file of rows, those moved inside it too.
  `host_disk_bytes`: their sum x bytes of a row with its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_ctr.ops.mix_cache_ops import TABLE_COUNTERS, TOTAL_COUNTERS

Stats = dict[str, Any]

#: Over the ranks the largest counts, not the sum.
_MAXIMA = frozenset({"steps", "pinned_peak", "invalid_ids"})
#: The total of no table.
_ZEROS: dict[str, float] = dict.fromkeys(
    [
        *TABLE_COUNTERS,
        "device_host_bytes",
        *(name for name in TOTAL_COUNTERS if name != "record_bytes"),
        "host_disk_bytes",
    ],
    0,
)


def of_groups(groups: Iterable[tuple[Mapping[str, Mapping[str, int]], Mapping[str, int]]]) -> Stats:
    """{"tables": {name: counters}, "total": counters} of what `mix_cache_ops.stats` says of each group."""
    tables: dict[str, dict[str, int]] = {}
    totals: list[dict[str, int]] = []
    for per_table, group in groups:
        record_bytes = group["record_bytes"]
        for name, row in per_table.items():
            tables[name] = {**row, "device_host_bytes": (row["loads"] + row["write_backs"]) * record_bytes}
        total = {counter: value for counter, value in group.items() if counter != "record_bytes"}
        total["host_disk_bytes"] = (group["disk_rows_read"] + group["disk_rows_written"]) * record_bytes
        totals.append(total)
    return {"tables": tables, "total": _rated(_added([*totals, *tables.values()], {"steps"}))}


def merged(parts: Sequence[Stats]) -> Stats:
    """Several embeddings of one rank, or none, as one; their tables have different names."""
    tables = {name: row for part in parts for name, row in part["tables"].items()}
    return {"tables": tables, "total": _rated(_added([_ZEROS, *(part["total"] for part in parts)], {"steps"}))}


def over_ranks(parts: Sequence[Stats]) -> Stats:
    """Stats of single ranks as one: sums, or maxima where the module says so."""
    tables = {name: _added([part["tables"][name] for part in parts], _MAXIMA) for name in parts[0]["tables"]}
    return {"tables": tables, "total": _rated(_added([part["total"] for part in parts], _MAXIMA))}


def hit_rate(row: Mapping[str, Any]) -> float:
    """hits / unique, 0 .. 1; 0 before the first step."""
    return row["hits"] / row["unique"] if row.get("unique") else 0.0


def _added(rows: Iterable[Mapping[str, Any]], maxima: Iterable[str]) -> dict[str, Any]:
    added: dict[str, Any] = {}
    for row in rows:
        for counter, value in row.items():
            known = added.get(counter, 0)
            added[counter] = max(known, value) if counter in maxima else known + value
    return added


def _rated(total: dict[str, Any]) -> dict[str, Any]:
    return {**total, "hit_rate": hit_rate(total)}
