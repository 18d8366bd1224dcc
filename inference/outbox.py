"""Finished episodes on disk until Kafka has them.

An episode counts as produced once it is appended. A pack fixes which episodes a message holds, and its sequence number,
before the message is first sent, so that a message sent again is the same message. What a kill -9 leaves behind is
sent after the restart, under the same numbers.

Records: an episode, a pack (partition, sequence, episodes), an acknowledgement (partition, sequence). A file's header
has the outbox's id, the totals and the next sequences, so totals stay absolute while acknowledged files go.
"""

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from inference.segments import HEADER, Place, Record, SegmentLog
from infra import disk, failpoints
from infra.store import sync_path
from schemas import wire
from schemas.ids import shard_of
from schemas.names import Header
from schemas.trajectory import Trajectory, to_batch

_EPISODE, _PACK, _ACKNOWLEDGED = 1, 2, 3

_MAX_SEGMENT_BYTES = 8 * 1024 * 1024

_SKIPPED_SEQUENCES = 1_000_000
"""After damage the sequences jump: one that was sent and then lost from disk is never used for other content."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode in the outbox. `number` counts the outbox's episodes from 1."""

    number: int
    group_id: str
    task_id: str
    num_tokens: int
    place: Place


@dataclass(frozen=True, slots=True)
class Pack:
    """Episodes of one group that travel in one message, the `sequence`-th of its partition."""

    partition: int
    sequence: int
    episodes: tuple[Episode, ...]
    segment: int

    @property
    def key(self) -> str:
        """The message's key."""
        return self.episodes[0].group_id


