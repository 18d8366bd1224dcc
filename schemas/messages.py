"""JSON messages between processes: tasks, buffer reports, weights, evals, directives, usage.

Frozen, strict about unknown keys, timestamps in UTC. `decode` turns bytes into a message or a ContractError.
"""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    StringConstraints,
    ValidationError,
    model_validator,
)

from schemas.errors import ContractError
from schemas.ids import group_id, task_id
from schemas.settings import Family

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""A JSON message longer than this is refused unread."""

CLOCK_SKEW = timedelta(minutes=5)
"""A directive from further in the future is refused: clocks of two machines do not differ by more."""

MAX_PAUSE = timedelta(days=1)
"""Nothing waits for ever: a pause that was forgotten ends by itself. Who needs a longer one issues it again."""

MAX_PROBE_TOKENS = 1024
"""Attention over a probe takes memory that grows with the square of its length."""

MAX_PREFIX = 32_768
"""Tokens before a forked turn: a task has to fit into a message, and into the dispatcher's state."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\w./:@+\- ]+$")]


def _within_reach(time: datetime) -> datetime:
    if not _EARLIEST <= time <= _LATEST:
        raise ValueError("lies outside the years 1970 to 2200")
    return time


_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

Time = Annotated[AwareDatetime, AfterValidator(_within_reach)]
"""A time with its zone, that every reader of the lake can hold in UTC."""

Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Total = Annotated[int, Field(ge=0, le=2**48)]
"""A count over all of a run; the books add those of many outboxes up."""
Factor = Annotated[float, Field(ge=0, le=1000)]
Seconds = Annotated[float, Field(ge=0)]


class Message(BaseModel):
    """Base of the JSON messages: immutable, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """The message as compact JSON."""
        return self.model_dump_json().encode()


M = TypeVar("M", bound=BaseModel)


def decode(type_: type[M], body: bytes | None) -> M:
    """The message of `type_` in `body`.

    Raises:
        ContractError: empty, too long, not JSON, or not of this type; names the fields at fault.
    """
    if not body or len(body) > MAX_MESSAGE_BYTES:
        raise ContractError(f"{type_.__name__} message of {len(body or b'')} bytes; expected 1 to {MAX_MESSAGE_BYTES}")
    try:
        return type_.model_validate_json(body)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise ContractError(f"not a {type_.__name__} message: {faults[:800]}") from error


class Branch(Message):
    """Where a task's episodes leave a recorded one: they replay it up to a turn, and sample on from there.

    The parent was member `group_index` of the group, in issue `attempt`; whatever was random in it came from these.
    `token_ids` are all that it had before the turn, `actions` its earlier turns' actions among them, [start, end);
    `action` is what it said in the turn.
    """

    parent_id: Name
    group_id: Name
    group_index: Count
    attempt: int = Field(ge=1, le=1024)
    token_ids: tuple[Count, ...] = Field(min_length=1, max_length=MAX_PREFIX)
    actions: tuple[tuple[Count, Count], ...] = Field(default=(), max_length=1024)
    action: tuple[Count, ...] = Field(default=(), max_length=MAX_PREFIX)

    @property
    def turn(self) -> int:
        """Number of the turn that is taken anew, from 0."""
        return len(self.actions)

    @model_validator(mode="after")
    def _in_order(self) -> "Branch":
        edges = [0, *(edge for action in self.actions for edge in action), len(self.token_ids)]
        if any(b <= a for a, b in pairwise(edges[:-1])) or edges[-2] > edges[-1]:
            raise ValueError(f"actions {self.actions} do not follow one another in {len(self.token_ids)} tokens")
        return self


class Task(Message):
    """One group to roll out (topic `tasks`), a lease until `lease_until`."""

    group_id: Name
    group_size: int = Field(ge=1, le=1024)
    task_id: Name
    family: Name
    index: Count
    environment: Name
    options: dict[str, Any] = {}
    seed: int
    draw: Count
    attempt: int = Field(default=1, ge=1, le=1024)
    origin: Name = "rollout"
    branch: Branch | None = None
    min_weight_version: Count = 0
    directive_id: str | None = None
    dispatched_at: Time
    lease_until: Time

    @classmethod
    def of(cls, family: Family, index: int, draw: int, *, run: str = "", **fields: Any) -> "Task":
        """Task `index` of `family`, the `draw`-th of `run` unless `fields`, which are all the others, name a group."""
        name = task_id(family.name, index)
        found = {
            "group_id": group_id(run, name, draw),
            "task_id": name,
            "family": family.name,
            "index": index,
            "environment": family.environment,
            "options": family.options,
            "draw": draw,
        }
        return cls.model_validate(found | fields)


class TaskPosterior(Message):
    """Beta posterior of a task's success, discounted by weight version."""

    task_id: Name
    alpha: float = Field(gt=0)
    beta: float = Field(gt=0)
    weight_version: Count

    @property
    def mean(self) -> float:
        """Expected success, in (0, 1)."""
        return self.alpha / (self.alpha + self.beta)


