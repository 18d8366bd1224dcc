"""One holder at a time for a name, over machines: a lease in an object store.

`<name>/00000007.json` is the lease's seventh generation, made by a conditional create: of two takers one wins. Its
holder counts a beat up in it; the newest generation is the one in force. Clocks of two machines are never compared:

- A taker watches the beat. It takes over when the holder has released the lease or is proven dead (its processes ran
  under this very kernel and are gone), or when the beat has not changed for `lease_s` by the taker's own clock; else it
  gives up.
- A holder is *fresh* until `lease_s` after it began its last successful renewal, by its own clock. As long as it is
  fresh, nobody has taken over: the taker's wait began after that renewal. A beat that comes just before a taker's
  create is found by the taker, which waits once more; a renewal that comes after it finds the newer generation.

A holder that was stopped can wake up at any point, so freshness bounds what it does but does not stop it. That is what
the fence is for: `fence` is the generation of the last take-over from a holder not proven dead; stores compare it
(`infra.lake`).
"""

import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore

from infra.logs import logger
from infra.retries import retry
from infra.store import open_store
from schemas.errors import LakeError
from schemas.messages import Message, decode
from schemas.settings import Settings

FOLDER = "_lagoon/leases"
"""Where a lake, or a weight store, keeps the leases of those who write to it."""

LEASE_S = 10.0
"""A holder whose beat has stood still for this long is taken for gone."""

_PATIENCE_S = 5.0
"""How long a taker waits for a living holder to release: one that was asked to end takes a little."""

_BEATS = 4
"""Renewals in `lease_s`."""

_KEPT = 3
"""Generations that stay; older ones are removed."""


class Process(Message):
    """A process, so that another one under the same kernel can prove that it is gone."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> "Process":
        """The calling process."""
        boot, namespace = _kernel()
        pid = os.getpid()
        return cls(host=socket.gethostname(), boot=boot, namespace=namespace, pid=pid, started=_started(pid))

    @property
    def is_dead(self) -> bool:
        """Whether it certainly ran under this kernel, in this space of process ids, and is gone."""
        return bool(self.boot) and (self.boot, self.namespace) == _kernel() and _started(self.pid) != self.started


class Holder(Message):
    """Content of a generation's object."""

    generation: int
    fence: int
    beat: int = 0
    released: bool = False
    members: tuple[Process, ...]

    @property
    def is_gone(self) -> bool:
        """Whether it is certain that none of its processes writes any more."""
        return self.released or all(member.is_dead for member in self.members)


