"""Claim checks: a body too large for a message lies in an object store, and the message says which object it is.

The object's name is the SHA-256 of its bytes, so a claim can name no other place, and whoever reads it can tell whether
it is what was written.
"""

import hashlib
from collections.abc import Iterable, Mapping

from pydantic import Field

from schemas.errors import ContractError
from schemas.messages import Message, decode
from schemas.names import Header

MAX_CLAIM_BYTES = 64 * 1024 * 1024
"""Most bytes of an object: about eight million tokens. A claim of more is refused before anything is read."""


class Claim(Message):
    """Body of a claim: name (SHA-256 in hexadecimal) and size of the object that holds the Arrow IPC stream."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_bytes: int = Field(ge=1, le=MAX_CLAIM_BYTES)

    @classmethod
    def of(cls, body: bytes) -> "Claim":
        """The claim of `body`, whatever its size: one that is too large is refused by its reader, with the reason."""
        return cls.model_construct(sha256=hashlib.sha256(body).hexdigest(), num_bytes=len(body))

    @property
    def header(self) -> dict[str, bytes]:
        """The header that tells a claim from a body, and the size of what it stands for."""
        return {Header.CLAIM: str(self.num_bytes).encode()}


def claim_in(headers: Mapping[str, bytes | None], body: bytes) -> Claim | None:
    """The claim that a message is, or None where it carries its body itself.

    Raises:
        ContractError: its header says that it is a claim, and it is none, or one of another size.
    """
    said = headers.get(Header.CLAIM)
    if said is None:
        return None
    claim = decode(Claim, body)
    if said != str(claim.num_bytes).encode():
        raise ContractError(f"header {Header.CLAIM} says {said[:20]!r}, the claim {claim.num_bytes} bytes")
    return claim


def claimed_bytes(headers: Iterable[tuple[str, bytes]]) -> int:
    """Bytes that a message with `headers` stands for beside its own, at most MAX_CLAIM_BYTES; 0 if it is no claim."""
    said = dict(headers).get(Header.CLAIM, b"")  # of two the last one, which is also what `claim_in` is asked about
    return min(int(said), MAX_CLAIM_BYTES) if said.isdigit() and len(said) < 19 else 0
