"""A flow's state as bytes in its recovery store."""

import pickle
from typing import ClassVar, Self

from schemas.errors import ContractError


class Stored:
    """What a state has in common with others: its bytes say which version of the code wrote them."""

    __slots__ = ()
    FLOW: ClassVar[str]
    FORMAT: ClassVar[int]

    def to_bytes(self) -> bytes:
        """The state as it goes into the recovery store: an immutable copy."""
        return pickle.dumps((self.FORMAT, self), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """The state in `body`.

        Raises:
            ContractError: it was written by another version of this code.
        """
        format_, state = pickle.loads(body)  # noqa: S301  (our own recovery store)
        if format_ != cls.FORMAT:
            raise ContractError(
                f"{cls.FLOW} state of format {format_}; this code reads {cls.FORMAT}. Go on with the version of Lagoon "
                "that wrote it, or begin a new run"
            )
        return state
