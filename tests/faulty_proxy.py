"""A proxy before an HTTP store that fails on command: `python -m tests.faulty_proxy PORT UPSTREAM_PORT FAULT_FILE`.

The fault file holds JSON, read anew for each request; `Proxy` writes it:

    {"kind": "none"}                     passes everything on
    {"kind": "delay", "seconds": 1.5}    passes everything on, later
    {"kind": "status", "status": 503}    answers so without asking
    {"kind": "reset"}                    closes the connection without an answer
    {"kind": "hang"}                     accepts, and never answers
    {"kind": "lose", "count": 2}         passes conditional creates of commits on, and closes before their answer

Each fault that was dealt out is a line in FAULT_FILE.log.
"""

import http.client
import io
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infra.stack.ports import free_port

_HOP = {"connection", "transfer-encoding", "keep-alive"}


class Proxy:
    """The proxy as its test sees it."""

    def __init__(self, port: int, file: Path) -> None:
        self.uri, self._file = f"http://127.0.0.1:{port}", file
        self._log = file.with_suffix(".log")
        self.set("none")

    def set(self, kind: str, **more: Any) -> None:
        """From now on fail so."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({"kind": kind, "at": time.monotonic(), **more}))
        temporary.replace(self._file)

    def dealt(self, kind: str) -> int:
        """How often requests failed so."""
        return self._log.read_text().split().count(kind) if self._log.exists() else 0


@contextmanager
def proxied(upstream_port: int, folder: Path) -> Iterator[Proxy]:
    """A proxy process in front of 127.0.0.1:`upstream_port`."""
    port = free_port()
    proxy = Proxy(port, folder / "fault.json")
    command = [sys.executable, "-m", "tests.faulty_proxy", str(port), str(upstream_port), str(folder / "fault.json")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        _wait_for(port)
        yield proxy
    finally:
        process.kill()
        process.wait(10)


def _wait_for(port: int, limit_s: float = 200) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: int
    file: Path
    lost: dict[float, int]

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = json.loads(self.file.read_text())
        kind = fault["kind"]
        loses = kind == "lose" and self._is_commit() and self.lost.get(fault["at"], 0) < fault["count"]
        if kind not in {"none", "lose"} or loses:
            self._note(kind)
        if kind == "delay":
            time.sleep(fault["seconds"])
        if kind == "status":
            return self._answer(fault["status"], [], b"<Error><Code>SlowDown</Code></Error>")
        if kind == "reset":
            return self._reset()
        if kind == "hang":
            time.sleep(3600)
        status, headers, answer = self._ask(body)
        if loses and status < 300:
            self.lost[fault["at"]] = self.lost.get(fault["at"], 0) + 1
            return self._reset()
        return self._answer(status, headers, answer)

    def _is_commit(self) -> bool:
        return self.command == "PUT" and "/_delta_log/" in self.path and self.headers.get("If-None-Match") == "*"

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=30)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        sized = False
        for name, value in headers:
            if name.lower() not in _HOP:
                sized = sized or name.lower() == "content-length"
                self.send_header(name, value)
        if not sized:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        # with a linger of zero seconds closing sends a reset
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.wfile = self.rfile = io.BytesIO()

    def _note(self, kind: str) -> None:
        with open(self.file.with_suffix(".log"), "a") as log:
            log.write(f"{kind}\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle  # noqa: N815 - the base class's names


if __name__ == "__main__":
    _Handler.upstream, _Handler.file, _Handler.lost = int(sys.argv[2]), Path(sys.argv[3]), {}
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler)
    server.daemon_threads = True
    server.serve_forever()
