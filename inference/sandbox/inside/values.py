"""Plain Python values as JSON and back: what may cross between a candidate and its tests.

Only the value crosses: a subclass arrives as its base, so no method that a candidate wrote takes part in a comparison.
"""

from typing import Any

_SMALL = 1 << 63


def pack(value: Any) -> Any:
    """`value` as JSON.

    Raises:
        TypeError: it is, or contains, something that is not plain.
        RecursionError: it is nested too deep, or contains itself.
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL < number < _SMALL else {"int": hex(number)}  # decimal text of a long one is refused
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [pack(item) for item in value]
    return _tagged(value)


def unpack(value: Any) -> Any:
    """The plain value of JSON from `pack`, or from somebody who pretends.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RecursionError: it is not from `pack`.
    """
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    return _READERS[kind](body)


def _tagged(value: Any) -> dict[str, Any]:
    for kind, type_ in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, type_):
            return {kind: [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in dict.items(value)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    raise TypeError(f"a {type(value).__name__} is no plain value")


_READERS = {
    "int": lambda body: int(body, 16),
    "tuple": lambda body: tuple(unpack(body)),
    "set": lambda body: set(unpack(body)),
    "frozenset": lambda body: frozenset(unpack(body)),
    "dict": lambda body: {unpack(key): unpack(item) for key, item in body},
    "complex": lambda body: complex(*body),
    "bytes": bytes.fromhex,
}
