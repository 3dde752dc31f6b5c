"""`pip wheel .` gives a platform wheel that holds the op library and the command."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.sandbox import ROOT, run_here


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_holds_the_op_library(tmp_path: Path) -> None:
    """Without build isolation: with it, pip would install TensorFlow a second time just for this."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = run_here(command, timeout=590)
    assert done.returncode == 0, done.stdout
    (wheel,) = tmp_path.glob("hvd_ctr-0.1.0-*.whl")
    assert "linux" in wheel.stem, "a wheel with a library belongs to one platform"
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        library = content.read("hvd_ctr/ops/libhvd_ctr_ops.so")
        entry_points = content.read("hvd_ctr-0.1.0.dist-info/entry_points.txt").decode()
    assert b"hvd_ctr_built_for_tensorflow=2.18" in library
    assert "hvd-ctr = hvd_ctr.cli:main" in entry_points
    assert "hvd_ctr/training/train_step.py" in names
    assert not [name for name in names if name.startswith(("tests/", "tf_ops/", "benchmarks/", "build/"))]
