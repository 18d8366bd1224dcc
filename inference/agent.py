"""One episode, turn by turn: prompt, action, tool results, ..., answer, reward. Always ends in a trajectory.

The agent's own failures earn a reward of 0; failures of the infrastructure earn none (null). `Ending` says which.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from inference.conversation import Conversation
from inference.endings import Ending, cut, failed, fault, truncated
from inference.engines.base import Engine, Generation, request_seed
from inference.environments.base import Environment, Message, Result, build
from inference.environments.program import Program
from inference.replay import alternative, replay, take
from inference.tokenizer import ChatTokenizer
from inference.tools import Toolbox, within
from inference.transcript import Transcript, recorded, tool_messages
from schemas.errors import ContractError
from schemas.ids import content_hash, trajectory_id
from schemas.messages import Branch, Task
from schemas.names import ErrorKind, Status, StopReason
from schemas.settings import Rollout
from schemas.trajectory import Reward, Trajectory


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an episode, and how it is sampled: fields of `schemas.settings.Rollout`."""

    max_turns: int
    max_turn_tokens: int
    max_tokens: int
    temperature: float
    tool_timeout_s: float
    episode_timeout_s: float

    @classmethod
    def of(cls, rollout: Rollout) -> "Limits":
        """The limits in the settings."""
        return cls(
            rollout.max_turns,
            rollout.max_turn_tokens,
            rollout.max_tokens,
            rollout.temperature,
            rollout.tool_timeout_s,
            rollout.episode_timeout_s,
        )


@dataclass(slots=True)
class Live:
    """An episode that runs: the oldest version that its tokens may be of; None before the first."""

    oldest: int | None = None

    def sampling(self, version: int) -> None:
        """A turn begins with `version`."""
        self.oldest = version if self.oldest is None else min(self.oldest, version)


async def play(
    task: Task,
    group_index: int,
    *,
    engine: Engine,
    tokenizer: ChatTokenizer,
    toolbox: Toolbox,
    limits: Limits,
    producer: str,
    live: Live | None = None,
) -> Trajectory:
    """Play member `group_index` of `task`'s group.

    Raises nothing of its own: whatever breaks becomes a failed trajectory with its prompt and error. Cancelling the
    call ends the episode at once, as a failed trajectory too: `shutdown`, or `stale_in_flight` with the message STALE.
    `live` is kept up to date.
    """
    return await _Episode(task, group_index, engine, tokenizer, toolbox, limits, producer, live or Live()).run()


