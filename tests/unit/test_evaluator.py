"""The evaluator: a row for every version, each result at its own version, a champion, directives."""

import asyncio
import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from flows.connectors.items import Raw
from flows.steps.records import to_rows
from inference.earlier import in_lake
from inference.engines.base import EngineError, Generation
from inference.engines.vllm.engine import VllmEngine
from inference.eval_plan import Job, Kind
from inference.evaluator import Evaluator, Training
from inference.returning import Returning
from inference.serving import MakeEngine, Server
from inference.tokenizer import make_tokenizer
from infra.lake import Lake
from schemas.errors import SettingsError
from schemas.messages import Directive, EvalResult, Message
from schemas.messages import decode as decode_message
from schemas.settings import Settings, Vllm, load
from schemas.tables import EVALS
from schemas.trajectory import from_batch
from schemas.wire import decode
from tests.rollout_fakes import FakeEngine, FakeProducer, FakeStore

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
        self.full_scores: dict[int, float] = {}
        self.names: set[str] = set()
        self.aliases: dict[str, int] = {}

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.names |= set(values)
        self.scores |= {step: values["eval/score"]} if "eval/score" in values else {}
        self.full_scores |= {step: values["eval_full/score"]} if "eval_full/score" in values else {}

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

    def __init__(
        self,
        folder: Path,
        store: FakeStore,
        light: MakeEngine = FakeEngine,
        full: MakeEngine = FakeEngine,
        settings: Settings = SETTINGS,
        training: Training | None = None,
    ) -> None:
        self.sent: list[tuple[str, str, Message]] = []
        self.board, self.meter = Board(), Meter()
        self._servers: dict[Kind, Server] = {
            "light": Server(store, light, folder / "light", "fp32"),
            "full": Server(store, full, folder / "full", "fp32"),
        }
        self.evaluator = Evaluator(
            settings,
            self._servers,
            self._publish,
            self.board,
            self.meter,
            name="evaluator",
            training=training,
        )
        self.store = store

    def _publish(self, topic: str, key: str, message: Message) -> None:
        self.sent.append((topic, key, message))

    @property
    def results(self) -> list[EvalResult]:
        return [m for _, _, m in self.sent if isinstance(m, EvalResult)]

    async def judge(self) -> EvalResult:
        """The light evaluation that is due."""
        return await self.evaluator.run(self.due()[0])

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    def due(self, *running: Kind) -> list[Job]:
        return self.evaluator.next_jobs(self.store.versions(), running)


def test_overtaken_versions_get_a_row_that_says_so_and_the_result_stands_at_its_own_version(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store(dict.fromkeys((24, 25, 26), PROBE)))
    setup.evaluator.remember([_earlier(24)])
    result = asyncio.run(setup.judge())
    assert [(r.requested_version, r.kind, r.score) for r in setup.results] == [(25, "skipped", None), (26, "light", 1)]
    assert setup.results[0].reason == "passed over: version 26 was there first"
    assert (result.start_version, result.end_version, result.num_scored) == (26, 26, 3)
    assert setup.board.scores == {26: 1.0}
    assert setup.due() == [Job(26, "full")]


def test_a_light_and_a_full_evaluation_of_a_version_overwrite_nothing_of_one_another(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({25: PROBE}))

    async def both() -> None:
        await asyncio.gather(*(setup.evaluator.run(job) for job in setup.due()))

    asyncio.run(both())
    assert {r.kind: (r.end_version, r.num_scored) for r in setup.results} == {"light": (25, 3), "full": (25, 6)}
    assert {r.kind: r.families["good"].by_task for r in setup.results} == {"light": "111", "full": "111111"}
    assert sorted(key for topic, key, _ in setup.sent if topic == "evals") == ["25/full", "25/light"]
    assert (setup.board.scores, setup.board.full_scores) == ({25: 1.0}, {25: 1.0})
    assert setup.due() == []


