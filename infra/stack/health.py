"""How the parts of a run are: what the supervisor says, and what each part answers itself."""

import http.client
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from infra.kafka.client import broker_error, client_settings
from infra.stack import programs
from infra.stack.supervise import State
from schemas.settings import Kafka, Settings

REMOTE, STOPPED = "remote", "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """One part's answer: well or not, why not, and where it answers.

    `is_up` without `ok` is a process that runs and says itself what it lacks, a first batch for example; `is_silent` is
    one that is there, should answer, and does not; `is_elsewhere` one on another machine, which was not asked.
    """

    ok: bool
    reason: str = ""
    address: str = ""
    is_up: bool = False
    is_silent: bool = False
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a run: the supervisor's word on it (REMOTE where it is not ours to run) and its own."""

    name: str
    state: str
    age_s: int
    health: Health

    @property
    def is_stopped(self) -> bool:
        """Ours, and not running because nobody wants it to."""
        return self.state == STOPPED and not self.health.ok


def parts(settings: Settings, states: list[State], started: Sequence[str]) -> list[Part]:
    """Every part of the run: servers first, then the processes that were `started`, also without a supervisor."""
    known = {s.program: s for s in states}
    names = [programs.KAFKA, *([programs.MLFLOW] if settings.tracking.enabled else [])]
    names += sorted({*known, *started} - {*programs.SERVERS})
    return [_part(settings, name, known.get(name)) for name in names]


def check(settings: Settings, state: State) -> Health:
    """The health of a supervised program: a dead one is not well, a live one says so itself."""
    if state.name in {"running", "starting"}:
        return _answer(settings, state.program, state.pid)
    if state.is_finished:
        return Health(True, "finished")
    return Health(False, f"{state.name}, exit status {state.exit_status}: {last_line(state.log)}")


def kafka(settings: Kafka) -> Health:
    """Whether the broker answers."""
    admin = AdminClient(client_settings(settings, "lagoon-health") | {"log_level": 0})
    try:
        return Health(bool(admin.list_topics(timeout=5).brokers), "", settings.brokers)
    except KafkaException as error:
        return Health(False, str(broker_error(settings, "listing brokers", error, admin)), settings.brokers)


def mlflow(uri: str) -> Health:
    """Whether the tracking server answers."""
    status, body = get(uri, "/health")
    return Health(status == 200, "" if status == 200 else body or f"HTTP status {status}", uri)


def service(settings: Settings, name: str, pid: int | None = None) -> Health:
    """What a process of the run says of itself; it leaves its address in the run's `services` folder."""
    return at(settings.run.folder / "services" / f"{programs.kind_of(name)}-{name}.json", pid)


def at(file: Path, pid: int | None = None) -> Health:
    """What the process says that has left its address in `file`; not what an earlier one left, where `pid` is known."""
    try:
        address = json.loads(file.read_text())
    except (OSError, ValueError):
        return Health(False, "has not come up yet")
    if stranger := _stranger(file, address, pid):
        return stranger
    try:
        os.kill(address["pid"], 0)
    except OSError:
        return Health(False, f"process {address['pid']} is gone, and no other has taken its place yet")
    uri = f"http://{address['host']}:{address['port']}"
    status, body = get(uri, "/healthz")
    if status and not all(_said(body).get(key) == address.get(key) for key in ("service", "instance", "pid")):
        return Health(False, f"process {address['pid']} is gone, and another one answers at {uri}")
    reason = "" if status == 200 else _reason(body)
    is_up = status == 503 and reason != "starting"
    return Health(status == 200, reason, uri, is_up, is_silent=not status)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        with open(log, errors="replace") as lines:
            return next((line.strip()[:300] for line in reversed(deque(lines, 50)) if line.strip()), "its log is empty")
    except OSError:
        return "it has no log"


def get(uri: str, path: str, timeout_s: float = 2) -> tuple[int, str]:
    """Status and body of an HTTP GET; status 0 and the reason where nothing answers."""
    try:
        parsed = urlsplit(uri)
        host, port = parsed.hostname or "", parsed.port
    except ValueError as error:
        return 0, f"no address: {error}"
    type_ = http.client.HTTPSConnection if parsed.scheme == "https" else http.client.HTTPConnection
    connection = type_(host, port, timeout=timeout_s)
    try:
        connection.request("GET", parsed.path.rstrip("/") + path)
        answer = connection.getresponse()
        return answer.status, answer.read(65536).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"no answer: {error}"
    finally:
        connection.close()


def _part(settings: Settings, name: str, state: State | None) -> Part:
    if state:
        return Part(name, state.name, state.age_s, check(settings, state))
    is_remote = name in programs.SERVERS and not programs.is_local(settings, name)
    return Part(name, REMOTE if is_remote else STOPPED, 0, _answer(settings, name))


def _answer(settings: Settings, name: str, pid: int | None = None) -> Health:
    if name == programs.KAFKA:
        return kafka(settings.kafka)
    if name == programs.MLFLOW:
        return mlflow(settings.tracking.uri)
    return service(settings, name, pid)


def _stranger(file: Path, address: dict[str, Any], pid: int | None) -> Health | None:
    """What to say where `address` is another process's: of an earlier one, of another machine, or of another folder."""
    if pid is not None:
        said = f"has not come up yet; the one before was process {address['pid']}"
        return None if pid == address["pid"] else Health(False, said)
    if address.get("machine", here := socket.gethostname()) != here:
        return Health(False, f"runs on {address['machine']}; ask it there", is_elsewhere=True)
    if address.get("folder", folder := os.path.realpath(file.parent.parent)) != folder:
        return Health(False, f"has not come up yet; what it left was copied from {address['folder']}")
    return None


def _reason(body: str) -> str:
    return str(_said(body).get("reason") or body[:300])


def _said(body: str) -> dict[str, Any]:
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
