"""What source partitions do about epochs: a tick first, a cap on bytes, an end that leaves nothing pending."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from bytewax.inputs import StatefulSourcePartition

from flows.connectors.hold import HOLD
from flows.connectors.items import Clock, Hole, Raw, Tick
from flows.connectors.pulse import PULSE

Item = Raw | Hole | Tick | Clock
State = dict[str, Any]

MAX_ITEMS = 256
"""Most items that a partition emits at a time."""

_IDLE_S = 0.02
_REST_S = 0.005
_QUIET_S = 0.25


class Flag(Protocol):
    """Something that becomes true: `infra.telemetry.Stop`."""

    def __bool__(self) -> bool: ...


class Never:
    """Never true."""

    def __bool__(self) -> bool:
        return False


class EpochPart(StatefulSourcePartition[Item, State | None]):
    """A source partition. Subclasses say what to emit, where they are, and whether they are at their end.

    At the end, or when `stop` is set, it emits nothing more until the epoch is over and so durable, then one last tick,
    on which the sinks commit that epoch; then it ends.

    It never says when to be awoken (`next_awake`): Bytewax subtracts from that a time of day that it read before
    `next_batch`, so a clock set forward by an hour in between would put the source to sleep for an hour.
    """

    def __init__(self, part: str, epoch_bytes: int, stop: Flag) -> None:
        self.part = part
        self._epoch_bytes, self._left = epoch_bytes, epoch_bytes
        self._stop = stop
        self._tick_due, self._ending, self._drained, self._over = True, False, False, False
        self._rests_until = 0.0
        PULSE.expect(part)

    @abstractmethod
    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole | Clock]:
        """Items that can be emitted now, without waiting."""

    @abstractmethod
    def position(self) -> State | None:
        """Where to resume after what was emitted; None if nothing was. Never changed afterwards."""

    @abstractmethod
    def at_end(self) -> bool:
        """Whether there is nothing more to come."""

    def next_batch(self) -> list[Item]:
        """A tick at the start of an epoch, then items while the epoch has room for their bytes.

        Raises:
            StopIteration: the partition has ended.
            LakeError: another process has taken over.
        """
        if self._over:
            raise StopIteration
        if time.monotonic() < self._rests_until:
            return []
        if not HOLD.is_fresh():  # a tick says that what is durable may be acted on: not while that is in doubt
            self._rest()
            return []
        batch: list[Item] = [Tick()] if self._tick_due else []
        self._tick_due, self._over = False, self._drained
        if not self._ending and self._left > 0:
            batch += self._pull()
        self._ending = self._ending or bool(self._stop) or self.at_end()
        if not batch:
            self._rest()
        return batch

    def snapshot(self) -> State | None:
        """The end of an epoch."""
        self._tick_due, self._left = True, self._epoch_bytes
        self._drained = self._ending
        PULSE.beat(self.part)
        return self.position()

    def close(self) -> None:
        """Let go of what the partition holds."""
        PULSE.end(self.part)

    def _rest(self) -> None:
        """Look again a little later: polling without rest would take a core.

        Bytewax asks a thousand times a second while it waits, so a quiet process sleeps.
        """
        if PULSE.quiet_s() > _QUIET_S:
            time.sleep(_REST_S)
        self._rests_until = time.monotonic() + _IDLE_S

    def _pull(self) -> Sequence[Raw | Hole | Clock]:
        items = self.pull(MAX_ITEMS, self._left)
        if items:
            PULSE.active()
        self._left -= sum(item.num_bytes for item in items if not isinstance(item, Clock))
        return items
