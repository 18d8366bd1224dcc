"""Retries of Delta transactions: bounded, with jitter, and only where trying again can help."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError

from schemas.errors import LakeError

ATTEMPTS = 40
"""Tries of one transaction; the waits between them grow to half a second, up to 17 s in all."""

_PERMANENT = (SchemaMismatchError, DeltaProtocolError, TableNotFoundError)

T = TypeVar("T")


def retry(what: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called until it does not raise; it must be safe to repeat.

    Conflicts with other writers and failures of the store are tried again, a wrong schema or protocol is not.

    Raises:
        LakeError: it cannot succeed, or has failed ATTEMPTS times; names `what` and the last failure.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except _PERMANENT as error:
            raise LakeError(f"{what} is refused: {error}") from error
        except (DeltaError, OSError) as error:
            if number == ATTEMPTS - 1:
                raise LakeError(f"{what} failed {ATTEMPTS} times; last: {type(error).__name__}: {error}") from error
            time.sleep(random.random() * min(0.5, 0.01 * 2**number))
    raise AssertionError
