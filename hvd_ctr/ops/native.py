"""Finds, checks and loads libhvd_ctr_ops.so, the C++ part of hvd_ctr. No other module loads it.

The library is built for one TensorFlow release. In another one it may fail to load with a missing symbol, or load and
crash, so the release it was built for is compared first. It is read from the file: a library that does not fit must not
be loaded in order to ask it, and loading it by other means hides its ops from tf.load_op_library.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

#: Environment variable with the path of a library to load instead of the one beside this file.
LIBRARY_VARIABLE = "HVD_CTR_LIBRARY"
_FILE_NAME = "libhvd_ctr_ops.so"
#: hvd_ctr_build_marker in tf_ops/glue/library_version.cc.
_MARKER = re.compile(rb"hvd_ctr_built_for_tensorflow=([0-9][0-9A-Za-z.+-]*)\x00")
_REBUILD = "rebuild with ./launch/setup.sh"


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
    return load(library_path())
