"""What curation costs: the curate flow with every step on, beside a flow that only decodes and writes.

OMP_NUM_THREADS=1 python -m tests.benchmarks.curate [--trajectories N] [--tokens N] [--runs N] [--out bench.jsonl]

Both read the same messages of 16 trajectories from the same Kafka broker, which this starts, and write them to Delta
lakes by the same two-phase sink. Runs alternate; the figures are medians. Ratio aimed at: 0.6 or more.
"""

import argparse
import contextlib
import gc
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import numpy as np
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig
from bytewax.testing import run_main

from flows import curate
from flows.connectors.delta_sink import DeltaSink, lake_output
from flows.connectors.items import Raw
from flows.connectors.kafka_source import TopicsSource
from flows.run import recovery_store
from flows.steps.decode import decode as split
from flows.steps.route import shards
from flows.steps.shard import Shard
from flows.steps.validate import validate
from infra.kafka import Producer, ensure_topics
from infra.lake import Lake
from infra.stack import health
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from schemas.ids import partition_of, shard_of, task_id
from schemas.messages import Directive, WeightSummary
from schemas.names import NUM_SHARDS, Header
from schemas.settings import Kafka, Settings
from schemas.tables import EXPERIENCE
from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory, Turn, WeightVersionSpan, to_batch
from schemas.wire import counting_headers, decode, encode
from tests.benchmarks.lines import keep

