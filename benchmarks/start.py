"""How long does a user wait? Imports, the first training step, the whole quickstart; after launch/setup.sh.

    python benchmarks/start.py                       # about 3 minutes
    python benchmarks/start.py --skip-quickstart     # one minute

    import            seconds that `import hvd_ctr` with all its public names and the command line's modules takes
                      beyond the import of TensorFlow and Keras
    --help            the whole of `hvd-ctr --help`, which loads neither
    first step        from the launch of `hvd-ctr train configs/quickstart.yaml` on 2 ranks to the report of step 1
    quickstart        data, training and evaluation as in launch/quickstart.sh, one run

All but the last are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MUST_SECONDS = {"import": 3.0, "first step": 10.0, "quickstart": 120.0}
_IMPORTS = """
import time
start = time.perf_counter()
import tensorflow, keras
theirs = time.perf_counter()
import hvd_ctr, hvd_ctr.cli.commands
for name in hvd_ctr.__all__:
    getattr(hvd_ctr, name)
print(theirs - start, time.perf_counter() - theirs)
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-quickstart", action="store_true")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args(arguments)


def environment() -> dict[str, str]:
    """This checkout is what is measured, wherever the package is installed from."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def import_seconds() -> tuple[float, float]:
    """Of TensorFlow and Keras, and of ours beyond."""
    theirs, ours = map(float, run([sys.executable, "-c", _IMPORTS]).split()[-2:])
    return theirs, ours


def help_seconds() -> float:
    start = time.perf_counter()
    run([sys.executable, "-m", "hvd_ctr", "--help"])
    return time.perf_counter() - start


def command(name: str, ranks: int | None, folder: str, *options: str) -> list[str]:
    """A command of the quickstart, with data and run in `folder`."""
    program = [sys.executable, "-m", "hvd_ctr", name, str(ROOT / "configs/quickstart.yaml"), *options]
    values = {
        "synth.out_dir": f"{folder}/data",
        "data.train": f"[{folder}/data/train-*.tsv]",
        "data.eval": f"[{folder}/data/eval-*.tsv]",
        "run_dir": f"{folder}/run",
    }
    for key, value in values.items():
        program += ["--set", f"{key}={value}"]
    return program if ranks is None else [str(ROOT / "launch/mpirun.sh"), "-np", str(ranks), *program]


def first_step_seconds(ranks: int, folder: str) -> float:
    """From the launch to the line that reports step 1."""
    options = ["--overwrite", "--set", "train.max_steps=1"]
    start, seconds = time.perf_counter(), None
    process = subprocess.Popen(
        command("train", ranks, folder, *options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if seconds is None and re.search(r"train epoch 1/\d+ step 1 ", line):
            seconds = time.perf_counter() - start
    if process.wait() or seconds is None:
        raise RuntimeError(f"training ended with exit code {process.returncode} without a report of step 1")
    return seconds


def quickstart_seconds(ranks: int, folder: str) -> float:
    start = time.perf_counter()
    for name, launched, options in (("synth", None, []), ("train", ranks, ["--overwrite"]), ("evaluate", ranks, [])):
        run(command(name, launched, folder, *options))
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    imports = [import_seconds() for _ in range(options.repeats)]
    figures = {
        "TensorFlow, Keras": [theirs for theirs, _ in imports],
        "import": [ours for _, ours in imports],
        "--help": [help_seconds() for _ in range(options.repeats)],
    }
    with tempfile.TemporaryDirectory() as folder:
        run(command("synth", None, folder))
        figures["first step"] = [first_step_seconds(options.ranks, folder) for _ in range(options.repeats)]
    if not options.skip_quickstart:
        with tempfile.TemporaryDirectory() as folder:
            figures["quickstart"] = [quickstart_seconds(options.ranks, folder)]
    return figures


def table(figures: dict[str, Any]) -> str:
    lines = [f"{'':20}{'median':>10}{'lowest':>10}{'highest':>10}{'must':>10}"]
    for name, seconds in figures.items():
        must = f"{MUST_SECONDS[name]:8.0f} s" if name in MUST_SECONDS else ""
        three = (statistics.median(seconds), min(seconds), max(seconds))
        lines.append(f"{name:20}" + "".join(f"{value:8.2f} s" for value in three) + must)
    return "\n".join(lines)


def main() -> None:
    options = parse(sys.argv[1:])
    figures = measure(options)
    print(table(figures))
    if options.json:
        Path(options.json).write_text(json.dumps({"ranks": options.ranks, "seconds": figures}, indent=1))


if __name__ == "__main__":
    main()
