"""Running programs that nobody trusts: `await sandbox().run(source)` and `await sandbox().grade(source, ...)`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from inference.sandbox.command import start
from inference.sandbox.inside.frames import FrameError
from inference.sandbox.limits import Limits, Outcome, SandboxError, Verdict
from inference.workers import START_S, LateError, Workers
from schemas.errors import SettingsError

GRACE_S = 10.0
"""What the sandbox may take beyond a program's own limit before it counts as broken."""

MAX_SANDBOXES = 32

Test = tuple[str, str]
"""Name and source of a test. The source passes by raising nothing; `candidate` is what it calls."""


class Sandbox:
    """`size` warm sandboxes behind one queue; programs beyond that wait, and their limits do not run meanwhile."""

    def __init__(self, size: int):
        if not 1 <= size <= MAX_SANDBOXES:
            raise SettingsError(f"{size} sandboxes; expected 1 to {MAX_SANDBOXES}")
        self._workers = Workers(start, size)

    async def run(self, source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run `source` as a Python script.

        Raises:
            SandboxError: the sandbox failed.
            SettingsError: no sandbox can be started here.
        """
        limits = limits or Limits()
        return _outcome(await self._ask([_script(source, stdin, limits)], limits))

    def probe(self) -> None:
        """Really run something, waiting for it here.

        Raises:
            SettingsError: no sandbox can be started here.
            SandboxError: it fails.
        """
        script = _script("print(6 * 7)", "", Limits())
        outcome = _outcome(self._workers.submit([script], START_S).result())
        if outcome.stdout != "42\n":
            raise SandboxError(f"a program that prints 42 printed {outcome.stdout!r}, {outcome.stderr!r}")

    async def grade(
        self, source: str, entry_point: str, tests: Sequence[Test], preamble: str = "", limits: Limits | None = None
    ) -> Mapping[str, Verdict]:
        """Run `tests` against the function `entry_point` of the module `source`.

        Tests run in order in one namespace, which `preamble` fills, in a process of their own: `candidate` there
        passes plain values (numbers, text, bytes, lists, tuples, sets, dicts, None) to the candidate's process and
        back. What a candidate does to its arguments in place is not seen.

        Returns:
            A verdict for each test, in order; one without a report did not pass.

        Raises:
            SandboxError: the sandbox failed, or the preamble or a test is broken.
            SettingsError: no sandbox can be started here.
        """
        limits = limits or Limits()
        job = {"graded": True, "source": source, "stdin": "", "limits": asdict(limits), "entry_point": entry_point}
        answer = await self._ask([job, {"preamble": preamble, "tests": list(tests)}], limits)
        missing = Verdict(False, f"not within {limits.wall_s:g} s" if answer["timed_out"] else "no verdict")
        given = {r["test"]: Verdict(r["passed"], r["why"]) for r in answer["reports"]}
        return {name: given.get(name, missing) for name, _ in tests}

    def close(self) -> None:
        """End the sandboxes, after the programs that run."""
        self._workers.close()

    async def _ask(self, messages: Sequence[Any], limits: Limits) -> dict[str, Any]:
        try:
            answer = await self._workers.ask(messages, limits.wall_s + GRACE_S)
        except (LateError, EOFError, OSError, FrameError) as error:
            raise SandboxError(f"the sandbox broke: {type(error).__name__}: {error}") from error
        return _sound(answer)


@cache
def sandbox() -> Sandbox:
    """The sandboxes of this process, one for each core, tried out with a program.

    Raises:
        SettingsError: no sandbox works here; the message says why.
    """
    made = Sandbox(min(MAX_SANDBOXES, len(os.sched_getaffinity(0))))
    try:
        made.probe()
    except (SandboxError, LateError, EOFError, OSError, FrameError) as error:
        made.close()
        raise SettingsError(f"the sandbox for code does not work here: {type(error).__name__}: {error}") from error
    return made


def _script(source: str, stdin: str, limits: Limits) -> dict[str, Any]:
    return {"graded": False, "source": source, "stdin": stdin.encode().decode("latin-1"), "limits": asdict(limits)}


def _outcome(answer: dict[str, Any]) -> Outcome:
    status = next((report["status"] for report in _sound(answer)["reports"]), None)
    if status is None and not answer["timed_out"]:
        raise SandboxError("the end of the program was not reported")
    return Outcome(status, _text(answer["stdout"]), _text(answer["stderr"]), answer["dropped_bytes"], answer["wall_s"])


def _sound(answer: dict[str, Any]) -> dict[str, Any]:
    """`answer`, unless it says that something other than the program failed."""
    fault = next((report["fault"] for report in answer["reports"] if "fault" in report), None)
    if fault:
        raise SandboxError(fault)
    return answer


def _text(latin: str) -> str:
    return latin.encode("latin-1").decode(errors="replace")
