"""The curate flow while its lake on S3 is slow, refuses, breaks connections, loses answers, and is away for good."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import ensure_topics
from infra.lake import Lake
from infra.stack.ports import free_port
from infra.stack.programs import ROOT
from schemas.settings import Kafka, Settings
from tests.faulty_proxy import Proxy, proxied
from tests.integration.test_curate_kafka import Rollout, settings_for
from tests.integration.test_weights_s3 import BUCKET, serving
from tests.samples import group

LIMIT_S = 120
FAULTS = (
    ("lose", {"count": 3}),
    ("delay", {"seconds": 0.3}),
    ("status", {"status": 503}),
    ("reset", {}),
)
PATIENCE = {"TIMEOUT": "1s", "CONNECT_TIMEOUT": "1s", "RETRY_TIMEOUT": "1s", "MAX_RETRIES": "1"}


class Curation:
    """The curate process of a run whose lake lies behind the proxy, and who feeds it."""

    def __init__(self, kafka: Kafka, folder: Path, proxy: Proxy, options: dict[str, str]) -> None:
        self.proxy = proxy
        through = options | PATIENCE | {"AWS_ENDPOINT_URL": proxy.uri}
        public = {key: value for key, value in through.items() if "KEY" not in key}
        lake = {"uri": f"s3://{BUCKET}/lake", "storage_options": public}
        own = settings_for(kafka, folder).model_dump() | {"lake": lake}
        self.settings = Settings.model_validate(own)
        self.settings.save(folder / "settings.json")
        ensure_topics(kafka)
        self.lake = Lake(lake["uri"], options)  # past the proxy
        self.lake.ensure()
        self.rollout, self._folder, self.fed = Rollout(kafka), folder, 0
        self.rollout.publish(1)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flows.curate", "--config", str(self._folder / "settings.json")]
        with open(self._folder / "curate.log", "ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log)

    def feed(self, num_groups: int = 4) -> None:
        """Groups that are admitted whole."""
        for number in range(self.fed, self.fed + num_groups):
            self.rollout.send(group(number, [0.0, 1.0, 1.0, 0.0]))
        self.fed += num_groups

    def misbehave(self, kind: str, more: dict[str, Any]) -> None:
        """Feed while the lake behaves so; what is refused shows in health, and all is there once it behaves again."""
        before = self.proxy.dealt(kind)
        self.proxy.set(kind, **more)
        self.feed()
        self.until(lambda: self.proxy.dealt(kind) >= before + 3)
        if kind in {"status", "reset"}:
            self.until(lambda: "then this process ends with status 1" in self.health()["reason"])
        self.proxy.set("none")
        self.until(lambda: self.is_complete)
        self.until(lambda: self.health()["ok"])

    def away(self) -> None:
        """Feed while the lake does not answer at all: the flow ends with its reason, and goes on when started again."""
        self.proxy.set("hang")
        self.feed()
        self.until(lambda: self.process.poll() is not None, alive=False)
        assert self.process.returncode == 1
        self.proxy.set("none")
        self.process = self.start()
        self.until(lambda: self.is_complete)

    def rows(self) -> Counter[str]:
        """Rows of `experience` by trajectory."""
        self.lake.version("experience")
        return Counter(self.lake.table("experience").to_pyarrow_table(columns=["trajectory_id"])[0].to_pylist())

    @property
    def is_complete(self) -> bool:
        """Whether all that was fed is there."""
        return self.rows().total() >= 4 * self.fed

    def health(self) -> dict[str, Any]:
        """What `/healthz` answers."""
        for file in (self.settings.run.folder / "services").glob("curate-*.json"):
            address = json.loads(file.read_text())
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{address['port']}/healthz", timeout=5) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                return json.load(error)
            except OSError:
                continue
        return {"ok": False, "reason": "no answer"}

    def until(self, condition: Callable[[], bool], alive: bool = True) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert not alive or self.process.poll() is None, (self._folder / "curate.log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
            time.sleep(0.1)


@pytest.fixture
def curation(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Curation]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    port = free_port()
    store = serving(["moto.server", "-H", "127.0.0.1", "-p", str(port)], port, tmp_path)
    with store as options, proxied(port, tmp_path) as proxy:
        found = Curation(kafka, tmp_path, proxy, options)
        try:
            yield found
        finally:
            found.process.kill()
            found.process.wait(10)


@pytest.mark.kafka
@pytest.mark.slow
def test_no_row_is_missing_or_twice_however_the_lake_behaves(curation: Curation) -> None:
    for kind, more in FAULTS:
        curation.misbehave(kind, more)
    assert set(curation.rows().values()) == {1}
    assert curation.rows().total() == len(FAULTS) * 4 * 4
