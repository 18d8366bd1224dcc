"""`make escape`: every attempt, and what came of it. Exit status 1 if one wins or breaks the sandbox."""

import asyncio
import sys
import time

from inference.sandbox.sandbox import Sandbox
from tests.escape.attempts import ATTEMPTS, REACH
from tests.escape.play import LIMITS, PATIENT, host, play, serves_on


async def main() -> int:
    sandbox, bad = Sandbox(1), 0
    for name, attempt in ATTEMPTS.items():
        begun = time.perf_counter()
        reward, verdicts = await play(sandbox, attempt.source, PATIENT if name in REACH else LIMITS)
        took = time.perf_counter() - begun
        well = reward == 0 and await serves_on(sandbox)
        bad += not well
        why = next((v.why for v in verdicts.values() if v.why), "")
        print(f"{name:52} {'held' if well else 'ESCAPED':8} {took:5.2f} s  {why[:60]!r}", flush=True)
    sandbox.close()
    print(f"{len(ATTEMPTS) - bad} of {len(ATTEMPTS)} attempts failed, as they should")
    return bool(bad)


if __name__ == "__main__":
    with host():
        sys.exit(asyncio.run(main()))
