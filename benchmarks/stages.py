"""How fast is each stage of the core on one core, beside what the machine takes for the same bytes?

    python benchmarks/stages.py                            all stages but the disk tier (half a minute)
    python benchmarks/stages.py keys step                  two groups of: keys rows insert step disk
    HVD_CTR_SIMD=baseline python benchmarks/stages.py rows

Builds build/stages/hvd_ctr_stages (benchmarks/stages/*.cc, with the library's own flags) and runs it on one core. The
ids are those of `hvd-ctr bench train-step`: 26 features, 8.44 million rows, two logical ranks, B=4096 and 16384; a
figure is the median over the sweeps (p10..p90), the first of them dropped. `limit` is a bare loop over the same memory
in the same run. `must` and `aim` are the project's targets for this stage on a 2-core AMD EPYC (Zen 5) machine.
Exits with 1 where a `must` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "stages"
GROUPS = ("keys", "rows", "insert", "step", "disk")
DEFAULT_GROUPS = GROUPS[:-1]

#: (stage, case) -> must, aim. Upper bounds, except for rates ("rows/s").
TARGETS: dict[tuple[str, str], tuple[float, float]] = {
    ("dedupe + partition", "B=4096 workload"): (6, 4.2),
    ("dedupe + partition", "B=16384 workload"): (8, 5.6),
    ("dedupe + partition", "B=4096 uniform"): (10, 8),
    ("dedupe + partition", "B=16384 uniform"): (16, 14),
    ("owner union", "B=4096 workload"): (9, 6),
    ("directory hit with recency", "workload"): (20, 13),
    ("directory hit with recency", "uniform"): (25, 15),
    ("create rows", "memory in use"): (60, 25),
    ("gather", "D=16 workload"): (16, 11),
    ("gather", "D=64 workload"): (45, 32),
    ("gather", "D=128 workload"): (90, 52),
    ("gather", "D=16 uniform"): (20, 14),
    ("gather", "D=64 uniform"): (50, 38),
    ("gather", "D=128 uniform"): (90, 67),
    ("expand", "D=16"): (4.5, 3.1),
    ("expand", "D=64"): (18, 13),
    ("expand", "D=128"): (40, 29),
    ("pool of 10", "D=16"): (2, 1),
    ("segment sum", "D=16 B=4096 in cache"): (5, 3.3),
    ("segment sum", "D=16 B=4096 evicted"): (8, 5.6),
    ("Adagrad", "D=16 workload"): (22, 15),
    ("Adagrad", "D=64 workload"): (70, 45),
    ("Adagrad", "D=128 workload"): (160, 108),
    ("Adagrad", "D=16 uniform"): (28, 18),
    ("Adagrad", "D=64 uniform"): (90, 69),
    ("Adagrad", "D=128 uniform"): (180, 136),
    ("Adam", "D=16 workload"): (30, 19),
    ("Adam", "D=16 uniform"): (40, 26),
    ("work per step", "B=4096 D=16 workload"): (4, 2.4),
    ("work per step", "B=16384 D=16 workload"): (16, 10),
    ("1000 tables / 26", "work per step"): (1.3, 1.0),
    ("disk reads", "128-byte rows"): (80e3, 110e3),
    ("disk eviction", "128-byte rows"): (1e6, 2.9e6),
    ("disk eviction", "512-byte rows"): (0.5e6, 1.4e6),
}


def build() -> Path:
    """Builds the program where it is not up to date; returns its path."""
    fresh = not (BUILD / "CMakeCache.txt").exists()
    bin_folder = str(Path(sys.executable).parent)  # CMake and Ninja stand beside the Python of a virtual environment.
    environment = {**os.environ, "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")])}
    generator = ["-G", "Ninja"] if fresh and shutil.which("ninja", path=environment["PATH"]) else []
    for command in (
        ["cmake", "-S", str(ROOT / "tf_ops"), "-B", str(BUILD), *generator, "-DHVD_CTR_BENCHMARKS=ON"],
        ["cmake", "--build", str(BUILD), "--target", "hvd_ctr_stages"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return BUILD / "hvd_ctr_stages"


def reached(value: float, target: float, unit: str) -> bool:
    return value >= target if unit == "rows/s" else value <= target


def verdict(result: dict[str, Any]) -> str:
    """aim, must, or MISSED; empty where there is no target."""
    if "must" not in result:
        return ""
    if reached(result["median"], result["aim"], result["unit"]):
        return "aim"
    return "must" if reached(result["median"], result["must"], result["unit"]) else "MISSED"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def print_row(cells: list[str]) -> None:
    widths = (28, 34, 8, 26, 9, 9, 9, 6)
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def print_result(result: dict[str, Any]) -> None:
    spread = f"{number(result['median'])} ({number(result['p10'])}..{number(result['p90'])})"
    values = [number(result.get(key)) for key in ("limit", "must", "aim")]
    print_row([result["stage"], result["case"], result["unit"], spread, *values, verdict(result)])


def one_core(program: list[str]) -> list[str]:
    """The command that keeps the program on the last core this process may use, where the system has taskset."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if core is None or shutil.which("taskset") is None:
        return program
    return ["taskset", "-c", str(core), *program]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=(*GROUPS, []), help="what to run; default: all but disk")
    parser.add_argument("--repeats", type=int, default=11, help="sweeps that count, for each stage")
    parser.add_argument("--folder", type=Path, default=BUILD, help="disk: where its file of 1 GB goes")
    parser.add_argument("--json", type=Path, default=BUILD / "stages.json", help="where the results go")
    arguments = parser.parse_args()
    program = build()
    groups = arguments.groups or list(DEFAULT_GROUPS)
    command = one_core([str(program), str(arguments.repeats), str(arguments.folder), *groups])
    results: list[dict[str, Any]] = []
    print_row(["stage", "case", "unit", "median (p10..p90)", "limit", "must", "aim", "held"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            result = json.loads(line)
            if target := TARGETS.get((result["stage"], result["case"])):
                result["must"], result["aim"] = target
            results.append(result)
            print_result(result)
    if running.returncode:
        sys.exit(f"{' '.join(command)} ended with {running.returncode}")
    arguments.json.write_text(
        json.dumps({"groups": groups, "repeats": arguments.repeats, "results": results}, indent=1)
    )
    missed = [f"{r['stage']} {r['case']}" for r in results if verdict(r) == "MISSED"]
    if missed:
        print("missed: " + "; ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
