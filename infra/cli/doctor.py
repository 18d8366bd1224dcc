"""`lagoon doctor`: checks that say how to mend what they find."""

import importlib.metadata
import math
import shutil
import tomllib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewTopic
from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError
from packaging.requirements import Requirement

from infra import sql
from infra.cli import arguments, tables
from infra.kafka import administrator, client_settings, topic_differences
from infra.lake import Lake
from infra.retries import reason
from infra.stack import container, health, java, kafka, mlflow
from infra.stack.bring_up import resolve
from infra.stack.programs import ROOT
from infra.stack.supervise import Supervisor
from infra.weights import exclusive_create_works
from schemas.errors import LagoonError, LakeError, StackError
from schemas.settings import Settings
from schemas.tables import TABLES

DISTRIBUTION = "lagoon-rl"

RECENT = 50
"""Steps after a publication that `sampling` looks back on."""
_MISMATCH = "SELECT sum(num_samples), exp(avg(ln(ratio))) FROM (FROM engine_mismatch ORDER BY step DESC LIMIT ?)"
MAX_MISMATCH = 0.1
"""Largest |log ratio| at equal weights; kernels and bfloat16 make for some hundredths."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw; `mend` says what to do about it, and is empty where nothing needs doing."""

    observed: str
    mend: str = ""


def run(argv: Sequence[str]) -> int:
    """Run all checks; 1 if any of them found something."""
    args, overrides = arguments.parse(arguments.parser("doctor", "Check everything that Lagoon stands on."), argv)
    settings = resolve(arguments.settings_of(args.config, overrides, must_exist=False))
    findings = {name: examine(check, settings) for name, check in CHECKS.items()}
    rows = [(name, tables.verdict(not f.mend, bad="mend"), f.observed, f.mend) for name, f in findings.items()]
    tables.show(tables.table(("check", "", "observed", "mend"), rows))
    return 1 if any(f.mend for f in findings.values()) else 0


def examine(check: Callable[[Settings], Finding], settings: Settings) -> Finding:
    """The finding of `check`; an error on the way is a finding too."""
    try:
        return check(settings)
    except (LagoonError, OSError, BaseError) as error:
        return Finding("failed", str(error))
    except (DeltaError, duckdb.Error) as error:
        return Finding("failed", f"{reason(error)}; restore what is damaged, or bring the store back")
    except KafkaException as error:
        return Finding("failed", f"{error.args[0].str()}; check kafka.brokers and the rights of this client")


def local_broker(settings: Settings) -> Finding:
    """What the local broker runs on."""
    if not kafka.is_local(settings):
        return Finding("not needed: kafka.brokers is set")
    lacking = java.missing(kafka.local(settings).jars)
    if not lacking:
        return Finding(f"Java {java.java_version(java.find_java()[0])}, jars or Maven")
    return Finding("Docker") if container.is_possible() else Finding("missing", lacking)


def supervisor(settings: Settings) -> Finding:
    """Programs that the supervisor has given up on."""
    states = Supervisor(settings.run.data_dir).states()
    lost = [s for s in states if s.name == "fatal"]
    if lost:
        faults = "; ".join(f"{s.program}: {health.last_line(s.log)} ({s.log})" for s in lost)
        return Finding(f"{len(lost)} of {len(states)} programs given up", f"mend the cause, then `lagoon up`: {faults}")
    return Finding(f"{len(states)} programs" if states else "not running; `lagoon up` starts it")


def services(settings: Settings) -> Finding:
    """What the processes of the run say of themselves; one that is hung or was killed says nothing."""
    files = sorted((settings.run.folder / "services").glob("*.json"))
    asked = {file.stem: health.at(file) for file in files}
    answers = {name: answer for name, answer in asked.items() if not answer.is_elsewhere}
    elsewhere = f", {n} on other machines, not asked" if (n := len(asked) - len(answers)) else ""
    sick = [f"{name}: {answer.reason}" for name, answer in answers.items() if not answer.ok]
    if sick:
        return Finding(f"{len(sick)} of {len(answers)} are not well{elsewhere}", "; ".join(sick))
    return Finding((f"{len(answers)} are well" if answers else "none is running") + elsewhere)


