"""The claims store: bodies too large for a message, each under its SHA-256, beside the lake.

An object is written before the message that names it, and never changes: writing it again writes the same bytes.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from types import MappingProxyType

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import ObjectStore

from infra.store import local_path, open_store, sync_path
from schemas.claims import Claim, claim_in
from schemas.errors import ContractError, LakeError
from schemas.settings import Settings

FRESH = timedelta(hours=1)
"""An object that is older is written again before another message names it, so that maintenance sees it as new."""

WAITS_S = (0.1, 0.4, 1.6)
"""Waits before a missing or wrong object is looked for again; file systems of a network may show it late."""

_HOPELESS = 8
"""After as many in a row the next ones are judged at once, or a lost folder would cost seconds for each message."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Claims:
    """The objects under `uri`, a local folder or an object store; nothing is opened before the first use."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] = _NOTHING, waits_s: Sequence[float] = WAITS_S):
        self._folder = local_path(uri)
        self.uri = str(self._folder) if self._folder is not None else uri.rstrip("/")
        self._options, self._waits_s = storage_options, waits_s
        self._missed = 0

    @classmethod
    def of(cls, settings: Settings) -> "Claims":
        """The claims of a run."""
        return cls(settings.claims_uri, settings.lake.storage_options)

    @cached_property
    def store(self) -> ObjectStore:
        """The store rooted at `uri`."""
        return open_store(self.uri, self._options)

    def put(self, body: bytes) -> Claim:
        """Store `body` durably, unless it is there; returns its claim.

        Raises:
            LakeError: the store does not take it.
        """
        claim = Claim.of(body)
        try:
            self._put(claim, body)
        except (BaseError, OSError) as error:
            raise LakeError(f"the claims store {self.uri} takes no objects: {_first_line(error)}") from error
        return claim

    def body(self, headers: Mapping[str, bytes | None], value: bytes) -> bytes:
        """The body of a message: `value`, or what it claims.

        Raises:
            ContractError: a malformed claim; or, after retries, an object that is missing, shut, or not what it says.
            LakeError: the store does not answer.
        """
        claim = claim_in(headers, value)
        return value if claim is None else self._fetch(claim)

    def remove(self, name: str, before: datetime) -> int:
        """Remove object `name` unless it was written since `before`; returns the bytes that this freed."""
        try:
            found = self.store.head(name)  # once more: it may have been written again since it was listed
        except FileNotFoundError:
            return 0
        if found["last_modified"] >= before:
            return 0
        self.store.delete(name)
        return found["size"]

    def _put(self, claim: Claim, body: bytes) -> None:
        try:
            self.store.put(claim.sha256, body, mode="create")
        except AlreadyExistsError:
            found = self.store.head(claim.sha256)
            if found["size"] == claim.num_bytes and datetime.now(UTC) - found["last_modified"] < FRESH:
                return
            self.store.put(claim.sha256, body)
        if self._folder is not None:
            sync_path(self._folder / claim.sha256)
            sync_path(self._folder)

    def _fetch(self, claim: Claim) -> bytes:
        fault = ContractError()
        for wait_s in (0.0, *(self._waits_s if self._missed < _HOPELESS else ())):
            time.sleep(wait_s)
            try:
                body = self._read(claim)
            except ContractError as error:
                fault = error
            else:
                self._missed = 0
                return body
        self._missed += 1
        raise fault

    def _read(self, claim: Claim) -> bytes:
        """The object, of which no more is read than the claim declares."""
        name = f"claim {claim.sha256} in {self.uri}"
        try:
            size = self.store.head(claim.sha256)["size"]
            if size != claim.num_bytes:
                raise ContractError(f"{name} has {size} bytes, expected {claim.num_bytes}")
            body = bytes(self.store.get_range(claim.sha256, start=0, length=claim.num_bytes))
        except FileNotFoundError as error:
            raise ContractError(f"{name} is missing") from error
        except (PermissionDeniedError, PermissionError) as error:
            raise ContractError(f"{name} may not be read: {_first_line(error)}") from error
        except (BaseError, OSError) as error:
            raise LakeError(f"{name}: the store does not answer: {_first_line(error)}") from error
        if hashlib.sha256(body).hexdigest() != claim.sha256:
            raise ContractError(f"{name} holds other bytes than were written: its SHA-256 differs")
        return body


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
