"""A stand-in for a GPU, for machines without one: TensorFlow sees a device of type GPU whose memory is host memory.

    python -m pytest -p tests.support.stand_in_gpu tests/unit/test_ops_cache.py

What it proves: that every op of ours has a kernel for a GPU, is placed there or on the CPU as it should be, and finds
each tensor in the memory where it looks for it; with the kernels of the CUDA backend run in loops (HVD_CTR_BACKEND).
What it cannot: anything of CUDA itself, streams above all.

TensorFlow's own kernels for GPUs are missing, so what nobody places runs on the CPU. That is also why it does not take
part in the tests of one process together: it must be loaded before TensorFlow looks for devices.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before the import

import tensorflow as tf

_SOURCE = Path(__file__).with_suffix(".cc")
_FOLDER = Path(__file__).resolve().parents[2] / "build" / "stand_in_gpu"


def build() -> Path:
    """The library, compiled for this TensorFlow if that was not done before (some 10 s)."""
    flags = tf.sysconfig.get_compile_flags()
    key = hashlib.sha256(repr([_SOURCE.read_text(), flags, tf.version.VERSION]).encode()).hexdigest()[:16]
    library = _FOLDER / f"{key}.so"
    if not library.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        building = library.with_suffix(f".{os.getpid()}")
        # TensorFlow's headers have warnings.
        include = [part for flag in flags for part in (("-isystem", flag[2:]) if flag.startswith("-I") else (flag,))]
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        link = tf.sysconfig.get_link_flags()
        subprocess.run([*command, *include, "-o", str(building), str(_SOURCE), *link], check=True)
        building.rename(library)
    return library


def load() -> None:
    """Gives TensorFlow the device. Before TensorFlow looks for its devices, and before the op library is loaded."""
    os.environ["HVD_CTR_BACKEND"] = "cuda_on_cpu"
    tf.load_library(str(build()))
    if not tf.config.list_physical_devices("GPU"):
        sys.exit("the stand-in GPU was loaded too late: TensorFlow has looked for its devices before")
    # For good: what is not placed by hvd_ctr is on the CPU.
    tf.device("/device:CPU:0").__enter__()


load()
