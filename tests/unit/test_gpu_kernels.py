"""Every op has a kernel for CPUs and one for GPUs, and what is in which memory there; without a GPU nothing changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvd_ctr import launcher, transports
from hvd_ctr.ops import native, placement

ROOT = Path(__file__).resolve().parents[2]

#: What is in the memory of a GPU, by op; everything else is in host memory. An op that is not named has nothing there.
ON_GPU = {
    "Lookup": {"rows"},
    "Read": {"rows"},
    "CheckRows": {"rows", "checked"},
    "Apply": {"gradients"},
    "PoolRows": {"rows", "weights", "beside", "pooled"},
    "PoolRowsGrad": {"d_pooled", "rows", "weights", "d_rows", "d_weights"},
    "DotPairs": {"vectors", "pairs"},
    "DotPairsGrad": {"vectors", "d_pairs", "d_vectors"},
    "PairSum": {"vectors", "sums"},
    "PairSumGrad": {"vectors", "d_sums", "d_vectors"},
    "StageMark": {"values", "passed"},
}

_LIST_KERNELS = """
import json
from tensorflow.python.framework import kernels, op_def_registry
from hvd_ctr.ops import native
names = {"".join(p.capitalize() for p in n.split("_")) for n in dir(native.ops()) if n.startswith("hvd_ctr_")}
found = {}
for name in sorted(n for n in names if not n.endswith("EagerFallback")):
    definition = op_def_registry.get(name)
    arguments = [a.name for a in [*definition.input_arg, *definition.output_arg]]
    registered = {k.device_type: list(k.host_memory_arg) for k in kernels.get_registered_kernels_for_op(name).kernel}
    found[name.removeprefix("HvdCtr")] = [arguments, registered]
print(json.dumps(found))
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=120)


def test_every_op_has_kernels_for_both_devices() -> None:
    done = _run(_LIST_KERNELS, HVD_CTR_BACKEND="cuda_on_cpu")
    assert done.returncode == 0, done.stderr
    ops = json.loads(done.stdout.splitlines()[-1])
    assert len(ops) > 40 and set(ON_GPU) <= set(ops)
    for name, (arguments, registered) in ops.items():
        assert set(registered) == {"CPU", "GPU"}, name
        assert registered["CPU"] == [], name
        on_host = registered["GPU"]
        assert len(set(on_host)) == len(on_host), name
        assert set(arguments) - set(on_host) == ON_GPU.get(name, set()), name
        assert set(on_host) <= set(arguments), name


def test_kernels_for_gpus_need_a_library_that_has_them() -> None:
    """Without CUDA a kernel for GPUs would only be found out at its first call."""
    done = _run(_LIST_KERNELS, HVD_CTR_BACKEND="")
    devices = {device for _, registered in json.loads(done.stdout.splitlines()[-1]).values() for device in registered}
    assert devices == ({"CPU", "GPU"} if native.built_with_cuda() else {"CPU"})
    assert native.has_gpu_kernels() == (native.built_with_cuda() or os.environ.get("HVD_CTR_BACKEND") == "cuda_on_cpu")


def test_every_kernel_is_registered_in_one_way() -> None:
    """Reads the sources: it holds for a library without CUDA, too."""
    sources = {path: path.read_text() for path in (ROOT / "tf_ops" / "glue").glob("*.cc")}
    defined = {name for text in sources.values() for name in re.findall(r'REGISTER_OP\("(\w+)"\)', text)}
    registered = [name for text in sources.values() for name in re.findall(r'HVD_CTR_REGISTER_KERNEL\("(\w+)"', text)]
    assert len(defined) > 40
    assert sorted(registered) == sorted(defined)
    others = [path.name for path, text in sources.items() if "REGISTER_KERNEL_BUILDER" in text]
    assert not others, "HVD_CTR_REGISTER_KERNEL registers for both devices"


