"""Hostile JSON: a sound document with one thing changed in it."""

import copy
import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e9,
    -1e308,
    2**31,
    2**63,
    2**70,
    -(2**63) - 1,
    float("nan"),
    float("inf"),
    "",
    "NaN",
    "../../../../etc/passwd",
    "/etc/passwd",
    "a\x00b\x1b[2J",
    "'; DROP TABLE ledger; --",
    "x" * 100_000,
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+14:00",
    [],
    {},
    [[[[]]]],
    {"a": {"b": 1}},
)


def mutated(rng: random.Random, document: Any) -> Any:
    """A copy of `document` with a value replaced, removed, doubled or added somewhere."""
    document = copy.deepcopy(document)
    parent, key = rng.choice(list(_places(document)))
    how = rng.randrange(5)
    if how == 0 and isinstance(parent, dict):
        parent[rng.choice(["surprise", "__class__", "auto_map", ""])] = rng.choice(HOSTILE)
    elif how == 1:
        del parent[key]
    elif how == 2 and isinstance(parent, list):
        parent.extend([parent[key]] * 3)
    else:
        parent[key] = rng.choice(HOSTILE)
    return document


def as_json(rng: random.Random, document: Any) -> bytes:
    """`document` as JSON that may be cut off, nested too deep, or hold bytes that are no UTF-8."""
    text = json.dumps(document).encode()
    how = rng.randrange(20)
    if how == 0:
        return text[: rng.randrange(len(text))]
    if how == 1:
        depth = rng.choice([1000, 200_000])
        return text.replace(b"null", b"[" * depth + b"]" * depth, 1) if b"null" in text else b"[" * depth
    if how == 2:
        place = rng.randrange(len(text))
        return text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :]
    return text


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside `value`."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list) and value[key]:
            found += _places(value[key])
    return found
