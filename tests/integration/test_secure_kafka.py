"""A broker behind TLS, passwords and access control: each role may do its work, and nothing else."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from inference.tasks import ShareGroupTasks
from infra.cli import doctor
from infra.experiments import parameters
from infra.kafka import Follower, Producer, access, client_settings, ensure_topics, topic_differences
from infra.lake import Lake
from infra.stack import health
from infra.stack.kafka import LocalKafka
from infra.stack.ports import HOST, free_port
from schemas.errors import BrokerError, SettingsError
from schemas.messages import Directive, WeightSummary
from schemas.settings import Family, Kafka, Run, Settings
from schemas.settings import Lake as LakeSettings
from schemas.topics import TOPICS, WEIGHTS
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
MECHANISM = "SCRAM-SHA-512"
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_PROPERTIES = """
listeners=SASL_SSL://{host}:{port},CONTROLLER://{host}:{controller_port}
listener.security.protocol.map=SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=SASL_SSL
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required username="admin" password="{password}";
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={truststore}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin;User:ANONYMOUS
"""
"""ANONYMOUS is the broker's own controller, on its plain listener."""


@dataclass(frozen=True)
class Secure:
    """The broker's address, who signed its certificate, and everyone's password."""

    address: str
    authority: Path
    passwords: dict[str, str]

    def kafka(self, user: str, prefix: str = "rights.", **client: str) -> Kafka:
        """Settings of `user`."""
        login = {"security.protocol": "SASL_SSL", "sasl.mechanism": MECHANISM, "sasl.username": user}
        return Kafka(
            brokers=self.address,
            topic_prefix=prefix,
            partitions=1,
            timeout_s=20,
            client=login | {"ssl.ca.location": str(self.authority)} | client,
            secrets={"sasl.password": variable(user)},
        )


def variable(user: str) -> str:
    return f"LAGOON_TEST_{user.upper()}_PASSWORD"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority(folder, "authority")
    passwords = {user: uuid.uuid4().hex for user in ("admin", *access.ROLES)}
    port, controller_port = free_port(), free_port()
    keystore = authority.server("broker", HOST)
    lines = _PROPERTIES.format(
        host=HOST,
        port=port,
        controller_port=controller_port,
        password=passwords["admin"],
        keystore=keystore,
        truststore=authority.path,
    )
    users = tuple(f"--add-scram={MECHANISM}=[name={user},password={word}]" for user, word in passwords.items())
    local = LocalKafka(ROOT / ".lagoon" / "kafka", folder / "data", port, controller_port, lines, users)
    made = Secure(local.address, authority.path, passwords)
    with pytest.MonkeyPatch.context() as environment, open(folder / "kafka.log", "wb") as log:
        for user, word in passwords.items():
            environment.setenv(variable(user), word)
        process = subprocess.Popen(local.prepare(), stdout=log, stderr=log)
        try:
            until(lambda: process.poll() is not None or health.kafka(made.kafka("admin")).ok)
            assert process.poll() is None, (folder / "kafka.log").read_text()[-2000:]
            yield made
        finally:
            process.kill()  # the data are thrown away, so nothing is lost by it
            process.wait(10)