@pytest.mark.parametrize("value", ["cuda", "CUDA_ON_CPU"])
def test_a_wrong_backend_is_named(value: str) -> None:
    code = (
        "from hvd_ctr.config import TableConfig\n"
        "from hvd_ctr.ops.mix_cache_ops import MixCacheSpec, create\n"
        "create(MixCacheSpec(name='c', dim=4, slots=8, tables=[TableConfig('t', dim=4)]))\n"
    )
    done = _run(code, HVD_CTR_BACKEND=value)
    assert done.returncode != 0
    assert f"HVD_CTR_BACKEND is '{value}', allowed: cuda_on_cpu (for tests), or unset" in done.stderr


def test_without_a_gpu_no_op_is_given_a_device() -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    assert not placement.has_gpu() and not placement.rows_on_gpu()

    @tf.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        with placement.on_host():
            ids = ids + 1
        with placement.on_rows_device():
            return ids * 2

    operations = step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph.get_operations()
    assert {operation.device for operation in operations} == {""}


def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    monkeypatch.setattr(launcher.tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(launcher.tf.config, "set_visible_devices", lambda device, kind: chosen.append(device))
    monkeypatch.setattr(launcher.tf.config.experimental, "set_memory_growth", lambda device, on: chosen.append(on))
    assert launcher.use_gpu(1, 2) == "GPU 1 of 2"
    assert chosen == [gpus[1], True]
    with pytest.raises(RuntimeError, match="3 ranks were started on this machine, but it has 2 GPUs"):
        launcher.use_gpu(0, 3)

    def too_late(device: Any, kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(launcher.tf.config, "set_visible_devices", too_late)
    assert launcher.use_gpu(0, 2) == "GPU 0 of 2"
    with pytest.raises(RuntimeError, match="has taken the first of 2 GPUs, which is another rank's"):
        launcher.use_gpu(1, 2)
    monkeypatch.setattr(launcher.tf.config, "set_visible_devices", lambda device, kind: chosen.append(device))
    del gpus[1]
    assert launcher.use_gpu(3, 4) == "GPU 0 of 1"  # the launcher has given each process one of its own
    gpus.clear()
    assert launcher.use_gpu(0, 1) == ""


def test_ranks_agree_on_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, none = ["a", "GPU 0 of 1", ""], ["b", "", ""]
    assert launcher.gpu_disagreement([gpu, gpu]) == launcher.gpu_disagreement([none]) == ""
    mixed = launcher.gpu_disagreement([gpu, ["a", "", ""], none, none])
    assert "a GPU on a: rank(s) 0; no GPU on a: rank(s) 1; no GPU on b: rank(s) 2, 3; give every rank one" in mixed
    many = launcher.gpu_disagreement([gpu, *[none] * 20])
    assert "no GPU on b: rank(s) 1, 2, 3, 4, 5, 6, 7, 8 and 12 more" in many
    assert launcher.gpu_disagreement([gpu, ["b", "", "no room"]]) == "rank 1 on b: no room"
    # Every rank tells before any fails.
    told: list[Any] = []

    def too_many(local_rank: int, local_size: int) -> str:
        raise RuntimeError("3 ranks were started")

    def allgather(mine: Any) -> list[Any]:
        told.append(mine)
        return [none, mine]

    monkeypatch.setattr(launcher, "use_gpu", too_many)
    with pytest.raises(RuntimeError, match="rank 1 on .*: 3 ranks were started"):
        launcher.use_gpus_alike(0, 3, allgather)
    assert len(told) == 1
    monkeypatch.setattr(launcher, "use_gpu", lambda local_rank, local_size: "GPU 1 of 2")
    assert launcher.use_gpus_alike(1, 2, lambda mine: [mine, mine]) == "GPU 1 of 2"


def test_ranks_agree_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "rows_on_gpu", lambda: True)

    class WithoutNccl:
        @staticmethod
        def nccl_built() -> bool:
            return False

    assert transports.for_gpu(WithoutNccl, lambda mine: [mine, mine]) is None
    differs = "rank 0 has Horovod without NCCL and an op library with CUDA, rank 1 has Horovod with NCCL"
    with pytest.raises(RuntimeError, match=differs):
        transports.for_gpu(WithoutNccl, lambda mine: [mine, [True, True]])
