"""ExperienceStream: the lake's admitted trajectories as batches, each row once, resumable.

Only rank 0 has one. It pins the Delta version that a batch was read at and hands every rank its slice, so that all
ranks agree, and the order of trajectories does not depend on how many there are.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pydantic import Field

from infra.lake import Lake
from infra.tail import Tail
from schemas.errors import LakeError
from schemas.messages import Message
from schemas.names import Event, Origin
from schemas.settings import Settings
from trainers.batches import Tokens
from trainers.branches import COLUMNS, Branches, is_branch
from trainers.buffer import LiveBuffer, Memory, Pick, Rule, gather
from trainers.fairness import Fairness, Lengths
from trainers.siblings import Chunk

SCALARS = (
    "trajectory_id",
    "group_id",
    "min_weight_version",
    "version_bucket",
    "priority",
    "status",
    "reward",
    "group_reward_mean",
    "group_reward_std",
    "group_num_rewards",
)
TOKENS = ("token_ids", "action_mask", "behavior_logprobs")
_GONE = (Event.EVICTED, Event.EXPIRED)


def columns(settings: Settings) -> list[str]:
    """What is read from the lake; `turns`, the most costly column, only where credit asks for it."""
    return [*SCALARS, *TOKENS, *COLUMNS, "ingested_at", *(["turns"] if settings.credit.reads_turns else [])]


class Cursor(Message):
    """Where a stream stands: what it has read, and what of that it may still train on.

    `live` lists (trajectory_id, delta_version, uses) by arrival, `groups` what the buffer knows of their groups, `come`
    and `trained` its counts by length class; `gone` maps evicted or expired trajectories that have not been seen yet to
    their oldest version. `offsets` has, by `topic/partition`, the offset after the last message that the ledger knows.
    `waiting` are (trajectory_id, delta_version) of rows that wait for branches.
    """

    experience_version: int = -1
    ledger_version: int = -1
    num_consumed: int = 0
    last_admitted_at: datetime | None = None
    live: tuple[tuple[str, int, int], ...] = ()
    groups: dict[str, Memory] = Field(default_factory=dict)
    come: dict[int, float] = Field(default_factory=dict)
    trained: dict[int, float] = Field(default_factory=dict)
    waiting: tuple[tuple[str, int], ...] = ()
    oldest_bucket: int = 0
    offsets: dict[str, int] = Field(default_factory=dict)
    gone: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to train on in one step, read at `delta_version`: scalar columns, tokens, and per row `uses` and version.

    `probabilities` are those with which the rows were drawn from the live ones.
    """

    rows: pa.Table
    tokens: Tokens
    uses: tuple[int, ...]
    delta_versions: tuple[int, ...]
    delta_version: int
    probabilities: tuple[float, ...] = ()


