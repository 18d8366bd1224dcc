"""Kafka in a container: the way where Docker runs and Java or Maven is missing (extra `docker`).

`python -m infra.stack.container server.properties` runs the broker until it is asked to end.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

IMAGE = "apache/kafka:4.3.1"
DATA = "/data"


def is_possible() -> bool:
    """Whether Docker's engine answers and Testcontainers is installed."""
    if not shutil.which("docker") or not importlib.util.find_spec("testcontainers"):
        return False
    return not subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30).returncode


def command(config: Path) -> list[str]:
    """The command that runs the broker of this `server.properties` in a container."""
    return [sys.executable, "-m", "infra.stack.container", str(config)]


def environment(properties: str) -> dict[str, str]:
    """`server.properties` as the image's environment; listeners open inside the container, data under DATA."""
    pairs = dict(line.split("=", 1) for line in properties.splitlines() if "=" in line)
    pairs["advertised.listeners"] = pairs["listeners"].partition(",")[0]
    pairs["listeners"] = pairs["listeners"].replace("127.0.0.1", "")
    pairs["listener.security.protocol.map"] = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
    pairs["log.dirs"] = DATA
    return {f"KAFKA_{key.upper().replace('.', '_')}": value for key, value in pairs.items()}


def main(config: Path) -> None:
    """Run the container until SIGTERM; only the loopback address of this machine reaches it."""
    from testcontainers.core.container import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports] (optional)
        DockerContainer,
    )

    properties = environment(config.read_text())
    port = int(properties["KAFKA_ADVERTISED_LISTENERS"].rpartition(":")[2])
    container: Any = DockerContainer(IMAGE, user=f"{os.getuid()}:{os.getgid()}")
    container.with_volume_mapping(str(config.with_name("data")), DATA, "rw")
    container.ports[port] = ("127.0.0.1", port)
    for name, value in properties.items():
        container.with_env(name, value)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with container:
        container.get_wrapped_container().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