class Lease:
    """The lease `name` in `store`; `take` or `join` it, then stay in `kept`."""

    def __init__(self, store: ObjectStore, name: str, lease_s: float = LEASE_S) -> None:
        self._store, self.name, self._lease_s = store, name, lease_s
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._is_follower = False
        self._renewed = self._polled = 0.0
        self._lost = ""

    @classmethod
    def of(cls, settings: Settings, name: str) -> "Lease":
        """The lease `name` on the lake of a run."""
        return cls(open_store(f"{settings.lake_uri}/{FOLDER}", settings.lake.storage_options), name)

    @property
    def generation(self) -> int:
        """Counts the holders of this lease, from 1; 0 before it is taken."""
        return self._holder.generation if self._holder else 0

    @property
    def fence(self) -> int:
        """What stores compare: whoever has a lower one may not write any more."""
        return self._holder.fence if self._holder else 0

    @property
    def lost(self) -> str:
        """Why this process is not the holder any more; empty while nothing says so."""
        return self._lost

    def is_fresh(self) -> bool:
        """Whether it is certain that nobody has taken over yet.

        Raises:
            LakeError: somebody has.
        """
        if self._lost:
            raise LakeError(self._lost)
        return _clock() - self._renewed < 0.9 * self._lease_s  # two clocks may run a little differently

    def confirm(self) -> None:
        """Ask the store whether this is the holder still, before something that is not fenced.

        Raises:
            LakeError: it is not.
        """
        retry(f"confirming the lease {self.name}", self.renew)
        self.is_fresh()

    def take(self, members: Sequence[Process]) -> None:
        """Become the holder, for the processes `members`; waits while it is not certain whether there is another.

        Raises:
            LakeError: another holder is alive; names it.
        """
        began = since = _clock()
        seen: tuple[int, int] | None = None
        lives = False
        while True:
            newest = retry(f"reading the lease {self.name}", self._newest)
            if newest is None or newest.is_gone:
                if self._create(newest, newest.fence if newest else 0, members):
                    return
                continue  # another taker was faster
            if seen != (newest.generation, newest.beat):
                lives, seen, since = seen is not None, (newest.generation, newest.beat), _clock()
            if lives and _clock() - began > _PATIENCE_S:
                raise LakeError(self._refusal(newest))
            if _clock() - since > self._lease_s and self._create(newest, newest.generation + 1, members):
                return
            time.sleep(self._lease_s / 50)

    def join(self, generation: int) -> None:
        """Be another process of the holder, which has `generation`; that one alone renews it.

        Raises:
            LakeError: there is no such generation.
        """
        self._is_follower = True
        self._holder = self._read(_path(self.name, generation))
        if self._holder is None:
            raise LakeError(f"lease {self.name} has no generation {generation}; do all processes use one lake?")
        self._polled = self._renewed = _clock()
        self.renew()

    def renew(self) -> None:
        """Say that this holder lives, and look whether it is one still. Failures of the store raise BaseError."""
        with self._lock:
            self._renew(self._of(), _clock())

    def _renew(self, holder: Holder, began: float) -> None:
        if self._is_follower:
            self._follow(holder, began)
        else:
            self._holder = holder.model_copy(update={"beat": holder.beat + 1})
            self._store.put(_path(self.name, holder.generation), self._holder.to_bytes())
        newer = self._paths(after=holder.generation)
        if newer:
            self._lost = (
                f"lost its lease {self.name}: generation {holder.generation} was replaced by {_words(self._newest())} "
                f"after this process had not answered for {self._lease_s:g} s (stopped, or cut off from its store). It "
                "ends without writing; what it had not committed, the new holder does again"
            )
        elif not self._is_follower:
            self._renewed = began

    @contextmanager
    def kept(self) -> Generator[None]:
        """Renew it in a thread; released at the end, unless by an error: then the next one finds out what is left."""
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(self._lease_s / _BEATS) and not self._lost:
                try:
                    self.renew()
                except BaseError as error:
                    logger("lease").warning("the lease cannot be renewed", lease=self.name, error=str(error))

        thread = threading.Thread(target=keep, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self._release()

    def _release(self) -> None:
        if self._lost or self._is_follower:
            return
        holder = self._of().model_copy(update={"released": True})
        try:
            self._store.put(_path(self.name, holder.generation), holder.to_bytes())
        except BaseError as error:  # then it lapses
            logger("lease").warning("the lease is not released", lease=self.name, error=str(error))

    def _follow(self, holder: Holder, began: float) -> None:
        """A beat that has changed since the last look was made after that look began."""
        found = self._read(_path(self.name, holder.generation))
        if found is not None and found.beat != holder.beat:
            self._holder, self._renewed = found, self._polled
        self._polled = began

    def _create(self, before: Holder | None, fence: int, members: Sequence[Process]) -> bool:
        generation = before.generation + 1 if before else 1
        holder = Holder(generation=generation, fence=fence, members=tuple(members))
        began = _clock()
        if not retry(f"taking the lease {self.name}", lambda: self._put_new(holder)):
            return False
        self._holder = holder
        if before and not before.is_gone:
            self._wait_out(before)
            began = _clock()
            self.renew()
        self._renewed = began
        for path in self._paths()[:-_KEPT]:
            self._store.delete(path)
        return True

    def _put_new(self, holder: Holder) -> bool:
        path = _path(self.name, holder.generation)
        try:
            self._store.put(path, holder.to_bytes(), mode="create")
        except AlreadyExistsError:
            return self._read(path) == holder  # made by an earlier try whose reply was lost
        return True

    def _wait_out(self, before: Holder) -> None:
        """A holder that renewed just before this one came believes in it for as long as a lease is."""
        found = self._read(_path(self.name, before.generation))
        deadline = _clock() + (self._lease_s if found and found.beat != before.beat else 0)
        while (left := deadline - _clock()) > 0:
            time.sleep(min(left, self._lease_s / _BEATS))
            self.renew()

    def _of(self) -> Holder:
        if self._holder is None:
            raise RuntimeError(f"lease {self.name} is not held")
        return self._holder

    def _newest(self) -> Holder | None:
        """What is in force; a generation that is removed while it is looked at is not the newest."""
        while paths := self._paths():
            if (found := self._read(paths[-1])) is not None:
                return found
        return None

    def _paths(self, after: int = 0) -> list[str]:
        offset = _path(self.name, after)
        return sorted(o["path"] for batch in self._store.list(f"{self.name}/", offset=offset) for o in batch)

    def _read(self, path: str) -> Holder | None:
        try:
            return decode(Holder, bytes(self._store.get(path).bytes()))
        except FileNotFoundError:
            return None

    def _refusal(self, newest: Holder) -> str:
        return (
            f"another process holds the lease {self.name}: {_words(newest)}, and it is alive. Two of them would write "
            "everything twice: stop it first. The lease of one that is gone lapses by itself, at once on its own "
            f"machine, after {self._lease_s:g} s elsewhere"
        )


def _words(holder: Holder | None) -> str:
    if holder is None:
        return "nobody"
    return f"generation {holder.generation}, " + ", ".join(f"process {m.pid} on {m.host}" for m in holder.members)


def _path(name: str, generation: int) -> str:
    return f"{name}/{generation:08d}.json"


def _clock() -> float:
    """Seconds that also count while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _kernel() -> tuple[str, str]:
    """This boot of this kernel, and this space of process ids; empty where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> int:
    """When process `pid` began, in ticks since the boot; -1 where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in {"Z", "X"} else int(fields[19])
