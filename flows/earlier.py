"""What earlier lives of the run left in the lake: where the flows begin on a log that starts anew.

A flow has its state from its recovery store. Where Kafka's log and that store were lost, `lagoon resume` counts
`run.life` up, and the flows begin with what the lake knows: difficulty, draws, versions, live trajectories, and what
became of groups that may still have late members: a dead letter that is sent again, for example.
"""

from collections import defaultdict
from functools import cached_property
from statistics import fmean
from typing import Any

from flows.steps.difficulty import Posterior
from flows.steps.dispatcher import State as DispatcherState
from flows.steps.eviction import POLICIES
from flows.steps.groups import MAX_CLOSED, ClosedGroup, Stats
from flows.steps.member import Member
from flows.steps.state import State
from flows.steps.supply import Supply
from infra.lake import Lake
from infra.run_manifests import RunManifests
from schemas.ids import shard_of
from schemas.names import NUM_SHARDS
from schemas.settings import Settings

_POSTERIORS = """
SELECT DISTINCT ON (task_id) task_id, alpha, beta, weight_version, num_groups
FROM task_difficulty ORDER BY task_id, "at" DESC, num_groups DESC"""

_DRAWS = "SELECT count(*) FROM dispatches WHERE event = 'opened'"

_LIVE = """
SELECT {columns}, len(token_ids) AS num_tokens, partition, "offset", "row", epoch_ms(ingested_at) AS at_ms,
       version_bucket, priority
FROM experience
WHERE version_bucket >= ? AND origin <> 'counterfactual' AND trajectory_id NOT IN (
    SELECT trajectory_id FROM ledger WHERE event IN ('evicted', 'expired')
)
ORDER BY ingested_at, partition, "offset", "row"
"""

_CLOSED = """
SELECT groups.group_id, groups.task_id, groups.group_size, any_value(ledger.origin),
       list(DISTINCT group_index) FILTER (group_index IS NOT NULL), list(DISTINCT ledger.trajectory_id),
       groups.at_version, epoch_ms(closed_at) AS closed_ms, bool_or(event = 'evicted'),
       num_rewards, reward_mean, reward_std, pass_rate, zero_variance
FROM groups JOIN ledger USING (group_id)
LEFT JOIN experience ON experience.trajectory_id = ledger.trajectory_id AND version_bucket >= ?
WHERE groups.at_version >= ? AND event IN ('admitted', 'stale', 'no_signal', 'evicted')
GROUP BY ALL ORDER BY closed_ms DESC LIMIT ?
"""

_COLUMNS = Member._fields[: Member._fields.index("num_tokens")]


class Earlier:
    """The states that flows begin with; empty ones in a run's first life. The lake is read when it is first asked."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def shard(self, shard: int) -> State:
        """The state of a curation shard: difficulty, what is live, and what became of closed groups.

        Groups that were open are gone with the log.
        """
        if not self._settings.run.life:
            return State()
        state = State(learner_version=self._newest[0])
        state.posteriors = {task: p for task, p in self._posteriors.items() if shard_of(task) == shard}
        policy = POLICIES[self._settings.curate.eviction]
        for siblings in self._live.values():
            members, buckets, priorities = zip(*siblings, strict=True)
            if shard_of(members[0].task_id) == shard:
                state.live.add(members, max(buckets), fmean(priorities), policy)
        newest = [(name, group) for name, group in self._closed if shard_of(group.task_id) == shard][:MAX_CLOSED]
        state.closed = dict(reversed(newest))
        return state

    def dispatcher(self) -> DispatcherState:
        """The dispatcher's state: difficulty, and the number of draws, which goes on."""
        state = DispatcherState(Supply.of(self._settings))
        if self._settings.run.life:
            state.weight_version, state.train_step = self._newest
            state.posteriors = dict(self._posteriors)
            state.num_draws = self._ask(_DRAWS)[0][0]
        return state

    @cached_property
    def _newest(self) -> tuple[int, int]:
        """The weight version and the train step that the learner goes on from."""
        newest = next(RunManifests(Lake.of(self._settings)).newest_first([]), None)
        return (newest.weight_version, newest.train_step) if newest else (0, 0)

    @cached_property
    def _posteriors(self) -> dict[str, Posterior]:
        return {task: Posterior(*values) for task, *values in self._ask(_POSTERIORS)}

    @cached_property
    def _live(self) -> dict[str, list[tuple[Member, int, float]]]:
        """By group the members, buckets and priorities of what has not been evicted or expired, in order of arrival."""
        rows = self._ask(_LIVE.format(columns=", ".join(_COLUMNS)), [self._oldest_bucket])
        found: dict[str, list[tuple[Member, int, float]]] = defaultdict(list)
        for *values, bucket, priority in rows:
            member = Member(*values)
            found[member.group_id].append((member, bucket, priority))
        return found

    @cached_property
    def _closed(self) -> list[tuple[str, ClosedGroup]]:
        """By name the groups that closed last, newest first. Places of members that were not admitted are not known."""
        rows = self._ask(_CLOSED, [self._oldest_bucket, self._oldest_version, NUM_SHARDS * MAX_CLOSED])
        return [(name, _remembered(*values)) for name, *values in rows]

    @property
    def _oldest_version(self) -> int:
        """A little before the staleness bound: curation may have died before it wrote what had expired."""
        return self._newest[0] - 2 * (self._settings.loop.max_staleness + 1)

    @property
    def _oldest_bucket(self) -> int:
        return self._oldest_version // self._settings.loop.bucket_width

    def _ask(self, query: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
        from infra import sql  # noqa: PLC0415 - a second of imports, which a run's first life has no use for

        with sql.connect(Lake.of(self._settings)) as lake:
            return lake.execute(query, values).fetchall()


def _remembered(
    task: str,
    size: int,
    origin: str,
    places: list[int] | None,
    ids: list[str],
    version: int,
    at_ms: int,
    is_evicted: bool,
    *stats: Any,
) -> ClosedGroup:
    taken = sum(1 << place for place in places or ())
    known = b"".join(bytes.fromhex(name.replace("-", "")) for name in ids)
    return ClosedGroup(task, size, origin, taken, known, version, at_ms, Stats(*stats), is_evicted)
