"""launch/env.sh: what it sets, and that a user's own values stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.sandbox import ROOT, Sandbox, run_here

TUNED = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def sourced(**environment: str) -> dict[str, str]:
    """The environment after sourcing, in a shell as strict as the scripts'."""
    done = run_here(["bash", "-c", "set -euo pipefail; . launch/env.sh; env -0"], **environment)
    assert done.returncode == 0, done.stdout
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)


@pytest.mark.parametrize("name", TUNED)
def test_default_and_user_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert sourced()[name] == TUNED[name]
    assert sourced(**{name: "7"})[name] == "7"


def test_environment_is_active() -> None:
    after = sourced(VIRTUAL_ENV="", PATH="/usr/bin:/bin")
    assert after["VIRTUAL_ENV"] == str(ROOT / ".venv")
    assert after["PATH"].split(":")[0] == str(ROOT / ".venv" / "bin")


def test_opal_prefix_only_for_the_mpi_of_the_environment(tmp_path: Path) -> None:
    if (ROOT / ".venv" / "bin" / "mpirun").exists():
        assert sourced()["OPAL_PREFIX"] == str(ROOT / ".venv")
    sandbox = Sandbox(tmp_path).with_fake_tools()
    activate = sandbox.root / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export VIRTUAL_ENV={sandbox.root}/.venv\n")
    command = ["bash", "-c", f'. {sandbox.root}/launch/env.sh && echo "<${{OPAL_PREFIX-unset}}>"']
    assert run_here(["env", "-u", "OPAL_PREFIX", *command]).stdout == "<unset>\n"


def test_without_set_up(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    done = run_here(["bash", "-c", f". {sandbox.root}/launch/env.sh || echo status $?"])
    assert "there is no" in done.stdout and "run ./launch/setup.sh" in done.stdout
    assert done.stdout.endswith("status 1\n")
