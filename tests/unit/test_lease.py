"""A lease has one holder at a time, whoever stops, dies or wakes up."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from obstore.store import LocalStore

from infra.lease import Holder, Lease, Process
from schemas.errors import LakeError

LEASE_S = 10.0

ELSEWHERE = Process(host="elsewhere", boot="b", namespace="n", pid=1, started=1)
"""A process of another machine: nothing proves that it is gone."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, mkdir=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes only while a taker waits, or by the test's hand."""
    now = [0.0]
    monkeypatch.setattr("infra.lease._clock", lambda: now[0])
    monkeypatch.setattr("infra.lease.time", SimpleNamespace(sleep=lambda s: now.__setitem__(0, now[0] + s)))
    return now


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder beats a hundred times in a lease, so that a taker hears of it soon."""
    monkeypatch.setattr("infra.lease._BEATS", 100)
    monkeypatch.setattr("infra.lease._PATIENCE_S", 0.5)


def taken(store: LocalStore, process: Process = ELSEWHERE) -> Lease:
    lease = Lease(store, "flow", LEASE_S)
    lease.take([process])
    return lease


def test_the_first_holder_has_the_first_generation_and_no_fence(store: LocalStore) -> None:
    lease = taken(store)
    assert (lease.generation, lease.fence, lease.is_fresh()) == (1, 0, True)


@pytest.mark.usefixtures("patience")
def test_a_holder_that_lives_is_not_replaced_and_is_named(store: LocalStore) -> None:
    with taken(store).kept(), pytest.raises(LakeError, match="generation 1, process 1 on elsewhere"):
        taken(store)


@pytest.mark.usefixtures("clock")
def test_a_silent_holder_is_replaced_fenced_off_and_told_so(store: LocalStore) -> None:
    zombie = taken(store)
    heir = taken(store)
    assert (heir.generation, heir.fence, heir.is_fresh()) == (2, 2, True)
    assert not zombie.is_fresh()
    zombie.renew()
    with pytest.raises(LakeError, match="lost its lease flow: generation 1 was replaced by generation 2"):
        zombie.is_fresh()
    with heir.kept():
        pass
    assert taken(store).fence == 2  # released, so its own fence suffices


def test_a_released_lease_is_taken_at_once_and_needs_no_fence(store: LocalStore) -> None:
    with taken(store).kept():
        pass
    heir = Lease(store, "flow", lease_s=3600)
    heir.take([ELSEWHERE])
    assert (heir.generation, heir.fence) == (2, 0)


@pytest.mark.usefixtures("clock")
def test_an_error_releases_nothing(store: LocalStore) -> None:
    with pytest.raises(ZeroDivisionError), taken(store).kept():
        raise ZeroDivisionError
    assert taken(store).fence == 2


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    code = "from infra.lease import Process; print(Process.this().to_bytes().decode(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_a_dead_holder_of_this_machine_is_replaced_at_once_and_needs_no_fence(
    store: LocalStore, child: subprocess.Popen[str]
) -> None:
    assert child.stdout
    process = Process.model_validate_json(child.stdout.readline())
    assert not process.is_dead
    taken(store, process)
    os.kill(child.pid, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert process.is_dead
    heir = Lease(store, "flow", lease_s=3600)
    heir.take([ELSEWHERE])
    assert (heir.generation, heir.fence) == (2, 0)


def test_a_process_id_that_was_given_to_another_process_proves_the_death_of_the_first() -> None:
    this = Process.this()
    assert not this.is_dead
    assert this.model_copy(update={"started": this.started - 1}).is_dead
    assert not this.model_copy(update={"started": this.started - 1, "boot": "another machine's"}).is_dead


@pytest.mark.usefixtures("clock")
def test_one_that_is_left_of_a_cluster_keeps_its_lease_from_being_taken_at_once(store: LocalStore) -> None:
    gone = Process.this().model_copy(update={"started": 0})
    first = Lease(store, "flow", LEASE_S)
    first.take([gone, Process.this()])
    assert taken(store).fence == 2


@pytest.mark.usefixtures("clock")
def test_a_beat_in_the_last_moment_makes_the_taker_wait_once_more(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = taken(store)
    heir = Lease(store, "flow", LEASE_S)
    put = heir._put_new  # pyright: ignore[reportPrivateUsage]

    def just_before(holder: Holder) -> bool:
        first.renew()
        made = put(holder)
        assert first.is_fresh()
        return made

    monkeypatch.setattr(heir, "_put_new", just_before)
    heir.take([ELSEWHERE])
    assert not first.is_fresh()


@pytest.mark.usefixtures("patience")
def test_of_many_takers_one_wins(store: LocalStore) -> None:
    barrier, over = threading.Barrier(6), threading.Semaphore(0)

    def compete(number: int) -> int:
        barrier.wait(10)
        lease = Lease(store, "flow", LEASE_S)
        try:
            lease.take([ELSEWHERE.model_copy(update={"pid": number})])
        except LakeError:
            over.release()
            return 0
        with lease.kept():
            assert all(over.acquire(timeout=20) for _ in range(5))
        return lease.generation

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(compete, range(6))) == [0, 0, 0, 0, 0, 1]


def test_a_follower_believes_what_process_0_proves(store: LocalStore, clock: list[float]) -> None:
    first, follower = Lease(store, "flow", 10), Lease(store, "flow", 10)
    first.take([ELSEWHERE])
    follower.join(first.generation)
    for clock[0] in (6.0, 11.0):  # at 11 it sees a beat that it had not seen at 6, so process 0 held the lease at 6
        first.renew()
        follower.renew()
    clock[0] = 6 + 0.9 * 10 - 0.1
    assert follower.is_fresh()
    clock[0] = 6 + 0.9 * 10 + 0.1
    assert not follower.is_fresh()
    follower.renew()  # no new beat
    assert not follower.is_fresh()
    with first.kept():
        pass
    Lease(store, "flow", 10).take([ELSEWHERE])
    follower.renew()
    with pytest.raises(LakeError, match="replaced by generation 2"):
        follower.is_fresh()


def test_old_generations_go(store: LocalStore) -> None:
    for _ in range(6):
        with taken(store).kept():
            pass
    assert sorted(o["path"] for batch in store.list("flow") for o in batch) == [
        f"flow/0000000{n}.json" for n in (4, 5, 6)
    ]
