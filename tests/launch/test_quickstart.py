"""launch/quickstart.sh end to end on little data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.sandbox import run_here


@pytest.mark.slow
@pytest.mark.ranks
def test_quickstart_trains_and_reports(tmp_path: Path) -> None:
    settings = [
        f"synth.out_dir={tmp_path}/data",
        "synth.train_rows=40000",
        "synth.eval_rows=10000",
        f"data.train=[{tmp_path}/data/train-*.tsv]",
        f"data.eval=[{tmp_path}/data/eval-*.tsv]",
        f"run_dir={tmp_path}/run",
        "train.global_batch=1024",
        "train.epochs=1",
    ]
    done = run_here(
        ["launch/quickstart.sh", *(word for setting in settings for word in ("--set", setting))], timeout=280
    )
    assert done.returncode == 0, done.stdout
    auc, teacher = map(float, re.findall(r"auc\s+(0\.\d+) .*teacher.*?(0\.\d+)", done.stdout)[-1])
    assert 0.6 < auc < teacher < 1, done.stdout
    for part in ("40,000 samples on 2 rank(s)", "samples/s", "cache hit rate", f"run folder: {tmp_path}/run"):
        assert part in done.stdout, (part, done.stdout)
    assert re.search(r"quickstart: done in \d+\.\d s", done.stdout)
