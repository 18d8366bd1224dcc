"""Points in the code where a test may kill the process: `LAGOON_FAILPOINTS="curate.after_stage=0.1,other=1"`.

`stop:NAME` stops it there (SIGSTOP) until somebody wakes it up: a machine that stood still.
"""

import os
import random
import signal
from functools import cache

from schemas.errors import SettingsError

ENVIRONMENT = "LAGOON_FAILPOINTS"


def hit(name: str) -> None:
    """Die by SIGKILL, with the probability that `$LAGOON_FAILPOINTS` gives `name`; without it, go on.

    Raises:
        SettingsError: the variable is malformed.
    """
    probabilities = _probabilities(os.environ.get(ENVIRONMENT, ""))
    for what, send in ((name, signal.SIGKILL), (f"stop:{name}", signal.SIGSTOP)):
        probability = probabilities.get(what, 0.0)
        if probability and random.random() < probability:
            os.kill(os.getpid(), send)


@cache
def _probabilities(text: str) -> dict[str, float]:
    """`a=0.1,b=1` as a mapping."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not name or not 0 <= found[name] <= 1:
            raise SettingsError(f"${ENVIRONMENT} has {part!r}; expected name=probability, with a probability in [0, 1]")
    return found