GROUP = 16
VERSIONS = 8
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: wall-clock and CPU seconds, and rows by table."""

    wall_s: float
    cpu_s: float
    rows: dict[str, int]


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[str]:
    local = LocalKafka(ROOT / ".lagoon" / "kafka", folder / "kafka", free_port(), free_port())
    with open(folder / "kafka.log", "wb") as log:
        process = subprocess.Popen(local.prepare(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (answer := health.kafka(Kafka(brokers=local.address))).ok:
            assert process.poll() is None, "the broker ended while it started"
            assert time.monotonic() < deadline, answer.reason
        yield local.address
    finally:
        process.kill()
        process.wait(10)


def settings_for(brokers: str, folder: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "bench", "data_dir": str(folder)},
            "kafka": {"brokers": brokers, "partitions": 4},
            "families": [{"name": name} for name in ("add", "chain", "muladd", "larger")],
        }
    )


def template(tokens: int, rng: np.random.Generator) -> pa.RecordBatch:
    """A message's worth of trajectories: two turns with a tool call between them, random tokens and logprobs."""
    prompt, action, rest = tokens // 4, tokens // 2, tokens - tokens // 4 - tokens // 2
    mask = (False,) * prompt + (True,) * action + (False,) * rest
    turns = (
        Turn(prompt, prompt + action // 2, prompt + action // 2, "calculator", "75+65", "ok", 0.0, 0.01),
        Turn(prompt + action // 2, prompt + action, tokens),
    )
    chat = ({"role": "user", "content": "x" * prompt}, {"role": "assistant", "content": "y" * action})
    now = datetime.now(UTC)
    return to_batch(
        [
            Trajectory(
                trajectory_id="",
                group_id="",
                group_index=i,
                group_size=GROUP,
                task_id="",
                task_family="",
                environment="calculator",
                producer="rollout-0",
                content_hash=uuid.uuid4().hex,
                dispatch_weight_version=1,
                min_weight_version=1,
                max_weight_version=1,
                weight_version_spans=(WeightVersionSpan(0, tokens, 1),),
                reward=0.0,
                token_ids=tuple(rng.integers(0, 32_000, tokens).tolist()),
                action_mask=mask,
                behavior_logprobs=tuple((-rng.random(tokens, np.float32) * np.array(mask)).tolist()),
                turns=turns,
                messages=chat,
                num_prompt_tokens=prompt,
                num_generated_tokens=action,
                accelerator_s=0.1,
                environment_s=0.1,
                started_at=now,
                finished_at=now,
            )
            for i in range(GROUP)
        ]
    )


def with_columns(batch: pa.RecordBatch, **columns: list[Any]) -> pa.RecordBatch:
    for name, values in columns.items():
        index = batch.schema.get_field_index(name)
        batch = batch.set_column(index, batch.schema.field(index), pa.array(values, batch.schema.field(index).type))
    return batch


def messages(settings: Settings, num_messages: int, tokens: int) -> Iterator[tuple[str, bytes, dict[str, bytes]]]:
    """Task, body and headers of whole groups with mixed rewards, one group in 16 all equal."""
    rng = np.random.default_rng(0)
    templates = [template(tokens, rng) for _ in range(64)]
    names = [f.name for f in settings.families]
    for number in range(num_messages):
        version = 1 + number * VERSIONS // num_messages
        family = names[number % len(names)]
        task = task_id(family, int(rng.integers(0, 160)))
        rewards = np.ones(GROUP) if number % 16 == 0 else rng.integers(0, 2, GROUP).astype(float)
        batch = with_columns(
            templates[number % 64],
            trajectory_id=[str(uuid.uuid4()) for _ in range(GROUP)],
            group_id=[str(uuid.uuid4())] * GROUP,
            task_id=[task] * GROUP,
            task_family=[family] * GROUP,
            reward=rewards.tolist(),
            min_weight_version=[version] * GROUP,
            max_weight_version=[version] * GROUP,
            weight_version_spans=[[{"start": 0, "end": tokens, "version": version}]] * GROUP,
        )
        headers = counting_headers(GROUP, GROUP * tokens) | {
            Header.SHARD: str(shard_of(task)).encode(),
            Header.OUTBOX: b"o1",
            Header.SEQUENCE: str(number).encode(),
        }
        yield task, encode(batch), headers


def fill(settings: Settings, num_messages: int, tokens: int) -> None:
    """Write the log: groups, and a new weight version and a clock message between every eighth of them."""
    producer = Producer(settings.kafka, "bench")
    for number, (task, body, headers) in enumerate(messages(settings, num_messages, tokens)):
        if number % (num_messages // VERSIONS) == 0:
            producer.flush(60)
            _side(producer, 1 + number * VERSIONS // num_messages)
        partition = partition_of(task, settings.kafka.partitions)
        producer.send(TRAJECTORIES.name, task, body, headers=headers, partition=partition)
    producer.flush(60)
    _side(producer, VERSIONS)
    producer.close()


def _side(producer: Producer, version: int) -> None:
    now = datetime.now(UTC)
    summary = WeightSummary(version=version, fingerprint="f", num_bytes=1, train_step=1, created_at=now)
    clock = Directive(directive_id="c", target="clock", issued_by="bench", issued_at=now)
    producer.send(WEIGHTS.name, str(version), summary.to_bytes())
    producer.send(CONTROL.name, "clock", clock.to_bytes())
    producer.flush(60)


def ceiling(settings: Settings) -> Dataflow:
    """Source, decode, two-phase Delta: nothing is judged, nothing remembered."""
    source = TopicsSource(
        settings.kafka,
        (TRAJECTORIES.name,),
        epoch_bytes=settings.curate.epoch_bytes,
        skip_expired=False,
        client_id="ceiling",
        stop_at_end=True,
    )
    constants, bucket = _constants(), EXPERIENCE.schema.get_field_index("version_bucket")

    def to_rows(item: Any) -> tuple[str, pa.RecordBatch] | None:
        if not isinstance(item, Raw):
            return None
        batch = decode(item.value)
        columns = [*batch.columns, *constants]
        columns[bucket] = batch.column("min_weight_version")  # the same files as curation writes
        return str(item.partition), pa.RecordBatch.from_arrays(columns, schema=EXPERIENCE.schema)

    flow = Dataflow("ceiling")
    items = op.input("read", flow, source)
    rows = op.filter_map("decode", items, to_rows)
    sink = DeltaSink(Lake.of(settings), EXPERIENCE.name, "ceiling", settings.lake.sink_partitions)
    lake_output("write", rows, items, sink)
    return flow


def _constants() -> list[pa.Array]:
    """What curation would have added to the columns of a message."""
    added = list(EXPERIENCE.schema)[len(TRAJECTORY_SCHEMA) :]
    values = {"topic": TRAJECTORIES.name, "is_hard": False, "forked_turns": None}
    return [pa.array([values.get(f.name, 1)] * GROUP).cast(f.type) for f in added]


def measure(settings: Settings, build: Callable[[Settings], Dataflow]) -> Run:
    Lake.of(settings).ensure()
    store = RecoveryConfig(recovery_store(settings.run.folder / "recovery"))
    gc.collect()
    gc.freeze()  # as the services do
    wall, cpu = time.perf_counter(), time.process_time()
    run_main(build(settings), epoch_interval=timedelta(seconds=settings.curate.epoch_s), recovery_config=store)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    lake = Lake.of(settings)
    rows = {name: lake.table(name).to_pyarrow_dataset().count_rows() for name in curate.TABLES}
    return Run(wall, cpu, rows)


def curated(settings: Settings) -> Dataflow:
    return curate.flow_for(settings, stop_at_end=True)


class NoPayloads:
    """Whole groups never need a message again."""

    def read(self, partition: int, offset: int) -> bytes | None:
        raise AssertionError(f"{partition}/{offset} was read again")


def where_time_goes(settings: Settings, tokens: int, num_messages: int = 1024, per_call: int = 64) -> dict[str, float]:
    """CPU time of each step in microseconds a trajectory, without Kafka and lake."""
    made = [m for m in messages(settings, num_messages * NUM_SHARDS // 8, tokens) if shard_of(m[0]) in {0, 1}]
    spent = dict.fromkeys(("route", "decode", "validate", "curate", "snapshot"), 0.0)
    num_rows = 0

    def timed(step: str, function: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.process_time()
        result = function(*arguments)
        spent[step] += time.process_time() - begun
        return result

    for shard in (0, 1):
        curator, sequences = Shard(settings, NoPayloads()), {}
        raws = [_raw(n, m) for n, m in enumerate(made) if shard_of(m[0]) == shard]
        for start in range(0, len(raws), per_call):
            part = raws[start : start + per_call]
            timed("route", lambda items: [shards(raw, 1) for raw in items], part)
            chunk = timed("decode", split, shard, part, sequences)
            chunk = timed("validate", validate, chunk, settings.families)
            timed("curate", curator.curate, chunk)
            timed("snapshot", curator.state.to_bytes)
            num_rows += chunk.rows.num_rows
    return {step: seconds / num_rows * 1e6 for step, seconds in spent.items()}


def _raw(number: int, message: tuple[str, bytes, dict[str, bytes]]) -> Raw:
    _, body, headers = message
    return Raw(TRAJECTORIES.name, 0, number, 1_800_000_000_000 + number, b"", tuple(headers.items()), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=65_536)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    num_messages = arguments.trajectories // GROUP
    runs: dict[str, list[Run]] = {"ceiling": [], "curate": []}
    with tempfile.TemporaryDirectory() as name, broker(Path(name)) as address:
        folder = Path(name)
        settings = settings_for(address, folder)
        ensure_topics(settings.kafka, 60)
        fill(settings, num_messages, arguments.tokens)
        for number in range(arguments.runs):
            for kind, build in (("ceiling", ceiling), ("curate", curated)):
                own = folder / f"{kind}-{number}"
                runs[kind].append(measure(settings_for(address, own), build))
                shutil.rmtree(own)
    report(runs, num_messages * GROUP, arguments.tokens, arguments.out)
    print("CPU time by step, us a trajectory (without reading Kafka and writing Parquet):")
    print("  ".join(f"{step} {us:.1f}" for step, us in where_time_goes(settings, arguments.tokens).items()))


def report(runs: dict[str, list[Run]], count: int, tokens: int, out: Path | None) -> None:
    rates = {kind: count / statistics.median(r.wall_s for r in found) for kind, found in runs.items()}
    costs = {kind: statistics.median(r.cpu_s for r in found) / count * 1e6 for kind, found in runs.items()}
    print(f"\n{count} trajectories of {tokens} tokens, {GROUP} a message, median of {len(runs['curate'])} runs")
    print(f"{'flow':10} {'trajectories/s':>15} {'MB/s of tokens':>15} {'CPU us each':>12}  rows")
    for kind in runs:
        megabytes = rates[kind] * tokens * 8 / 1e6
        print(f"{kind:10} {rates[kind]:15,.0f} {megabytes:15,.0f} {costs[kind]:12.1f}  {runs[kind][-1].rows}")
    ratio = rates["curate"] / rates["ceiling"]
    print(f"ratio {ratio:.2f} by the clock, {costs['ceiling'] / costs['curate']:.2f} by CPU time (aim 0.6 or more)")
    line = {
        "name": f"curate_{tokens}_tokens",
        "value": round(rates["curate"]),
        "unit": "trajectories/s",
        "reference": round(rates["ceiling"]),
        "ratio": round(ratio, 3),
    }
    keep(out, line)


if __name__ == "__main__":
    main()