class _Episode:
    """The state of one episode."""

    def __init__(
        self,
        task: Task,
        index: int,
        engine: Engine,
        tokenizer: ChatTokenizer,
        toolbox: Toolbox,
        limits: Limits,
        producer: str,
        live: Live,
    ):
        self.task, self.index, self.producer = task, index, producer
        self.engine, self.tokenizer, self.toolbox, self.limits = engine, tokenizer, toolbox, limits
        self.id, self.live = trajectory_id(), live
        self.transcript = Transcript()
        self.dispatch_version = engine.weight_version
        self.started_at = datetime.now(UTC)
        self.begun_s = time.perf_counter()
        self.engine_s = 0.0
        self.environment: Environment | None = None
        self.at = ErrorKind.ENVIRONMENT
        """Whose work is being waited for: an exception is theirs."""

    async def run(self) -> Trajectory:
        limit = asyncio.timeout(self.limits.episode_timeout_s)
        try:
            async with limit:
                ending = await self._turns()
        except asyncio.CancelledError as error:
            ending = cut(error)
        except Exception as error:  # environments are other people's code, and every episode leaves a row
            late = limit.expired() and isinstance(error, TimeoutError)
            ending = self._late() if late else failed(self.at, f"{type(error).__name__}: {error}")
        await self._close()
        return self._trajectory(ending)

    async def _turns(self) -> Ending:
        environment = self._begin()
        if isinstance(environment, Program) and self.task.branch:
            raise ContractError(f"{self.task.environment} leads the conversation itself, which cannot be replayed")
        if isinstance(environment, Program):
            return await self._follow(environment)
        for number in range(await self._start(environment), self.limits.max_turns):
            begun_s = time.perf_counter()
            generation, text = await self._act(number)
            if not generation.stopped:
                self._end_turn(generation, (), 0.0, begun_s)
                return self._overlong(generation)
            calls = environment.parse(text)
            results = await self.toolbox.run(environment, calls, self.limits.tool_timeout_s)
            fits = self._observe(environment, results)
            self._end_turn(generation, results, float(environment.turn_reward(text, results)), begun_s)
            if not calls:
                return await self._answer(environment, text)
            if not fits:
                return truncated(StopReason.CONTEXT)
        return truncated(StopReason.MAX_TURNS)

    async def _follow(self, program: Program) -> Ending:
        """Let `program` lead; what it asks the agent becomes the turns."""
        self._reset(program)
        limits = self.limits
        talk = Conversation(
            self.transcript,
            self.tokenizer,
            max_turns=limits.max_turns,
            max_tokens=limits.max_tokens,
            act=self._act,
            aside=self._aside,
        )
        answer, error = "", None
        try:
            answer = await program.converse(talk)
        except Exception as failure:  # judged below: a program may well break when the agent is refused to it
            error = failure
        finally:
            talk.close()
        if talk.fault is not None:
            self.at = ErrorKind.ENGINE
            raise talk.fault
        if talk.refused is not None and self.transcript.turns:
            return truncated(talk.refused)
        self.at = ErrorKind.ENVIRONMENT
        if error is not None and talk.refused is None:
            raise error
        if not self.transcript.turns:
            raise ContractError(f"the program ended without a turn of the agent ({talk.refused or 'it asked nothing'})")
        ending = await self._answer(program, answer)
        asides = (Reward("asides", float(talk.num_asides)),) if talk.num_asides else ()
        return replace(ending, parts=ending.parts + asides)

    def _begin(self) -> Environment:
        task = self.task
        self.environment = build(task.environment, task.family, task.index, task.seed, task.options)
        return self.environment

    def _reset(self, environment: Environment) -> list[Message]:
        return environment.reset(self._seed("environment"))

    def _seed(self, kind: str, *number: int) -> int:
        """The seed of something random. A branch has its parent's, but for the turn that it takes anew.

        So its later turns have the luck that the parent's had, and what differs in the end is that turn's doing (common
        random numbers; the baseline stays independent of the turn's action: Mao et al. 2019, arXiv 1807.02264).
        """
        task, branch = self.task, self.task.branch
        if branch is None or number == (branch.turn,):
            return request_seed(kind, task.group_id, task.attempt, self.index, *number)
        return request_seed(kind, branch.group_id, branch.attempt, branch.group_index, *number)

    async def _start(self, environment: Environment) -> int:
        """Let the agent read its prompt, or a branch what its parent had read; returns the number of its first turn."""
        messages, branch, number = self._reset(environment), self.task.branch, 0
        if branch is None:
            self.transcript.prompt(messages, self.tokenizer.prompt(messages))
        else:
            number = await self._return_to(branch, messages, environment)
        self._check_room()
        return number

    async def _return_to(self, branch: Branch, prompt: list[Message], environment: Environment) -> int:
        """Replay the parent up to the forked turn, which is sampled next, or is an alternative that a tool declares."""
        said, tokenizer, number = self.transcript, self.tokenizer, branch.turn
        said.prompt((), branch.token_ids)  # before the replay, so that a failure keeps it
        run = partial(self.toolbox.run, environment, timeout_s=self.limits.tool_timeout_s)
        said.messages += await replay(branch, prompt, environment, tokenizer, run)
        text = alternative(branch, environment, tokenizer, self.index)
        if text is None or number + 1 >= self.limits.max_turns:
            return number
        messages, read = await take(text, environment, tokenizer, run)
        said.prompt(messages, [*tokenizer.encode(text), tokenizer.end_id, *read])
        return number + 1

    def _check_room(self) -> None:
        if self._room() < 1:
            raise ContractError(
                f"the prompt has {len(self.transcript.token_ids)} tokens; rollout.max_tokens is "
                f"{self.limits.max_tokens}: raise it"
            )

    async def _act(self, number: int, limit: int | None = None) -> tuple[Generation, str]:
        self.at = ErrorKind.ENGINE
        self.live.sampling(self.engine.weight_version)
        generation, text = await self._generate(self.id, self.transcript.token_ids, limit, "action", number)
        self.at = ErrorKind.ENVIRONMENT
        self.transcript.action(generation, text)
        return generation, text

    async def _aside(self, prompt: Sequence[int], number: int, limit: int | None) -> tuple[Generation, str]:
        """Sample after `prompt`, which is no part of the trajectory."""
        session = f"{self.id}/{number}"
        try:
            return await self._generate(session, prompt, limit, "aside", number)
        finally:
            self.engine.release(session)

    async def _generate(
        self, session: str, prompt: Sequence[int], limit: int | None, kind: str, number: int
    ) -> tuple[Generation, str]:
        begun_s, most = time.perf_counter(), self.limits.max_turn_tokens
        try:
            generation = await self.engine.generate(
                session,
                prompt,
                max_new_tokens=min(limit or most, most, self.limits.max_tokens - len(prompt)),
                temperature=self.limits.temperature,
                stop_ids=self.tokenizer.stop_ids,
                seed=self._seed(kind, number),
            )
        finally:
            self.engine_s += time.perf_counter() - begun_s
        said = generation.token_ids[:-1] if generation.stopped else generation.token_ids
        return generation, self.tokenizer.decode(said)

    def _observe(self, environment: Environment, results: tuple[Result, ...]) -> bool:
        """Let the agent read `results`; False when they leave no room to act on them."""
        messages = tool_messages(environment, results)
        token_ids = self.tokenizer.observation(messages) if messages else []
        fits = self._room() > len(token_ids)
        self.transcript.observation(recorded(messages, results), token_ids if fits else ())
        return fits

    async def _answer(self, environment: Environment, text: str) -> Ending:
        self.at = ErrorKind.VERIFIER
        score = await within(environment.score_timeout_s or self.limits.tool_timeout_s, environment.score(text))
        if not math.isfinite(score.reward):
            raise ContractError(f"the verifier gave a reward of {score.reward}")
        parts = tuple(Reward(part.name, float(part.value)) for part in score.parts)
        return Ending(Status.COMPLETED, StopReason.ANSWER, float(score.reward), parts)

    def _end_turn(self, generation: Generation, results: tuple[Result, ...], reward: float, begun_s: float) -> None:
        latency_s = time.perf_counter() - begun_s
        self.transcript.end_turn(len(generation.token_ids), results, reward, latency_s)

    def _room(self) -> int:
        return self.limits.max_tokens - len(self.transcript.token_ids)

    def _overlong(self, generation: Generation) -> Ending:
        full = len(generation.token_ids) < self.limits.max_turn_tokens
        return truncated(StopReason.CONTEXT if full else StopReason.TURN_TOKENS)

    def _late(self) -> Ending:
        """The limit has passed: the fault of a verifier at work, of an engine that took most of it, or the agent's."""
        limit_s = self.limits.episode_timeout_s
        if self.at == ErrorKind.VERIFIER:
            return failed(self.at, f"no score by the end of the episode's {limit_s:g} s", StopReason.EPISODE_TIMEOUT)
        if self.engine_s > limit_s / 2:
            error = f"the engine took {self.engine_s:.1f} of the episode's {limit_s:g} s"
            return failed(ErrorKind.ENGINE, error, StopReason.EPISODE_TIMEOUT)
        return truncated(StopReason.EPISODE_TIMEOUT, ErrorKind.AGENT_TIMEOUT, f"no answer within {limit_s:g} s")

    async def _close(self) -> None:
        self.engine.release(self.id)
        if self.environment is None:
            return
        with suppress(Exception, asyncio.CancelledError):  # the episode is over; its row must not be lost
            await within(self.limits.tool_timeout_s, self.environment.close())

    def _trajectory(self, ending: Ending) -> Trajectory:
        task, said = self.task, self.transcript
        spans = said.spans(self.dispatch_version)
        oldest, newest = said.versions(self.dispatch_version)
        kind, error = fault(ending, said)
        hashed = content_hash(task.task_id, said.token_ids, [(s.start, s.end, s.version) for s in spans])
        return Trajectory(
            trajectory_id=self.id,
            group_id=task.group_id,
            group_index=self.index,
            group_size=task.group_size,
            task_id=task.task_id,
            task_family=task.family,
            environment=task.environment,
            attempt=task.attempt,
            parent_id=task.branch.parent_id if task.branch else None,
            origin=task.origin,
            producer=self.producer,
            content_hash=hashed,
            dispatch_weight_version=self.dispatch_version,
            min_weight_version=oldest,
            max_weight_version=newest,
            weight_version_spans=spans,
            status=ending.status,
            stop_reason=ending.stop_reason,
            error_kind=kind,
            error=error,
            reward=ending.reward,
            rewards=ending.parts,
            token_ids=tuple(said.token_ids),
            action_mask=tuple(said.action_mask),
            behavior_logprobs=tuple(said.behavior_logprobs),
            turns=tuple(said.turns),
            messages=tuple(said.messages),
            num_prompt_tokens=said.num_prompt_tokens,
            num_generated_tokens=said.num_generated_tokens,
            accelerator_s=said.accelerator_s,
            environment_s=time.perf_counter() - self.begun_s - self.engine_s,
            started_at=self.started_at,
            finished_at=datetime.now(UTC),
        )
