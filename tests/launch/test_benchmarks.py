"""The scripts of benchmarks/ run, in sizes that measure nothing, and write their figures."""

import json
import subprocess
import sys

import pytest

from tests.support.run_ranks import REPOSITORY, clean_environment

TINY = {
    "first_layer": "--batch 32 --dim 4 --units 5 --share 0.5 --scale 0.001 --rounds 1 --calls 1",
    "interactions": "--batch 8 --features 3 --dim 4 --rounds 1 --calls 1",
    "scaling": "--ranks 1 --batch 32 --scale 0.001 --mlp 4 --launches 1 --rounds 1 --steps 1 --warm 1",
    "growth": "--axes hotness --ids 260 --rounds 1 --steps 1 --ranks 1",
    "transports": "--ranks 1 --batch 32 --scale 0.001 --dim 4 --launches 1 --rounds 1 --milliseconds 5 --warm 2",
    "train_step": "--depth 1 --batch 32 --scale 0.001 --rounds 1 --steps 1 --warm 1",
}
FIGURES = {
    "first_layer": "cases",
    "growth": "axes",
    "interactions": "ms",
    "scaling": "entries",
    "train_step": "workloads",
    "transports": "ratios",
}


@pytest.mark.ranks
@pytest.mark.parametrize("script", sorted(TINY))
def test_script_runs_and_writes_its_figures(script, tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, f"benchmarks/{script}.py", *TINY[script].split(), "--json", str(figures)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "|" in done.stdout  # a table
    assert FIGURES[script] in json.loads(figures.read_text())
