"""Classes of hostile messages: each makes (body, headers), as a broken or malicious producer might send them."""

import dataclasses
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.names import Header
from schemas.replay import REPLAYED
from schemas.trajectory import Trajectory, WeightVersionSpan, to_batch
from schemas.wire import pack
from tests.samples import group, uid

GROUP = (0.0, 1.0, 1.0, 0.0)
HOSTILE = (
    "../../../../etc/passwd",
    "'; DROP TABLE ledger; --",
    "add/7\x00\n\x1b[2J",
    "%2e%2e%2fadd",
    "\u202egpj.exe",
    "x" * 100_000,
    "",
    "NaN",
)


class Sent(NamedTuple):
    """A message to send: its body, headers, and the task that decides its partition."""

    body: bytes
    headers: dict[str, bytes]
    task_id: str


Make = Callable[[random.Random, int], Sent]


def sound(rng: random.Random, number: int) -> Sent:
    """A whole group that nothing is wrong with."""
    return _packed(_group(number))


def random_bytes(rng: random.Random, number: int) -> Sent:
    """Noise, with headers that count it."""
    return _headed(rng.randbytes(rng.randrange(2000)), number)


def truncated(rng: random.Random, number: int) -> Sent:
    """A sound body that ends too early."""
    made = sound(rng, number)
    return made._replace(body=made.body[: rng.randrange(len(made.body))])


def flipped(rng: random.Random, number: int) -> Sent:
    """A sound body with some bytes changed."""
    made = sound(rng, number)
    body = bytearray(made.body)
    for _ in range(rng.randint(1, 8)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return made._replace(body=bytes(body))


def huge_lengths(rng: random.Random, number: int) -> Sent:
    """A sound body in which a length or an offset is very large or negative."""
    made = sound(rng, number)
    body = bytearray(made.body)
    value = rng.choice([2**31 - 1, -1, -(2**31), 2**30])
    place = 4 * rng.randrange(len(body) // 4 - 1)
    body[place : place + 4] = value.to_bytes(4, "little", signed=True)
    if rng.random() < 0.5:
        body[4:8] = value.to_bytes(4, "little", signed=True)  # length of the schema
    return made._replace(body=bytes(body))


def bomb(rng: random.Random, number: int) -> Sent:
    """Some kilobytes that would become 64 MiB, through a codec, a dictionary, runs or nulls."""
    batch = to_batch(_group(number))
    kind = rng.choice(["lz4", "zstd", "dictionary", "runs", "nulls", "view"])
    if kind in {"lz4", "zstd"}:
        return _headed(_compressed(kind), number)
    texts = pa.array(["x" * 1000])
    values: dict[str, Callable[[], pa.Array]] = {
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0] * 4, pa.int8()), texts),
        "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([4], pa.int32()), texts),
        "nulls": lambda: pa.ListArray.from_arrays(pa.array([0, 0, 0, 0, 2**31 - 1], pa.int32()), pa.nulls(2**31 - 1)),
        "view": lambda: pa.array(["x" * 1000] * 4, pa.string_view()),
    }
    return _headed(_stream(_with(batch, "turns" if kind == "nulls" else "messages", values[kind]())), number)


def wrong_types(rng: random.Random, number: int) -> Sent:
    """A column of another type, missing, unknown, or twice there."""
    batch = to_batch(_group(number))
    name = rng.choice(batch.schema.names)
    values = rng.choice(
        [
            pa.array([1, 2, 3, 4]),
            pa.array(["a", "b", "c", "d"]),
            pa.array([b"\xff\xfe"] * 4),
            pa.array([[1.5]] * 4),
            pa.nulls(4),
            pa.array([{"a": 1}] * 4),
        ]
    )
    if rng.random() < 0.25:
        return _headed(_stream(batch.drop_columns([name])), number)
    if rng.random() < 0.25:
        return _headed(_stream(batch.append_column(rng.choice([name, "surprise"]), values)), number)
    return _headed(_stream(_with(batch, name, values)), number)


def unequal_lengths(rng: random.Random, number: int) -> Sent:
    """Token columns that differ in length, spans and turns that lie outside."""
    changes: list[dict[str, Any]] = [
        {"token_ids": (1, 2, 3)},
        {"action_mask": (True,) * 50},
        {"behavior_logprobs": ()},
        {"token_ids": (), "action_mask": (), "behavior_logprobs": ()},
        {"weight_version_spans": (WeightVersionSpan(-5, 2**31 - 1, 1),)},
        {"weight_version_spans": (WeightVersionSpan(4, 6, 1), WeightVersionSpan(0, 5, 1))},
        {"num_generated_tokens": 2**31 - 1},
        {"num_prompt_tokens": -1},
    ]
    return _packed(_changed(_group(number), rng.choice(changes)))


