"""How supervisord is spoken to: its configuration files, and XML-RPC over a Unix socket."""

import http.client
import shlex
import socket
import xmlrpc.client
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.stack.programs import Program

_MAIN = """\
[unix_http_server]
file={socket}
chmod=0700
[supervisord]
logfile={folder}/supervisord.log
logfile_maxbytes=5MB
logfile_backups=1
pidfile={folder}/supervisord.pid
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[include]
files=programs/*.conf
"""

_PROGRAM = """\
[program:{name}]
command={command}
environment={environment}
autostart=false
autorestart=unexpected
exitcodes=0,2
startsecs=5
startretries=30
stopsignal=TERM
stopwaitsecs={stop_s}
stopasgroup=true
killasgroup=true
redirect_stderr=true
stdout_logfile={log}
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=2
"""


def main(folder: Path, socket_path: str) -> str:
    """The configuration of a supervisord that keeps its files in `folder`."""
    return _MAIN.format(socket=_escape(socket_path), folder=_escape(folder))


def program(program: Program, marks: Mapping[str, str]) -> str:
    """The section of one program; `marks` are added to its environment."""
    environment = {**program.environment, **marks}
    return _PROGRAM.format(
        name=program.name,
        command=_escape(shlex.join(program.command)),
        environment=",".join(f'{k}="{_escape(v)}"' for k, v in sorted(environment.items())),
        stop_s=program.stop_s,
        log=_escape(program.log),
    )


def connect(socket_path: str) -> Any:
    """The XML-RPC interface behind a socket; each call waits 60 s at most."""
    return xmlrpc.client.ServerProxy("http://localhost", transport=_Transport(socket_path), allow_none=True)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _UnixConnection(self._path)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _escape(value: str | Path) -> str:
    """`value` for a configuration file in which % begins an expansion."""
    return str(value).replace("%", "%%")
