"""Finds, checks and loads libhvd_ctr_ops.so, the C++ part of hvd_ctr. No other module loads it.

The library is built for one TensorFlow release. In another one it may fail to load with a missing symbol, or load and
crash, so the release it was built for is compared first. It is read from the file: a library that does not fit must not
be loaded in order to ask it, and loading it by other means hides its ops from tf.load_op_library.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

#: Environment variable with the path of a library to load instead of the one beside this file.
LIBRARY_VARIABLE = "HVD_CTR_LIBRARY"
#: Environment variable that forces a level of vector instructions, one of SIMD_LEVELS; unset: the best there is.
SIMD_VARIABLE = "HVD_CTR_SIMD"
#: In ascending order; as in tf_ops/core/simd_level.h.
SIMD_LEVELS = ("baseline", "avx2", "avx512")
_FILE_NAME = "libhvd_ctr_ops.so"
#: hvd_ctr_build_marker in tf_ops/glue/library_version.cc.
_MARKER = re.compile(rb"hvd_ctr_built_for_tensorflow=([0-9][0-9A-Za-z.+-]*)\x00")
_REBUILD = "rebuild with ./launch/setup.sh"
_log = logging.getLogger(__name__)


def library_path() -> Path:
    """Where the library is looked for: $HVD_CTR_LIBRARY, or beside this module."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name(_FILE_NAME))


def built_for(path: Path) -> str:
    """The TensorFlow release that a library was built for, such as "2.18.1".

    Raises:
        ImportError: there is no such file, or it is not a library of hvd_ctr.
    """
    if not path.is_file() or path.stat().st_size == 0:
        raise ImportError(f"the op library {path} does not exist or is empty; build it with ./launch/setup.sh")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _MARKER.search(content)
        if found is None:
            raise ImportError(f"{path} is not an op library of hvd_ctr (it holds no build marker); {_REBUILD}")
        return found.group(1).decode()


def load(path: Path) -> Any:
    """Loads a library and returns the module of its op functions.

    Raises:
        ImportError: see `built_for`; or it was built for another TensorFlow release, or it cannot be loaded.
    """
    expected = built_for(path)
    if expected != tf.version.VERSION:
        raise ImportError(
            f"the op library {path} was built for TensorFlow {expected}, but TensorFlow {tf.version.VERSION} runs; "
            f"{_REBUILD}"
        )
    try:
        return tf.load_op_library(str(path))
    except tf.errors.OpError as error:
        raise ImportError(f"the op library {path} cannot be loaded: {error.message}; {_REBUILD}") from error


@functools.cache
def ops() -> Any:
    """The op functions, one for each op of tf_ops/glue/*_op_defs.cc: `ops().hvd_ctr_pool_rows(...)`.

    Loads the library at the first call.

    Raises:
        ImportError: see `load`.
    """
    module = load(library_path())
    if warning := _text("hvd_ctr_simd_warning"):
        _log.warning("%s", warning)
    return module


@functools.cache
def _symbols() -> ctypes.CDLL:
    # The same file as tf.load_op_library has loaded, so this is the same library in memory.
    return ctypes.CDLL(str(library_path()))


def built_with_cuda() -> bool:
    """Whether the library has the CUDA backend.

    Raises:
        ImportError: see `load`.
    """
    ops()
    return bool(_symbols().hvd_ctr_built_with_cuda())


def has_gpu_kernels() -> bool:
    """Whether the ops have kernels for GPUs: the library was built with CUDA, or a test has asked for a stand-in
    (HVD_CTR_BACKEND, tf_ops/glue/device_memory.h).

    Raises:
        ImportError: see `load`.
    """
    ops()
    return bool(_symbols().hvd_ctr_has_gpu_kernels())


def _text(symbol: str) -> str:
    function = getattr(_symbols(), symbol)
    function.restype = ctypes.c_char_p
    return str(function().decode())


def simd_level() -> str:
    """The level of vector instructions in use, one of SIMD_LEVELS. It changes speed and no bit of a result.

    Raises:
        ImportError: see `load`.
    """
    ops()
    return _text("hvd_ctr_simd_level")


def best_simd_level() -> str:
    """The highest level that this processor has.

    Raises:
        ImportError: see `load`.
    """
    ops()
    return _text("hvd_ctr_best_simd_level")


def force_simd_level(level: str) -> None:
    """For tests: uses a level from now on in this process. No op of the library may be running.

    Raises:
        ValueError: not one of SIMD_LEVELS, or more than this processor has.
        ImportError: see `load`.
    """
    available = SIMD_LEVELS[: SIMD_LEVELS.index(best_simd_level()) + 1]
    if level not in available:
        raise ValueError(f"SIMD level: received {level!r}; this processor has {', '.join(available)}")
    _symbols().hvd_ctr_force_simd_level(ctypes.c_int(SIMD_LEVELS.index(level)))
