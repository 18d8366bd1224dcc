"""The processes of a cluster: none waits for the others without an end, and a stranger at the address is not one."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.store import LocalStore

from flows import cluster
from flows.cluster import Cluster
from infra.lease import Lease
from infra.stack.ports import free_port
from schemas.errors import DeadlineError
from tests.conftest import ROOT

LIMIT_S = 120

ALONE = """
import sys
from datetime import timedelta
import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, TestingSource, cluster_main
from flows import watch
from infra.telemetry import Stop

class Told:
    def health(self, ok, reason):
        self.reason = reason
    def close(self):
        print(self.reason, flush=True)

watch.FIRST_EPOCH_S = 2
flow = Dataflow("alone")
op.output("out", op.input("in", flow, TestingSource([1])), TestingSink([]))
with watch.watch(Told(), Stop(), 3600):
    cluster_main(flow, sys.argv[1:], 0, epoch_interval=timedelta(seconds=1))
"""


def two_addresses() -> tuple[str, str]:
    return f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"


@pytest.mark.timeout(LIMIT_S)
def test_a_process_whose_cluster_never_comes_together_ends_with_the_reason() -> None:
    command = [sys.executable, "-c", ALONE, *two_addresses()]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (1, "no epoch has ended yet")


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"index": 7, "process": {}}\n', b"x" * 100_000, None]
)
def test_who_calls_at_the_address_of_a_cluster_and_is_none_of_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes | None
) -> None:
    monkeypatch.setattr(cluster, "HELLO_S", 0.2)
    addresses, store, prepared = two_addresses(), LocalStore(tmp_path), list[int]()

    def hold(process: int) -> None:
        member = Cluster(addresses, process, 1)
        member.hold(Lease(store, "flow", 10.0), lambda: prepared.append(process))

    with ThreadPoolExecutor() as pool:
        first = pool.submit(hold, 0)
        stranger = _call(addresses[0])
        if said is not None:
            stranger.sendall(said)
            stranger.close()
        second = pool.submit(hold, 1)
        first.result(LIMIT_S)
        second.result(LIMIT_S)
        stranger.close()
    assert prepared == [0, 1]


@pytest.mark.timeout(LIMIT_S)
def test_callers_that_say_nothing_put_the_limit_of_gathering_off_by_one_of_them_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "GATHER_S", 0.5)
    monkeypatch.setattr(cluster, "HELLO_S", 1.0)
    addresses = two_addresses()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(Cluster(addresses, 0, 1).hold, Lease(LocalStore(tmp_path), "flow", 10.0), list)
        silent = [_call(addresses[0]) for _ in range(LIMIT_S)]
        with pytest.raises(DeadlineError, match=r"processes \[1\] of 2 have not come"):
            first.result(LIMIT_S / 2)
        for caller in silent:
            caller.close()


def _call(address: str) -> socket.socket:
    host, port = address.split(":")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError("process 0 does not listen")
