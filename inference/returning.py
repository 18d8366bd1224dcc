"""Episodes of evaluations that go back as training samples: of training tasks, by an outbox as any rollout's."""

from collections.abc import Callable

from inference.keeping import Keeper
from inference.outbox import Outbox
from inference.packs import Packer
from inference.sender import Producer, Sender
from schemas.messages import Task
from schemas.settings import Settings
from schemas.trajectory import Trajectory

OUTBOX = "evaluator"


class Returning:
    """The way of such episodes into `trajectories`; `produced(outbox, trajectories, tokens)` keeps the books."""

    def __init__(self, settings: Settings, producer: Producer, produced: Callable[[str, int, int], None]) -> None:
        self._outbox = Outbox(settings.run.folder / "outbox" / OUTBOX, settings.rollout.outbox_bytes)
        self._packer = Packer(settings.rollout.pack_linger_s)
        self._sender = Sender.of(settings, self._outbox, self._packer, producer)
        self._keeper = Keeper(self._sender.finished, self._outbox.folder)
        self._produced = produced

    @property
    def fault(self) -> str:
        """Why episodes wait; empty where they do not."""
        return self._keeper.fault or self._sender.no_place or self._sender.unsent

    @property
    def is_full(self) -> bool:
        """Kafka has to take some before more are played."""
        return bool(self._keeper.fault or self._sender.no_place)

    def started(self, task: Task) -> None:
        """The members of a group begin."""
        self._packer.started(task.group_id, task.group_size)

    def finished(self, trajectory: Trajectory) -> None:
        """Keep an episode, and send it when its group is ready."""
        self._keeper.finished(trajectory)

    def send(self) -> None:
        """See what is ready into Kafka."""
        self._keeper.retry()
        self._sender.send()
        self._outbox.sync()
        self._produced(self._outbox.id, self._outbox.num_trajectories, self._outbox.num_tokens)

    def close(self) -> None:
        """What Kafka has not taken stays in the outbox, and is sent in the next life."""
        self._sender.close()
        self._outbox.close()
        self._keeper.close()
