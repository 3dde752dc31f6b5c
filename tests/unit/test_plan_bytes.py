"""The bytes that a plan expects against those that a cache has after it has run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.group_plan import GroupDemand, GroupPlan, plan_group
from hvd_ctr.embedding.id_stream import IdCounts
from hvd_ctr.embedding.sharding import GroupLayout, group_by_dim
from hvd_ctr.ops import id_ops, mix_cache_ops
from hvd_ctr.ops.mix_cache_ops import MixCacheSpec
from hvd_ctr.ops.plan_ops import MemoryDemand, plan_memory

_IDS, _BATCH, _STEPS = 150_000, 2048, 80


def _ids(exponent: float, seed: int) -> np.ndarray:
    """ids (steps, B)."""
    generator = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, _IDS + 1) ** -exponent)
    ranks = np.searchsorted(shares, generator.random(_STEPS * _BATCH) * shares[-1])
    return generator.permutation(_IDS)[ranks].astype(np.int64).reshape(-1, _BATCH)


_COLUMNS = np.stack([_ids(1.1, 0), _ids(0.9, 1)], axis=2)


def _layout(dim: int, *kinds: str) -> GroupLayout:
    tables = [TableConfig(f"t{i}", dim=dim, optimizer=SparseOptimizerConfig(kind=kind)) for i, kind in enumerate(kinds)]
    return group_by_dim([FeatureConfig(table.name, table=table) for table in tables])[0]


def _counts(layout: GroupLayout) -> list[tuple[np.ndarray, np.ndarray]]:
    return [np.unique(_COLUMNS[:, :, i], return_counts=True) for i in range(len(layout.tables))]


def _plan(layout: GroupLayout, cache: CacheConfig, host: HostConfig, depth: int) -> GroupPlan:
    counts = {
        table.name: IdCounts.of(counts) for table, (_, counts) in zip(layout.tables, _counts(layout), strict=True)
    }
    return plan_group(layout, GroupDemand(1, _BATCH, depth, _STEPS, _STEPS * _BATCH, counts), cache, host)


def _spec(layout: GroupLayout, cache: CacheConfig, host: HostConfig) -> MixCacheSpec:
    return MixCacheSpec(
        name="measured",
        dim=layout.dim,
        slots=cache.slots,
        row_dtype=cache.row_dtype,
        policy=cache.policy,
        window=cache.window,
        tables=layout.tables,
        features=layout.feature_names,
        feature_tables=layout.feature_tables,
        host=host,
    )


def _measured(layout: GroupLayout, cache: CacheConfig, host: HostConfig, depth: int) -> dict[str, Any]:
    """Counters of a cache that has trained on all batches, `depth` ahead, and flushed."""
    handle = mix_cache_ops.create(_spec(layout, cache, host))
    if cache.policy == "freq":
        for index, (ids, counts) in enumerate(_counts(layout)):
            mix_cache_ops.set_frequencies(handle, index, ids, counts)
        mix_cache_ops.warm_start(handle)
    prepared = [
        id_ops.prepare_batch(
            tf.constant(ids[:, : len(layout.tables)]),
            feature_splits=None,
            batch_rows=_BATCH,
            weight_sum=float(_BATCH),
            tables=layout.tables,
            features=layout.features,
            feature_tables=layout.feature_tables,
            world_size=1,
        )
        for ids in _COLUMNS
    ]
    announced, tickets = 0, []
    for number, batch in enumerate([*prepared, *[None] * (depth + 1)]):
        if number > depth:
            ticket, rows = tickets.pop(0)
            mix_cache_ops.apply(handle, ticket, tf.zeros([rows, layout.dim]), 1.0)
        if batch is None:
            continue
        while depth and announced < _STEPS:
            ahead = prepared[announced]
            if not mix_cache_ops.announce(handle, ahead.send, ahead.send_splits):
                break
            announced += 1
        tickets.append(
            (mix_cache_ops.prefetch(handle, batch.send, batch.send_splits).ticket, int(sum(batch.row_splits)))
        )
    loaded = mix_cache_ops.stats(handle, [table.name for table in layout.tables])[1]
    mix_cache_ops.flush(handle)
    tables, total = mix_cache_ops.stats(handle, [table.name for table in layout.tables])
    assert total["pinned_slots"] == 0
    sums = {name: sum(table[name] for table in tables.values()) for name in ("hits", "unique", "host_rows")}
    return {**total, **sums, "disk_rows_read": loaded["disk_rows_read"]}


def _check(plan: GroupPlan, measured: dict[str, Any]) -> None:
    memory = plan.memory
    assert memory.device_bytes == measured["device_bytes"]
    assert memory.host_bytes == pytest.approx(measured["host_bytes"], rel=0.05)
    assert memory.disk_bytes == pytest.approx(measured["disk_bytes"], rel=0.05)
    assert plan.rows == pytest.approx(measured["host_rows"], abs=1)
    assert plan.hit_rate == pytest.approx(measured["hits"] / measured["unique"], abs=0.02)


@pytest.mark.parametrize(
    ("dim", "kinds", "policy", "slots", "depth"),
    [
        (16, ("adagrad",), "lru", 8000, 0),
        (17, ("adam", "sgd"), "lookahead", 12000, 2),
        (8, ("rowwise_adagrad", "rowwise_adagrad"), "clock", 20000, 1),
        (1, ("sgd",), "freq", 5000, 2),
        (64, ("adagrad",), "lfu", 6000, 2),
        (4, ("ftrl", "adagrad"), "lookahead", 300_000, 4),
    ],
)
def test_rows_in_ram(dim: int, kinds: tuple[str, ...], policy: str, slots: int, depth: int) -> None:
    layout = _layout(dim, *kinds)
    cache = CacheConfig(slots=slots, policy=policy, counts="unused" if policy == "freq" else None)
    _check(_plan(layout, cache, HostConfig(), depth), _measured(layout, cache, HostConfig(), depth))


def test_narrow_rows_take_less_of_the_device_and_as_much_of_the_host() -> None:
    layout = _layout(64, "rowwise_adagrad")
    plans = {}
    for row_dtype in ("float32", "float16", "bfloat16"):
        cache = CacheConfig(slots=8000, policy="lru", row_dtype=row_dtype)
        plans[row_dtype] = _plan(layout, cache, HostConfig(), 0)
        if row_dtype != "float16":
            _check(plans[row_dtype], _measured(layout, cache, HostConfig(), 0))
    strides = (288, 160, 160) if os.environ.get("HVD_CTR_BACKEND") == "cuda_on_cpu" else (320, 144, 144)
    assert [plan.memory.device_bytes for plan in plans.values()] == [8000 * stride for stride in strides]
    assert len({plan.memory.host_bytes for plan in plans.values()}) == 1


def test_on_a_gpu_records_have_another_stride_and_sums_are_there() -> None:
    layout, demand = _layout(64, "rowwise_adagrad"), MemoryDemand([10_000], received=2000, unique=1000)
    for row_dtype, stride in (("float32", 288), ("float16", 160), ("bfloat16", 160)):
        spec = _spec(layout, CacheConfig(slots=8000, policy="lru", row_dtype=row_dtype), HostConfig())
        there, here = plan_memory(spec, demand, on_gpu=True), plan_memory(spec, demand)
        assert there.device_bytes == 8000 * stride
        assert there.sum_bytes == 2 * 1000 * 64 * 4
        assert there.host_bytes == here.host_bytes - (there.sum_bytes - here.sum_bytes)


@pytest.mark.parametrize(
    ("ram_bytes", "policy", "slots"),
    [(8 << 20, "lru", 8000), (8 << 20, "lookahead", 14000), (256 << 20, "clock", 8000)],
)
def test_rows_on_disk(tmp_path: Path, ram_bytes: int, policy: str, slots: int) -> None:
    layout = _layout(32, "adagrad", "adagrad")
    cache = CacheConfig(slots=slots, policy=policy)
    host = HostConfig(kind="disk", path=str(tmp_path), ram_bytes=ram_bytes)
    plan, measured = _plan(layout, cache, host, 2), _measured(layout, cache, host, 2)
    _check(plan, measured)
    assert plan.disk is not None
    assert plan.disk.reads == pytest.approx(measured["disk_rows_read"], rel=0.15)
    assert plan.disk.written == pytest.approx(measured["disk_rows_written"], rel=0.05)
    assert (measured["disk_rows_read"] > 10_000) == (ram_bytes == 8 << 20)


def test_least_budget_of_a_disk_tier(tmp_path: Path) -> None:
    layout, cache = _layout(64, "adam"), CacheConfig(slots=10, policy="lru")

    def spec(ram_bytes: int) -> MixCacheSpec:
        return _spec(layout, cache, HostConfig(kind="disk", path=str(tmp_path), ram_bytes=ram_bytes))

    least = plan_memory(spec(1), MemoryDemand([0])).least_ram_bytes
    with pytest.raises(ValueError, match="ram_bytes is 1; .* need at least ") as refused:
        mix_cache_ops.create(spec(1))
    exact = int(str(refused.value).split("need at least ")[1].split(",")[0])
    # The blocks of the folder's file system are not planned.
    assert least == pytest.approx(exact, rel=0.02)
    mix_cache_ops.create(spec(exact))
    with pytest.raises(ValueError, match=f"need at least {exact},"):
        mix_cache_ops.create(spec(exact - 1))


def test_without_counts_there_are_bounds() -> None:
    tables = [TableConfig("grows", dim=4), TableConfig("fixed", dim=4, rows=1000)]
    features = [FeatureConfig("a", table=tables[0], length=3), FeatureConfig("b", table=tables[1])]
    layout = group_by_dim(features)[0]
    plan = plan_group(layout, GroupDemand(2, 4096, 2), CacheConfig(slots=4096), HostConfig())
    assert not plan.exact and plan.hit_rate is None and plan.rows is None
    assert [table.rows for table in plan.tables] == [None, 500]
    assert plan.traffic.local_keys == 3 * 2048 + 1000
    assert plan.traffic.unique == (3 * 4096 + 1000) / 2
    assert plan.traffic.gradient_bytes == (3 * 2048 + 1000) / 2 * 4 * 4
    more, most = plan.memory_for(1e6), plan.memory_for(1e9)
    # A row takes 8 floats and 19 to 30 bytes of the index.
    assert 51e6 < more.host_bytes - plan.memory.host_bytes < 64e6
    assert 51e9 < most.host_bytes < 64e9


def test_demands_that_do_not_fit_are_errors() -> None:
    layout, cache = _layout(4, "sgd"), CacheConfig(slots=10, policy="lru")
    with pytest.raises(ValueError, match="received 2 rows and 8 demands; needed are 1 and 8"):
        plan_memory(_spec(layout, cache, HostConfig()), MemoryDemand([1, 2]))
