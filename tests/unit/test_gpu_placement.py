"""What is on the GPU and what is not, and that it changes no bit. Needs a GPU, or the stand-in for one:

python -m pytest -p tests.support.stand_in_gpu tests/unit/test_gpu_placement.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr import comm
from hvd_ctr.cli.plan_findings import Machine
from hvd_ctr.config import CacheConfig, FeatureConfig, TableConfig
from hvd_ctr.embedding import ShardedEmbedding
from hvd_ctr.embedding.sharded_embedding import BatchFacts
from hvd_ctr.ops import mix_cache_ops, native, placement, plan_ops, pooling_ops
from tests.support import trained_bits
from tests.support.hybrid import unique_name

pytestmark = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"), reason="needs a GPU or its stand-in, see the module's docstring"
)


@pytest.fixture(scope="module", autouse=True)
def joined() -> None:
    comm.init()


def _memory(tensor: Any) -> str:
    """Where its values are; outputs of ops on a GPU may be in host memory."""
    return str(tensor.backing_device).rsplit("/device:", 1)[-1]


def _embedding(slots: int = 64) -> ShardedEmbedding:
    features = [FeatureConfig(name, table=TableConfig(unique_name("t"), dim=4)) for name in ("a", "b")]
    return ShardedEmbedding(features, CacheConfig(slots=slots), comm.current(), name=unique_name("placed"))


def _facts(rows: int) -> BatchFacts:
    return BatchFacts(tf.constant(rows, tf.int64), tf.constant(float(rows), tf.float64))


def test_rows_are_on_the_gpu_and_ids_on_the_host() -> None:
    assert placement.rows_on_gpu()
    group = _embedding().groups[0]
    assert "GPU:0" in group.cache.device
    prepared = group.prepare(tf.constant([[1, 2], [3, 2]], tf.int64), None, _facts(2))
    assert {_memory(value) for value in prepared} == {"CPU:0"}
    prefetched = group.prefetch(group.input_dist(prepared))
    assert {_memory(value) for value in prefetched} == {"CPU:0"}
    rows = group.lookup(prepared, prefetched).rows
    assert _memory(rows) == "GPU:0"
    with tf.GradientTape() as tape:
        tape.watch(rows)
        pooled = pooling_ops.pool_rows(rows, prepared.virtual_ids)
    gradient = tape.gradient(pooled, rows)
    assert (_memory(pooled), _memory(gradient)) == ("GPU:0", "GPU:0")
    np.testing.assert_array_equal(gradient.numpy(), np.repeat(prepared.counts.numpy()[:, None], 4, axis=1))
    step = group.backward(prepared, prefetched, gradient, tf.constant(1.0))
    assert int(step) == 1


def test_the_error_of_an_owner_comes_back_from_the_gpu() -> None:
    """The answer of an owner that failed is made on the host, travels as rows on the GPU, and is read on the host."""
    group = _embedding(slots=2).groups[0]
    prepared = group.prepare(tf.constant([[1, 2], [3, 4], [5, 6]], tf.int64), None, _facts(3))
    prefetched = group.prefetch(group.input_dist(prepared))
    assert int(prefetched.ticket) < 0
    answer, _ = mix_cache_ops.lookup(group.cache, prefetched.ticket, 4)
    assert _memory(answer) == "GPU:0"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"cache\.slots"):
        group.lookup(prepared, prefetched)


def test_an_op_elsewhere_than_the_rows_is_refused() -> None:
    """It would take addresses of the GPU's memory for its own."""
    group = _embedding().groups[0]
    prepared = group.prepare(tf.constant([[1, 2]], tf.int64), None, _facts(1))
    received = group.input_dist(prepared)
    prefetched = group.prefetch(received)
    rows = group.lookup(prepared, prefetched).rows
    cpu = "/device:CPU:0"
    calls = {
        "Lookup": lambda: native.ops().hvd_ctr_lookup(handle=group.cache, ticket=prefetched.ticket),
        "Read": lambda: native.ops().hvd_ctr_read(
            handle=group.cache, received=received.words, received_splits=received.splits
        ),
        "Apply": lambda: native.ops().hvd_ctr_apply(
            handle=group.cache, ticket=prefetched.ticket, gradients=tf.zeros_like(rows), learning_rate_scale=1.0
        ),
    }
    for name, call in calls.items():
        for run in (call, tf.function(call)):
            with tf.device(cpu), pytest.raises(tf.errors.InvalidArgumentError) as raised:
                run()
            text = str(raised.value)
            assert f"HvdCtr{name} was placed on" in text and f"{cpu}, but the rows of {group.name} are on" in text
            assert "GPU:0, whose memory it cannot use; leave the device" in text
    # Nothing has happened to the ticket.
    assert int(group.backward(prepared, prefetched, tf.zeros_like(rows), tf.constant(1.0))) == 1


def test_an_op_on_the_gpu_with_rows_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = mix_cache_ops.MixCacheSpec(name=unique_name("c"), dim=4, slots=8, tables=[TableConfig("t", dim=4)])
    with monkeypatch.context() as patched:
        patched.setattr(placement, "on_rows_device", lambda: tf.device("/device:CPU:0"))
        handle = mix_cache_ops.create(spec)
    ticket = tf.constant(1, tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"GPU:0, but the rows of {spec.name} are on .*CPU:0"):
        mix_cache_ops.lookup(handle, ticket, 4)


def test_rows_are_imported_from_the_host_and_exported_to_it() -> None:
    embedding = _embedding()
    table = embedding.table_names[0]
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    embedding.import_rows(table, np.array([7, 8, 9]), rows)
    np.testing.assert_array_equal(embedding.get_rows(table, np.array([9, 7])), rows[[2, 0]])
    (chunk,) = embedding.export_rows(table)
    np.testing.assert_array_equal(chunk.rows[np.argsort(chunk.ids)], rows)


@pytest.mark.parametrize(("dim", "row_dtype"), [(4, "float32"), (17, "float32"), (64, "bfloat16")])
def test_a_plan_knows_the_memory_of_the_gpu(dim: int, row_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_CTR_GPU", raising=False)
    assert Machine.this(None).rows_on_gpu
    spec = mix_cache_ops.MixCacheSpec(
        name=unique_name("planned"), dim=dim, slots=64, row_dtype=row_dtype, tables=[TableConfig("t", dim=dim)]
    )
    _, total = mix_cache_ops.stats(mix_cache_ops.create(spec), ["t"])
    assert plan_ops.plan_memory(spec, plan_ops.MemoryDemand([0]), on_gpu=True).device_bytes == total["device_bytes"]


def test_training_gives_the_bits_of_the_cpu() -> None:
    """The CPU backend in a process of its own, without a GPU, is what this one is compared with."""
    if tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0]):
        pytest.skip("on a GPU the dense layers round differently")
    environment = {**os.environ, "HVD_CTR_BACKEND": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.trained_bits"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert trained_bits.train() == done.stdout.split()[-1]
