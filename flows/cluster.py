"""The processes of one flow: they come together before any of them runs, and hold one lease.

Process 0 waits for the others on the address that Bytewax will use, takes the lease on behalf of all, does what has to
be done before the recovery state is read, and then lets the others go, with the lease's generation. So nobody runs
under a lease that another cluster holds, and a process that never comes is an error, not a wait without an end.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.lease import Lease, Process
from schemas.errors import ContractError, DeadlineError, SettingsError
from schemas.messages import Message, decode

ADDRESSES, PROCESS_ID, THREADS = "BYTEWAX_ADDRESSES", "BYTEWAX_PROCESS_ID", "BYTEWAX_WORKERS_PER_PROCESS"
"""Environment variables of a cluster, as for `python -m bytewax.run`: `host:port;host:port`, index, worker threads."""

GATHER_S = 60.0
"""Limit of waiting for the other processes."""

HELLO_S = 5.0
"""Limit of waiting for what who calls has to say; it says so at once, or is none of the others."""

_MAX_HELLO_BYTES = 4096

_RETRY_S = 0.1


class Hello(Message):
    """What a process says to process 0."""

    index: int
    process: Process


class Go(Message):
    """What process 0 answers when everything is ready."""

    generation: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who this process is among the processes of its flow."""

    addresses: tuple[str, ...]
    process: int
    threads: int

    @classmethod
    def of_environment(cls) -> "Cluster":
        """As the environment variables say; one process with one thread without them.

        Raises:
            SettingsError: the process's index is none of the addresses'.
        """
        addresses = tuple(a.strip() for a in os.environ.get(ADDRESSES, "").split(";") if a.strip())
        process = int(os.environ.get(PROCESS_ID, "0"))
        if process and process >= len(addresses):
            raise SettingsError(f"{PROCESS_ID} is {process}, but {ADDRESSES} has {len(addresses)} addresses")
        return cls(addresses, process, int(os.environ.get(THREADS, "1")))

    @property
    def is_single(self) -> bool:
        """Whether there is one worker only."""
        return len(self.addresses) <= 1 and self.threads == 1

    def hold(self, lease: Lease, prepare: Callable[[], None]) -> None:
        """Take `lease` for all processes, run `prepare` in process 0, then in the others.

        Raises:
            LakeError: another cluster holds it.
            DeadlineError: not all processes have come.
        """
        if self.process:
            lease.join(self._follow())
            prepare()
        elif len(self.addresses) > 1:
            self._lead(lease, prepare)
        else:
            lease.take([Process.this()])
            prepare()

    def _lead(self, lease: Lease, prepare: Callable[[], None]) -> None:
        others = self._gather()
        try:
            lease.take([Process.this(), *(hello.process for hello, _ in others.values())])
            prepare()
            for _, connection in others.values():
                connection.sendall(Go(generation=lease.generation).to_bytes() + b"\n")
        finally:
            for _, connection in others.values():
                connection.close()

    def _gather(self) -> dict[int, tuple[Hello, socket.socket]]:
        """The others by index, and connections to them; the address is free again afterwards."""
        others: dict[int, tuple[Hello, socket.socket]] = {}
        deadline = time.monotonic() + GATHER_S
        with socket.create_server(_place(self.addresses[0])) as server:
            while len(others) < len(self.addresses) - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    if time.monotonic() > deadline:  # callers that say nothing put nothing off
                        raise TimeoutError
                    connection = server.accept()[0]
                except TimeoutError:
                    missing = sorted({*range(1, len(self.addresses))} - {*others})
                    raise DeadlineError(
                        f"processes {missing} of {len(self.addresses)} have not come within {GATHER_S:g} s; this one "
                        f"ends. All need the same {ADDRESSES}, and each its own {PROCESS_ID}"
                    ) from None
                if (hello := _hello(connection)) and 0 < hello.index < len(self.addresses):
                    others[hello.index] = (hello, connection)
                else:
                    connection.close()
        return others

    def _follow(self) -> int:
        """The generation that process 0 holds, once everything is ready."""
        deadline = time.monotonic() + GATHER_S
        hello = Hello(index=self.process, process=Process.this()).to_bytes() + b"\n"
        while True:
            try:
                with socket.create_connection(_place(self.addresses[0]), timeout=GATHER_S) as connection:
                    connection.sendall(hello)
                    if answer := connection.makefile("rb").readline():
                        return decode(Go, answer).generation
            except (OSError, ContractError):
                pass
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"process 0 has not let this one (process {self.process}) begin within {GATHER_S:g} s at "
                    f"{self.addresses[0]}; its log says why. This one ends"
                )
            time.sleep(_RETRY_S)


def _hello(connection: socket.socket) -> Hello | None:
    """What who called says; None for one that died, and comes again, and for who is no process of a flow."""
    connection.settimeout(HELLO_S)
    try:
        return decode(Hello, connection.makefile("rb").readline(_MAX_HELLO_BYTES))
    except (OSError, ContractError):
        return None


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
