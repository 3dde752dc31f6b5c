"""What a plan finds: what cannot work, what may go wrong or could be better, with the field to change and a value for
it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hvd_ctr import launcher
from hvd_ctr.config import ConfigError
from hvd_ctr.embedding.group_plan import GroupPlan
from hvd_ctr.ops import native

if TYPE_CHECKING:
    from hvd_ctr.cli.plan import Plan

# Values are proposed with some room.
_ROOM = 1.05
# The choice of launch/setup.sh.
_GPU_VARIABLE = "HVD_CTR_GPU"
# Of the free memory of a machine a plan may take without a warning.
_COMFORTABLE = 0.85
# Rows that one rank can hold: row numbers have 32 bits, places in a file 31.
_MOST_ROWS = {"ram": 2**32 - 1, "disk": 2**31}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        fatal: the run cannot work.
        field: configuration key or option to change; empty: none.
        value: a value of the field that works; None: a matter of choice.
        text: what and why, in one line.
    """

    fatal: bool
    field: str
    value: str | int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        memory_bytes: all of it.
        available_bytes: that a new process may take.
        disk_free_bytes: at embedding.host.path; None: no such path, or not wanted.
        rows_on_gpu: whether the cached rows of a run here are on GPUs.
    """

    memory_bytes: int
    available_bytes: int
    disk_free_bytes: int | None
    rows_on_gpu: bool = False

    @classmethod
    def this(cls, path: str | None) -> Machine:
        """As it is now; HVD_CTR_GPU set to 1 or 0: as if it had GPUs and a library for them, or none.

        Raises:
            ConfigError: another value.
        """
        memory = psutil.virtual_memory()
        free = shutil.disk_usage(path).free if path is not None and Path(path).is_dir() else None
        return cls(int(memory.total), int(memory.available), free, _rows_on_gpu())


def _rows_on_gpu() -> bool:
    """As `placement.rows_on_gpu` will find it in a run; starts no GPU."""
    wanted = os.environ.get(_GPU_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"{_GPU_VARIABLE} is {wanted!r}, allowed: 0, 1, or unset for what this machine has")
    return wanted == "1" if wanted else launcher.gpu_count() > 0 and native.has_gpu_kernels()


def size(value: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:,.{2 if value < 100 * factor else 0}f} {unit}"
    return f"{value:,.0f} B"


def findings_of(plan: Plan) -> list[Finding]:
    """All findings, fatal ones first."""
    found = list(_on_counts(plan))
    for group in plan.groups:
        found += [*_on_slots(plan, group), *_on_host(plan, group)]
    found += [*_on_memory(plan), *_on_disk(plan)]
    return sorted(found, key=lambda finding: not finding.fatal)


def _on_counts(plan: Plan) -> Iterator[Finding]:
    cache = plan.config.embedding.cache
    if cache.counts is not None and not Path(cache.counts).is_file():
        text = f"{cache.counts} does not exist; `hvd-ctr count CONFIG --output {cache.counts}` writes it"
        yield Finding(cache.policy == "freq", "embedding.cache.counts", None, text)
    if plan.counted is None:
        text = (
            "no id counts: hit rates are not known, rows and bytes are upper bounds; `hvd-ctr count CONFIG` makes them"
        )
        yield Finding(False, "--counts", None, text)
        return
    missing = [table.name for group in plan.groups for table in group.tables if table.name not in plan.counted.tables]
    if missing:
        text = (
            f"{plan.counted.path} has no counts of table(s) {', '.join(missing)}: their group is planned without counts"
        )
        yield Finding(False, "--counts", None, text)
    if plan.counted.max_error > 0:
        text = (
            f"counts are low by up to {plan.counted.max_error:,} and ids that are more rare are not listed: they were "
            "estimated from the rest, and so were rows and hit rates; more --max-ids of `hvd-ctr count` make them exact"
        )
        yield Finding(False, "--max-ids", None, text)


def _on_slots(plan: Plan, group: GroupPlan) -> Iterator[Finding]:
    field, traffic = "embedding.cache.slots", group.traffic
    largest, flying = math.ceil(traffic.largest_unique), math.ceil(traffic.in_flight * _ROOM)
    bound = "" if group.exact else "up to "
    if group.slots < largest:
        value = math.ceil(largest * _ROOM)
        text = (
            f"{group.name}: the largest batches need {bound}{largest:,} rows on one rank, there are "
            f"{group.slots:,} slots; "
            "raise slots, lower train.global_batch, or use more ranks"
        )
        yield Finding(group.exact, field, value, text)
    elif group.slots < flying and plan.config.train.pipeline_depth > 0:
        text = (
            f"{group.name}: the {plan.config.train.pipeline_depth + 1} batches in flight need {bound}"
            f"{math.ceil(traffic.in_flight):,} rows, there are {group.slots:,} slots: fetching ahead will wait "
            f"for steps to end"
        )
        yield Finding(False, field, flying, text)
    if group.exact and group.rows is not None and group.slots > 1.2 * group.rows + 1:
        value = max(math.ceil(group.rows * _ROOM), largest, 1)
        text = (
            f"{group.name}: a rank owns {group.rows:,.0f} rows only; {group.slots - value:,} slots fewer save "
            f"{size((group.slots - value) * group.memory.device_bytes / group.slots)} and lose nothing"
        )
        yield Finding(False, field, value, text)


def _on_host(plan: Plan, group: GroupPlan) -> Iterator[Finding]:
    host = plan.config.embedding.host
    memory = group.memory
    if group.rows is not None and group.rows > _MOST_ROWS[host.kind]:
        text = f"{group.name}: {group.rows:,.0f} rows per rank; one rank can hold {_MOST_ROWS[host.kind]:,}"
        yield Finding(True, "--ranks", math.ceil(plan.ranks * group.rows / _MOST_ROWS[host.kind] * _ROOM), text)
    if host.ram_bytes is None:
        return
    field = "embedding.host.ram_bytes"
    needed = memory.needed_ram_bytes
    if host.kind == "ram":
        if group.rows is not None and needed > host.ram_bytes:
            text = (
                f"{group.name}: {group.rows:,.0f} rows per rank take {size(needed)} with state and index, the "
                f"budget is "
                f"{size(host.ram_bytes)}; raise ram_bytes, set embedding.host.kind to disk, or use more ranks"
            )
            yield Finding(group.exact, field, math.ceil(needed * _ROOM), text)
        return
    if host.ram_bytes < memory.least_ram_bytes:
        text = (
            f"{group.name}: ram_bytes is {size(host.ram_bytes)}; this tier needs at least "
            f"{size(memory.least_ram_bytes)}"
        )
        yield Finding(True, field, math.ceil(memory.least_ram_bytes * _ROOM), text)
        return
    if group.rows is not None and needed > host.ram_bytes:
        text = (
            f"{group.name}: the index of {group.rows:,.0f} rows per rank takes {size(memory.index_bytes)}, buffers "
            f"{size(memory.buffer_bytes)}, and {size(needed)} are the least that does; ram_bytes is "
            f"{size(host.ram_bytes)}; raise it or use more ranks"
        )
        yield Finding(group.exact, field, math.ceil(needed * _ROOM), text)


def _on_memory(plan: Plan) -> Iterator[Finding]:
    needed, there = plan.rank_bytes() * plan.ranks_per_host, plan.machine.available_bytes
    if needed <= _COMFORTABLE * there:
        return
    host = plan.config.embedding.host
    ram = [group.memory.record_bytes + group.memory.index_bytes for group in plan.groups]
    advice = "use more machines" if plan.on_gpu() else "lower embedding.cache.slots, or use more machines"
    field: str = "" if plan.on_gpu() else "embedding.cache.slots"
    value: str | int | None = None
    if host.kind == "ram" and sum(ram) > 0.3 * plan.rank_bytes():
        advice = "keep the rows on disk (embedding.host: {kind: disk, path: ..., ram_bytes: ...}), or use more machines"
        field, value = "embedding.host.kind", "disk"
    elif host.kind == "disk" and host.ram_bytes is not None:
        over = (needed - _COMFORTABLE * there) / plan.ranks_per_host / len(plan.groups)
        if host.ram_bytes - over > max(group.memory.needed_ram_bytes for group in plan.groups):
            field, value, advice = "embedding.host.ram_bytes", int(host.ram_bytes - over), "lower ram_bytes"
    exact = all(group.rows is not None and group.exact for group in plan.groups)
    text = (
        f"{plan.ranks_per_host} rank(s) on this machine take {size(needed)} of memory, {size(there)} of "
        f"{size(plan.machine.memory_bytes)} are available; {advice}"
    )
    yield Finding(exact and needed > there, field, value, text)


def _on_disk(plan: Plan) -> Iterator[Finding]:
    host = plan.config.embedding.host
    if host.kind != "disk" or host.path is None:
        return
    field = "embedding.host.path"
    if not Path(host.path).is_dir():
        yield Finding(
            True, field, None, f"{host.path} is no folder; make it on each host, on a local disk: mkdir -p {host.path}"
        )
        return
    if not os.access(host.path, os.W_OK):
        yield Finding(True, field, None, f"{host.path} cannot be written to")
    # A file holds up to twice what is needed of it.
    needed = sum(group.memory.disk_bytes for group in plan.groups) * plan.ranks_per_host
    free = plan.machine.disk_free_bytes
    if free is None or needed <= _COMFORTABLE * free:
        return
    exact = all(group.rows is not None and group.exact for group in plan.groups)
    text = (
        f"the files of {plan.ranks_per_host} rank(s) grow to {size(needed)}, {size(free)} are free at "
        f"{host.path}; name a folder "
        "on a larger disk, or use more machines"
    )
    yield Finding(exact and needed > free, field, None, text)