def broker(settings: Settings) -> Finding:
    """A broker that answers, and takes and confirms a message on a topic made for this check."""
    answer = health.kafka(settings.kafka)
    if not answer.ok:
        return Finding(f"{answer.address}: {answer.reason}", "start it (`lagoon up kafka`) or correct kafka.brokers")
    topic = f"{settings.kafka.topic_prefix}doctor-{uuid.uuid4().hex[:8]}"
    with administrator(settings.kafka, "lagoon-doctor") as admin:
        admin.create_topics([NewTopic(topic, 1, settings.kafka.replication)])[topic].result(settings.kafka.timeout_s)
        try:
            producer = Producer(client_settings(settings.kafka, "lagoon-doctor") | {"acks": "all"})
            producer.produce(topic, b"?")
            unsent = producer.flush(settings.kafka.timeout_s)
        finally:
            admin.delete_topics([topic])[topic].result(settings.kafka.timeout_s)
    if unsent:
        return Finding(f"{answer.address} did not confirm a message", "look at the broker's log: disk, replicas, quota")
    return Finding(f"{answer.address} takes messages")


def topics(settings: Settings) -> Finding:
    """Topics as declared."""
    if not health.kafka(settings.kafka).ok:
        return Finding("not looked at: no broker")
    differences = topic_differences(settings.kafka)
    return Finding(f"{len(differences)} differences" if differences else "as declared", "\n".join(differences))


def lake(settings: Settings) -> Finding:
    """A lake with all tables, on a store where only one of several writers wins."""
    try:
        for name in TABLES:
            Lake.of(settings).table(name)
    except LakeError as error:
        return Finding(str(error), "`lagoon up` makes missing tables")
    return _store(settings.lake_uri, settings.lake.storage_options)


def sampling(settings: Settings) -> Finding:
    """A learner that gives tokens the logprobs that their sampler gave them, where both have the same weights."""
    with sql.connect(Lake.of(settings)) as connection:
        [(count, ratio)] = connection.execute(_MISMATCH, [RECENT]).fetchall()
    if not count:
        return Finding("nothing was trained on at the weights that sampled it")
    observed = f"importance ratio {ratio:.3f} at equal weights, over {count} trajectories"
    if abs(math.log(ratio)) <= MAX_MISMATCH:
        return Finding(observed)
    return Finding(
        observed,
        "sampler and learner differ on the same tokens: compare tokenizer, temperature and precision of the two; "
        "logprobs that are shifted by a place look like this too. See view engine_mismatch",
    )


def claims(settings: Settings) -> Finding:
    """A claims store of its own where only one of several writers wins."""
    if not settings.lake.claims_uri:
        return Finding("in the lake: lake.claims_uri is not set")
    return _store(settings.claims_uri, settings.lake.storage_options)


def weight_store(settings: Settings) -> Finding:
    """A weight store where only one of several writers wins."""
    return _store(settings.weights_uri, settings.weights.storage_options)


def tracking(settings: Settings) -> Finding:
    """An MLflow server that answers."""
    if not settings.tracking.enabled:
        return Finding("not used: tracking.enabled is false")
    answer = health.mlflow(settings.tracking.uri)
    mend = "start it (`lagoon up mlflow`)" if mlflow.is_local(settings) else "correct tracking.uri"
    return Finding(f"{answer.address} {answer.reason}".strip(), "" if answer.ok else mend)


def disk(settings: Settings) -> Finding:
    """Free space under the data folder."""
    folder = Path(settings.run.data_dir)
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free, wanted = shutil.disk_usage(existing).free, settings.stack.min_free_bytes
    observed = f"{free / 1e9:.1f} GB free in {folder}"
    return Finding(
        observed, "" if free >= wanted else f"make room: stack.min_free_bytes asks for {wanted / 1e9:.1f} GB"
    )


def libraries(_settings: Settings) -> Finding:
    """Installed libraries within the bounds that the project declares."""
    required = [Requirement(r) for r in _requirements()]
    wrong = [f"{r} (found {found})" for r in required if not r.specifier.contains(found := _installed(r.name))]
    if wrong:
        return Finding(f"{len(wrong)} of {len(required)} differ", f"`make setup` installs: {', '.join(wrong)}")
    return Finding(f"all {len(required)} as declared")


CHECKS = {
    "libraries": libraries,
    "disk": disk,
    "java": local_broker,
    "supervisor": supervisor,
    "services": services,
    "broker": broker,
    "topics": topics,
    "lake": lake,
    "sampling": sampling,
    "claims": claims,
    "weight store": weight_store,
    "tracking": tracking,
}


def _store(uri: str, options: dict[str, str]) -> Finding:
    if exclusive_create_works(uri, options):
        return Finding(f"{uri}: writable, one of 8 writers wins")
    return Finding(
        f"{uri}: several of 8 writers of one object won",
        "use a store with conditional creates; on this one concurrent commits would lose data without an error",
    )


def _requirements() -> list[str]:
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        project = ROOT / "pyproject.toml"
        if not project.exists():
            raise StackError(f"{DISTRIBUTION} is not installed and {project} is missing; install it") from None
        declared = tomllib.loads(project.read_text())["project"]["dependencies"]
    return [r for r in declared if "extra ==" not in r]


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "0"
