"""A plan's figures for any number of ranks against a run through the pipeline: bytes, hit rate, bytes between ranks,
memory that the ranks share.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.group_plan import GroupDemand, plan_group
from hvd_ctr.embedding.id_stream import IdCounts
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.ops.plan_ops import Messages, plan_shared_memory
from hvd_ctr.training.pipeline import Inputs, Pipeline
from tests.support.hybrid import share, unique_name

_IDS, _GB, _STEPS, _DIM = 100_000, 2048, 60, 32
_DEPTH = 2


def _stream() -> np.ndarray:
    """ids (steps, GB, 2)."""
    generator = np.random.default_rng(5)
    shares = np.cumsum(np.arange(1, _IDS + 1) ** -1.1)
    ranks = np.searchsorted(shares, generator.random(_STEPS * _GB * 2) * shares[-1])
    return generator.permutation(_IDS)[ranks].astype(np.int64).reshape(_STEPS, _GB, 2)


def _shared_bytes() -> int:
    """Of this rank's own shared memory; that of the others is mapped to be read only."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:hvd_ctr" in line and line.split()[1] == "rw-s":
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            total += end - begin
    return total


@pytest.mark.parametrize(("policy", "ram_bytes"), [("lookahead", None), ("lru", 2 << 20), ("clock", None)])
def test_a_run_does_what_was_planned(comm: Comm, policy: str, ram_bytes: int | None) -> None:
    ids = _stream()
    table = TableConfig("t", dim=_DIM, optimizer=SparseOptimizerConfig(kind="adagrad"))
    features = [FeatureConfig(f"f{i}", table=table) for i in range(2)]
    cache = CacheConfig(slots=9000 // comm.size, policy=policy)
    counts = np.unique(ids, return_counts=True)[1]
    with tempfile.TemporaryDirectory() as folder:
        host = HostConfig() if ram_bytes is None else HostConfig(kind="disk", path=folder, ram_bytes=ram_bytes)
        layer = MixCacheEmbedding(features, cache, seed=1, name=unique_name("planned"), host=host)
        layer.build(None)
        (group,) = layer.sharded.groups
        demand = GroupDemand(comm.size, _GB, _DEPTH, _STEPS, _STEPS * _GB, {"t": IdCounts.of(counts)})
        plan = plan_group(group.layout, demand, cache, host)
        before, shared_before = comm.traffic(), _shared_bytes()
        mine = [share(comm, batch) for batch in ids]
        batches = Pipeline(
            comm,
            [layer],
            iter(mine),
            lambda batch: Inputs([batch], BatchFacts(np.int64(len(batch)), np.float64(len(batch)))),
            lambda: np.zeros((0, 2), np.int64),
            _DEPTH,
        )
        for _, (staged,) in batches:
            rows = group.lookup(staged.prepared, staged.prefetched).rows
            group.backward(staged.prepared, staged.prefetched, tf.zeros_like(rows), tf.constant(1.0))
        after, shared = comm.traffic(), _shared_bytes() - shared_before
        layer.sharded.flush()
        total = layer.cache_stats()["total"]
    assert plan.memory.device_bytes == total["device_bytes"]
    assert plan.memory.host_bytes == pytest.approx(total["host_bytes"], rel=0.05)
    assert plan.rows == pytest.approx(total["host_rows"], rel=0.05)
    hits, unique = (sum(comm.allgather_object(int(total[name]))) for name in ("hits", "unique"))
    assert plan.hit_rate == pytest.approx(hits / unique, abs=0.02)
    assert plan.traffic.unique == pytest.approx(unique / comm.size / _STEPS, rel=0.02)
    if ram_bytes is not None and comm.size <= 2:  # With more ranks all rows fit into RAM.
        assert total["disk_rows_written"] > 0
        assert plan.memory.disk_bytes == pytest.approx(total["disk_bytes"], rel=0.1)
    for kind, planned in (
        ("keys", plan.traffic.key_bytes),
        ("rows", plan.traffic.row_bytes),
        ("gradients", plan.traffic.gradient_bytes),
    ):
        # Owners of very frequent rows send more than others: a plan gives the mean.
        sent = comm.allgather_object(after[kind]["sent_bytes"] - before[kind]["sent_bytes"])
        assert planned == pytest.approx(np.mean(sent) / _STEPS, rel=0.02), kind
    if comm.size > 1 and shared_before > 0:
        planned = plan_shared_memory(comm.size, plan.messages) - plan_shared_memory(comm.size, Messages())
        assert planned == pytest.approx(np.mean(comm.allgather_object(shared)), rel=0.1)


@pytest.mark.parametrize("exchange", ["allgather", "allreduce"])
def test_the_other_exchanges_share_what_was_planned(comm: Comm, exchange: str) -> None:
    """Alike keys on all ranks, so that sizes are exact: K of each batch are all of its ids."""
    if comm.size == 1 or not _shared_bytes():
        pytest.skip("nothing is shared")
    ids, dim = 4096, 16
    features = [FeatureConfig("f", table=TableConfig("t", dim=dim, rows=ids * comm.size))]
    layer = MixCacheEmbedding(
        features, CacheConfig(slots=2 * ids), seed=1, name=unique_name("planned"), exchange=exchange
    )
    layer.build(None)
    (group,) = layer.sharded.groups
    plan = plan_group(
        group.layout,
        GroupDemand(comm.size, ids * comm.size, 0, exchange=exchange),
        CacheConfig(slots=2 * ids),
        HostConfig(),
    )
    before = _shared_bytes()
    mine = np.arange(ids * comm.rank, ids * (comm.rank + 1), dtype=np.int64)[:, None]
    for _ in range(3):
        prepared = group.prepare(tf.constant(mine), None, BatchFacts(np.int64(ids), np.float64(ids)))
        staged = group.prefetch(group.input_dist(prepared))
        rows = group.lookup(prepared, staged).rows
        group.backward(prepared, staged, tf.zeros_like(rows), tf.constant(1.0))
    planned = plan_shared_memory(comm.size, plan.messages) - plan_shared_memory(comm.size, Messages())
    assert planned == pytest.approx(_shared_bytes() - before, rel=0.05)


def test_the_sum_of_dense_gradients_shares_what_was_planned(comm: Comm) -> None:
    """In one phase, and with more than two ranks in two."""
    if comm.size == 1 or not _shared_bytes():
        pytest.skip("nothing is shared")
    before, name, weights = _shared_bytes(), unique_name("planned_sum"), 300_000
    for _ in range(3):
        comm.allreduce_sum([tf.zeros([weights])], name)
    planned = plan_shared_memory(comm.size, Messages(sums=[4 * weights])) - plan_shared_memory(comm.size, Messages())
    assert planned == pytest.approx(_shared_bytes() - before, rel=0.02)
