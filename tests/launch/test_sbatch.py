"""launch/train.sbatch as Slurm would start it, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.launch.sandbox import ROOT, write_program


def submit(tmp_path: Path, mpi_of_the_environment: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script from a spool folder, as slurmd does, for a job of 2 machines with 4 ranks each."""
    repository, programs = tmp_path / "repository", tmp_path / "bin"
    (repository / "launch").mkdir(parents=True)
    prefix = "export OPAL_PREFIX=/prefix" if mpi_of_the_environment else "unset OPAL_PREFIX"
    (repository / "launch" / "env.sh").write_text(f"{prefix}\n")
    write_program(repository / "launch" / "mpirun.sh", '#!/bin/bash\necho "mpirun.sh $*"\n')
    write_program(programs / "srun", '#!/bin/bash\necho "srun $*"\n')
    write_program(programs / "scontrol", "#!/bin/bash\nprintf 'node1\\nnode2\\n'\n")
    spooled = write_program(tmp_path / "spool" / "slurm_script", (ROOT / "launch" / "train.sbatch").read_text())
    job = {
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "8",
    }
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **job}
    return subprocess.run(
        [str(spooled), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )


def test_srun_with_a_cluster_mpi(tmp_path: Path) -> None:
    done = submit(tmp_path, False, "my.yaml", "--set", "train.epochs=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "srun --mpi=pmix --cpus-per-task=8 --kill-on-bad-exit=1 hvd-ctr train my.yaml --set train.epochs=2"
    )


def test_mpirun_with_the_mpi_of_the_environment(tmp_path: Path) -> None:
    done = submit(tmp_path, True, "my.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "mpirun.sh -np 8 -H node1:4,node2:4 hvd-ctr train my.yaml"


def test_without_a_config(tmp_path: Path) -> None:
    done = submit(tmp_path, True)
    assert done.returncode != 0
    assert "usage: sbatch launch/train.sbatch CONFIG" in done.stderr


def test_options_are_of_sbatch_and_come_first() -> None:
    """Slurm reads #SBATCH lines up to the first command, and refuses the job for an option that it does not know."""
    lines = (ROOT / "launch" / "train.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = {line.split()[1].split("=")[0] for line in lines[:first_command] if line.startswith("#SBATCH ")}
    known = ["job-name", "output", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "time"]
    assert options == {f"--{name}" for name in known}
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
