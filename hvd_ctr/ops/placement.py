"""Where ops run on a machine with a GPU: rows, their gradients and pooled vectors on the rank's GPU, ids and what is
made of them on the CPU. Without a GPU no op is given a device.

    with placement.on_rows_device():
        handle = ...      # a cache has its rows where its handle was made; the handle itself is the host's
    with placement.on_host():
        prepared = ...    # ids

TensorFlow would place an op by itself on the GPU as soon as there is a kernel for it. `on_host` keeps chains of small
integer operations where their inputs and readers are, which else would travel back and forth.

`hvd_ctr.init()` chooses the GPU, see `launcher.use_gpu`: it is the only one that TensorFlow sees then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_ctr.ops import native

_log = logging.getLogger(__name__)

_HOST = "/device:CPU:0"
_GPU = "/device:GPU:0"


@functools.cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU. Starts TensorFlow's devices: after `hvd_ctr.init()` only."""
    return bool(tf.config.list_logical_devices("GPU"))


@functools.cache
def rows_on_gpu() -> bool:
    """Whether the rows of caches that are made from now on are on the GPU.

    Raises:
        ImportError: see `native.load`.
    """
    if not has_gpu():
        return False
    if not native.has_gpu_kernels():
        _log.warning(
            "TensorFlow sees a GPU, but the op library was built without CUDA: the rows stay in host memory; to have "
            "them on the GPU rebuild with HVD_CTR_GPU=1 ./launch/setup.sh (docs/gpu.md)"
        )
        return False
    return True


def on_rows_device() -> contextlib.AbstractContextManager[Any]:
    """Ops on rows, also the one that makes a cache."""
    return tf.device(_GPU) if rows_on_gpu() else contextlib.nullcontext()


def near(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """What is done with tensors before and after they travel, where they are: on the host, if none of them is
    floating-point; those may be on either side, and are left to TensorFlow.
    """
    return contextlib.nullcontext() if any(tensor.dtype.is_floating for tensor in tensors) else on_host()


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Ops on ids, splits and figures."""
    return tf.device(_HOST) if has_gpu() else contextlib.nullcontext()
