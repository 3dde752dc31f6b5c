"""Reads the sources and fails on an edge that the architecture forbids (the layers are drawn in CONTRIBUTING.md).

A new file or package needs a place in the tables below; the failure says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500

# --- Python: what each part of hvd_ctr may import of hvd_ctr, itself apart.
PYTHON_LAYERS: dict[str, set[str]] = {
    "config": set(),
    "launcher": set(),
    "stage_clock": set(),
    "collective_inputs": set(),
    "traffic": set(),
    "ops": {"config", "stage_clock"},
    "transports": {"ops"},
    "comm": {"config", "launcher", "collective_inputs", "traffic", "transports", "ops"},
    "data": {"config", "stage_clock", "ops"},
    "embedding": {"config", "collective_inputs", "comm", "ops"},
    "layers": {"config", "comm", "ops", "embedding"},
    "models": {"config", "comm", "ops", "embedding", "layers"},
    "training": {"config", "traffic", "stage_clock", "comm", "ops", "data", "embedding", "layers"},
}
# On top: they may import everything.
PYTHON_TOP = {"__init__", "__main__", "cli", "bench"}

# --- C++: the stems of tf_ops/core, lowest level first. A file may include the levels below it. Files of one level know
# each other only where the level says so: its members then are one part in several files, or plain vocabulary.
CORE_LEVELS: list[tuple[set[str], bool]] = [
    (
        {
            "status",
            "types",
            "options",
            "row_math",
            "row_type",
            "backend_checks",
            "hash",
            "key_hashes",
            "aligned_block",
            "chunked_array",
            "simd_level",
            "stage_clock",
            "bag_places",
            "bags",
            "factor_plan",
        },
        True,
    ),
    ({"shared_segment", "shared_group", "shared_collectives"}, True),
    (
        {
            "host_store",
            "ram_host_store",
            "disk_host_store",
            "catalog_host_store",
            "row_catalog",
            "record_cache",
            "segment_log",
            "batch_reader",
            "record_file",
            "uring_queue",
        },
        True,
    ),
    ({"usual_criteo_line", "count_log"}, True),
    (
        {
            "id_dedupe",
            "rank_partition",
            "request_merge",
            "key_map",
            "slot_directory",
            "criteo_parser",
        },
        False,
    ),
    ({"eviction_policy", "eviction_recency", "eviction_frequency", "eviction_clock"}, True),
    ({"cache_plan", "device_backend", "key_exchange", "mix_cache_options", "row_life"}, False),
    (
        {
            "mix_cache",
            "mix_cache_impl",
            "mix_cache_prefetch",
            "mix_cache_export",
            "mix_cache_hints",
            "mix_cache_life",
            "memory_plan",
        },
        True,
    ),
]
BACKENDS = ("cpu", "cuda")
CHECK = ("cuda", "check")


def source_files(folder: str, *suffixes: str) -> list[Path]:
    """Files below `folder` with one of the suffixes, relative to the repository; fails when there are none."""
    found = sorted(path.relative_to(ROOT) for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return [path for path in found if "__pycache__" not in path.parts]


def python_part(path: Path) -> str:
    """hvd_ctr/comm.py -> comm, hvd_ctr/ops/native.py -> ops."""
    return path.with_suffix("").parts[1]


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Full names of the modules a source of `package` imports, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden_python_imports(path: Path, source: str) -> list[str]:
    part = python_part(path)
    if part in PYTHON_TOP:
        return []
    if part not in PYTHON_LAYERS:
        return [f"{path}: hvd_ctr/{part} has no place in PYTHON_LAYERS"]
    package = ".".join(path.parent.parts)
    problems = []
    for module in imported_modules(source, package):
        names = module.split(".")
        if names[0] != "hvd_ctr" or names[1] == part or names[1] in PYTHON_LAYERS[part]:
            continue
        problems.append(f"{path} imports {module}; {part} may import only {sorted(PYTHON_LAYERS[part])}")
    return problems


def core_level(stem: str) -> int | None:
    return next((level for level, (stems, _) in enumerate(CORE_LEVELS) if stem in stems), None)


def included_files(source: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE)


def forbidden_includes(path: Path, source: str) -> list[str]:
    """Problems of one C++ file, by its folder below tf_ops."""
    folder = path.parts[1]
    problems = []
    for include in included_files(source):
        part = include.split("/")
        if part[0] != "tf_ops":
            foreign = re.match(r"(tensorflow|xla|tsl|absl|Eigen|unsupported|google|horovod)/|(mpi|Python)\.h$", include)
            cuda = re.match(r"cu(da|b)|nv|thrust/", include)
            if folder != "glue" and (foreign or (cuda and folder != "cuda")):
                problems.append(f"{path} includes {include}; only glue/ may know a framework, only cuda/ CUDA")
        elif folder == "core" and part[1] == "core":
            problems += _forbidden_in_core(path, Path(include).stem)
        elif folder == "core":
            problems.append(f"{path} includes {include}; core/ knows no other folder")
        elif path.parts[1:3] == CHECK:
            continue  # A program on top: it runs all of the core, and the suites of tests/cpp.
        elif folder in BACKENDS:
            first_group = part[1] == "core" and core_level(Path(include).stem) == 0
            if not (first_group or part[1] == folder or include == "tf_ops/core/device_backend.h"):
                problems.append(f"{path} includes {include}; a backend sees the first level and device_backend.h only")
    return problems


def _forbidden_in_core(path: Path, included: str) -> list[str]:
    level, other = core_level(path.stem), core_level(included)
    if level is None or other is None:
        return [f"{path}: {path.stem if level is None else included} has no place in CORE_LEVELS"]
    if included == path.stem or other < level or (other == level and CORE_LEVELS[level][1]):
        return []
    return [f"{path} (level {level}) includes {included} (level {other})"]


def test_python_imports_go_down_only() -> None:
    files = source_files("hvd_ctr", ".py")
    assert len(files) > 10
    problems = [problem for path in files for problem in forbidden_python_imports(path, (ROOT / path).read_text())]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("horovod", {"hvd_ctr/comm.py"}),
        ("mpi4py", {"hvd_ctr/comm.py"}),
        ("ctypes", {"hvd_ctr/ops/native.py"}),
        # A checkpoint or a data file must never be able to run code.
        ("pickle", set()),
    ],
)
def test_sole_importer(library: str, allowed: set[str]) -> None:
    importers = {
        str(path)
        for path in source_files("hvd_ctr", ".py")
        if any(name.split(".")[0] == library for name in imported_modules((ROOT / path).read_text(), "hvd_ctr"))
    }
    assert importers <= allowed


def test_one_loader_of_the_op_library() -> None:
    loaders = {
        str(path)
        for path in source_files("hvd_ctr", ".py")
        if re.search(r"\bload_op_library\s*\(|\bCDLL\s*\(", (ROOT / path).read_text())
    }
    assert loaders == {"hvd_ctr/ops/native.py"}


def test_config_knows_no_tensorflow() -> None:
    for path in source_files("hvd_ctr/config", ".py"):
        modules = {name.split(".")[0] for name in imported_modules((ROOT / path).read_text(), "hvd_ctr.config")}
        assert not modules & {"tensorflow", "keras"}, path


def test_cpp_includes_go_down_only() -> None:
    files = source_files("tf_ops", ".h", ".cc", ".cu", ".cuh")
    assert {path.parts[1] for path in files} >= {"core", "cpu", "glue"}
    problems = [problem for path in files for problem in forbidden_includes(path, (ROOT / path).read_text())]
    assert not problems, "\n".join(problems)


def test_files_stay_short() -> None:
    files = [
        path
        for folder in ("hvd_ctr", "tf_ops", "tests", "launch", "benchmarks")
        for path in source_files(folder, ".py", ".h", ".cc", ".cu", ".sh")
    ]
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in files}
    too_long = {path: lines for path, lines in lengths.items() if lines >= MAX_FILE_LINES}
    assert not too_long, f"files of {MAX_FILE_LINES} lines and more, split them: {too_long}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hvd_ctr/ops/a.py", "from hvd_ctr.embedding import dist"),
        ("hvd_ctr/ops/a.py", "def f():\n    import hvd_ctr.training.metrics"),
        ("hvd_ctr/data/a.py", "from hvd_ctr import comm"),
        ("hvd_ctr/data/a.py", "from ..comm import init"),
        ("hvd_ctr/training/a.py", "from hvd_ctr import models"),
        ("hvd_ctr/brand_new/a.py", ""),
    ],
)
def test_forbidden_python_imports_are_found(path: str, source: str) -> None:
    assert len(forbidden_python_imports(Path(path), source)) == 1


def test_allowed_python_imports_pass() -> None:
    source = "import numpy\nfrom hvd_ctr import comm\nfrom . import dist\nfrom hvd_ctr.ops import native\n"
    assert forbidden_python_imports(Path("hvd_ctr/embedding/a.py"), source) == []
    assert forbidden_python_imports(Path("hvd_ctr/cli/a.py"), "from hvd_ctr.models import build") == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("tf_ops/core/types.h", '"tf_ops/core/mix_cache.h"'),
        ("tf_ops/core/host_store.h", '"tf_ops/core/slot_directory.h"'),
        ("tf_ops/core/mix_cache.cc", '"tf_ops/cpu/cpu_backend.h"'),
        ("tf_ops/core/mix_cache.cc", '"tensorflow/core/framework/tensor.h"'),
        ("tf_ops/core/types.h", "<cuda_runtime.h>"),
        ("tf_ops/core/brand_new.h", '"tf_ops/core/types.h"'),
        ("tf_ops/cpu/cpu_backend.cc", '"tf_ops/core/host_store.h"'),
        ("tf_ops/cpu/cpu_backend.cc", "<Eigen/Core>"),
        ("tf_ops/cuda/row_kernels.cu", '"tf_ops/cpu/pool_rows.h"'),
        ("tf_ops/cuda/device_pool_impl.h", '"tf_ops/core/mix_cache.h"'),
        ("tf_ops/cuda/check/report.cc", '"tensorflow/core/framework/tensor.h"'),
    ],
)
def test_forbidden_includes_are_found(path: str, include: str) -> None:
    assert len(forbidden_includes(Path(path), f"#pragma once\n#include {include}\n")) == 1


def test_allowed_includes_pass() -> None:
    assert (
        forbidden_includes(Path("tf_ops/core/mix_cache.cc"), '#include "tf_ops/core/cache_plan.h"\n#include <vector>')
        == []
    )
    assert forbidden_includes(Path("tf_ops/cpu/cpu_backend.cc"), '#include "tf_ops/core/device_backend.h"') == []
    assert forbidden_includes(Path("tf_ops/glue/a.cc"), '#include "tensorflow/core/framework/op.h"') == []
    assert forbidden_includes(Path("tf_ops/cuda/a.cu"), "#include <cuda_runtime.h>") == []
    assert forbidden_includes(Path("tf_ops/cuda/check/a.cu"), '#include "tf_ops/core/mix_cache.h"') == []
