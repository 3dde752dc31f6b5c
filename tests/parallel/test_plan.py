"""A plan's figures for any number of ranks against a run through the pipeline: bytes, hit rate, bytes between ranks."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.config import CacheConfig, FeatureConfig, HostConfig, SparseOptimizerConfig, TableConfig
from hvd_ctr.embedding.group_plan import GroupDemand, plan_group
from hvd_ctr.embedding.id_stream import IdCounts
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.layers import MixCacheEmbedding
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
        before = comm.traffic()
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
        after = comm.traffic()
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
