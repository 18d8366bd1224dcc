"""Which finished episodes travel together: up to 16 of one group, soon."""

from collections import Counter
from collections.abc import Sequence

from inference.outbox import Episode
from schemas.wire import MAX_PACK


def fitting(episodes: Sequence[Episode], max_bytes: int) -> list[list[Episode]]:
    """`episodes` in order, parted where together they would exceed `max_bytes`; one that does so alone is alone."""
    parts: list[list[Episode]] = []
    room = 0
    for episode in episodes:
        if episode.place.num_bytes > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(episode)
        room -= episode.place.num_bytes
    return parts


class Packer:
    """Gathers finished episodes by group.

    A pack is ready when it is full, when none of the group's members is still running here, or when its first episode
    has waited `linger_s`. Times are seconds of any one clock.
    """

    def __init__(self, linger_s: float, max_episodes: int = MAX_PACK) -> None:
        self._linger_s, self._max_episodes = linger_s, max_episodes
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[Episode]] = {}
        self._due: dict[str, float] = {}

    def started(self, group_id: str, num_members: int) -> None:
        """Members of a group began, or queue, in this service."""
        self._running[group_id] += num_members

    def finished(self, episode: Episode, now: float) -> None:
        """A member that had started is in the outbox."""
        self._running[episode.group_id] -= 1
        self.add([episode], now)

    def add(self, episodes: Sequence[Episode], now: float) -> None:
        """Episodes to pack that nothing is known to run beside, such as those of an earlier life."""
        for episode in episodes:
            self._waiting.setdefault(episode.group_id, []).append(episode)
            self._due.setdefault(episode.group_id, now + self._linger_s)

    def take(self, now: float, force: bool = False) -> list[list[Episode]]:
        """The packs that are ready; all episodes with `force`. They are this packer's concern no longer."""
        packs: list[list[Episode]] = []
        for group_id, episodes in list(self._waiting.items()):
            while len(episodes) >= self._max_episodes:
                packs.append(episodes[: self._max_episodes])
                del episodes[: self._max_episodes]
            if episodes and (force or self._running[group_id] <= 0 or now >= self._due[group_id]):
                packs.append(episodes[:])
                episodes.clear()
            if not episodes:
                self._forget(group_id)
        return packs

    def _forget(self, group_id: str) -> None:
        del self._waiting[group_id], self._due[group_id]
        if self._running[group_id] <= 0:
            del self._running[group_id]
