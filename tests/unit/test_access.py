"""Roles on the broker: the page shows them, and a role's entries are what its row says."""

from pathlib import Path

from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from infra.kafka import access
from schemas.settings import Kafka
from schemas.topics import TOPICS


def test_the_security_page_shows_the_roles_as_they_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "security.md"
    assert access.table() in page.read_text(), "put the output of `python -m infra.kafka.access` there"


def test_the_learner_may_read_one_topic_write_three_and_see_its_group() -> None:
    kafka, exact, prefixed = Kafka(topic_prefix="p."), ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
    expected = [
        (ResourceType.TOPIC, "p.control", exact, AclOperation.READ),
        (ResourceType.TOPIC, "p.weights", exact, AclOperation.WRITE),
        (ResourceType.TOPIC, "p.buffer", exact, AclOperation.WRITE),
        (ResourceType.TOPIC, "p.usage", exact, AclOperation.WRITE),
        (ResourceType.GROUP, "p.learner", prefixed, AclOperation.DESCRIBE),
    ]
    made = access.bindings(kafka, access.ROLES["learner"], "User:l")
    assert made == [AclBinding(t, name, how, "User:l", "*", o, AclPermissionType.ALLOW) for t, name, how, o in expected]


def test_every_topic_has_a_role_that_writes_and_one_that_reads_it() -> None:
    assert {t.name for role in access.ROLES.values() for t in role.writes} == set(TOPICS)
    assert {t.name for role in access.ROLES.values() for t in role.reads} == set(TOPICS)