class ExperienceStream:
    """Tails `experience` and `ledger`, keeps the live buffer and draws batches; never waits itself.

    Rows that no learner may use are dropped and counted in `dropped`: without a reward, too old at use, or of more
    tokens than the policy has positions for (`max_positions`; None: any length). `too_long` names the last of these.
    `newest_version` is the newest that sampled a row; None before the first. `lengths` are those in the ledger.
    """

    def __init__(self, lake: Lake, settings: Settings, cursor: Cursor | None = None, max_positions: int | None = None):
        self._lake, self._loop = lake, settings.loop
        cursor = cursor or Cursor()
        self._buffer = LiveBuffer(rule(settings), Fairness(dict(cursor.come), dict(cursor.trained)))
        self._branches = Branches(settings.credit.fork_wait_s)
        self._gone = dict(cursor.gone)
        self.num_consumed = cursor.num_consumed
        self.last_admitted_at = cursor.last_admitted_at
        self.dropped = {"stale": 0, "unscored": 0, "evicted": 0, "too_long": 0}
        self.too_long: tuple[str, ...] = ()
        self.newest_version: int | None = None
        self.lengths = Lengths()
        self._max_positions = max_positions
        self._columns = columns(settings)
        self._experience = Tail(lake, "experience", cursor.experience_version, self._columns)
        self._offsets = dict(cursor.offsets)
        names = ["trajectory_id", "event", "min_weight_version", "num_generated_tokens", "origin"]
        self._ledger = Tail(lake, "ledger", cursor.ledger_version, [*names, "topic", "partition", "offset"])
        self._rebuild(cursor)

    @property
    def num_available(self) -> int:
        """Trajectories that may still be trained on, those that wait for branches included."""
        return len(self._buffer) + len(self._branches.waiting())

    @property
    def delta_version(self) -> int:
        """Version of `experience` that has been read."""
        return self._experience.version

    def poll(self, version: int) -> None:
        """Take in what is new in the lake for a learner at weight `version`.

        Files of buckets that are too old for it are not opened: a learner that was away begins with what it can use.

        Raises:
            LakeError: a commit or a file is missing; nothing is passed over.
        """
        passed_over = self._experience.num_passed_over
        oldest_bucket = (version - self._loop.max_staleness) // self._loop.bucket_width
        for delta_version, rows in self._experience.poll(wanted=lambda values: _bucket(values) >= oldest_bucket):
            self._admit(delta_version, rows)
        for delta_version, rows in self._branches.ready(time.monotonic()):
            self._add(delta_version, rows)
        self.dropped["stale"] += self._experience.num_passed_over - passed_over
        for _, rows in self._ledger.poll():
            self._note_offsets(rows)
            self.lengths.note(rows.filter(pc.invert(is_branch(rows))))
            self._leave(rows.filter(pc.is_in(rows["event"], pa.array(_GONE))))
        self._forget(version - self._loop.max_staleness)

    def take(self, version: int, weights: Sequence[float] | None = None, min_version: int = 0) -> Batch | None:
        """The next `loop.batch_size` rows for a learner at weight `version`, or None while there are fewer.

        `weights` multiply the buckets' weights by age; `min_version` bars older rows beyond `max_staleness`.
        """
        oldest = max(version - self._loop.max_staleness, min_version)
        self.dropped["stale"] += self._buffer.prune(oldest)
        if len(self._buffer) < self._loop.batch_size:
            return None
        picks = self._buffer.choose(self._loop.batch_size, version, weights, self.num_consumed)
        self._buffer.use(picks)
        self.num_consumed += len(picks)
        batch = _batch(picks, self.delta_version, version - self._loop.max_staleness)
        return replace(batch, rows=self._branches.told(batch.rows))

    def cursor(self) -> Cursor:
        """Where the stream stands; hand it back to go on from here."""
        live = self._buffer.rows()
        return Cursor(
            experience_version=self._experience.version,
            ledger_version=self._ledger.version,
            num_consumed=self.num_consumed,
            last_admitted_at=self.last_admitted_at,
            live=tuple((row.trajectory_id, row.delta_version, row.uses) for row in live),
            groups=self._buffer.groups(),
            come=self._buffer.fairness.come,
            trained=self._buffer.fairness.trained,
            waiting=tuple(self._branches.waiting()),
            oldest_bucket=min((*(row.bucket for row in live), *self._branches.buckets()), default=0),
            offsets=self._offsets,
            gone=self._gone,
        )

    def _note_offsets(self, rows: pa.Table) -> None:
        last = rows.group_by(["topic", "partition"]).aggregate([("offset", "max")])
        for row in last.to_pylist():
            log = f"{row['topic']}/{row['partition']}"
            self._offsets[log] = max(self._offsets.get(log, 0), row["offset_max"] + 1)

    def _admit(self, delta_version: int, rows: pa.Table) -> None:
        newest = pc.max(rows["ingested_at"]).as_py()
        self.last_admitted_at = max(filter(None, (self.last_admitted_at, newest)), default=None)
        sampled_by = pc.max(rows["min_weight_version"]).as_py()
        self.newest_version = max(filter(None, (self.newest_version, sampled_by)), default=None)
        scored = rows
        if rows["reward"].null_count or rows["group_reward_mean"].null_count:
            scored = rows.filter(pc.and_(pc.is_valid(rows["reward"]), pc.is_valid(rows["group_reward_mean"])))
        self.dropped["unscored"] += rows.num_rows - scored.num_rows
        self._add(delta_version, self._branches.sort(delta_version, scored, time.monotonic()))

    def _add(self, delta_version: int, rows: pa.Table) -> None:
        self._buffer.add(delta_version, _chunk(self._fitting(rows)))
        early = [name for name in self._gone if name in self._buffer]
        self._drop(early)
        for name in early:
            del self._gone[name]

    def _fitting(self, rows: pa.Table) -> pa.Table:
        """Those of `rows` that the policy has positions for; cut off, the others would be answers that nobody gave."""
        if self._max_positions is None:
            return rows
        fits = pc.less_equal(pc.list_value_length(rows["token_ids"]), self._max_positions)
        if pc.all(fits).as_py() is not False:
            return rows
        self.too_long = tuple(rows.filter(pc.invert(fits))["trajectory_id"].to_pylist())
        self.dropped["too_long"] += len(self.too_long)
        return rows.filter(fits)

    def _leave(self, rows: pa.Table) -> None:
        """Drop evicted and expired rows; the ledger may be ahead of `experience`, so unseen ones are remembered."""
        names, versions = (rows[name].to_pylist() for name in ("trajectory_id", "min_weight_version"))
        self._gone |= {n: v for n, v in zip(names, versions, strict=True) if n not in self._buffer}
        self._drop(names)

    def _drop(self, names: Sequence[str]) -> None:
        self.dropped["evicted"] += self._buffer.discard(names)

    def _forget(self, oldest: int) -> None:
        """What is too old to be trained on need not be remembered as gone."""
        self._gone = {name: version for name, version in self._gone.items() if version >= oldest}
        self._branches.forget(oldest)

    def _rebuild(self, cursor: Cursor) -> None:
        """Read the rows of `cursor` again, from the snapshot: compaction may have moved them to other files."""
        ids = [name for name, *_ in (*cursor.live, *cursor.waiting)]
        if not ids:
            return
        wanted = ds.field("trajectory_id").isin(ids) | (ds.field("origin") == Origin.COUNTERFACTUAL)
        wanted &= ds.field("version_bucket") >= cursor.oldest_bucket
        found = self._lake.read("experience", "what was live", self._columns, wanted)
        branches = is_branch(found)
        self._branches.learn(found.filter(branches))
        rows = found.filter(pc.invert(branches))
        if missing := sorted(set(ids) - set(rows["trajectory_id"].to_pylist())):
            raise LakeError(
                f"{len(missing)} of {len(ids)} live trajectories of the checkpoint are not in `experience` "
                f"at version {self._lake.version('experience')}, for example {missing[0]}; "
                "rows must stay in the lake for as long as a learner may use them"
            )
        self._restore(cursor, rows.cast(self._experience.schema))

    def _restore(self, cursor: Cursor, rows: pa.Table) -> None:
        place = {name: index for index, name in enumerate(rows["trajectory_id"].to_pylist())}
        self._buffer.remember(cursor.groups)
        for version in dict.fromkeys(version for _, version in cursor.waiting):
            again = rows.take([place[name] for name, known in cursor.waiting if known == version])
            self._add(version, self._branches.sort(version, again, time.monotonic()))
        rows = rows.take([place[name] for name, *_ in cursor.live])
        start = 0
        while start < len(cursor.live):
            version = cursor.live[start][1]
            end = next((i for i in range(start, len(cursor.live)) if cursor.live[i][1] != version), len(cursor.live))
            uses = [uses for *_, uses in cursor.live[start:end]]
            self._buffer.add(version, _chunk(rows.slice(start, end - start)), uses)
            start = end


