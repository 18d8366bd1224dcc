"""Curation into a lake on S3 that is slow, refuses, breaks connections, loses answers, and goes away for good."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from infra.stack.ports import free_port
from schemas.settings import Kafka
from tests.chaos.table import Row
from tests.conftest import running_broker
from tests.faulty_proxy import proxied
from tests.integration.test_slow_lake import FAULTS, Curation
from tests.integration.test_weights_s3 import serving


def run(rounds: int, folder: Path) -> list[Row]:
    """A round deals each fault once, then takes the lake away until the flow gives up, and gives it back."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    rows = [Row(f"lake, {kind}") for kind, _ in FAULTS] + [Row("lake, away")]
    port = free_port()
    store = serving(["moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder)
    with running_broker(folder) as address, store as options, proxied(port, folder) as proxy:
        curation = Curation(Kafka(brokers=address, topic_prefix="chaos.", partitions=4), folder, proxy, options)
        try:
            for _ in range(rounds):
                for row, (kind, more) in zip(rows, FAULTS, strict=False):
                    _time(row, lambda k=kind, m=more: curation.misbehave(k, m))
                _time(rows[-1], curation.away)
        finally:
            curation.process.kill()
            curation.process.wait(10)
        found = curation.rows()
        rows[-1].lost = 4 * curation.fed - len(found)
        rows[-1].duplicated = found.total() - len(found)
    return rows


def _time(row: Row, deal: Callable[[], None]) -> None:
    began = time.monotonic()
    deal()
    row.kills += 1
    row.recoveries_s.append(time.monotonic() - began)
