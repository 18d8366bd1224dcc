"""Retries of Delta transactions: bounded, with jitter, and only where trying again can help."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError

from schemas.errors import LakeError

ATTEMPTS = 40
"""Tries of one transaction; the waits between them grow to half a second, up to 17 s in all."""

LIMIT_S = 60
"""After this long there is no further try: a store that is away answers slowly, not never."""

_PERMANENT = (SchemaMismatchError, DeltaProtocolError, TableNotFoundError)

T = TypeVar("T")


def retry(what: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called until it does not raise; it must be safe to repeat.

    Conflicts with other writers and failures of the store are tried again, a wrong schema or protocol is not.

    Raises:
        LakeError: it cannot succeed, or has failed for LIMIT_S seconds or ATTEMPTS times; names `what` and the failure.
    """
    began = time.monotonic()
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except _PERMANENT as error:
            raise LakeError(f"{what} is refused: {error}") from error
        except (DeltaError, OSError) as error:
            if number == ATTEMPTS or time.monotonic() - began > LIMIT_S:
                raise LakeError(f"{what} failed {number} times; last: {type(error).__name__}: {error}") from error
            time.sleep(random.random() * min(0.5, 0.01 * 2**number))
    raise AssertionError
