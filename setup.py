"""Puts the op library into wheels. The metadata is in setup.cfg, the build itself in launch/build_ops.sh."""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPyWithOps(build_py):
    """Copies the Python files, then builds libhvd_ctr_ops.so beside them.

    An editable install takes the library of the source tree, which launch/setup.sh builds; nothing is built here then.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        # A folder of its own: that of launch/setup.sh is for another TensorFlow than the one in an isolated build.
        subprocess.run(
            [
                "bash",
                str(ROOT / "launch" / "build_ops.sh"),
                sys.executable,
                str(Path(self.build_lib).resolve() / "hvd_ctr" / "ops"),
                str(Path(self.build_lib).resolve().parent / "ops"),
            ],
            check=True,
        )


class PlatformDistribution(Distribution):
    """Marks the wheel as belonging to one platform: setuptools sees no extension module and would call it pure."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPyWithOps}, distclass=PlatformDistribution)
