"""Apache Kafka for this machine: KRaft, one node, jars fetched by Maven, on loopback only."""

import base64
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from infra.stack import container, java, ports
from schemas.settings import Settings

_LOGGING = [
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss",
]

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.share.min.record.lock.duration.ms=1000
group.share.record.lock.duration.ms=5000
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=16777216
log.index.size.max.bytes=1048576
"""


def _new_cluster_id() -> str:
    """A name for a cluster, as Kafka wants it."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class LocalKafka:
    """One broker: where its jars and its data lie, and its ports.

    `extra` are further lines of `server.properties`, which win; `format_options` go to `StorageTool format`. Nodes of
    one cluster need one `cluster_id`.
    """

    jars: Path
    data: Path
    port: int
    controller_port: int
    extra: str = ""
    format_options: tuple[str, ...] = ()
    cluster_id: str = field(default_factory=_new_cluster_id)
    heap_mb: int = 512

    @property
    def address(self) -> str:
        """Bootstrap address for clients."""
        return f"{ports.HOST}:{self.port}"

    @property
    def properties(self) -> str:
        """The text of `server.properties`."""
        places = {"port": self.port, "controller_port": self.controller_port, "data": self.data.absolute()}
        return _PROPERTIES.format(host=ports.HOST, **places) + self.extra

    def prepare(self) -> list[str]:
        """Fetch what is missing, format the data folder once, and return the command that runs the broker.

        Raises:
            StackError: no Java or Maven and no Docker either, a failed download, or a folder that cannot be formatted.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        config = self.data.parent / "server.properties"
        config.write_text(self.properties)
        if java.missing(self.jars) and container.is_possible():
            return container.command(config)
        run = [*java.command(self.jars), f"-Xmx{self.heap_mb}m", "-XX:+UseSerialGC", *_LOGGING]
        if not (self.data / "meta.properties").exists():
            storage = [*run, "kafka.tools.StorageTool", "format", f"--cluster-id={self.cluster_id}", "-c", str(config)]
            java.call([*storage, *self.format_options], "format Kafka's folder")
        return [*run, "kafka.Kafka", str(config)]


def local(settings: Settings) -> LocalKafka:
    """The broker of this data folder."""
    data_dir = Path(settings.run.data_dir).absolute()
    port = ports.remembered(data_dir, "kafka", settings.stack.kafka_port)
    controller_port = ports.remembered(data_dir, "kafka_controller")
    return LocalKafka(data_dir / "kafka", data_dir / "kafka" / "data", port, controller_port)


def is_local(settings: Settings) -> bool:
    """Whether the run uses this data folder's own broker, on whatever port it was when the settings were saved."""
    known = ports.all_of(Path(settings.run.data_dir).absolute(), "kafka")
    return settings.kafka.brokers in {"", *(f"{ports.HOST}:{p}" for p in (settings.stack.kafka_port, *known))}
