"""Episodes a second of one rollout service and of two, on one broker and this machine's cores.

python -m tests.benchmarks.services [--services 2] [--out bench.jsonl]

Two workloads of the environment in `tests.benchmarks.longtail`: `tools` waits for a tool of 0 to 2 s and leaves the
cores idle; `cores` has none, and samples as fast as they do. Each service samples with one thread; the broker runs
beside them, so `cores` ends where the cores do.
"""

import argparse
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from schemas.settings import Kafka, Settings
from tests.benchmarks.lines import tell
from tests.benchmarks.longtail import ENVIRONMENT, MAX_TOKENS
from tests.conftest import running_broker
from tests.rollout_fakes import task
from tests.rollout_process import GROUP_SIZE, Service, prepare_rollouts, received, send, until

PLACES = 48
WORKLOADS = {"tools": (2.0, 60), "cores": (0.0, 100)}
"""Longest tool in seconds, and groups for each service."""


def episodes_per_s(kafka: Kafka, workload: str, num_services: int) -> float:
    """The rate at which episodes end, without the first and the last tenth of them."""
    tool_s, groups = WORKLOADS[workload]
    tasks = [
        task(draw, family=f"{workload}-{num_services}", group_size=GROUP_SIZE, environment=ENVIRONMENT, options=options)
        for options in [{"tool_s": tool_s}]
        for draw in range(groups * num_services)
    ]
    send(kafka, tasks)
    ends: list[datetime] = []

    def all_there() -> bool:
        time.sleep(0.5)
        rows = [r for m in received(kafka) for r in m.rows if r.task_family == f"{workload}-{num_services}"]
        ends[:] = sorted(r.finished_at for r in rows)
        return len(ends) == len(tasks) * GROUP_SIZE

    until(all_there)
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth) / (ends[-tenth] - ends[tenth]).total_seconds()


def measure(folder: Path, brokers: str, most: int) -> list[dict[str, Any]]:
    """Rates by workload and number of services, and their ratios to one service."""
    kafka = Kafka(brokers=brokers, topic_prefix="bench.", partitions=4)
    values = prepare_rollouts(folder, kafka).model_dump()
    values["rollout"] |= {"max_episodes": PLACES, "max_turn_tokens": 200, "max_tokens": MAX_TOKENS}
    settings = Settings.model_validate(values)
    services, rates = list[Service](), dict[str, list[float]]({name: [] for name in WORKLOADS})
    try:
        for number in range(most):
            services.append(Service(settings, instance=f"rollout-{number}"))
            until(lambda: services[-1].health()[0])
            for workload, found in rates.items():
                found.append(round(episodes_per_s(kafka, workload, number + 1), 1))
    finally:
        for service in services:
            service.kill()
    return [
        {"name": f"{most} services, {workload}", "value": found[-1], "unit": "episodes/s"}
        | {"reference": found[0], "ratio": round(found[-1] / found[0], 2)}
        for workload, found in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as brokers:
        lines = measure(Path(name), brokers, args.services)
    for line in lines:
        tell(line, args.out)


if __name__ == "__main__":
    main()
