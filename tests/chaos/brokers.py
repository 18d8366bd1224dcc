"""A Kafka cluster of three machines, each of which can die, stand still, and come back with its disk."""

import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from infra.stack.kafka import LocalKafka
from infra.stack.ports import HOST, free_port
from tests.chaos.processes import wait
from tests.conftest import ROOT

NODES = 3
START_S = 180.0

_PROPERTIES = """\
node.id={node}
controller.quorum.voters={voters}
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
share.coordinator.state.topic.replication.factor=3
share.coordinator.state.topic.min.isr=2
replica.lag.time.max.ms=10000
"""


class Brokers:
    """Three nodes that are broker and controller in one. What two of them have acknowledged survives the third."""

    def __init__(self, folder: Path) -> None:
        ports = [(free_port(), free_port()) for _ in range(NODES)]
        voters = ",".join(f"{n}@{HOST}:{controller}" for n, (_, controller) in enumerate(ports, 1))
        first = LocalKafka(ROOT / ".lagoon" / "kafka", folder, *ports[0])
        self.nodes = [
            LocalKafka(
                first.jars,
                folder / f"node-{n}" / "data",
                *places,
                extra=_PROPERTIES.format(node=n, voters=voters),
                cluster_id=first.cluster_id,
                heap_mb=384,
            )
            for n, places in enumerate(ports, 1)
        ]
        self.address = ",".join(node.address for node in self.nodes)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        """Start a node, the first time with an empty disk."""
        node = self.nodes[index]
        command = node.prepare()
        with open(node.data.parent / "log", "ab") as log:
            self._processes[index] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, index: int) -> None:
        """Kill -9 a node."""
        self._processes[index].kill()
        self._processes[index].wait(20)

    def kill_all(self) -> None:
        """Kill -9 whatever was started."""
        for index in self._processes:
            self.kill(index)

    def stop(self, index: int) -> None:
        """Let a node stand still: it answers nothing, and its connections stay open."""
        self._processes[index].send_signal(signal.SIGSTOP)

    def wake(self, index: int) -> None:
        """Let it go on."""
        self._processes[index].send_signal(signal.SIGCONT)

    def wait_whole(self) -> None:
        """Wait until all nodes are members, and every replica of every partition is in sync."""
        wait(self._is_whole, START_S, f"three brokers at {self.address} to be in sync", every_s=0.3)

    def _is_whole(self) -> bool:
        dead = [n for n, process in self._processes.items() if process.poll() is not None]
        if dead:
            raise AssertionError(f"nodes {dead} ended by themselves; see {self.nodes[dead[0]].data.parent / 'log'}")
        try:
            found = AdminClient({"bootstrap.servers": self.address, "log_level": 0}).list_topics(timeout=5)
        except KafkaException:
            return False
        partitions = [p for topic in found.topics.values() for p in topic.partitions.values()]
        return len(found.brokers) == NODES and all(p.leader > 0 and len(p.isrs) == NODES for p in partitions)


@contextmanager
def three_brokers(folder: Path) -> Generator[Brokers]:
    """A cluster whose disks lie in `folder`; it is dead at the end."""
    brokers = Brokers(folder)
    try:
        for index in range(NODES):
            brokers.start(index)
        brokers.wait_whole()
        yield brokers
    finally:
        brokers.kill_all()
