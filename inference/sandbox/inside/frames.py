"""Messages on a stream socket: four bytes of length, then JSON."""

import json
import socket
import struct
from typing import Any

MAX_BYTES = 16 << 20
"""Longest message. A longer one ends the conversation."""

_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """The other side wrote something that is no message."""


def pair() -> tuple[int, int]:
    """Two connected descriptors; numbers, because a socket object closes its number when it goes, in any process."""
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def send(stream: socket.socket, message: Any) -> None:
    """Write `message`, which JSON can express.

    Raises:
        FrameError: it is too long.
        OSError: nobody reads.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise FrameError(f"a message of {len(body)} bytes; at most {MAX_BYTES}")
    stream.sendall(_LENGTH.pack(len(body)) + body)


def receive(stream: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
        FrameError: what came is no message.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > MAX_BYTES:
        raise FrameError(f"a message of {length} bytes; at most {MAX_BYTES}")
    try:
        return json.loads(_exactly(stream, length))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from error


def split(data: bytes) -> list[Any]:
    """The whole messages in `data`, which trusted code wrote."""
    messages: list[Any] = []
    while len(data) >= _LENGTH.size and len(data) >= (end := _LENGTH.size + _LENGTH.unpack_from(data)[0]):
        messages.append(json.loads(data[_LENGTH.size : end]))
        data = data[end:]
    return messages


def _exactly(stream: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = stream.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
