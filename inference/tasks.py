"""Where tasks come from: a Kafka share group, a work queue without skew between services.

Every record of a poll has to be acknowledged before the next poll, and the lock on a record cannot be renewed, so a
task is acknowledged when it is handed over; what a killed service had in hand comes back through the task's lease.
(A plain consumer group would tie each service to some partitions: tasks would wait behind a busy one.)
"""

from collections.abc import Callable
from typing import Protocol

from confluent_kafka import AcknowledgeType, KafkaException, Message, ShareConsumer
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from prometheus_client import Counter

from infra.kafka import administrator, client_settings
from schemas.errors import ContractError
from schemas.messages import Task, decode
from schemas.settings import Kafka
from schemas.topics import TASKS

REFUSED = Counter("lagoon_refused_tasks", "Task messages that break their schema")

_POLL_S = 0.25
_NEXT_POLL_S = 0.02
_JOIN_S = 2.0
_MAX_DELIVERIES = 3
"""A task that was handed back this often is kept by whoever has it: the broker drops one after five deliveries."""

_NEVER_MS = 24 * 3600 * 1000
"""A service without room does not poll; the group is not to expel it for that."""


class Tasks(Protocol):
    """Where a rollout service gets its work. `error` says why it gets none, and is empty where all is well."""

    error: str

    def next(self, max_tasks: int) -> list[Task]:
        """Up to about `max_tasks` tasks, now this service's; waits a moment for the first. One thread at a time.

        With 0 it only joins the queue, if it has not yet.
        """
        ...

    def close(self) -> None:
        """Leave the queue."""
        ...


class ShareGroupTasks:
    """Tasks from the share group `<topic_prefix>rollout`.

    The broker hands out whole batches of the dispatcher: what is above `max_tasks` goes back for another service.

    Attributes:
        error: What Kafka said last; empty while it answers.
    """

    def __init__(self, kafka: Kafka, client_id: str, log: Callable[..., None]) -> None:
        """`log` gets what is refused. The group is joined at the first `next`, from the oldest task in the topic."""
        self.error = ""
        self._log, self._kafka, self._client_id = log, kafka, client_id
        self._group = kafka.topic("rollout")
        self._consumer: ShareConsumer | None = None

    def next(self, max_tasks: int) -> list[Task]:
        """See `Tasks.next`. A broker that is away is no error: `error` says so, and there are no tasks."""
        tasks: list[Task] = []
        try:
            consumer = self._consumer = self._consumer or self._join()
            while len(tasks) < max_tasks:
                messages = consumer.poll(timeout=_NEXT_POLL_S if tasks else _POLL_S)
                for message in messages:
                    tasks += self._take(consumer, message, has_room=len(tasks) < max_tasks)
                if not len(messages):
                    break
                consumer.commit_sync(timeout=5.0)
        except (KafkaException, TimeoutError) as error:
            self.error = f"no tasks from share group {self._group} (it needs Kafka 4.1 or newer): {error}"
        return tasks

    def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            self._consumer.close()

    def _join(self) -> ShareConsumer:
        settings = client_settings(self._kafka, self._client_id)
        _read_from_the_start(self._kafka, self._client_id, self._group)
        own = {
            "group.id": self._group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": 1,  # at least one: the broker hands out whole batches of the dispatcher
            "max.poll.interval.ms": _NEVER_MS,
        }
        consumer = ShareConsumer(settings | own)
        consumer.subscribe([self._kafka.topic(TASKS.name)])
        return consumer

    def _take(self, consumer: ShareConsumer, message: Message, has_room: bool) -> list[Task]:
        if (fault := message.error()) is not None:
            self.error = f"tasks cannot be read: {fault.str()}"
            return []
        self.error = ""
        if not has_room and (message.delivery_count() or 0) < _MAX_DELIVERIES:
            consumer.acknowledge(message, AcknowledgeType.RELEASE)
            return []
        try:
            task = decode(Task, message.value())
        except ContractError as error:
            REFUSED.inc()
            self._log("task refused", partition=message.partition(), offset=message.offset(), error=str(error))
            consumer.acknowledge(message, AcknowledgeType.REJECT)
            return []
        consumer.acknowledge(message, AcknowledgeType.ACCEPT)
        return [task]


def _read_from_the_start(kafka: Kafka, client_id: str, group: str) -> None:
    """Let a new group begin at the oldest task; by default it would miss those sent before its first member joined."""
    entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    with administrator(kafka, client_id) as admin:
        for answer in admin.incremental_alter_configs([resource], request_timeout=_JOIN_S).values():
            answer.result(2 * _JOIN_S)