class ClosedGroup(Message):
    """A group that will not change any more."""

    group_id: Name
    task_id: Name
    num_members: Count
    complete: bool


class BufferReport(Message):
    """What one curation shard holds (topic `buffer`): absolute totals, so a repeat is harmless.

    `closed` and `posteriors` list what changed since the shard's last report; both are idempotent.
    """

    kind: Literal["shard"] = "shard"
    shard: Name
    at: Time
    learner_version: Count
    trajectories: dict[str, Count]
    tokens: dict[str, Count]
    live: dict[int, Count]
    num_pending: Count
    num_branches: Count = 0
    """Admitted ones among `trajectories`; nobody trains on them."""
    closed: tuple[ClosedGroup, ...] = ()
    posteriors: tuple[TaskPosterior, ...] = ()


class Fork(Message):
    """A turn that branches are wanted of (topic `buffer`); `group_id` is theirs (`schemas.ids.fork_id`)."""

    kind: Literal["fork"] = "fork"
    group_id: Name
    num_branches: int = Field(ge=1, le=1024)
    task_id: Name
    family: Name
    index: Count
    branch: Branch


class LearnerReport(Message):
    """What the learner can still use (topic `buffer`, key `learner`): absolute figures."""

    kind: Literal["learner"] = "learner"
    at: Time
    weight_version: Count
    train_step: Count
    num_available: Count
    num_consumed: Count
    needs_per_step: Count


class BufferMessage(RootModel[Annotated[BufferReport | LearnerReport | Fork, Field(discriminator="kind")]]):
    """Any message of topic `buffer`; `root` is what it says."""


class WeightSummary(Message):
    """A published version (topic `weights`): a hint, the weight store is the truth."""

    version: Count
    parent: int | None = None
    kind: Literal["full", "delta", "adapters"] = "full"
    fingerprint: Name
    num_bytes: Count
    train_step: Count
    mlflow_run: str | None = None
    created_at: Time


class FamilyScore(Message):
    """Score of one task family in an evaluation; `score` is the mean over the scored episodes, null without any.

    `by_task` has a letter for each held-out task, in order: 1 solved, 0 not, - unscored. All evaluations play the same
    tasks in the same order, with the same seeds; the shorter of two plays the first of them. Empty in old results.
    """

    score: float | None
    num_scored: Count
    num_unscored: Count
    by_task: str = Field(default="", pattern=r"^[01-]*$")


class EvalResult(Message):
    """One evaluation of one weight version (topic `evals`).

    `score` averages the scored episodes only; the agent's own failures are scored (0), the infrastructure's are not.
    `low` and `high` bound a 95 % Wilson interval. The key is (requested, start, end version) and `kind`.
    """

    eval_id: Name
    kind: Literal["light", "full", "skipped"]
    requested_version: Count
    start_version: Count
    end_version: Count
    score: float | None
    low: float | None = None
    high: float | None = None
    num_scored: Count
    num_unscored: Count
    families: dict[str, FamilyScore] = {}
    reason: str | None = None
    num_tokens: Count = 0
    started_at: Time
    finished_at: Time


