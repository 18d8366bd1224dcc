"""Retries against the lake: bounded, with jitter, seen in health, and only where trying again can help."""

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError
from obstore.exceptions import BaseError

from infra import disk
from infra.waits import WAITS
from schemas.errors import LakeError

ATTEMPTS = 40
"""Tries of one operation; the waits between them grow to half a second, up to 17 s in all."""

LIMIT_S = 60
"""After this long there is no further try: a store that is away answers slowly, not never (`infra.store.REQUEST_S`)."""

_DECISION = "this process ends with status 1, and goes on from its last durable state when it is started again"
_PERMANENT = (SchemaMismatchError, DeltaProtocolError, TableNotFoundError)
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
_MAX_REASON = 400

T = TypeVar("T")


def retry(what: str, attempt: Callable[[], T], folder: Path | None = None) -> T:
    """The result of `attempt`, which is called until it does not raise; it must be safe to repeat.

    Conflicts with other writers and failures of the store are tried again, a wrong schema or protocol is not. `folder`
    is where a local lake lies: if its disk is full, the error says so.

    Raises:
        LakeError: it cannot succeed, or has failed for LIMIT_S seconds or ATTEMPTS times; names `what` and the failure.
    """
    began = time.monotonic()
    with WAITS.on(what, LIMIT_S, _DECISION) as wait:
        for number in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except _PERMANENT as error:
                raise LakeError(f"{what} is refused: {error}") from error
            except (DeltaError, OSError, BaseError) as error:
                wait.note(reason(error, folder))
                if number == ATTEMPTS or time.monotonic() - began > LIMIT_S:
                    raise LakeError(f"{what} failed {number} times; last: {wait.reason}") from error
                time.sleep(random.random() * min(0.5, 0.01 * 2**number))
    raise AssertionError


def reason(error: Exception, folder: Path | None = None) -> str:
    """`error` on one line, with its kind and, if a disk is full, which one and what to do."""
    text = " ".join(_DECORATION.sub(" ", str(error)).split())[:_MAX_REASON]
    hint = f"; {disk.full(folder)}" if folder is not None and disk.is_full(error) else ""
    return f"{type(error).__name__}: {text}{hint}"
