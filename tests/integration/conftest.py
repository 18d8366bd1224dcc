"""What several tests share: a sandbox for code, a starting policy, rollout services that end with their test."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference.sandbox.command import INSTALL
from inference.sandbox.sandbox import Sandbox
from infra.cli.demo import PROFILE
from infra.stack.policy import prepare_policy
from schemas.settings import Settings, load
from tests.rollout_process import INSTANCE, Service

BARE = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true")


@pytest.fixture(scope="session")
def sandboxes() -> None:
    """Skips a test where bubblewrap is missing or may not make namespaces; any other trouble is a failure."""
    if shutil.which("bwrap") is None:
        pytest.skip(f"no bwrap: {INSTALL}")
    if (bare := subprocess.run(BARE, capture_output=True, check=False)).returncode:
        pytest.skip(f"bwrap may not make namespaces here: {bare.stderr.decode().strip()}")


@pytest.fixture(scope="module")
def sandbox(sandboxes: None) -> Iterator[Sandbox]:
    """One warm sandbox."""
    made = Sandbox(1)
    yield made
    made.close()


@pytest.fixture(scope="session")
def demo_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A starting policy for the demo's families, made as the demo makes its own, in fewer steps."""
    folder = tmp_path_factory.mktemp("policy")
    return prepare_policy(load([PROFILE], [f"--run.data_dir={folder}", "--policy.warm_start_steps=250"]), print)


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Starts services, and ends what is left of them after the test."""
    started: list[Service] = []

    def one(settings: Settings, failpoints: str = "", instance: str = INSTANCE) -> Service:
        started.append(Service(settings, failpoints, instance))
        return started[-1]

    yield one
    for service in started:
        if not service.has_ended:
            service.kill()