def _bucket(values: Mapping[str, str | None]) -> int:
    return int(values["version_bucket"] or 0)


def _chunk(rows: pa.Table) -> Chunk:
    kept = [name for name in rows.column_names if name in SCALARS or name == "turns"]
    return Chunk(rows.select(kept).combine_chunks(), Tokens.of(rows))


def rule(settings: Settings) -> Rule:
    """How `settings` say that rows are drawn."""
    learner, loop = settings.learner, settings.loop
    return Rule(
        loop.bucket_width, learner.max_uses, learner.old_bucket_weight, learner.priority_exponent, loop.group_size
    )


def _batch(picks: Sequence[Pick], delta_version: int, oldest: int) -> Batch:
    stale = [pick.row.trajectory_id for pick in picks if pick.row.min_weight_version < oldest]
    if stale:
        raise LakeError(f"trajectories {stale[:3]} are older than version {oldest}; a batch may not hold them")
    picks = sorted(picks, key=lambda pick: (pick.row.num_tokens, pick.row.arrival))  # as micro-batches want them
    chosen = [pick.row for pick in picks]
    found = gather(chosen)
    return Batch(
        rows=found.rows,
        tokens=found.tokens,
        uses=tuple(row.uses for row in chosen),
        delta_versions=tuple(row.delta_version for row in chosen),
        delta_version=delta_version,
        probabilities=tuple(pick.probability for pick in picks),
    )


def summary(batch: Batch, version: int) -> dict[str, Any]:
    """Staleness and reward of a batch, at use, for a learner at weight `version`."""
    staleness = pc.subtract(pa.scalar(version), batch.rows["min_weight_version"])
    return {
        "staleness_min": pc.min(staleness).as_py(),
        "staleness_mean": pc.mean(staleness).as_py(),
        "staleness_max": pc.max(staleness).as_py(),
        "reward_mean": pc.mean(batch.rows["reward"]).as_py(),
    }
