"""tf_ops/cuda/check: its flow on the host runtime, its part of GoogleTest against GoogleTest, its build for a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.run_ranks import REPOSITORY

CHECK = REPOSITORY / "tf_ops" / "cuda" / "check"
# Kept, so that only what changed is compiled again.
BUILD = REPOSITORY / "build" / "cuda_check"
LONG = os.environ.get("HVD_CTR_LONG") == "1"


def has_gtest(folder: Path) -> bool:
    program = folder / "probe.cc"
    program.write_text("#include <gtest/gtest.h>\nint main() { return 0; }\n")
    command = ["g++", "-std=c++17", str(program), "-lgtest", "-lpthread", "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def outcomes(folder: Path, subset: bool, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and the lines of the program that say what ran and how it ended."""
    program = folder / f"outcomes_{subset}"
    if not program.exists():
        library = [f"-I{CHECK / 'gtest_subset'}"] if subset else []
        tail = [] if subset else ["-lgtest"]
        command = [
            "g++",
            "-std=c++17",
            *library,
            str(CHECK / "gtest_subset" / "outcomes.cc"),
            *tail,
            "-lpthread",
            "-o",
            str(program),
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    ends = re.findall(r"^\[ +(OK|FAILED|SKIPPED|RUN) +\] ([\w/]+\.[\w/]+)", done.stdout, re.MULTILINE)
    # In the order they ran; what is listed again at the end is not asked for.
    ran = ends[: 2 * sum(end == "RUN" for end, _ in ends)]
    said = re.findall(r"^(?:\d \d \w|went on|NOT REACHED)$", done.stdout, re.MULTILINE)
    return done.returncode, sorted(f"{end} {name}" for end, name in ran) + sorted(said)


def test_the_part_of_googletest_is_equal_to_it(tmp_path: Path) -> None:
    if not has_gtest(tmp_path):
        pytest.skip("GoogleTest is not installed where g++ finds it")
    for arguments in ((), ("--gtest_filter=*Fails.*:-*Thread*",), ("--gtest_filter=Passes.*:Fixture.*:Three*",)):
        ours, theirs = outcomes(tmp_path, True, *arguments), outcomes(tmp_path, False, *arguments)
        assert ours == theirs
    assert ours[0] == 0
    status, lines = outcomes(tmp_path, True)
    assert status == 1
    assert "FAILED Fails.Equal" in lines and "NOT REACHED" not in lines and "went on" in lines
    assert sum(line.startswith("RUN Fails.") for line in lines) == sum(
        line.startswith("FAILED Fails.") for line in lines
    )


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHECK / "run.sh"), "--build", str(BUILD), "--jobs", "2", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)


def passed(output: str) -> int:
    counts = re.findall(r"^\[  PASSED  \] (\d+) tests?\.", output, re.MULTILINE)
    assert len(counts) == 1, output
    return int(counts[0])


def test_the_whole_flow_runs_on_the_host(tmp_path: Path) -> None:
    done = run_check("--host", "--subset", "--json", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    count = passed(done.stdout)
    assert count > 100
    report = json.loads((tmp_path / "check.json").read_text())
    kernels, moves, loop = report["tables"]
    assert {row[1] for row in kernels["rows"]} == {16, 64}
    assert len(moves["rows"]) == 6
    assert [row[0] for row in loop["rows"]] == [100, 99, 95, 90, 80]
    assert all(row[-1] == "yes" for row in loop["rows"])
    assert done.stdout.rstrip().endswith("|"), "the tables come last"
    if LONG:  # The same suites with GoogleTest itself.
        again = run_check("--host")
        assert again.returncode == 0, again.stdout + again.stderr
        assert "the installed GoogleTest" in again.stderr
        assert passed(again.stdout) == count


def test_a_failed_test_or_mismatch_fails_the_check(tmp_path: Path) -> None:
    """Breaks a copy: the device's kernels add a term twice."""
    if not LONG:
        pytest.skip("builds everything again; HVD_CTR_LONG=1 runs it")
    copy = tmp_path / "copy"
    for folder in ("tf_ops", "tests/cpp"):
        shutil.copytree(REPOSITORY / folder, copy / folder)
    kernels = copy / "tf_ops" / "cuda" / "row_kernels.h"
    text = kernels.read_text()
    broken = text.replace("sum->v[i] += term.v[i];", "sum->v[i] += term.v[i] + term.v[i];")
    assert broken != text
    kernels.write_text(broken)
    script = copy / "tf_ops" / "cuda" / "check" / "run.sh"
    for extra, words in ((["--no-suites"], "MISMATCH: segment sum"), ([], "FAILED")):
        command = [str(script), "--host", "--subset", "--build", str(tmp_path / "build"), *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 1, done.stdout + done.stderr
        assert words in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--jobs", "0"], ["--json"], ["--host", "--compile", "sm_90"]], ids=" ".join
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    done = subprocess.run([str(CHECK / "run.sh"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--host" in done.stderr


def test_without_nvcc_it_says_so(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "NVCC": ""}
    for tool in ("g++", "dirname", "basename", "ls", "nproc"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    bash = shutil.which("bash") or "/bin/bash"
    done = subprocess.run([bash, str(CHECK / "run.sh")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "no nvcc" in done.stderr or "no GPU" in done.stderr


def test_it_builds_for_a_gpu() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    done = run_check("--compile", "sm_90", *([] if LONG else ["--no-suites"]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr, done.stderr
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        ran = subprocess.run([str(BUILD / "sm_90" / "check")], capture_output=True, text=True, check=False)
        assert ran.returncode == 3
        assert "no GPU" in ran.stderr
