"""Who may do what on the broker: one role for each kind of process, with the rights that its code uses and no more.

python -m infra.kafka.access                                     the table of docs/security.md
python -m infra.kafka.access --config FILE ... [--principal P]   grants these rights; needs Alter on the cluster
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from infra.kafka.client import administrator, broker_error
from schemas.names import Service
from schemas.settings import Kafka, load
from schemas.topics import BUFFER, CONTROL, EVALS, TASKS, TOPICS, TRAJECTORIES, USAGE, WEIGHTS, Topic

DOCTOR = "doctor-"
"""Topics of this name are made, written and deleted by `lagoon doctor`."""

PRINCIPAL = "User:lagoon-{role}"


@dataclass(frozen=True, slots=True)
class Role:
    """What a kind of process does on the broker.

    `group` begins the name of each of its groups; a `queue` is a share group, whose start it sets. `checks` compares
    all topics with their declaration when it starts, `creates` makes them.
    """

    name: str
    reads: tuple[Topic, ...]
    writes: tuple[Topic, ...]
    group: str
    queue: bool = False
    checks: bool = False
    creates: bool = False


_ROLES = (
    Role(Service.ROLLOUT, (TASKS, CONTROL), (TRAJECTORIES, USAGE), "rollout", queue=True),
    Role(Service.CURATE, (TRAJECTORIES, WEIGHTS, CONTROL), (BUFFER,), "curate", checks=True),
    Role(Service.DISPATCH, (BUFFER, WEIGHTS, CONTROL), (TASKS, CONTROL), "dispatch", checks=True),
    Role(Service.RECORDS, (EVALS, USAGE, WEIGHTS, CONTROL), (), "records", checks=True),
    Role(Service.LEARNER, (CONTROL,), (WEIGHTS, BUFFER, USAGE), "learner"),
    Role(Service.EVALUATOR, (EVALS,), (EVALS, CONTROL, USAGE, TRAJECTORIES), "evaluator"),
    Role("operator", (WEIGHTS, EVALS, USAGE, BUFFER), (CONTROL,), "watch", checks=True, creates=True),
)

ROLES = {str(role.name): role for role in _ROLES}
"""`operator` is whoever calls `lagoon up`, `status`, `doctor`, `demo`; the others are services."""


def bindings(kafka: Kafka, role: Role, principal: str) -> list[AclBinding]:
    """The access control entries that `role` needs, for `principal` ("User:name"), on topics with this run's prefix."""
    exact, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
    wanted = [(ResourceType.TOPIC, kafka.topic(name), exact, o) for name, o in _topic_rights(role)]
    wanted += [(ResourceType.GROUP, kafka.topic(role.group), prefixed, o) for o in _group_rights(role)]
    wanted += [(ResourceType.TOPIC, kafka.topic(DOCTOR), prefixed, o) for o in _doctor_rights(role)]
    return [AclBinding(type_, name, how, principal, "*", o, AclPermissionType.ALLOW) for type_, name, how, o in wanted]


def grant(kafka: Kafka, role: Role, principal: str) -> None:
    """Give `principal` the rights of `role`; harmless when repeated.

    Raises:
        BrokerError: the broker is away, or this client may not grant.
    """
    with administrator(kafka, "lagoon-access") as admin:
        answers = admin.create_acls(bindings(kafka, role, principal), request_timeout=kafka.timeout_s)
        for answer in answers.values():
            try:
                answer.result()
            except KafkaException as error:
                raise broker_error(kafka, f"granting {principal} the rights of {role.name}", error, admin) from error


def table() -> str:
    """Roles and rights as Markdown. Names stand without `kafka.topic_prefix`."""
    rows = ["| role | reads | writes | further rights on topics | groups |", "| --- | --- | --- | --- | --- |"]
    for role in ROLES.values():
        group = ", ".join(o.name.title().replace("_", "") for o in _group_rights(role))
        cells = (_names(role.reads), _names(role.writes), _further(role), f"`{role.group}*`: {group}")
        rows.append(f"| {role.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _topic_rights(role: Role) -> list[tuple[str, AclOperation]]:
    rights = [(t.name, AclOperation.READ) for t in role.reads] + [(t.name, AclOperation.WRITE) for t in role.writes]
    if role.checks:
        rights += [(name, o) for name in TOPICS for o in (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)]
    return rights + ([(name, AclOperation.CREATE) for name in TOPICS] if role.creates else [])


def _group_rights(role: Role) -> list[AclOperation]:
    return [AclOperation.READ, AclOperation.ALTER_CONFIGS] if role.queue else [AclOperation.DESCRIBE]


def _doctor_rights(role: Role) -> list[AclOperation]:
    needed = [AclOperation.CREATE, AclOperation.DESCRIBE, AclOperation.WRITE, AclOperation.DELETE]
    return needed if role.creates else []


def _names(topics: tuple[Topic, ...]) -> str:
    return ", ".join(f"`{t.name}`" for t in topics)


def _further(role: Role) -> str:
    checks = "Describe, DescribeConfigs on all" if role.checks else ""
    return checks + (f"; Create on all; Create, Describe, Write, Delete on `{DOCTOR}*`" if role.creates else "")


def main(argv: Sequence[str]) -> None:
    """Print the table, or grant the rights on the broker of the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.kafka.access", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="settings; repeatable")
    parser.add_argument("--principal", default=PRINCIPAL, help="pattern of the roles' principals (default %(default)s)")
    args = parser.parse_args(argv)
    if not args.config:
        print(table())  # noqa: T201
        return
    kafka = load(args.config).kafka
    for name, role in ROLES.items():
        grant(kafka, role, args.principal.format(role=name))
        print(f"{args.principal.format(role=name)}: {name} on {kafka.topic('*')}")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
