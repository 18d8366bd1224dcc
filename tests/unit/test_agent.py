"""The agent loop: every episode ends in one trajectory, with the tokens that were sampled and whose fault it was."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from inference.agent import Limits, play
from inference.engines.base import EngineError
from inference.environments.base import ENVIRONMENTS, Environment, Message, Score, Tool, ToolError
from inference.environments.calls import parse_calls
from inference.tokenizer import END, START, ChatTokenizer, make_tokenizer
from inference.tools import Toolbox
from schemas.messages import Task
from schemas.names import ErrorKind, ResultStatus, Status, StopReason
from schemas.trajectory import Trajectory, WeightVersionSpan, from_batch, to_batch
from tests.policies import ScriptedEngine

CORPUS = [f"{START}user\ncompute {i}+{i}{END}\n{START}assistant\n{END}\n{START}tool\nerror{END}\n" for i in range(50)]
TOKENIZER = ChatTokenizer(make_tokenizer(CORPUS).to_str())
LIMITS = Limits(
    max_turns=6, max_turn_tokens=200, max_tokens=2000, temperature=1.0, tool_timeout_s=10, episode_timeout_s=60
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Desk(Environment):
    """Looks things up, one at a time or many at once, or breaks, as its arguments say; any answer but `no` is right."""

    def __init__(self, options: Mapping[str, str]):
        self.options = options
        self.ran: list[dict] = []
        self.batches: list[int] = []
        self.closed = False
        self.score_timeout_s = 0.2 if "slow_score" in options else 10
        self.tools = {"look": Tool(self._look), "batch": Tool(self._look, run_batch=self._look_many)}
        INSTANCES.append(self)

    def reset(self, seed: int) -> list[Message]:
        if "reset" in self.options:
            raise RuntimeError("no sandbox to be had")
        return [{"role": "user", "content": self.options.get("prompt", "compute")}]

    async def score(self, answer: str) -> Score:
        if "score" in self.options:
            raise RuntimeError("verifier lost")
        if self.options.keys() & {"slow_score", "wait"}:
            await asyncio.Event().wait()
        return Score(float("nan") if answer == "nan" else float(answer != "no"))

    async def close(self) -> None:
        self.closed = True
        raise RuntimeError("a failure to clean up is nobody's reward")

    async def _look(self, arguments: dict) -> str:
        self.ran.append(arguments)
        match arguments.get("do"):
            case "refuse":
                raise ToolError("not today")
            case "break":
                raise OSError("sandbox died")
            case "hang":
                await asyncio.Event().wait()
            case "ignore_cancel":
                while not self.closed:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.01)
            case "meet":
                self.options["barrier"].count += 1
                while self.options["barrier"].count < 2:
                    await asyncio.sleep(0)
        return f"saw {arguments.get('what', 'nothing')}"

    async def _look_many(self, many: Sequence[dict]) -> Sequence[str]:
        self.batches.append(len(many))
        return [f"saw {a['what']}" for a in many]


class Barrier:
    count = 0


INSTANCES: list[Desk] = []


@pytest.fixture(autouse=True)
def desk(monkeypatch: pytest.MonkeyPatch) -> list[Desk]:
    monkeypatch.setitem(ENVIRONMENTS, "desk", "tests.unit.test_agent:build_desk")
    INSTANCES.clear()
    return INSTANCES


def build_desk(family: str, index: int, seed: int, options: Mapping[str, str]) -> Environment:
    return Desk(options)


def _task(environment: str = "desk", **options) -> Task:
    return Task(
        group_id="g",
        group_size=16,
        task_id="desk/0",
        family="add",
        index=0,
        environment=environment,
        options=options,
        seed=0,
        draw=0,
        dispatched_at=NOW,
        lease_until=NOW,
    )


def _line(text: str) -> list[int]:
    return TOKENIZER.encode(text + END)


def _engine(*texts: str | Exception, **options) -> ScriptedEngine:
    script = [t if isinstance(t, Exception) else _line(t) for t in texts]
    return ScriptedEngine(script, TOKENIZER.end_id, **options)


def _play(engine: ScriptedEngine, task: Task | None = None, limits: Limits = LIMITS, index: int = 0) -> Trajectory:
    return asyncio.run(_episode(engine, task, limits, index))


async def _episode(engine, task: Task | None = None, limits: Limits = LIMITS, index: int = 0) -> Trajectory:
    trajectory = await play(
        task or _task(),
        index,
        engine=engine,
        tokenizer=TOKENIZER,
        toolbox=Toolbox(),
        limits=limits,
        producer="rollout-0",
    )
    _check(trajectory)
    return trajectory


def _check(trajectory: Trajectory) -> None:
    """What holds for every episode, however it ended."""
    n = len(trajectory.token_ids)
    assert len(trajectory.action_mask) == len(trajectory.behavior_logprobs) == n
    assert sum(trajectory.action_mask) == trajectory.num_generated_tokens
    assert not any(trajectory.action_mask[: trajectory.num_prompt_tokens])
    assert [s.start for s in trajectory.weight_version_spans] == [0, *(s.end for s in trajectory.weight_version_spans)][
        : len(trajectory.weight_version_spans)
    ]
    assert not n or trajectory.weight_version_spans[-1].end == n
    for turn in trajectory.turns:
        assert all(trajectory.action_mask[turn.action_start : turn.action_end])
        assert not any(trajectory.action_mask[turn.action_end : turn.observation_end])
    assert (trajectory.reward is None) == (trajectory.status == Status.FAILED)
    (row,) = from_batch(to_batch([trajectory]))
    assert row.token_ids == trajectory.token_ids


def _call(do: str = "", tool: str = "look", what: str = "it") -> str:
    return f'<call>{{"name": "{tool}", "arguments": {{"do": "{do}", "what": "{what}"}}}}</call>'


def _statuses(trajectory: Trajectory) -> list[str]:
    return [t.result_status for t in trajectory.turns]


def test_sampled_ids_are_kept_where_the_tokenizer_would_have_chosen_others():
    whole = TOKENIZER.encode("compute")
    pieces = TOKENIZER.encode("comp") + TOKENIZER.encode("ute")
    assert whole != pieces
    assert TOKENIZER.decode(whole) == TOKENIZER.decode(pieces)
    first = [*pieces, *_line(_call())]
    engine = ScriptedEngine([first, _line("42")], TOKENIZER.end_id)
    trajectory = _play(engine)
    prompt = engine.prompts[0]
    assert trajectory.token_ids[len(prompt) : len(prompt) + len(first)] == tuple(first)
    assert engine.prompts[1][: len(prompt) + len(first)] == prompt + first
    assert trajectory.token_ids[: len(engine.prompts[1])] == tuple(engine.prompts[1])


def test_an_episode_is_its_prompt_actions_observations_and_answer():
    trajectory = _play(_engine(_call(what="cat"), "42"))
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == ("completed", "answer", 1.0)
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    record = trajectory.messages[2]
    assert record.pop("latency_s") >= 0
    assert record == {"role": "tool", "name": "look", "content": "saw cat", "status": "ok", "attempts": 1}
    assert TOKENIZER.decode(trajectory.token_ids) == (
        f"{START}user\ncompute{END}\n{START}assistant\n{_call(what='cat')}{END}\n"
        f"{START}tool\nsaw cat{END}\n{START}assistant\n42{END}"
    )
    first, last = trajectory.turns
    assert (first.tool, first.result_status) == ("look", "ok")
    assert first.arguments == '{"name": "look", "arguments": {"do": "", "what": "cat"}}'
    assert first.observation_end == last.action_start
    assert last.observation_end == last.action_end == len(trajectory.token_ids)
    assert {lp for lp, m in zip(trajectory.behavior_logprobs, trajectory.action_mask, strict=True) if m} == {-0.5}


def test_versions_are_those_of_the_tokens_not_of_the_reply():
    line = [5] * 127 + [TOKENIZER.end_id]
    engine = ScriptedEngine([line], TOKENIZER.end_id, versions=[[7] * 57 + [8] * 71], weight_version=7)
    trajectory = _play(engine)
    assert (trajectory.dispatch_weight_version, trajectory.min_weight_version, trajectory.max_weight_version) == (
        7,
        7,
        8,
    )
    start = trajectory.num_prompt_tokens
    assert trajectory.weight_version_spans == (
        WeightVersionSpan(0, start + 57, 7),
        WeightVersionSpan(start + 57, start + 128, 8),
    )


def test_an_observation_belongs_to_the_weights_that_read_it():
    first, last = _line(_call()), _line("42")
    engine = ScriptedEngine([first, last], TOKENIZER.end_id, versions=[[3] * len(first), [5] * len(last)])
    trajectory = _play(engine)
    end = trajectory.turns[0].action_end
    assert trajectory.weight_version_spans == (
        WeightVersionSpan(0, end, 3),
        WeightVersionSpan(end, len(trajectory.token_ids), 5),
    )


BAD_CALLS = [
    '<call>{"name": "look", "arguments": {"what"</call>',
    '<call>{"name": "look", "arguments": {"what": "i',
    "<call>null</call>",
    "<call>[1]</call>",
    '<call>{"name": "look", "arguments": null}</call>',
    '<call>{"name": "look", "arguments": [1]}</call>',
    '<call>{"arguments": {}}</call>',
    "so the call is done</call>",
    "<call>" + "[" * 100_000 + "</call>",
]


@pytest.mark.parametrize("bad", BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_a_malformed_call_is_an_observation_and_runs_no_tool(bad, desk):
    limits = replace(LIMITS, max_tokens=300_000, max_turn_tokens=200_000)
    trajectory = _play(_engine(bad, _call(), "42"), limits=limits)
    assert _statuses(trajectory) == ["malformed", "ok", "none"]
    assert (trajectory.status, trajectory.reward, trajectory.error_kind) == ("completed", 1.0, None)
    assert desk[0].ran == [{"do": "", "what": "it"}]
    assert trajectory.messages[2]["content"].startswith("error: malformed call")
    assert len(trajectory.messages[2]["content"]) < 300
    assert len(trajectory.turns[0].arguments or "") <= 512


def test_sixteen_episodes_with_four_cut_off_calls_are_sixteen_rows(desk):
    async def group() -> list[Trajectory]:
        engines = [_engine(BAD_CALLS[1], "no") if i < 4 else _engine(_call(), "42") for i in range(16)]
        return await asyncio.gather(*(_episode(e, index=i) for i, e in enumerate(engines)))

    rows = asyncio.run(group())
    assert [r.group_index for r in rows] == list(range(16))
    assert [r.reward for r in rows] == [0.0] * 4 + [1.0] * 12
    assert [r.error_kind for r in rows] == [ErrorKind.MALFORMED_CALL] * 4 + [None] * 12
    assert {} not in [arguments for d in desk for arguments in d.ran]


def test_a_refused_call_may_be_tried_again():
    trajectory = _play(_engine(_call("refuse"), _call(), "42"))
    assert _statuses(trajectory) == ["error", "ok", "none"]
    assert trajectory.messages[2]["content"] == "error: not today"
    assert (trajectory.reward, trajectory.error_kind) == (1.0, None)


def test_an_unsuccessful_episode_names_the_call_that_went_wrong_first():
    trajectory = _play(_engine(_call("refuse"), "<call>null</call>", "no"))
    assert (trajectory.status, trajectory.reward) == ("completed", 0.0)
    assert (trajectory.error_kind, trajectory.error) == (ErrorKind.TOOL_ERROR, "error: not today")


def test_an_unknown_tool_is_an_error_that_names_the_known_ones():
    trajectory = _play(_engine(_call(tool="sing"), "42"))
    assert _statuses(trajectory) == ["error", "none"]
    assert trajectory.messages[2]["content"] == "error: no tool 'sing'; there is batch, look"


@pytest.mark.parametrize("do", ["hang", "ignore_cancel"])
def test_a_tool_that_hangs_is_a_timeout_observation(do):
    limits = replace(LIMITS, tool_timeout_s=0.05)
    trajectory = _play(_engine(_call(do), "42"), limits=limits)
    assert _statuses(trajectory) == ["timeout", "none"]
    assert "did not answer within 0.05 s" in trajectory.messages[2]["content"]


def test_independent_calls_of_a_turn_run_at_once():
    task = _task()
    task = task.model_copy(update={"options": {"barrier": Barrier()}})  # each call waits for the other
    trajectory = _play(_engine(_call("meet", what="a") + _call("meet", what="b"), "42"), task)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["saw a", "saw b"]
    assert trajectory.turns[0].tool == "look,look"


def test_batchable_calls_of_a_turn_go_together_and_keep_their_order(desk):
    line = _call(tool="batch", what="a") + _call(what="b") + _call(tool="batch", what="c") + "<call>null</call>"
    trajectory = _play(_engine(line, "42"))
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"][:3] == ["saw a", "saw b", "saw c"]
    assert (desk[0].batches, trajectory.turns[0].result_status) == ([2], "malformed")


def test_a_broken_environment_leaves_a_row_without_a_reward():
    trajectory = _play(_engine(_call("break"), "42"))
    assert (trajectory.status, trajectory.error_kind, trajectory.reward) == ("failed", ErrorKind.ENVIRONMENT, None)
    assert trajectory.error == "OSError: sandbox died"
    assert trajectory.num_prompt_tokens > 0
    assert trajectory.num_generated_tokens == len(_line(_call("break")))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"reset": 1}, ErrorKind.ENVIRONMENT, "no sandbox to be had"),
        ({"score": 1}, ErrorKind.VERIFIER, "verifier lost"),
        ({"slow_score": 1}, ErrorKind.VERIFIER, "not done after 0.2 s"),
        ({"prompt": "1" * 3000}, ErrorKind.ENVIRONMENT, "rollout.max_tokens is 2000"),
    ],
)
def test_failures_of_the_infrastructure_are_told_apart(options, kind, words):
    trajectory = _play(_engine("42"), _task(**options))
    assert (trajectory.status, trajectory.error_kind, trajectory.reward) == ("failed", kind, None)
    assert words in (trajectory.error or "")


def test_a_reward_that_is_no_number_is_the_verifiers_failure():
    assert _play(_engine("nan")).error_kind == ErrorKind.VERIFIER


def test_an_environment_that_does_not_exist_is_a_failed_row():
    trajectory = _play(_engine("42"), _task("nowhere"))
    assert (trajectory.error_kind, trajectory.token_ids) == (ErrorKind.ENVIRONMENT, ())
    assert trajectory.weight_version_spans == ()


def test_a_lost_engine_is_a_failed_row_with_the_turns_so_far():
    trajectory = _play(_engine(_call(), EngineError("connection refused")))
    assert (trajectory.status, trajectory.error_kind, trajectory.reward) == ("failed", ErrorKind.ENGINE, None)
    assert _statuses(trajectory) == ["ok"]


def test_an_agent_that_uses_up_its_time_gets_zero():
    limits = replace(LIMITS, episode_timeout_s=1)
    trajectory = _play(_engine(_call("hang")), limits=limits)
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.EPISODE_TIMEOUT)
    assert (trajectory.error_kind, trajectory.reward) == (ErrorKind.AGENT_TIMEOUT, 0.0)


def test_an_engine_that_never_answers_is_not_the_agents_fault():
    trajectory = _play(_engine("42", hangs=True), limits=replace(LIMITS, episode_timeout_s=1))
    assert (trajectory.status, trajectory.stop_reason) == (Status.FAILED, StopReason.EPISODE_TIMEOUT)
    assert (trajectory.error_kind, trajectory.reward) == (ErrorKind.ENGINE, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"max_turns": 2}, StopReason.MAX_TURNS), ({"max_tokens": 0}, StopReason.CONTEXT)],
)
def test_limits_truncate_with_a_reward_of_zero(changes, reason):
    prompt = len(TOKENIZER.prompt([{"role": "user", "content": "compute"}]))
    if "max_tokens" in changes:  # room for the first call, none for what it returns
        changes = {"max_tokens": prompt + len(_line(_call())) + 3}
    trajectory = _play(_engine(_call(), _call(), _call()), limits=replace(LIMITS, **changes))
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == (Status.TRUNCATED, reason, 0.0)
    assert len(trajectory.token_ids) <= changes.get("max_tokens", 2000)


def test_a_turn_without_an_end_truncates_the_episode():
    engine = ScriptedEngine([[5] * 24], TOKENIZER.end_id)
    trajectory = _play(engine, limits=replace(LIMITS, max_turn_tokens=24))
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.TURN_TOKENS)
    assert (trajectory.reward, trajectory.num_generated_tokens) == (0.0, 24)
    assert _statuses(trajectory) == ["none"]


def test_an_answer_that_waits_for_its_score_beyond_the_episodes_limit_is_the_verifiers_failure(desk):
    """A queue of gradings must not turn right answers into zeros."""
    row = asyncio.run(_episode(_engine("42"), _task(wait=1), replace(LIMITS, episode_timeout_s=1)))
    assert (row.status, row.stop_reason, row.error_kind) == ("failed", "episode_timeout", "verifier")
    assert row.reward is None


def test_cancelling_ends_the_episode_as_a_row():
    async def run() -> Trajectory:
        engine = _engine(_call(), "42")
        episode = asyncio.ensure_future(_episode(engine, _task(wait=1)))
        while len(engine.prompts) < 2:
            await asyncio.sleep(0)
        episode.cancel()
        return await asyncio.wait_for(episode, 5)

    trajectory = asyncio.run(run())
    assert (trajectory.status, trajectory.stop_reason, trajectory.error_kind) == ("failed", "shutdown", "shutdown")
    assert trajectory.messages[0]["content"] == "compute"


def test_stuck_episodes_hold_their_places_no_longer_than_their_limit(desk):
    async def slots() -> list[Trajectory]:
        stuck, short = _call("hang"), replace(LIMITS, tool_timeout_s=0.3, episode_timeout_s=1)
        lines = [([stuck] * 6, short)] * 11 + [([_call("break")], LIMITS)] + [([_call(), "42"], LIMITS)] * 20
        return await asyncio.gather(*(_episode(_engine(*said), None, limits) for said, limits in lines))

    rows = asyncio.run(asyncio.wait_for(slots(), 30))
    stuck, broken, fine = rows[:11], rows[11], rows[12:]
    assert {(r.status, r.error_kind, r.reward) for r in stuck} == {("truncated", "agent_timeout", 0.0)}
    assert (broken.status, broken.error_kind) == ("failed", "environment")
    assert {r.status for r in fine} == {"completed"}
    assert all(r.messages[0]["content"] == "compute" for r in rows)
    assert all(d.closed for d in desk)


def test_every_session_is_released_however_it_ended():
    for engine in (_engine("42"), _engine(_call("break")), _engine(EngineError("gone"))):
        trajectory = _play(engine)
        assert engine.released == [trajectory.trajectory_id]


def test_siblings_differ_in_their_seeds_and_a_retry_in_its_too():
    seeds = []

    class Noting(ScriptedEngine):
        async def generate(self, session, token_ids, **options):
            seeds.append(options["seed"])
            return await super().generate(session, token_ids, **options)

    for index, attempt in [(0, 1), (1, 1), (0, 2), (0, 1)]:
        task = _task().model_copy(update={"attempt": attempt})
        _play(Noting([_line("42")], TOKENIZER.end_id), task, index=index)
    assert len(set(seeds[:3])) == 3
    assert seeds[3] == seeds[0]


def test_json_calls_are_read_with_free_text_around_them():
    calls = parse_calls(f"I will look.\n{_call(what='a')} and {_call(what='b')}")
    assert [c.arguments["what"] for c in calls] == ["a", "b"]  # pyright: ignore
    assert parse_calls("no call at all") == []


def test_result_statuses_are_words_of_the_contract():
    assert set(_statuses(_play(_engine(_call(), "42")))) <= set(ResultStatus)
