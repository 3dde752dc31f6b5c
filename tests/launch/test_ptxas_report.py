"""launch/ptxas_report.py: registers per kernel and architecture; spills and warnings fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.sandbox import run_here

_GATHER = "_ZN7hvd_ctr9RunKernelINS_6GatherILi4EEEEEvT_l"


def _log(arch: int, registers: int, spilled: int = 0, symbol: str = _GATHER) -> str:
    """What ptxas -v says about one kernel."""
    return (
        f"ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function '{symbol}' for 'sm_{arch}'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 0 barriers, 400 bytes cmem[0]\n"
        "ptxas info    : Compile time = 1.234 ms\n"
    )


def _report(folder: Path, *logs: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    for number, text in enumerate(logs):
        (folder / "CMakeFiles").mkdir(exist_ok=True)
        (folder / "CMakeFiles" / f"part{number}.cu.o.log").write_text(text)
    done = run_here([sys.executable, "launch/ptxas_report.py", str(folder), *options])
    return done.returncode, done.stdout


def test_registers_of_all_architectures(tmp_path: Path) -> None:
    status, text = _report(tmp_path, _log(75, 40) + _log(90, 32), _log(90, 64, symbol="_Z5otherv"))
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["kernel", "sm_75", "sm_90"]
    assert ["Gather<4>", "40", "32"] in lines and ["other", "64"] in lines
    assert text.endswith("2 kernels for sm 75, 90: at most 64 registers, 0 with spills, 0 warnings\n")
    status, text = _report(tmp_path, options=("--markdown",))
    assert "| `Gather<4>` | 40 | 32 |" in text.splitlines()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (_log(75, 255, spilled=8), f"spills 16 bytes on sm_75: {_GATHER}"),
        (_log(75, 40) + "a.cu(3): warning #177-D: variable was declared but never referenced\n", "never referenced"),
        ("", "holds no log that names a kernel"),
        ("ptxas info    : 0 bytes gmem\n", "holds no log that names a kernel"),
    ],
)
def test_what_must_not_be_fails(tmp_path: Path, log: str, said: str) -> None:
    status, text = _report(tmp_path, log)
    assert status == 1 and said in text