@pytest.mark.timeout(30)
def test_outcomes_stand_in_the_order_of_the_tasks_whichever_ends_first(tmp_path: Path) -> None:
    class FirstIsLast(FakeEngine):
        begun = 0

        async def generate(self, *args: object, **more: object) -> Generation:  # type: ignore[override]
            self.begun += 1
            if self.begun > 1:
                return await super().generate(*args, **more)  # type: ignore[arg-type]
            while self.begun < 1 + 2 * 2:  # two turns of each of the others
                await asyncio.sleep(0)
            raise EngineError("lost")

    setup = Setup(tmp_path, Store({1: PROBE}), FirstIsLast)
    result = asyncio.run(setup.judge())
    assert (result.families["good"].by_task, result.num_scored) == ("-11", 2)


@pytest.mark.parametrize("hung", ["light", "full"])
def test_an_evaluation_that_hangs_holds_up_none_of_the_other_kind(tmp_path: Path, hung: Kind) -> None:
    class Stuck(FakeEngine):
        async def generate(self, *args: object, **more: object) -> Generation:  # type: ignore[override]
            return await asyncio.Event().wait()  # type: ignore[return-value]

    setup = Setup(tmp_path, Store({25: PROBE}), **{hung: Stuck})  # type: ignore[arg-type]

    async def one_hangs() -> list[EvalResult]:
        jobs = {job.kind: job for job in setup.due()}
        waits = asyncio.create_task(setup.evaluator.run(jobs[hung]))
        results = []
        for version in (25, 50, 75):
            setup.store.published[version] = PROBE
            [job] = [job for job in setup.due(hung)]
            results.append(await setup.evaluator.run(job))
        assert not waits.done()
        waits.cancel()
        return results

    results = asyncio.run(one_hangs())
    assert [(r.end_version, r.score) for r in results] == [(25, 1.0), (50, 1.0), (75, 1.0)]
    assert hung not in {r.kind for r in results}


def test_a_full_evaluation_that_fails_is_a_row_and_due_again_with_the_next_window(tmp_path: Path) -> None:
    store = Store({25: PROBE})
    store.broken.add(25)
    setup = Setup(tmp_path, store)
    result = asyncio.run(setup.evaluator.run(setup.due()[1]))
    assert (result.kind, result.requested_version) == ("skipped", 25)
    assert str(result.reason).startswith("no full evaluation: version 25, file model.safetensors")
    assert setup.due() == [Job(25, "light")]
    store.published[50] = PROBE
    assert setup.due() == [Job(50, "light", passed_over=(25,)), Job(50, "full")]


def test_a_full_evaluation_that_fails_takes_no_light_one_away_in_this_life_and_the_next(tmp_path: Path) -> None:
    store = Store({24: PROBE})
    store.broken.add(26)
    setup = Setup(tmp_path, store)
    [slow] = setup.due()
    store.published |= {25: PROBE, 26: PROBE}
    [fails_at_once] = setup.due("light")
    asyncio.run(setup.evaluator.run(fails_at_once))
    asyncio.run(setup.evaluator.run(slow))
    assert setup.due() == [Job(26, "light", passed_over=(25,))]
    after = Setup(tmp_path, store)
    after.evaluator.remember(setup.results)
    assert after.due() == [Job(26, "light", passed_over=(25,))]


