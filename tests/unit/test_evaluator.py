"""The evaluator: a row for every version, each result at its own version, a champion, directives."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pyarrow as pa
import pytest

from flows.connectors.items import Raw
from flows.steps.records import to_rows
from inference.earlier import in_lake
from inference.evaluator import Evaluator
from inference.serving import Server
from inference.tokenizer import make_tokenizer
from infra.lake import Lake
from schemas.messages import Directive, EvalResult, Message
from schemas.settings import Settings
from tests.rollout_fakes import FakeEngine, FakeStore

PROBE = (-1.0, -2.0)
TOKENIZER = make_tokenizer(["good"]).to_str()
SETTINGS = Settings.model_validate(
    {
        "families": [{"name": "good", "environment": "tests.unit.test_rollouts:build", "num_tasks": 10}],
        "evaluator": {"samples_per_family": 3, "full_samples_per_family": 6, "full_every": 25},
        "rollout": {"max_tokens": 200},
    }
)


class Store(FakeStore):
    """With a tokenizer in each version."""

    def fetch(self, version: int, into: Path) -> Path:
        folder = super().fetch(version, into)
        (folder / "tokenizer.json").write_text(TOKENIZER)
        return folder


class Board:
    """Keeps what MLflow would."""

    def __init__(self) -> None:
        self.scores: dict[int, float] = {}
        self.aliases: dict[str, int] = {}

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.scores[step] = values["eval/score"]

    def alias(self, name: str, version: int) -> None:
        self.aliases[name] = version


class Meter:
    """Counts tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, tokens: int = 0, episodes: int = 0, failed: int = 0) -> None:
        self.tokens += tokens

    def version(self, version: int) -> None:
        """Not looked at."""


class Setup:
    """An evaluator whose messages are kept."""

    def __init__(self, folder: Path, store: FakeStore, engine: type[FakeEngine] = FakeEngine) -> None:
        self.sent: list[tuple[str, str, Message]] = []
        self.board, self.meter = Board(), Meter()
        server = Server(store, engine, folder, "fp32")
        self.evaluator = Evaluator(SETTINGS, server, self._publish, self.board, self.meter, name="evaluator")
        self.store = store

    def _publish(self, topic: str, key: str, message: Message) -> None:
        self.sent.append((topic, key, message))

    @property
    def results(self) -> list[EvalResult]:
        return [m for _, _, m in self.sent if isinstance(m, EvalResult)]

    async def judge(self) -> EvalResult:
        job = self.evaluator.next_job(self.store.versions())
        assert job is not None
        return await self.evaluator.run(job)


def test_overtaken_versions_get_a_row_that_says_so_and_the_result_stands_at_its_own_version(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store(dict.fromkeys((24, 25, 26), PROBE)))
    setup.evaluator.remember([_earlier(24)])
    result = asyncio.run(setup.judge())
    assert [(r.requested_version, r.kind, r.score) for r in setup.results] == [(25, "skipped", None), (26, "full", 1.0)]
    assert setup.results[0].reason == "passed over: version 26 was there first"
    assert (result.start_version, result.end_version, result.num_scored) == (26, 26, 6)
    assert setup.board.scores == {26: 1.0}
    assert [key for topic, key, _ in setup.sent if topic == "evals"] == ["25", "26"]
    assert setup.evaluator.next_job(setup.store.versions()) is None


def test_a_broken_version_is_skipped_with_its_reason_and_the_next_is_evaluated(tmp_path: Path) -> None:
    store = Store({1: PROBE})
    store.broken.add(1)
    setup = Setup(tmp_path, store)
    skipped = asyncio.run(setup.judge())
    assert (skipped.kind, skipped.score) == ("skipped", None)
    assert "SHA-256 differs" in str(skipped.reason)
    store.published[2] = PROBE
    assert asyncio.run(setup.judge()).score == 1.0
    assert setup.board.scores == {2: 1.0}


def test_a_store_that_is_away_skips_nothing(tmp_path: Path) -> None:
    store = Store({1: PROBE})
    setup = Setup(tmp_path, store)
    job = setup.evaluator.next_job([1])
    assert job is not None
    store.is_down = True
    with pytest.raises(OSError, match="connection refused"):
        asyncio.run(setup.evaluator.run(job))
    store.is_down = False
    assert setup.results == []
    assert asyncio.run(setup.judge()).requested_version == 1


def test_weights_that_the_engine_does_not_serve_are_not_evaluated(tmp_path: Path) -> None:
    class Liar(FakeEngine):
        async def score(self, token_ids: object) -> list[float]:
            return [-9.0, -9.0]

    setup = Setup(tmp_path, Store({1: PROBE}), Liar)
    result = asyncio.run(setup.judge())
    assert (result.kind, result.score) == ("skipped", None)
    assert "not proven" in str(result.reason)


def test_a_mastered_family_is_dealt_less_and_the_directive_says_why(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({1: PROBE}))
    asyncio.run(setup.judge())
    [directive] = [m for _, _, m in setup.sent if isinstance(m, Directive)]
    assert (directive.target, directive.family_weights) == ("dispatch", {"good": 0.25})
    assert directive.reason == "scores of version 1 change the weight of good 0.25"
    assert setup.board.aliases == {"latest": 1, "champion": 1}


def test_an_evaluator_that_starts_anew_remembers_champion_and_orders_and_repeats_nothing(tmp_path: Path) -> None:
    first = Setup(tmp_path, Store({1: PROBE}))
    asyncio.run(first.judge())
    second = Setup(tmp_path, Store({1: PROBE, 2: PROBE}))
    second.evaluator.remember(first.results)
    assert second.evaluator.champion == first.results[0]
    assert second.sent == []
    asyncio.run(second.judge())
    assert [m for _, _, m in second.sent if isinstance(m, Directive)] == []
    assert second.board.aliases == {"latest": 2}  # as good as the champion, no better


def test_results_come_back_from_the_lake_as_they_were_written(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({1: PROBE}))
    asyncio.run(setup.judge())
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    raw = Raw("evals", 0, 0, 0, None, (), setup.results[0].to_bytes())
    [(table, batch)] = to_rows([raw])
    lake.append(table, pa.Table.from_batches([batch]), "records", 1)
    assert in_lake(lake) == setup.results


def _earlier(version: int) -> EvalResult:
    folder = {"kind": "skipped", "requested_version": version, "start_version": version, "end_version": version}
    times = {"started_at": "2026-11-01T00:00:00Z", "finished_at": "2026-11-01T00:00:00Z"}
    counts = {"score": None, "num_scored": 0, "num_unscored": 0}
    return EvalResult.model_validate({"eval_id": "earlier", **folder, **counts, **times})


def test_tokens_are_counted(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({1: PROBE}))
    result = asyncio.run(setup.judge())
    assert result.num_tokens == setup.meter.tokens == 3 * 2 * 2  # 3 episodes of 2 turns of 2 tokens
