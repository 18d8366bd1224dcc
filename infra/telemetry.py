"""What a process shows of itself: logs, health, metrics, where it listens; and its edge, `main`."""

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import Thread
from typing import Any

from prometheus_client import REGISTRY, Gauge
from prometheus_client.exposition import choose_encoder

from infra import disk
from infra.logs import configure, logger
from infra.waits import WAITS
from schemas.errors import LagoonError, SettingsError
from schemas.settings import Settings, current, is_secret, load

__all__ = ["Stop", "Telemetry", "instance_name", "logger", "main"]

HEALTHY = Gauge("lagoon_healthy", "1 while the service is healthy", ["service", "instance"])

INSTANCE_ENVIRONMENT = "LAGOON_INSTANCE"
_CLOSE_S = 5
_SERVERS = ("AWS_", "AZURE_", "GOOGLE_", "MLFLOW_")
_LAUNCHER_ARGUMENTS = ("--local_rank=", "--local-rank=")  # the deepspeed launcher adds one to every rank


def instance_name(service: str) -> str:
    """The name of this process among those of its kind: `$LAGOON_INSTANCE`, else service, host and process id."""
    return os.environ.get(INSTANCE_ENVIRONMENT) or f"{service}-{socket.gethostname()}-{os.getpid()}"


class Telemetry:
    """Serves `/metrics` and `/healthz`, and says where in `<run>/services/<service>-<instance>.json`.

    Health is red ("starting") until the service first reports.

    Raises:
        SettingsError: the address in `[telemetry]` cannot be had.
    """

    def __init__(self, settings: Settings, service: str, instance: str) -> None:
        self.service, self.instance = service, instance
        self._log = logger(service, instance)
        self._ok, self._reason, self._reported_at = False, "starting", datetime.now(UTC)
        self._server = _listen(settings, self)
        self.host, self.port = settings.telemetry.host, int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="telemetry", daemon=True)
        self._thread.start()
        self._file = settings.run.folder / "services" / f"{_plain(service)}-{_plain(instance)}.json"
        _write(self._file, self._address())
        HEALTHY.labels(service, instance).set(0)

    def health(self, ok: bool, reason: str = "") -> None:
        """Report; a change is logged. Call it as often as you like: `/healthz` shows when it was last called."""
        if (ok, reason) != (self._ok, self._reason):
            (self._log.info if ok else self._log.warning)("health", ok=ok, reason=reason)
        self._ok, self._reason, self._reported_at = ok, reason, datetime.now(UTC)
        HEALTHY.labels(self.service, self.instance).set(int(ok))

    def status(self) -> dict[str, Any]:
        """What `/healthz` answers: what was reported last, and red while a wait lasts."""
        waits = WAITS.fault()
        ok = self._ok and not waits
        HEALTHY.labels(self.service, self.instance).set(int(ok))
        return {
            "ok": ok,
            "reason": "; ".join(filter(None, (waits, "" if waits and self._ok else self._reason))),
            "service": self.service,
            "instance": self.instance,
            "pid": os.getpid(),
            "reported_at": self._reported_at.isoformat(),
        }

    def close(self) -> None:
        """Stop serving and remove the service file, unless a successor has written it anew."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)
        if _read(self._file) == self._address():
            self._file.unlink(missing_ok=True)

    def _address(self) -> dict[str, Any]:
        names = {"service": self.service, "instance": self.instance, "machine": socket.gethostname()}
        folder = os.path.realpath(self._file.parent.parent)
        return names | {"folder": folder, "pid": os.getpid(), "host": self.host, "port": self.port}


class Stop:
    """Becomes true when the process is asked to end; a wait on it ends then, in every thread.

    A pipe rather than a threading.Event, whose lock a signal handler cannot take while the main thread waits.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._stopped = False

    def on_signals(self) -> "Stop":
        """Set on SIGTERM and SIGINT; a second SIGINT interrupts. Main thread only."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)
        return self

    def set(self) -> None:
        """Ask to end."""
        if not self._stopped:
            self._stopped = True
            os.write(self._writer, b"x")

    def wait(self, seconds: float) -> bool:
        """Wait until set, for up to `seconds`; true if it is."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
        return self._stopped

    def __bool__(self) -> bool:
        return self._stopped

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.set()


def main(service: str, run: Callable[[Settings, Telemetry, Stop], None], argv: Sequence[str] | None = None) -> None:
    """The edge of a process: settings, logs, signals, telemetry; then `run`, which returns soon after `stop` is set.

    Arguments: `--config FILE` (repeatable) and `--section.key=value`; without a file, the settings of the current run.
    Exits 0 after a clean end, 2 on wrong settings (a restart cannot help), 1 on any other error: one that Lagoon
    raises on purpose is logged in words, the rest with a traceback.
    """
    instance, stop = instance_name(service), Stop().on_signals()
    configure("info", service, instance)
    log = logger(service, instance)

    def serve() -> None:
        settings = _settings(service, sys.argv[1:] if argv is None else argv)
        configure(settings.telemetry.log_level, service, instance, _secrets(settings))
        telemetry = Telemetry(settings, service, instance)
        try:
            log.info("started", run=settings.run.name, pid=os.getpid(), port=telemetry.port)
            run(settings, telemetry, stop)
        finally:
            telemetry.close()

    sys.exit(_exit_code(serve, log))


def _exit_code(serve: Callable[[], None], log: Any) -> int:
    try:
        serve()
    except LagoonError as error:
        log.error("stopped", kind=type(error).__name__, error=str(error))
        return 2 if isinstance(error, SettingsError) else 1
    except (Exception, KeyboardInterrupt) as error:
        if disk.is_full(error):
            where = getattr(error, "filename", None)
            text = f"{error}; {disk.full(Path(where))}" if where else f"{error}; make room on the disk"
            log.error("stopped", kind=type(error).__name__, error=text)
            return 1
        log.error("crashed", kind=type(error).__name__, error=str(error), traceback=traceback.format_exc())
        return 1
    log.info("ended")
    return 0


def _settings(service: str, argv: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(
        prog=service, allow_abbrev=False, usage="%(prog)s [--config FILE ...] [--section.key=value ...]"
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML or JSON, left to right")
    known, rest = parser.parse_known_args([a for a in argv if not a.startswith(_LAUNCHER_ARGUMENTS)])
    return load(known.config, rest) if known.config else current(overrides=rest)


def _secrets(settings: Settings) -> list[str]:
    """Texts that no log line may show: values from the environment for Kafka, object stores and MLflow."""
    hidden = [v for k, v in os.environ.items() if k.startswith(_SERVERS) and is_secret(k)]
    return hidden + [os.environ.get(variable, "") for variable in settings.kafka.secrets.values()]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    telemetry: Telemetry

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for the host's name, which can hang
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            status = self.server.telemetry.status()
            code = HTTPStatus.OK if status["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(code, "application/json", json.dumps(status).encode())
        elif path == "/metrics":
            self.server.telemetry.status()
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, content_type, encode(REGISTRY))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"try /healthz or /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: scrapes are not news."""

    def _answer(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _listen(settings: Settings, telemetry: Telemetry) -> _Server:
    host, port = settings.telemetry.host, settings.telemetry.port
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on telemetry.host {host!r}, telemetry.port {port}: {error.strerror}; "
            "port 0 takes a free one"
        ) from error
    server.telemetry = telemetry
    return server


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(file)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