def test_a_vllm_server_that_does_not_come_up_is_the_reason_in_each_row_and_costs_the_other_kind_nothing(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no memory left >&2\nexit 3\n")
    python.chmod(0o755)
    log = tmp_path / "vllm.log"
    engine = partial(VllmEngine, settings=Vllm(python=str(python)), log=log, max_tokens=200, threads=1)
    setup = Setup(tmp_path, Store({}), light=engine)

    async def run() -> None:
        for version in (25, 50):
            setup.store.published[version] = PROBE
            await asyncio.gather(*(setup.evaluator.run(job) for job in setup.due()))

    asyncio.run(run())
    expected = f"not evaluated: the vLLM server ended; {log} says at its end: no memory left"
    rows = {(r.requested_version, r.kind): r.reason for r in setup.results}
    assert rows.pop((25, "skipped")) == expected
    assert str(rows.pop((50, "skipped"))).startswith(expected)  # tried again
    assert rows == {(25, "full"): None, (50, "full"): None}


def test_a_full_result_that_comes_late_stands_at_its_version_and_latest_stays(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({25: PROBE}))
    late = setup.due()[1]
    setup.store.published[26] = PROBE
    asyncio.run(setup.judge())
    asyncio.run(setup.evaluator.run(late))
    assert (setup.board.scores, setup.board.full_scores) == ({26: 1.0}, {25: 1.0})
    assert setup.board.aliases["latest"] == 26


def test_episodes_on_training_tasks_return_with_the_version_that_played_them_and_are_in_no_score(
    tmp_path: Path,
) -> None:
    changes = {"run": {"data_dir": str(tmp_path)}, "loop": {"group_size": 2}}
    evaluator = SETTINGS.evaluator.model_dump() | {"train_groups_per_family": 3}
    settings = Settings.model_validate(SETTINGS.model_dump() | changes | {"evaluator": evaluator})
    producer, totals = FakeProducer(), dict[str, tuple[int, int]]()
    returning = Returning(settings, producer, lambda outbox, *counts: totals.update({outbox: counts}))
    setup = Setup(tmp_path, Store({1: PROBE}), settings=settings, training=returning)
    result = asyncio.run(setup.judge())
    returning.send()
    returning.close()
    found = [t for _, body, _ in producer.sent for t in from_batch(decode(body))]
    assert result.num_scored == 3
    assert {(t.origin, t.min_weight_version) for t in found} == {("eval", 1)}
    assert len({t.group_id for t in found}) == len(producer.sent) == 3
    assert sorted((t.task_id, t.group_index) for t in found) == [
        (f"good/{index}", place) for index in (3, 4, 5) for place in (0, 1)
    ]  # tasks 8 and 9 are held out
    assert [counts[0] for counts in totals.values()] == [6]


def test_evaluations_that_sample_otherwise_than_the_learner_scores_are_not_trained_on() -> None:
    with pytest.raises(SettingsError, match=r"evaluator.temperature 0.5 is not rollout.temperature 1.0"):
        load(overrides=["--evaluator.train_groups_per_family=1", "--evaluator.temperature=0.5"])


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
    [job] = setup.due()
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


def test_results_from_before_outcomes_were_kept_by_task_are_remembered(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({1: PROBE}))
    asyncio.run(setup.judge())
    old = setup.results[0].model_dump(mode="json")
    del old["families"]["good"]["by_task"]
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    row = {**setup.results[0].model_dump(), "families": json.dumps(old["families"])}
    lake.append("evals", pa.Table.from_pylist([row], EVALS.schema), "records", 1)
    [found] = in_lake(lake)
    assert found == decode_message(EvalResult, json.dumps(old).encode())  # as it lies in the topic
    assert (found.families["good"].score, found.families["good"].by_task) == (1.0, "")


def _earlier(version: int) -> EvalResult:
    folder = {"kind": "skipped", "requested_version": version, "start_version": version, "end_version": version}
    times = {"started_at": "2026-11-01T00:00:00Z", "finished_at": "2026-11-01T00:00:00Z"}
    counts = {"score": None, "num_scored": 0, "num_unscored": 0}
    return EvalResult.model_validate({"eval_id": "earlier", **folder, **counts, **times})


def test_tokens_are_counted(tmp_path: Path) -> None:
    setup = Setup(tmp_path, Store({1: PROBE}))
    result = asyncio.run(setup.judge())
    assert result.num_tokens == setup.meter.tokens == 3 * 2 * 2  # 3 episodes of 2 turns of 2 tokens
