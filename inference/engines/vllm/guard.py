"""Keeps a server from outliving its service: `python guard.py PARENT_PID COMMAND...`.

vLLM's own worker processes survive a kill of the server, and a server a kill of the service, each with gigabytes. This
process leads the group that all of them are in, and ends the group when the server or the service is gone. Standard
library only; it runs under the server's interpreter.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

_POLL_S = 0.2
_END_S = 5.0


def main(parent: int, command: list[str]) -> None:
    """Run `command` until it ends, this process is told to, or process `parent` is gone; then end the whole group."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    temporary = tempfile.mkdtemp(prefix="lagoon-vllm-")  # short: paths of unix sockets go below it
    server = subprocess.Popen(command, env=os.environ | {"TMPDIR": temporary}, stdin=subprocess.DEVNULL)
    try:
        while server.poll() is None and os.getppid() == parent:
            time.sleep(_POLL_S)
    finally:
        _end(server)
        shutil.rmtree(temporary, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # the workers, and this process


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
    print(f"the server ended with status {server.wait()}", flush=True)  # noqa: T201 - its log


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