def not_finite(rng: random.Random, number: int) -> Sent:
    """NaN and infinity where numbers count."""
    bad = rng.choice([float("nan"), float("inf"), float("-inf")])
    logprobs = (0.0, 0.0, 0.0, bad, -0.25, -0.125)
    changes = [{"reward": bad}, {"accelerator_s": bad}, {"behavior_logprobs": logprobs}, {"environment_s": bad}]
    return _packed(_changed(_group(number), rng.choice(changes)))


def changed_duplicate(rng: random.Random, number: int) -> Sent:
    """Ids that were there before, with other content."""
    members = _group(number - number % len(CLASSES))
    return _packed(_changed(members, {"token_ids": tuple(rng.randrange(500) for _ in range(6))}))


def foreign_group(rng: random.Random, number: int) -> Sent:
    """Members of another task, size or origin that claim a group of others; or ids that are none."""
    changes = [
        {"group_id": uid("group", ("fuzz", number - number % len(CLASSES)))},
        {"group_size": 999, "group_id": uid("group", ("fuzz", number - number % len(CLASSES)))},
        {"group_id": rng.choice(HOSTILE)},
        {"group_index": rng.choice([-1, 4, 2**31 - 1])},
        {"origin": rng.choice(["eval", "import", "nobody"])},
        {"task_id": "add/8"},
    ]
    return _packed(_changed(_group(number), rng.choice(changes)))


def future_version(rng: random.Random, number: int) -> Sent:
    """Sampled by weights that nobody has published, or before any were."""
    version = rng.choice([2, 10**6, 2**62, -1])
    spans = (WeightVersionSpan(0, 6, version),)
    claimed = {"min_weight_version": version, "max_weight_version": version, "weight_version_spans": spans}
    return _packed(_changed(_group(number), claimed))


def deep_messages(rng: random.Random, number: int) -> Sent:
    """A conversation nested very deep, or no JSON at all."""
    made = to_batch(_group(number))
    depth = rng.choice([100, 10_000, 100_000])
    text = rng.choice(["[" * depth + "]" * depth, '{"a":' * depth, "\x00", json.dumps("\ud800")])
    return _headed(_stream(_with(made, "messages", pa.array([text] * 4))), number)


def schema_version(rng: random.Random, number: int) -> Sent:
    """A schema version that this code does not know, in the body or in the header."""
    made = to_batch(_group(number))
    version = rng.choice([b"2", b"0", b"-1", b"9" * 30, b"one", b""])
    body = _stream(made.replace_schema_metadata({b"lagoon.schema_version": version}))
    return _headed(body, number, {Header.SCHEMA_VERSION: version})


def hostile_ids(rng: random.Random, number: int) -> Sent:
    """Path traversal, SQL, control characters and very long texts in every text column."""
    names = ("trajectory_id", "group_id", "task_id", "task_family", "environment", "producer", "content_hash")
    name = rng.choice((*names, "status", "stop_reason", "origin", "parent_id", "error_kind", "error"))
    return _packed(_changed(_group(number), {name: rng.choice(HOSTILE)}))


def hostile_headers(rng: random.Random, number: int) -> Sent:
    """Headers that lie: counts, shard, outbox and sequence number, origin."""
    made = sound(rng, number)
    value = rng.choice([b"-1", b"9" * 18, b"", b"\xff\x00", b"1e9", b"15"])
    name = rng.choice([Header.NUM_ROWS, Header.NUM_TOKENS, Header.SHARD, Header.SCHEMA_VERSION])
    outbox = {Header.OUTBOX: b"fuzz", Header.SEQUENCE: rng.choice([b"1", b"0", b"x", b"2"])}
    replayed = {REPLAYED: rng.choice([b"trajectories/0/0", b"trajectories/99999/1", b"../0/0", b"\xff"])}
    further = [outbox, replayed, outbox | replayed, {}]
    return made._replace(headers=made.headers | {name: value} | rng.choice(further))


CLASSES: dict[str, Make] = {
    make.__name__: make
    for make in (
        sound,
        random_bytes,
        truncated,
        flipped,
        huge_lengths,
        bomb,
        wrong_types,
        unequal_lengths,
        not_finite,
        changed_duplicate,
        foreign_group,
        future_version,
        deep_messages,
        schema_version,
        hostile_ids,
        hostile_headers,
    )
}


def _group(number: int) -> list[Trajectory]:
    return group(("fuzz", number), GROUP, task_id=_task(number))


def _task(number: int) -> str:
    return f"add/{number % 61}"


def _changed(members: list[Trajectory], changes: dict[str, Any]) -> list[Trajectory]:
    return [dataclasses.replace(member, **changes) for member in members]


def _packed(members: list[Trajectory]) -> Sent:
    return Sent(*pack(members), members[0].task_id)


def _headed(body: bytes, number: int, headers: dict[str, bytes] | None = None) -> Sent:
    return Sent(body, pack(_group(number))[1] | (headers or {}), _task(number))


@cache
def _compressed(codec: str) -> bytes:
    texts = pa.array(["x" * (16 * 1024 * 1024)] * 4)
    return _stream(_with(to_batch(_group(0)), "messages", texts), codec)


def _with(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), pa.field(name, values.type), values)


def _stream(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
