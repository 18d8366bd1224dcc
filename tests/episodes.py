"""Episodes of real environments, played by an engine that says what a script says."""

from datetime import UTC, datetime
from typing import Any

from inference.agent import Limits, play
from inference.tokenizer import END, START, ChatTokenizer, make_tokenizer
from inference.tools import Toolbox
from schemas.messages import Task
from schemas.trajectory import Trajectory
from tests.policies import ScriptedEngine

CORPUS = [f"{START}user\ncompute {i}+{i}{END}\n{START}assistant\n{END}\n{START}tool\nerror{END}\n" for i in range(50)]
TOKENIZER = ChatTokenizer(make_tokenizer(CORPUS).to_str())
LIMITS = Limits(
    max_turns=6, max_turn_tokens=500, max_tokens=8000, temperature=1.0, tool_timeout_s=10, episode_timeout_s=120
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def task(environment: str, family: str = "family", index: int = 0, **options: Any) -> Task:
    """A task of a group of eight."""
    return Task(
        group_id="g",
        group_size=8,
        task_id=f"{family}/{index}",
        family=family,
        index=index,
        environment=environment,
        options=options,
        seed=0,
        draw=0,
        dispatched_at=NOW,
        lease_until=NOW,
    )


def line(text: str) -> list[int]:
    """An action that says `text`."""
    return TOKENIZER.encode(text + END)


def engine(*texts: str | Exception, **options: Any) -> ScriptedEngine:
    """Says `texts`, turn by turn, in every episode."""
    return ScriptedEngine([t if isinstance(t, Exception) else line(t) for t in texts], TOKENIZER.end_id, **options)


async def episode(of: Task, engine: ScriptedEngine, index: int = 0, limits: Limits = LIMITS) -> Trajectory:
    """One member of the task's group."""
    return await play(
        of, index, engine=engine, tokenizer=TOKENIZER, toolbox=Toolbox(), limits=limits, producer="rollout-0"
    )
