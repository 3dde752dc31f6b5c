"""How a plan is printed: tables with units, findings last."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hvd_ctr.cli.plan_findings import size
from hvd_ctr.embedding.group_plan import GroupPlan, TablePlan
from hvd_ctr.embedding.hit_rate import CachePolicy, predict

if TYPE_CHECKING:
    from hvd_ctr.cli.plan import Plan

# Without counts: rows over all ranks for which growing tables are shown.
_EXAMPLE_ROWS = (1e6, 1e7, 1e8, 1e9)
_SLOT_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_WIDTH = 132


def show(plan: Plan) -> None:
    """Prints the plan to standard output."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    _show_head(console, plan)
    for group in plan.groups:
        _show_tables(console, plan, group)
        _show_group_memory(console, plan, group)
        _show_step(console, group)
        _show_hits(console, group)
    _show_memory(console, plan)
    console.print()
    for finding in plan.findings:
        mark = "[bold red]cannot work[/]" if finding.fatal else "[yellow]note[/]"
        value = "" if finding.value is None else f": {finding.value}"
        field = "" if not finding.field else f"\n    -> {finding.field}{value}"
        console.print(f"{mark}  {finding.text}{field}", soft_wrap=True)
    if not plan.findings:
        console.print("everything fits")


def _rows(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _show_head(console: Console, plan: Plan) -> None:
    loop = plan.config.train
    steps = "steps not known" if plan.steps is None else f"{plan.steps:,.0f} steps"
    console.print(
        f"{plan.config.name}: {plan.ranks} rank(s), {plan.ranks_per_host} on this machine, global batch "
        f"{loop.global_batch:,} samples, {steps}, pipeline depth {loop.pipeline_depth}, cached rows "
        f"{'on GPUs' if plan.on_gpu() else 'in RAM'}"
    )
    if plan.counted is not None:
        exact = "exact" if plan.counted.max_error == 0 else f"low by up to {plan.counted.max_error:,}"
        console.print(
            f"from {plan.counted.path}: {plan.counted.listed:,} ids in {plan.counted.lines:,.0f} lines, counts "
            f"{exact}; "
            "assumes that samples come in random order"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _show_tables(console: Console, plan: Plan, group: GroupPlan) -> None:
    bound = "" if group.exact else ", at most"
    table = _table(
        f"Tables of dim {group.dim}, at the end of the run{bound}",
        "table",
        "rows, all ranks",
        "bytes per row",
        "rows + state + index, rank",
        "all ranks",
        f"on {'GPU' if plan.on_gpu() else 'device'}, rank",
        "hit rate",
    )
    for name, row in _alike(group):
        each = row.row_bytes + row.index_bytes_per_row
        table.add_row(
            name,
            "grow" if row.rows is None else _rows(row.rows * plan.ranks),
            f"{row.row_bytes}" + (f" + {row.index_bytes_per_row:.0f}" if row.index_bytes_per_row else ""),
            f"{each:,.0f} B per row" if row.host_bytes is None else size(row.host_bytes),
            "-" if row.host_bytes is None else size(row.host_bytes * plan.ranks),
            _bytes(row.device_bytes),
            _share(row.hit_rate),
        )
    console.print(table)


def _alike(group: GroupPlan) -> Iterator[tuple[str, TablePlan]]:
    """The tables with their names; those of which nothing is known together."""
    growing = [table for table in group.tables if table.rows is None]
    if len(growing) > 1:
        yield f"{len(growing)} tables", growing[0]
    for table in group.tables:
        if table.rows is not None or len(growing) == 1:
            yield table.name, table


def _show_group_memory(console: Console, plan: Plan, group: GroupPlan) -> None:
    disk = plan.config.embedding.host.kind == "disk"
    device = "GPU" if plan.on_gpu() else "device"
    table = _table(
        f"Memory of dim {group.dim}, {group.slots:,} slots per rank",
        "rows, all ranks",
        f"{device}, rank",
        "RAM, rank",
        "of it rows",
        "index",
        "slots",
        "batches",
        *(["disk, rank"] if disk else []),
        f"{device}, all",
        "RAM, all",
        *(["disk, all"] if disk else []),
    )
    sizes = [None] if group.rows is not None else [rows / plan.ranks for rows in _EXAMPLE_ROWS]
    for rows in sizes:
        memory = group.memory if rows is None else group.memory_for(rows)
        count = group.rows if rows is None else rows
        table.add_row(
            _rows((count or 0.0) * plan.ranks),
            size(memory.device_bytes),
            size(memory.host_bytes),
            size(memory.record_bytes + memory.buffer_bytes),
            size(memory.index_bytes),
            size(memory.slot_bytes),
            size(memory.batch_bytes),
            *([size(memory.disk_bytes)] if disk else []),
            size(memory.device_bytes * plan.ranks),
            size(memory.host_bytes * plan.ranks),
            *([size(memory.disk_bytes * plan.ranks)] if disk else []),
        )
    console.print(table)


def _show_step(console: Console, group: GroupPlan) -> None:
    traffic = group.traffic
    bound = "expected" if group.exact else "at most"
    table = _table(f"Each step of dim {group.dim}, one rank, {bound}", "what", "rows", "bytes")
    between = "to other ranks"
    table.add_row("keys of the local batch (U)", _rows(traffic.local_keys), f"{size(traffic.key_bytes)} {between}")
    table.add_row("keys received (R)", _rows(traffic.received), f"rows: {size(traffic.row_bytes)} {between}")
    table.add_row("working keys (K)", _rows(traffic.unique), f"gradients: {size(traffic.gradient_bytes)} {between}")
    table.add_row("working keys, largest batch", _rows(traffic.largest_unique), "")
    table.add_row("rows of all batches in flight", _rows(traffic.in_flight), "")
    if traffic.misses is not None:
        table.add_row(
            "misses (M), end of the run", _rows(traffic.misses), f"{_bytes(traffic.load_bytes)} host to device"
        )
        table.add_row("", "", f"{_bytes(traffic.write_back_bytes)} device to host")
    if traffic.disk_reads is not None:
        table.add_row("read from disk, end of the run", _rows(traffic.disk_reads), _bytes(traffic.disk_read_bytes))
        table.add_row("written to disk, end of the run", _rows(traffic.disk_writes), _bytes(traffic.disk_write_bytes))
    console.print(table)


def _show_hits(console: Console, group: GroupPlan) -> None:
    prediction = group.prediction
    if prediction is None:
        return
    line = (
        f"device cache of dim {group.dim}, policy {group.policy.policy}: expected hit rate "
        f"{_share(group.hit_rate)} over the run, "
        f"{_share(prediction.steady_hit_rate())} in the last batch"
    )
    if group.disk is not None:
        line += f"; of the rows loaded {_share(group.disk.hit_rate())} come from the RAM of the disk tier"
    console.print(line, soft_wrap=True)
    if group.policy.policy == "lfu":
        return
    parts = []
    for factor in _SLOT_FACTORS:
        slots = max(round(group.slots * factor), 1)
        if slots < group.traffic.unique:
            continue
        rate = predict(prediction.stream, _with_slots(group.policy, slots), prediction.steps).hit_rate()
        parts.append(f"{slots:,} slots {_share(rate)}")
        if slots >= prediction.stream.rows():
            break
    console.print(f"by slots: {', '.join(parts)}", soft_wrap=True)


def _with_slots(policy: CachePolicy, slots: int) -> CachePolicy:
    return dataclasses.replace(policy, slots=slots)


def _show_memory(console: Console, plan: Plan) -> None:
    tables = size(sum(group.memory.device_bytes for group in plan.groups))
    sums = size(sum(group.memory.sum_bytes for group in plan.groups))
    rows = [
        ("tables, device tier", tables),
        *([("sums of a batch's gradients, at most", sums)] if plan.on_gpu() else []),
        (f"dense model, {plan.dense_weights:,} weights, with optimizer", size(plan.memory.dense)),
        ("rows and activations of a batch, about", size(plan.memory.activations)),
    ]
    if plan.on_gpu():
        table = _table("GPU memory of one rank", "what", "bytes")
        for name, value in rows:
            table.add_row(name, value)
        table.add_row("total, beside TensorFlow's and CUDA's own", size(plan.gpu_bytes()), style="bold")
        console.print(table)
        rows = []
    _show_ram(console, plan, rows)


def _show_ram(console: Console, plan: Plan, device_rows: Sequence[tuple[str, str]]) -> None:
    """device_rows: of the device tier, where that is RAM."""
    table = _table("RAM of one rank", "what", "bytes")
    for name, value in device_rows:
        table.add_row(name, value)
    table.add_row("tables, host tier in RAM", size(sum(group.memory.host_bytes for group in plan.groups)))
    table.add_row("batches in flight, about", size(plan.memory.batches))
    table.add_row("rows held to shuffle, reader, about", size(plan.memory.shuffle))
    if plan.memory.shared > 0:
        table.add_row("exchange with the other ranks, shared memory", size(plan.memory.shared))
    table.add_row("process (Python, TensorFlow, Horovod), about", size(plan.memory.process))
    table.add_row("total", size(plan.rank_bytes()), style="bold")
    table.add_row(f"{plan.ranks_per_host} rank(s) on this machine", size(plan.rank_bytes() * plan.ranks_per_host))
    table.add_row("available on this machine", size(plan.machine.available_bytes))
    if plan.machine.disk_free_bytes is not None:
        disk = sum(group.memory.disk_bytes for group in plan.groups) * plan.ranks_per_host
        table.add_row("files of rows on this machine", size(disk))
        table.add_row("free on that disk", size(plan.machine.disk_free_bytes))
    console.print(table)
