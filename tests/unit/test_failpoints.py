"""Fail-points kill the process, and only where they are asked to."""

import os
import signal
import subprocess
import sys

import pytest

from infra import failpoints
from schemas.errors import SettingsError

CODE = "from infra.failpoints import hit; hit('curate.after_stage'); print('alive')"


def _run(spec: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, failpoints.ENVIRONMENT: spec}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


def test_a_sure_failpoint_kills_without_a_chance_to_clean_up() -> None:
    assert _run("other=0,curate.after_stage=1").returncode == -signal.SIGKILL


@pytest.mark.parametrize("spec", ["", "other=1", "curate.after_stage=0"])
def test_other_points_live_on(spec: str) -> None:
    assert _run(spec).stdout == "alive\n"


@pytest.mark.parametrize("spec", ["a", "a=", "a=2", "a=nan", "=1", "a=-0.5"])
def test_a_malformed_specification_is_named(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT, spec)
    with pytest.raises(SettingsError, match="expected name=probability"):
        failpoints.hit("a")
