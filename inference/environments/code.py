"""Code that an agent wrote: finding it in an answer, and splitting the function that checks it into named tests."""

import ast
import re

from inference.sandbox.sandbox import Test

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```|^```\w+\n(.*)\Z", re.DOTALL | re.MULTILINE)
"""A code block; one that the end of the answer cut off has to name its language, or it may be the end of one."""

_AFTER = re.compile(r"^(?:class|def|if|print|@|#|```|<)", re.MULTILINE)
"""What at the left margin no longer belongs to a function that a completion goes on with."""


def module_of(answer: str, prompt: str, entry_point: str) -> str:
    """The module that `answer` makes of `prompt`, which ends in the header of the function `entry_point`.

    An answer is a code block (the last one counts) or bare code; and either a whole definition of the function or the
    rest of its body, whose first line may have lost its indentation.
    """
    blocks = [closed or cut for closed, cut in _FENCE.findall(answer)]
    code = blocks[-1] if blocks else answer
    if re.search(rf"^(?:async )?def {re.escape(entry_point)}\b|^{re.escape(entry_point)} *=", code, re.MULTILINE):
        return f"{prompt}\n{code}"
    body = code if code[:1].isspace() or not code else f"    {code}"
    end = _AFTER.search(body)
    return prompt + (body[: end.start()] if end else body)


def named_tests(source: str, name: str) -> tuple[str, list[Test]]:
    """What `source` holds beside its function `name(candidate)`, and that function's body as tests, one an assertion.

    Other statements belong to the test that follows them. Tests run in order and share their names.

    Raises:
        SyntaxError: `source` is not Python.
        LookupError: there is no such function.
    """
    tree = ast.parse(source)
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if function is None:
        raise LookupError(f"no function {name} among the tests")
    preamble = [node for node in tree.body if node is not function]
    tests: list[Test] = []
    pending: list[ast.stmt] = []
    for statement in function.body:
        pending.append(statement)
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            tests.append((f"{name}-{len(tests)}", _unparse(pending)))
            pending = []
    if pending:
        tests.append((f"{name}-{len(tests)}", _unparse(pending)))
    return _unparse(preamble), tests


def _unparse(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(statements, type_ignores=[]))
