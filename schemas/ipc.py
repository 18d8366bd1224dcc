"""What the metadata of an Arrow record batch say about its body, read before the body is.

Arrow gives no way to ask whether a batch is compressed without decompressing it, and a few kilobytes may declare
gigabytes. So the flatbuffer is read here, which Arrow has verified when it made the message: a table begins with the
distance to its vtable, which gives the offset of each field in the table.
https://github.com/apache/arrow/blob/main/format/Message.fbs
"""

import struct

from schemas.errors import ContractError

_HEADER = 2
"""Field of Message: the record batch."""

_BUFFERS, _COMPRESSION = 2, 3
"""Fields of RecordBatch."""

_BUFFER_BYTES = 16
"""A buffer's offset and length in the body, as two 64-bit integers."""


def refuse_unfolding(metadata: bytes, body_bytes: int) -> None:
    """Refuse a batch that could become larger than its body of `body_bytes`.

    Raises:
        ContractError: compressed buffers, buffers that share bytes of the body, or malformed metadata.
    """
    try:
        batch = _target(metadata, _field(metadata, _target(metadata, 0), _HEADER))
        compressed = _field(metadata, batch, _COMPRESSION)
        declared = _declared_bytes(metadata, _field(metadata, batch, _BUFFERS))
    except struct.error as error:
        raise ContractError(f"malformed record batch metadata: {error}") from error
    if compressed:
        raise ContractError("the body is compressed; expected plain buffers, for Kafka compresses whole batches")
    if declared > body_bytes:
        raise ContractError(f"buffers of {declared} bytes in a body of {body_bytes}: they overlap")


def _target(metadata: bytes, place: int) -> int:
    return place + struct.unpack_from("<I", metadata, place)[0]


def _field(metadata: bytes, table: int, number: int) -> int:
    """Where field `number` of the table at `table` lies; 0 if it is not set."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (size,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else 0


def _declared_bytes(metadata: bytes, field: int) -> int:
    """Sum of the lengths of all buffers; negative ones are malformed."""
    if not field:
        return 0
    vector = _target(metadata, field)
    (count,) = struct.unpack_from("<I", metadata, vector)
    end = vector + 4 + count * _BUFFER_BYTES
    if end > len(metadata):
        raise struct.error("buffers beyond the end")
    lengths = memoryview(metadata[vector + 4 : end]).cast("q").tolist()[1::2]
    if lengths and min(lengths) < 0:
        raise struct.error("a buffer of negative length")
    return sum(lengths)