def until(condition: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def directive() -> bytes:
    return Directive(directive_id="d", target="all", issued_by="test", issued_at=datetime.now(UTC)).to_bytes()


def granted(secure: Secure, prefix: str) -> None:
    kafka = secure.kafka("admin", prefix)
    for role in access.ROLES.values():
        access.grant(kafka, role, f"User:{role.name}")
    wait_until_in_force(kafka)


def wait_until_in_force(kafka: Kafka) -> None:
    """The controller answers a grant; the broker that looks at it hears of it a little later."""
    admin = AdminClient(client_settings(kafka, "test"))
    everything = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    wanted = {b for role in access.ROLES.values() for b in access.bindings(kafka, role, f"User:{role.name}")}
    until(lambda: wanted <= set(admin.describe_acls(everything).result()))


@pytest.fixture(scope="module")
def rights(secure: Secure) -> Secure:
    """Every role has its rights, and every topic one message, which all could read if only they might."""
    granted(secure, "rights.")
    admin = secure.kafka("admin")
    ensure_topics(admin)
    producer = Producer(admin, "test")
    for topic in TOPICS:
        producer.send(topic, "all", directive())
    producer.close()
    return secure


def writes(kafka: Kafka, client_id: str) -> dict[str, BrokerError | None]:
    """What became of a message to each topic."""
    outcomes: dict[str, BrokerError | None] = {}
    producer = Producer(kafka, client_id)
    for topic in TOPICS:
        producer.send(topic, "all", directive(), on_delivery=lambda e, topic=topic: outcomes.update({topic: e}))
    try:
        until(lambda: producer.poll() is None and len(outcomes) == len(TOPICS))
        producer.close()
    except BrokerError as error:  # no topic at all may be written
        outcomes |= dict.fromkeys(TOPICS, error)
    return outcomes


def read(kafka: Kafka, topic: str, client_id: str) -> BrokerError | None:
    """The error of reading `topic` from its beginning, if any."""
    try:
        follower = Follower(kafka, topic, Directive, client_id)
    except BrokerError as error:
        return error
    try:
        assert list(follower.poll())
    except BrokerError as error:
        return error
    finally:
        follower.close()
    return None


@pytest.mark.parametrize("name", access.ROLES)
def test_a_role_reads_and_writes_its_topics_and_no_others(rights: Secure, name: str) -> None:
    role, kafka = access.ROLES[name], rights.kafka(name)
    outcomes = {"write": writes(kafka, role.group), "read": {t: read(kafka, t, role.group) for t in TOPICS}}
    allowed = {"write": {t.name for t in role.writes}, "read": {t.name for t in role.reads}}
    for action, errors in outcomes.items():
        assert {t for t, error in errors.items() if error is None} == allowed[action], (action, errors)
        refused = [str(error) for error in errors.values() if error is not None]
        assert all("AUTHORIZATION_FAILED" in text and "docs/security.md" in text for text in refused), refused


@pytest.mark.parametrize("name", [n for n, role in access.ROLES.items() if role.checks])
def test_a_role_that_checks_topics_may_look_at_all(rights: Secure, name: str) -> None:
    assert topic_differences(rights.kafka(name)) == []


def test_only_the_operator_makes_topics(secure: Secure, tmp_path: Path) -> None:
    Settings(kafka=secure.kafka("admin", "made.")).save(tmp_path / "admin.json")
    access.main(["--config", str(tmp_path / "admin.json"), "--principal", "User:{role}"])
    wait_until_in_force(secure.kafka("admin", "made."))
    with pytest.raises(BrokerError, match=r"made\.\w+.*TOPIC_AUTHORIZATION_FAILED.*docs/security\.md"):
        ensure_topics(secure.kafka("dispatch", "made."))
    ensure_topics(secure.kafka("operator", "made."))
    ensure_topics(secure.kafka("dispatch", "made."))


def test_the_doctor_is_well_with_the_rights_of_an_operator(rights: Secure) -> None:
    settings = Settings(kafka=rights.kafka("operator"))
    for check in (doctor.broker, doctor.topics):
        assert doctor.examine(check, settings).mend == ""


def test_only_the_rollout_role_takes_tasks(rights: Secure) -> None:
    tasks, taken = ShareGroupTasks(rights.kafka("learner"), "learner", lambda *_, **__: None), []
    until(lambda: taken.extend(tasks.next(1)) or "GROUP_AUTHORIZATION_FAILED" in tasks.error)
    assert taken == []
    tasks.close()


def test_only_an_administrator_grants(rights: Secure) -> None:
    with pytest.raises(BrokerError, match=r"granting User:me .*CLUSTER_AUTHORIZATION_FAILED.*docs/security\.md"):
        access.grant(rights.kafka("operator"), access.ROLES["operator"], "User:me")


def refused(attempt: Callable[[], object], word: str = "") -> str:
    """Its error; tried again while that lacks `word`: a busy broker may not answer at all within the limit."""
    for _ in range(5):
        with pytest.raises(BrokerError) as raised:
            attempt()
        if word in str(raised.value):
            break
    return str(raised.value)


def every_way_in(kafka: Kafka) -> list[Callable[[], object]]:
    producer = Producer(kafka, "test")
    return [
        lambda: ensure_topics(kafka, kafka.timeout_s),
        lambda: Follower(kafka, "control", Directive, "learner"),
        lambda: (producer.send("usage", "a", b"x"), producer.flush(30)),
    ]


def test_a_wrong_password_ends_within_the_limit_and_names_mechanism_and_setting(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG_PASSWORD", "wrong-and-secret")
    wrong = {"timeout_s": 2, "secrets": {"sasl.password": "WRONG_PASSWORD"}}
    kafka = secure.kafka("learner").model_copy(update=wrong)
    for text in [*(refused(way, MECHANISM) for way in every_way_in(kafka)), health.kafka(kafka).reason]:
        assert MECHANISM in text
        assert "sasl.username is learner" in text
        assert "$WRONG_PASSWORD" in text
        assert "wrong-and-secret" not in text
        assert "lagoon up" not in text


def test_an_unknown_authority_is_named(secure: Secure, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other").path
    kafka = secure.kafka("learner", **{"ssl.ca.location": str(other)}).model_copy(update={"timeout_s": 2})
    for way in every_way_in(kafka):
        text = refused(way, failure := "certificate verify failed")
        assert failure in text
        assert str(other) in text


def test_a_client_without_tls_is_told_which_setting(secure: Secure) -> None:
    text = refused(lambda: ensure_topics(Kafka(brokers=secure.address, timeout_s=2), 2))
    assert "security.protocol in kafka.client (not set: plaintext)" in text


def test_an_authority_that_is_no_file_is_a_wrong_setting(secure: Secure) -> None:
    with pytest.raises(SettingsError, match=r"ssl\.ca\.location"):
        Producer(secure.kafka("learner", **{"ssl.ca.location": "/no/such/file"}), "test")


def test_dispatcher_and_rollout_work_with_their_own_rights_and_no_secret_is_written(
    secure: Secure, tmp_path: Path
) -> None:
    granted(secure, "live.")
    ensure_topics(secure.kafka("operator", "live."))
    settings = Settings(
        run=Run(name="live", data_dir=str(tmp_path)),
        kafka=secure.kafka("dispatch", "live."),
        lake=LakeSettings(uri=str(tmp_path / "lake")),
        families=(Family(name="add"),),
    )
    Lake.of(settings).ensure()
    saved = settings.run.folder / "settings.json"
    settings.save(saved)
    summary = WeightSummary(version=1, fingerprint="f", num_bytes=1, train_step=0, created_at=datetime.now(UTC))
    learner = Producer(secure.kafka("learner", "live."), "learner")
    learner.send(WEIGHTS.name, "1", summary.to_bytes())
    learner.close()
    tasks = ShareGroupTasks(secure.kafka("rollout", "live."), "rollout-0", lambda *_, **__: None)
    log = tmp_path / "dispatch.log"
    with log.open("wb") as stderr:
        command = [sys.executable, "-m", "flows.dispatch", "--config", str(saved)]
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=stderr, stderr=stderr)
    try:
        until(lambda: process.poll() is not None or bool(tasks.next(1)))
        assert process.poll() is None, log.read_text()
        assert tasks.error == ""
    finally:
        tasks.close()
        process.kill()
        process.wait(10)
    written = log.read_text() + saved.read_text() + str(dict(parameters(settings)))
    written += "".join(p.read_text() for p in (settings.run.folder / "services").glob("*.json"))
    assert variable("dispatch") in written  # where it comes from may be known
    assert not [user for user, word in secure.passwords.items() if word in written]
