"""Code in answers, tests in functions, values between a candidate and its tests, the filter of system calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.environments.code import module_of, named_tests
from inference.sandbox.inside import seccomp
from inference.sandbox.inside.values import pack, unpack

PROMPT = 'import math\n\ndef f(x):\n    """Twice."""\n'
BODY = "    return 2 * x\n"


def _value(source: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["f"](4)


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        BODY.lstrip(),
        f"{BODY}\ndef main():\n    f(",
        f"{BODY}\nprint(f(",
        f"{BODY}```\nThat is it.",
        f"```python\n{PROMPT}{BODY}```",
        f"First:\n```\nnonsense(\n```\nthen:\n```py\ndef f(x):\n{BODY}```\nDone.",
        f"```python\n{BODY}```",
        f"```python\ndef f(x):\n{BODY}",
        "def helper(x):\n    return x + x\n\ndef f(x):\n    return helper(x)\n",
        "f = lambda x: 2 * x",
    ],
)
def test_a_body_a_block_or_a_whole_function_make_a_module(answer: str):
    assert _value(module_of(answer, PROMPT, "f")) == 8


def test_an_empty_answer_leaves_the_functions_stub():
    assert _value(module_of("", PROMPT, "f")) is None


def test_each_assertion_is_a_test_and_other_statements_go_with_the_next_one():
    source = (
        "LIMIT = 3\ndef check(candidate):\n    x = LIMIT\n    assert candidate(x) == 1\n"
        "    for i in range(2):\n        assert candidate(i)\n    assert True, 'note'\n    candidate(9)\n"
    )
    preamble, tests = named_tests(source, "check")
    assert preamble == "LIMIT = 3"
    assert [name for name, _ in tests] == ["check-0", "check-1", "check-2", "check-3"]
    assert tests[0][1] == "x = LIMIT\nassert candidate(x) == 1"
    assert tests[3][1] == "candidate(9)"


def test_tests_without_their_function_are_refused():
    with pytest.raises(LookupError, match="no function check"):
        named_tests("assert True", "check")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
        | st.sets(st.integers() | st.text(), max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_a_plain_value_survives_the_way(value: Any):
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value
    assert repr(type(back)) == repr(type(value))


def test_only_the_value_of_a_subclass_crosses():
    class Same(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    back = unpack(json.loads(json.dumps(pack([Same(1)]))))
    assert back != [2]
    assert type(back[0]) is int


@pytest.mark.parametrize("value", [object(), len, {1: object()}, (x for x in ()), range(3)])
def test_what_is_not_plain_does_not_cross(value: Any):
    with pytest.raises(TypeError, match="no plain value"):
        pack(value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=9
    )
)
def test_a_forged_message_gives_a_plain_value_or_a_known_error(message: Any):
    try:
        value = unpack(message)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return
    pack(value)


def _decide(machine: str, number: int, argument: int = 0, arch: int | None = None) -> int:
    """What the filter's program decides: a Berkeley packet filter in a few lines."""
    data = {0: number, 4: arch or seccomp._AUDIT_ARCH[machine], 16: argument}
    program, at, word = seccomp.program(machine), 0, 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        match code:
            case 0x20:
                word = data[operand]
            case 0x06:
                return operand
            case 0x15:
                at += yes if word == operand else no
            case 0x35:
                at += yes if word >= operand else no
            case 0x45:
                at += yes if word & operand else no


ALLOW, DENY, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "argument", "decision"),
    [
        ("x86_64", 0, 0, ALLOW),  # read
        ("x86_64", 101, 0, DENY),  # ptrace
        ("x86_64", 272, 0, DENY),  # unshare
        ("x86_64", 321, 0, DENY),  # bpf
        ("x86_64", 425, 0, DENY),  # io_uring_setup
        ("x86_64", 435, 0, NO_SUCH_CALL),  # clone3
        ("x86_64", 56, 17, ALLOW),  # clone of a process
        ("x86_64", 56, 0x10000000 | 17, DENY),  # into a new user namespace
        ("x86_64", 41, 1, ALLOW),  # socket of AF_UNIX
        ("x86_64", 41, 2, DENY),  # of AF_INET
        ("x86_64", 41, 40, DENY),  # of AF_VSOCK
        ("x86_64", 0x40000000, 0, DENY),  # the x32 interface
        ("aarch64", 63, 0, ALLOW),  # read
        ("aarch64", 117, 0, DENY),  # ptrace
        ("aarch64", 220, 0x10000000, DENY),
        ("aarch64", 198, 1, ALLOW),
        ("aarch64", 198, 2, DENY),
    ],
)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine: str, number: int, argument: int, decision: int):
    assert _decide(machine, number, argument) == decision


def test_system_calls_of_another_architecture_end_the_process():
    assert _decide("x86_64", 0, arch=0x40000003) == KILL
