"""Function calls as BFCL grades them: one call in Python's syntax, read as a syntax tree, against allowed values.

The rules are those of BFCL's checker for Python (Patil et al. 2025, "The Berkeley Function Calling Leaderboard"):
arguments by keyword; types as declared, an int for a float allowed; strings compared without case, blanks and
`,./-_*^`; a parameter may be left out where its allowed values include the empty string.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LENGTH = 4096
"""Characters of a call. A longer text is none."""

_TYPES = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)
_IGNORED = re.compile(r"[ ,./\-_*^]")


def read_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and keyword arguments of the one call that `text` is, alone, in brackets or in a code block; else None."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    if block := _FENCE.match(text):
        text = block[1].strip()
    try:
        tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.List) and len(tree.elts) == 1:
            tree = tree.elts[0]
        if not isinstance(tree, ast.Call) or tree.args or any(k.arg is None for k in tree.keywords):
            return None
        return ast.unparse(tree.func), {k.arg or "": _value(k.value) for k in tree.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def grade_call(text: str, function: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> float:
    """1.0 if `text` calls `function` (BFCL's description) with `allowed` values of each parameter, else 0.0."""
    call = read_call(text)
    if call is None or call[0] != function["name"]:
        return 0.0
    arguments, described = call[1], function["parameters"]["properties"]
    missing = [p for p in function["parameters"]["required"] if p not in arguments]
    left_out = [p for p, values in allowed.items() if p not in arguments and "" not in values]
    unknown = [p for p in arguments if p not in described or p not in allowed]
    if missing or left_out or unknown:
        return 0.0
    return float(all(_fits(value, allowed[p], described[p]) for p, value in arguments.items()))


def _value(node: ast.expr) -> Any:
    """A literal; a name or an expression counts as its text."""
    try:
        return _plain(ast.literal_eval(node))
    except (ValueError, TypeError):  # the latter for a list as a key
        return ast.unparse(node)


def _plain(value: Any) -> Any:
    """`value` as JSON would have it: tuples are lists."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _fits(value: Any, allowed: Sequence[Any], described: Mapping[str, Any]) -> bool:
    expected: Any = _TYPES[described["type"]]
    found: Any = float if expected is float and type(value) is int else type(value)
    answers = [a for a in allowed if a != ""]
    if found is not expected or (answers and type(answers[0]) is not expected and expected is not float):
        variable = bool(answers) and type(value) is type(answers[0])  # a variable's name where a value is declared
        return variable and value in allowed
    if isinstance(value, dict):
        return any(_dict_fits(value, a) for a in answers)
    if isinstance(value, list):
        return _list_fits(value, answers, _TYPES[described["items"]["type"]])
    return _normal(value) in [_normal(a) for a in allowed]


def _list_fits(value: list[Any], answers: Sequence[Any], inner: type) -> bool:
    if inner is dict:
        return any(
            len(value) == len(a)
            and all(isinstance(v, dict) and _dict_fits(v, x) for v, x in zip(value, a, strict=True))
            for a in answers
        )
    return any(
        _normal(value) == _normal(a) and all(type(v) is inner or type(v) is type(a[0]) for v in value) for a in answers
    )


def _dict_fits(value: Mapping[str, Any], answer: Mapping[str, Sequence[Any]]) -> bool:
    if any(key not in answer for key in value):
        return False
    if any(_normal(v) not in [_normal(a) for a in answer[key]] for key, v in value.items()):
        return False
    return all(key in value or "" in values for key, values in answer.items())


def _normal(value: Any) -> Any:
    """Strings, and those in a list, without what the comparison ignores."""
    if isinstance(value, str):
        return _IGNORED.sub("", value).lower().replace("'", '"')
    return [_normal(v) for v in value] if isinstance(value, list) else value
