"""What a replay is told: where in the log to begin and end; and what a message says that was sent again."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.errors import SettingsError
from schemas.topics import TRAJECTORIES

REPLAYED = "lagoon-replayed"
"""Header of a `trajectories` message that was a dead letter before: `topic/partition/offset` of that letter."""

_ORIGIN = re.compile(rb"trajectories/(\d{1,5})/(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Limit:
    """A place in the log of every partition: a broker time in ms since 1970, or an offset; the other one is None."""

    time_ms: int | None = None
    offset: int | None = None

    @classmethod
    def of(cls, text: str) -> "Limit":
        """The limit in `text`: digits are an offset, anything else a time as ISO 8601 writes it (UTC if it says none).

        Raises:
            SettingsError: neither.
        """
        if text.isascii() and text.isdigit():
            return cls(offset=int(text))
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise SettingsError(
                f"{text!r} is neither an offset (1200) nor a time (2026-11-29, 2026-11-29T20:15:00+01:00)"
            ) from None
        return cls(time_ms=round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))


@dataclass(frozen=True, slots=True)
class Range:
    """The messages from `start` on and before `end`; None leaves that side open."""

    start: Limit | None = None
    end: Limit | None = None

    def holds(self, topic: str, offset: int, time_ms: int) -> bool:
        """Whether the message is in range.

        What comes beside trajectories is in range from the beginning on, for it says which version the learner had;
        offsets do not limit it, for they count another log.
        """
        if topic == TRAJECTORIES.name and self.start and _is_before(self.start, offset, time_ms):
            return False
        if not self.end or (topic != TRAJECTORIES.name and self.end.time_ms is None):
            return True
        return _is_before(self.end, offset, time_ms)


def origin_of(value: bytes | None, partition: int, offset: int) -> str | None:
    """The letter that header REPLAYED names on the message at `offset`, or None where there is, or can be, none.

    A letter lies in the same partition, further back.
    """
    match = _ORIGIN.fullmatch(value or b"")
    if match is None or int(match[1]) != partition or int(match[2]) >= offset:
        return None
    return origin(partition, int(match[2]))


def origin(partition: int, offset: int) -> str:
    """How a letter is named."""
    return f"{TRAJECTORIES.name}/{partition}/{offset}"


def _is_before(limit: Limit, offset: int, time_ms: int) -> bool:
    return offset < limit.offset if limit.offset is not None else time_ms < (limit.time_ms or 0)