class Directive(Message):
    """An order on the `control` topic; an absent field leaves that setting as it is.

    `clock` directives carry no order: their broker timestamp is the time that the curate flow goes by. A pause that
    nobody lifts ends MAX_PAUSE after `issued_at`.
    """

    directive_id: Name
    target: Literal["all", "dispatch", "curate", "learner", "rollout", "clock"]
    issued_by: Name
    issued_at: Time
    reason: str = ""
    pause: bool | None = None
    min_weight_version: Count | None = None
    family_weights: dict[Name, Factor] | None = Field(default=None, max_length=1024)
    bucket_weights: tuple[Factor, ...] | None = Field(default=None, max_length=64)
    learning_rate_scale: float | None = Field(default=None, gt=0, le=10)

    def refusal(self, newest_version: int, max_staleness: int, now: datetime | None) -> str | None:
        """Why whoever knows of versions up to `newest_version` does not obey, or None.

        News of versions may lag behind the directive, by as many as a trajectory may lag. What is not known yet, 0 or
        None, refuses nothing.
        """
        if newest_version and (self.min_weight_version or 0) > newest_version + max_staleness + 1:
            return f"weight version {self.min_weight_version} is not published; the newest known is {newest_version}"
        if now and self.issued_at - now > CLOCK_SKEW:
            return f"issued at {self.issued_at}, which lies in the future: it is {now}"
        return None

    def pauses(self, now: datetime) -> bool:
        """Whether it orders a pause that is not over by itself."""
        return bool(self.pause) and now - self.issued_at < MAX_PAUSE


class UsageInterval(Message):
    """What one service did in one interval (topic `usage`).

    busy + idle seconds are at most the interval's length times the accelerators. `produced_*` are absolute totals of
    `outbox`, counted from its log, so that a killed service neither loses nor repeats any.
    """

    interval_id: Name
    service: Name
    instance: Name
    phase: Name
    started_at: Time
    ended_at: Time
    busy_s: Seconds
    idle_s: Seconds
    num_accelerators: Count = 1
    num_tokens: Count = 0
    num_episodes: Count = 0
    num_failed: Count = 0
    weight_version: int | None = None
    outbox: str | None = None
    produced_trajectories: Total | None = None
    produced_tokens: Total | None = None


class File(Message):
    """A file of a weight version: a plain name inside its folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    num_bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Probe(Message):
    """Token ids and the learner's logprobs for them (one fewer: the first token has none)."""

    token_ids: tuple[Count, ...] = Field(min_length=2, max_length=MAX_PROBE_TOKENS)
    logprobs: tuple[float, ...] = Field(min_length=1, max_length=MAX_PROBE_TOKENS)


class Manifest(Message):
    """`MANIFEST.json` of a weight version, written last: a version exists when this does.

    `fingerprint` is the SHA-256 over the sorted (tensor name, dtype, shape, bytes) of the materialised weights. `files`
    are those in the store. A delta lists in `whole` what its parent and they make together; adapters, what the full
    version `base` and they do. A full version has neither.
    """

    version: Count
    parent: int | None = None
    kind: Literal["full", "delta", "adapters"] = "full"
    base: int | None = None
    files: tuple[File, ...]
    whole: tuple[File, ...] = ()
    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    probe: Probe | None = None
    train_step: Count = 0
    delta_version: int | None = None
    mlflow_run: str | None = None
    checkpoint: str | None = None
    created_at: Time

    @property
    def contents(self) -> tuple[File, ...]:
        """The files of the materialised version, however it was published."""
        return self.files if self.kind == "full" else self.whole

    @property
    def builds_on(self) -> int | None:
        """The version without which this one cannot be made; None for a full one."""
        return {"full": None, "delta": self.parent, "adapters": self.base}[self.kind]

    @property
    def num_bytes(self) -> int:
        """Bytes in the store."""
        return sum(file.num_bytes for file in self.files)
