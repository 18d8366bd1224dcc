"""A shard at work: notes and packs in the order of the log become decisions.

Every decision depends on the messages before it and on nothing else: time is the broker's timestamp of the message at
hand. How many messages come in one call changes only how many batches carry the rows.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import fmean

import pyarrow as pa

from flows.steps import difficulty, eviction, forks, groups
from flows.steps.admission import from_the_future, too_old, version_at
from flows.steps.chunk import Chunk, Note, Pack
from flows.steps.difficulty import Posterior
from flows.steps.groups import ClosedGroup, OpenGroup, Stats
from flows.steps.ledger import Admission, Closing, Estimate, Rows
from flows.steps.member import Coordinates, Member, cleaned, members
from flows.steps.output import Output
from flows.steps.payloads import PayloadReader, Payloads
from flows.steps.report import report
from flows.steps.state import State, each_id
from flows.steps.validate import RULES, takes_a_place
from infra.control import refused
from schemas.messages import BufferReport, Directive, Fork, WeightSummary
from schemas.messages import ClosedGroup as ClosedGroupMessage
from schemas.names import Event, Origin
from schemas.settings import Settings


class Shard:
    """Curates one shard. `state` is all that it knows; the payload cache can be lost at any time."""

    def __init__(self, settings: Settings, reader: PayloadReader, state: State | None = None) -> None:
        self._loop, self._curate, self._dispatch = settings.loop, settings.curate, settings.dispatch
        self._credit = settings.credit
        self._most_bytes = settings.kafka.max_message_bytes // 2  # the task that is made of a fork says more
        self._capacity = eviction.capacity_of_a_shard(settings.curate.capacity)
        self._policy = eviction.POLICIES[settings.curate.eviction]
        self._payloads = Payloads(reader)
        self.begin(state or State())
        self._out, self._counted = Output(), 0
        self._here: dict[Coordinates, pa.RecordBatch] = {}

    def begin(self, state: State) -> None:
        """Go on from `state`."""
        self.state = state
        self._known = state.known_ids()
        self._oldest = self._oldest_version()

    def curate(self, chunk: Chunk) -> list[Rows | BufferReport | Fork]:
        """What follows from `chunk`: rows of the lake's tables, and a report at every clock message that finds news."""
        self._out, self._counted = Output(), 0
        self._here = {(e.partition, e.offset): e.batch for e in chunk.events if isinstance(e, Pack)}
        everyone, faults = members(chunk), chunk.faults.tolist()
        for event in chunk.events:
            self._pass_time(event.at_ms)
            if isinstance(event, Pack):
                part = slice(event.start, event.stop)
                self._take_pack(event, everyone[part], faults[part])
            else:
                self._obey(event, chunk.shard)
        self._count()
        return self._out.items(chunk)

    # time, weights, directives

    def _pass_time(self, at_ms: int) -> None:
        self.state.now_ms = max(self.state.now_ms, at_ms)
        limit_ms = self.state.now_ms - self._curate.group_timeout_s * 1000
        while self.state.open:
            group = next(iter(self.state.open.values()))
            if group.opened_ms > limit_ms:
                return
            self._close(group, "timeout")

    def _obey(self, note: Note, shard: int) -> None:
        if isinstance(note.message, WeightSummary):
            self.state.learner_version = max(self.state.learner_version, note.message.version)
            self._expire()
        elif note.message.target == "clock":
            self._report(shard)
        elif note.message.target in {"curate", "all"}:
            self._follow(note.message, shard)

    def _follow(self, directive: Directive, shard: int) -> None:
        now = datetime.fromtimestamp(self.state.now_ms / 1000, UTC)
        reason = directive.refusal(self.state.learner_version, self._loop.max_staleness, now)
        if reason is not None:
            refused(directive, reason if shard == 0 else None)  # every shard sees it; one tells
            return
        self.state.directive_id = directive.directive_id
        if directive.bucket_weights is not None:
            self.state.bucket_weights = directive.bucket_weights
        if directive.min_weight_version is not None:
            self.state.min_weight_version = directive.min_weight_version
            self._expire()

    def _expire(self) -> None:
        self._oldest = self._oldest_version()
        for member in self.state.live.expire(self._oldest):
            self._decide(member, Event.EXPIRED, self._too_old(member))
        self.state.live.forget(self._oldest // self._loop.bucket_width)

    def _oldest_version(self) -> int:
        return max(self.state.learner_version - self._loop.max_staleness, self.state.min_weight_version)

    def _report(self, shard: int) -> None:
        self._count()
        news = report(shard, self.state)
        if news:
            self._out.reports.append(news)

    # one trajectory

    def _take_pack(self, pack: Pack, pack_members: list[Member], faults: list[int]) -> None:
        if pack.redelivered:
            for member, fault in zip(pack_members, faults, strict=True):
                self._decide(cleaned(member) if fault else member, Event.REDELIVERED, "its outbox sent it before")
            return
        for member, fault in zip(pack_members, faults, strict=True):
            self._take(member, fault)
        touched = {member.group_id for member in pack_members}
        if any(group in self.state.open for group in touched):
            self._payloads.keep(pack)

    def _take(self, member: Member, fault: int) -> None:
        if fault and not takes_a_place(fault):
            self._decide(cleaned(member), Event.INVALID, RULES[fault - 1].reason)
            return
        group = self.state.open.get(member.group_id) or self.state.closed.get(member.group_id)
        if group and not groups.same_group(member, group):
            self._decide(cleaned(member), Event.INVALID, "differs from its group in task, group_size or origin")
            return
        invalid = RULES[fault - 1].reason if fault else None
        if not fault and member.max_weight_version > self.state.learner_version:
            invalid = from_the_future(member, self.state.learner_version, self._loop.max_staleness)
        id_bytes = member.id_bytes
        duplicate = self._duplicate(member, id_bytes, group)
        if duplicate:
            self._decide(cleaned(member), *((Event.INVALID, invalid) if invalid else (Event.DUPLICATE, duplicate)))
            return
        self._known.add(id_bytes)
        self.state.purse.count(member)
        if isinstance(group, ClosedGroup):
            self.state.closed[member.group_id] = group.with_late(member, id_bytes)
            self._judge_late(member, group, invalid)
        else:
            group = group or self._open(member)
            group.take(member, id_bytes)
            self._judge_in_time(member, group, invalid)

    def _judge_in_time(self, member: Member, group: OpenGroup, invalid: str | None) -> None:
        old = self._too_old(member)
        if invalid:
            self._decide(cleaned(member), Event.INVALID, invalid)
        else:
            group.vote(member)
            if old:
                self._decide(member, Event.STALE, old)
            elif member.reward is None:
                self._decide(member, Event.NO_SIGNAL, f"no reward: {member.error_kind} failed")
            else:
                group.pending.append(member)
        if group.complete:
            self._close(group, "complete")

    def _judge_late(self, member: Member, group: ClosedGroup, invalid: str | None) -> None:
        if invalid:
            self._decide(cleaned(member), Event.INVALID, invalid)
        elif old := self._too_old(member):
            self._decide(member, Event.STALE, old)
        elif member.reward is None:
            self._decide(member, Event.NO_SIGNAL, f"no reward: {member.error_kind} failed")
        elif why := _no_signal(group, group.stats):
            self._decide(member, Event.NO_SIGNAL, f"came after the close; {why}")
        else:
            self._admit([member], group.stats)

    def _duplicate(self, member: Member, id_bytes: bytes, group: OpenGroup | ClosedGroup | None) -> str | None:
        if id_bytes in self._known:
            return "trajectory_id is known"
        if group and group.places >> member.group_index & 1:
            return f"member {member.group_index} of its group has come before"
        if member.origin == Origin.IMPORT and member.content_hash and self.state.imported_before(member.content_hash):
            return "an import of this content is known"
        return None

    # groups

    def _open(self, member: Member) -> OpenGroup:
        group = OpenGroup.of(member, self.state.now_ms)
        self.state.open[member.group_id] = group
        return group

    def _close(self, group: OpenGroup, closed_by: str) -> None:
        state = self.state
        del state.open[group.group_id]
        closed = groups.close(group, state.now_ms, self._loop.success_reward)
        state.closed[group.group_id] = closed
        self._forget_groups()
        self._learn_difficulty(group, closed.stats)
        self._out.closings.append(Closing(group, closed.stats, closed_by, state.learner_version, state.now_ms))
        state.tally.close(
            ClosedGroupMessage(
                group_id=group.group_id,
                task_id=group.task_id,
                num_members=group.num_members,
                complete=group.complete,
            )
        )
        self._settle(group, closed.stats)

    def _settle(self, group: OpenGroup, stats: Stats) -> None:
        fresh: list[Member] = []
        why = _no_signal(group, stats)
        for member in group.pending:
            if old := self._too_old(member):
                self._decide(member, Event.STALE, old)
            elif why:
                self._decide(member, Event.NO_SIGNAL, why)
            elif self._has_payload(member):
                fresh.append(member)
            else:
                self._decide(
                    member, Event.INVALID, "its message, or the object it claims, was gone before its group closed"
                )
        self._admit(fresh, stats, self._fork(group, fresh, stats))
        self._payloads.drop(member.place for member in group.pending)

    def _fork(self, group: OpenGroup, fresh: list[Member], stats: Stats) -> dict[str, tuple[int, ...]]:
        """Ask for branches of the turns that are worth it; which those are, by trajectory."""
        purse = self.state.purse
        if group.origin == Origin.COUNTERFACTUAL:
            purse.settle(group.group_id, scored=stats.num_rewards > 0)
        if group.origin != Origin.ROLLOUT or not self._credit.fork_budget:
            return {}
        batches = self._out.kept | self._here
        rows = [(m, batches[m.place].slice(m.row, 1)) for m in fresh]
        wanted = forks.forks(rows, stats.std or 0.0, purse, self._credit, self._most_bytes)
        self._out.reports += wanted
        return forks.turns_by_parent(wanted)

    def _forget_groups(self) -> None:
        state = self.state
        keep_s = self._dispatch.lease_s * (self._dispatch.max_attempts + 1)
        while state.closed:
            group_id, group = next(iter(state.closed.items()))
            aged = groups.forgettable(group, state.learner_version, self._loop.max_staleness, state.now_ms, keep_s)
            if not aged and len(state.closed) <= groups.MAX_CLOSED:
                return
            del state.closed[group_id]
            self._known.difference_update(each_id(group))

    def _learn_difficulty(self, group: OpenGroup, stats: Stats) -> None:
        if not difficulty.counts_for(group.origin) or not stats.num_rewards:
            return
        state = self.state
        before = state.posteriors.get(group.task_id, Posterior(weight_version=state.learner_version))
        successes = round((stats.pass_rate or 0.0) * stats.num_rewards)
        posterior = before.at(state.learner_version, self._curate.posterior_discount)
        posterior = posterior.observe(successes, stats.num_rewards - successes)
        state.set_posterior(group.task_id, posterior)
        hard = difficulty.is_hard(posterior.mean, self._curate)
        self._out.estimates.append(Estimate(group.task_id, group.task_family, posterior, hard, state.now_ms))

    # admission

    def _has_payload(self, member: Member) -> bool:
        place = member.place
        if place in self._here or place in self._out.kept:
            return True
        batch = self._payloads.find(place)
        if batch is not None:
            self._out.kept[place] = batch
        return batch is not None

    def _admit(self, admitted: list[Member], stats: Stats, forked: Mapping[str, tuple[int, ...]] = {}) -> None:
        if not admitted:
            return
        state, loop, out = self.state, self._loop, self._out
        task_mean = state.posteriors.get(admitted[0].task_id, Posterior()).mean
        hard_task = difficulty.is_hard(task_mean, self._curate)
        buckets, priorities = list[int](), list[float]()
        for member in admitted:
            version = version_at(member, state.learner_version)
            staleness = version - member.min_weight_version
            hard = hard_task or difficulty.failed_with_error(member.status, member.error_kind)
            fresh = eviction.freshness(staleness, loop.max_staleness, loop.bucket_width, state.bucket_weights)
            priority = eviction.priority(member, task_mean, hard, fresh, self._curate)
            bucket = member.min_weight_version // loop.bucket_width
            buckets.append(bucket)
            priorities.append(priority)
            turns = forked.get(member.trajectory_id)
            out.admissions.append(Admission(member, bucket, version, staleness, priority, hard, stats, turns))
            self._decide(member, Event.ADMITTED, None)
        if admitted[0].origin != Origin.COUNTERFACTUAL:  # nobody trains on branches, so they take no place
            self._let_live(admitted, max(buckets), fmean(priorities))

    def _let_live(self, admitted: list[Member], bucket: int, priority: float) -> None:
        state = self.state
        group = state.closed.get(admitted[0].group_id)
        if group and group.is_evicted:
            gone = [(member, eviction.LATE) for member in admitted]
        else:
            state.live.add(admitted, bucket, priority, self._policy)
            gone = state.live.evict(self._capacity, self._curate.max_evicted_share)
        for member, reason in gone:
            self._decide(member, Event.EVICTED, reason)
            if closed := state.closed.get(member.group_id):
                state.closed[member.group_id] = closed._replace(is_evicted=True)

    def _too_old(self, member: Member) -> str | None:
        state = self.state
        if member.min_weight_version >= self._oldest and member.max_weight_version <= state.learner_version:
            return None
        return too_old(
            member, state.learner_version, self._loop.max_staleness, state.min_weight_version, state.directive_id
        )

    def _decide(self, member: Member, event: str, reason: str | None) -> None:
        state = self.state
        self._out.decisions.append((member, event, reason, state.learner_version, state.now_ms, state.directive_id))

    def _count(self) -> None:
        """Bring the totals up to date with the decisions of this call."""
        self.state.tally.count(self._out.decisions[self._counted :])
        self._counted = len(self._out.decisions)


def _no_signal(group: OpenGroup | ClosedGroup, stats: Stats) -> str | None:
    """Why the group teaches nothing, or None. Branches are compared with their parent, so they need not differ."""
    return None if group.origin == Origin.COUNTERFACTUAL else stats.no_signal
