"""A place to run the launch scripts in: a copy, a PATH of chosen programs, stand-ins that record their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the scripts use of a minimal Debian.
BASIC_PROGRAMS = """
    basename bash cat chmod cp cut date dirname env find flock grep head ln ls lscpu mkdir mktemp mv nproc
    readlink rm sed sh sha256sum sleep sort tail tr true uname wc xargs
"""

# Stands in for a Python: `-m venv` makes a tree of such stand-ins, `-m pip` records itself, `wheel` leaves a file.
FAKE_PYTHON = r"""#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
  --version) echo "Python 3.11.9" ;;
  "-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python3.11"
    cp "$0" "$3/bin/python"
    ln -s python "$3/bin/python3.11"
    printf '#!%s/bin/python\n' "$3" >"$3/bin/pip"
    ;;
  "-m pip wheel "*)
    echo "horovod: $(env | grep ^HOROVOD_ | tr '\n' ' ')" >>"$CALLS"
    if [[ -n ${FAIL_WHEEL:-} ]]; then echo "fatal error: mpi.h: No such file or directory"; exit 1; fi
    while [[ $1 != -w ]]; do shift; done
    echo "built in $2" >"$2/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    ;;
  *" -e "*) printf '#!/bin/bash\n' >"$(dirname "$0")/hvd-ctr"; chmod +x "$(dirname "$0")/hvd-ctr" ;;
  *"print(*sys.version_info"*) echo "3.11" ;;
esac
"""

# Stands in for launch/build_ops.sh.
FAKE_BUILD_OPS = r"""#!/bin/bash
echo "build_ops $* HVD_CTR_CUDA=$HVD_CTR_CUDA CUDACXX=${CUDACXX:-}" >>"$CALLS"
sleep "${BUILD_SECONDS:-0}"
mkdir -p "$2"
echo library >"$2/libhvd_ctr_ops.so"
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Sandbox:
    """A copy of the launch scripts below `folder`, with `bin/` as the whole PATH of what it runs."""

    def __init__(self, folder: Path, programs: str = BASIC_PROGRAMS) -> None:
        self.root = folder / "repository"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.bin.mkdir(parents=True)
        for program in programs.split():
            found = shutil.which(program, path="/usr/bin:/bin")
            if found is not None:
                (self.bin / program).symlink_to(found)
        shutil.copytree(ROOT / "launch", self.root / "launch")
        for name in ("setup.py", "setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "tf_ops" / "core").mkdir(parents=True)
        (self.root / "tf_ops" / "core" / "types.h").write_text("// a source\n")
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CALLS": str(self.calls_file),
            "HVD_CTR_CACHE": str(folder / "cache"),
        }

    def with_fake_tools(self) -> Sandbox:
        """Adds a Python and a C++ compiler that do nothing, and the stand-in of the library build."""
        write_program(self.bin / "python3.11", FAKE_PYTHON)
        write_program(self.bin / "g++", "#!/bin/bash\n")
        write_program(self.root / "launch" / "build_ops.sh", FAKE_BUILD_OPS)
        return self

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs launch/`script`; stdout and stderr come together in `stdout`."""
        return subprocess.run(
            ["/bin/bash", str(self.root / "launch" / script), *arguments],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    def take_calls(self) -> list[str]:
        """What the stand-ins were called with since the last time."""
        if not self.calls_file.exists():
            return []
        calls = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return calls


def run_here(command: list[str], timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository with its real environment; stdout and stderr come together in `stdout`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_"))}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