class Outbox:
    """The outbox in `folder`; one process at a time.

    Attributes:
        id: Names this outbox for as long as its folder lives.
        num_trajectories: Episodes that were ever appended, over all lives of the folder.
        num_tokens: Their tokens.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open the outbox and read back what is left in it.

        Raises:
            LagoonError: another process holds the folder.
        """
        self.folder = folder
        self.id, self.num_trajectories, self.num_tokens = str(uuid.uuid4()), 0, 0
        self._max_bytes = max_bytes
        self._last: Counter[int] = Counter()
        self._floor = 0
        self._loose: dict[int, Episode] = {}
        self._packs: dict[int, dict[int, Pack]] = {}
        self._partial: list[Pack] = []
        self._unacknowledged: Counter[int] = Counter()
        self._log = SegmentLog(folder, min(max_bytes // 8, _MAX_SEGMENT_BYTES), self._header)
        for record in self._log.recover():
            self._replay(record)
        if self._log.damage:
            self._floor = max([self._floor, *self._last.values()]) + _SKIPPED_SEQUENCES
            self._dissolve()
            self._log.roll()  # a header that knows of the jump comes before the damage, which is why, goes
            self._log.set_aside()
        self._drop_acknowledged()

    @property
    def damage(self) -> list[str]:
        """What could not be read and was set aside, in words."""
        return self._log.damage

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._log.num_bytes

    @property
    def is_full(self) -> bool:
        """Kafka has to take some before more tasks are pulled."""
        return self._log.num_bytes >= self._max_bytes and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Kafka has everything."""
        return not self._loose and not any(self._packs.values())

    @property
    def loose(self) -> list[Episode]:
        """Episodes in no pack yet, oldest first."""
        return list(self._loose.values())

    def append(self, trajectory: Trajectory) -> Episode:
        """Keep a finished episode; from here on it is produced and will be sent, whatever dies."""
        body = wire.encode(to_batch([trajectory]))
        place = self._log.append(_EPISODE, body)
        failpoints.hit("outbox.after_episode")
        return self._add_episode(trajectory.group_id, trajectory.task_id, len(trajectory.token_ids), place)

    def pack(self, episodes: Sequence[Episode], partition: int) -> Pack:
        """Fix a message: these episodes of one group, in this order, under the partition's next sequence."""
        sequence = max(self._last[partition], self._floor) + 1
        numbers = [e.number for e in episodes]
        place = self._log.append(_PACK, json.dumps([partition, sequence, numbers]).encode())
        failpoints.hit("outbox.after_pack")
        return self._add_pack(partition, sequence, episodes, place.segment)

    def sync(self) -> None:
        """Make what was appended survive the machine; comes before a message is sent and before totals are told."""
        self._log.sync()

    def oldest(self, partition: int) -> Pack | None:
        """The first pack of `partition` that Kafka has not acknowledged."""
        return next(iter(self._packs.get(partition, {}).values()), None)

    def packs(self, partition: int) -> list[Pack]:
        """All of them, oldest first."""
        return list(self._packs.get(partition, {}).values())

    @property
    def partitions(self) -> list[int]:
        """Partitions with unacknowledged packs."""
        return [p for p, packs in self._packs.items() if packs]

    def message(self, pack: Pack) -> tuple[bytes, dict[str, bytes]]:
        """Body and headers of `pack`: the same ones however often it is asked for."""
        batches = [_read_batch(self._log.read(e.place)) for e in pack.episodes]
        headers = wire.counting_headers(len(batches), sum(e.num_tokens for e in pack.episodes))
        headers[Header.SHARD] = str(shard_of(pack.episodes[0].task_id)).encode()
        headers[Header.OUTBOX] = self.id.encode()
        headers[Header.SEQUENCE] = str(pack.sequence).encode()
        return wire.encode(pa.concat_batches(batches)), headers

    def set_aside(self, pack: Pack, body: bytes) -> Path | None:
        """Keep `body`, which no message can carry, as a file beside the log; its path, None if it is there already."""
        path = self.folder / f"oversized-{pack.partition}-{pack.sequence}.arrow"
        if path.exists():
            return None
        part = path.with_suffix(".part")
        part.write_bytes(body)
        sync_path(part)
        part.rename(path)
        sync_path(self.folder)
        return path

    def acknowledge(self, pack: Pack) -> None:
        """Kafka has `pack`; its bytes may go. Losing this record only sends the same message once more.

        So on a full disk it is left out, or nothing would ever make room.
        """
        failpoints.hit("outbox.before_acknowledgement")
        try:
            self._log.append(_ACKNOWLEDGED, json.dumps([pack.partition, pack.sequence]).encode())
        except OSError as error:
            if not disk.is_full(error):
                raise
        self._forget(pack)
        self._drop_acknowledged()

    def close(self) -> None:
        """Sync and let another process have the folder."""
        self._log.close()

    def _header(self) -> bytes:
        totals = {"trajectories": self.num_trajectories, "tokens": self.num_tokens}
        return json.dumps({"outbox": self.id, **totals, "sequences": dict(self._last), "floor": self._floor}).encode()

    def _replay(self, record: Record) -> None:
        if record.kind == HEADER:
            header = json.loads(record.payload)
            self.id, self.num_trajectories, self.num_tokens = header["outbox"], header["trajectories"], header["tokens"]
            self._floor = max(self._floor, header["floor"])
            for partition, sequence in header["sequences"].items():
                self._last[int(partition)] = max(self._last[int(partition)], sequence)
        elif record.kind == _EPISODE:
            row = _read_batch(record.payload)
            group_id, task_id = (row.column(name)[0].as_py() for name in ("group_id", "task_id"))
            self._add_episode(group_id, task_id, len(row.column("token_ids")[0]), record.place)
        elif record.kind == _PACK:
            partition, sequence, numbers = json.loads(record.payload)
            self._last[partition] = max(self._last[partition], sequence)
            episodes = [self._loose[n] for n in numbers if n in self._loose]
            if episodes:
                pack = self._add_pack(partition, sequence, episodes, record.place.segment)
                self._partial += [pack] if len(episodes) < len(numbers) else []
        elif record.kind == _ACKNOWLEDGED:
            partition, sequence = json.loads(record.payload)
            if (pack := self._packs.get(partition, {}).get(sequence)) is not None:
                self._forget(pack)

    def _add_episode(self, group_id: str, task_id: str, num_tokens: int, place: Place) -> Episode:
        self.num_trajectories += 1
        self.num_tokens += num_tokens
        episode = Episode(self.num_trajectories, group_id, task_id, num_tokens, place)
        self._loose[episode.number] = episode
        self._unacknowledged[place.segment] += 1
        return episode

    def _add_pack(self, partition: int, sequence: int, episodes: Iterable[Episode], segment: int) -> Pack:
        pack = Pack(partition, sequence, tuple(episodes), segment)
        for episode in pack.episodes:
            del self._loose[episode.number]
        self._last[partition] = sequence
        self._packs.setdefault(partition, {})[sequence] = pack
        self._unacknowledged[segment] += 1
        return pack

    def _forget(self, pack: Pack) -> None:
        del self._packs[pack.partition][pack.sequence]
        self._unacknowledged.subtract([pack.segment, *(e.place.segment for e in pack.episodes)])

    def _dissolve(self) -> None:
        """Free the episodes of packs that lost members to damage: their message cannot be made again."""
        for pack in self._partial:
            if self._packs[pack.partition].get(pack.sequence) is pack:
                del self._packs[pack.partition][pack.sequence]
                self._unacknowledged[pack.segment] -= 1
                self._loose |= {e.number: e for e in pack.episodes}

    def _drop_acknowledged(self) -> None:
        """Remove files from the front for as long as Kafka has all that is in them."""
        while len(self._log.segments) > 1 and not self._unacknowledged[self._log.segments[0]]:
            self._log.drop_first()


def _read_batch(body: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(body) as reader:
        return reader.read_next_batch()
