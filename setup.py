"""Puts the op library into wheels. The metadata is in setup.cfg, the build itself in launch/build_ops.sh."""

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def tensorflow_is_installed_here() -> bool:
    """Whether this environment has a TensorFlow, and not only the one that pip unpacked for an isolated build."""
    for name in ("tensorflow-cpu", "tensorflow"):
        try:
            place = Path(str(metadata.distribution(name).locate_file(""))).resolve()
        except metadata.PackageNotFoundError:
            continue
        return place.is_relative_to(Path(sys.prefix).resolve())
    return False


class BuildPyWithOps(build_py):
    """Copies the Python files, then builds libhvd_ctr_ops.so beside them.

    An editable install takes the library of the source tree, which launch/setup.sh builds; nothing is built here then.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib).resolve() / "hvd_ctr" / "ops"
        command = ["bash", str(ROOT / "launch" / "build_ops.sh"), sys.executable, str(target)]
        if tensorflow_is_installed_here():
            subprocess.run(command, check=True)
            return
        # A build folder remembers the paths of its tools, and those of an isolated build are gone afterwards.
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, folder], check=True)


class PlatformDistribution(Distribution):
    """Marks the wheel as belonging to one platform: setuptools sees no extension module and would call it pure."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPyWithOps}, distclass=PlatformDistribution)
