"""What is served is the newest version that can be proven; what cannot be is named, and the older one stays."""

import asyncio
import json
from pathlib import Path

from inference.engines.base import Engine
from inference.serving import PROOFS, Server, Store
from inference.weights import WeightFollower
from infra.weights import WeightStore
from schemas.settings import Settings
from tests.manifests import flip
from tests.rollout_fakes import FakeEngine, FakeStore
from tests.snapshots import AdaptersLine, Line, fetched

OLD, NEW, NEWER = (-1.0, -2.0), (-1.5, -2.5), (-1.7, -2.7)


class Setup:
    """A follower over a fake store and a fake engine."""

    def __init__(self, folder: Path, store: Store, *, timeout_s: float = 60, max_staleness: int = 3) -> None:
        settings = Settings.model_validate(
            {"weights": {"timeout_s": timeout_s, "poll_s": 0.01}, "loop": {"max_staleness": max_staleness}}
        )
        self.lies: set[int] = set()
        self.server = Server(store, self._make, folder, "fp32")
        self.follower = WeightFollower(settings, store, self.server, retry_s=0)

    def _make(self, folder: Path, version: int) -> Engine:
        self.engine = FakeEngine(folder, version)
        self.engine.lies = self.lies
        return self.engine


def test_a_version_with_a_flipped_byte_is_skipped_and_the_older_one_is_served_until_a_repair(tmp_path: Path) -> None:
    store = FakeStore({42: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        follower = setup.follower
        assert await follower.follow()
        store.published[43] = NEW
        store.broken.add(43)
        assert not await follower.follow()
        assert (follower.serving, setup.engine.weight_version, follower.lag) == (42, 42, 1)
        assert follower.fingerprint == f"{42:064x}"
        assert follower.blocked() == ""
        assert "version 43 skipped: version 43, file model.safetensors: SHA-256 differs" in follower.warning()

        store.published[44] = NEWER  # full: it needs no 43
        assert await follower.follow()
        assert (follower.serving, follower.fingerprint, follower.warning()) == (44, f"{44:064x}", "")

        store.published[45] = NEW
        store.broken.add(45)
        await follower.follow()
        store.broken.clear()
        assert await follower.follow()
        assert (follower.serving, follower.fingerprint) == (45, f"{45:064x}")

    asyncio.run(run())


def test_no_delta_is_served_on_top_of_one_that_failed(tmp_path: Path) -> None:
    # THUDM/slime#2104
    line = Line(tmp_path)
    for version, logprobs in ((42, OLD), (43, NEW), (44, NEWER)):
        line.publish(version, logprobs=str(list(logprobs)))
    assert line.kinds() == "fdd"
    hidden = [line.place(version).parent.rename(tmp_path / f"hidden-{version}") for version in (43, 44)]

    async def run() -> None:
        setup = Setup(tmp_path / "cache", WeightStore(line.store.uri))
        follower = setup.follower
        assert await follower.follow()
        for version, folder in zip((43, 44), hidden, strict=True):
            folder.rename(line.place(version).parent)
        flip(line.place(43))
        for _ in range(3):
            assert not await follower.follow()
        assert (follower.serving, setup.engine.weight_version, follower.lag) == (42, 42, 2)
        assert follower.fingerprint == line.store.manifest(42).fingerprint
        assert await setup.engine.score(()) == list(OLD)
        assert "version 44 skipped: version 43, file model.delta.safetensors" in follower.warning()

        flip(line.place(43))
        assert await follower.follow()  # two deltas in one go: the stamp is the version's, no count of updates
        assert (follower.serving, setup.engine.weight_version, follower.warning()) == (44, 44, "")
        assert follower.fingerprint == line.store.manifest(44).fingerprint
        assert await setup.engine.score(()) == list(NEWER)

    asyncio.run(run())


def test_a_full_version_ends_what_a_broken_delta_began(tmp_path: Path) -> None:
    line = Line(tmp_path)
    for version in (42, 43):
        line.publish(version, logprobs=str(list(OLD)))
    flip(line.place(43))

    async def run() -> None:
        follower = Setup(tmp_path / "cache", line.store).follower
        assert await follower.follow()
        assert follower.serving == 42
        line.publish(44, rows=60, logprobs=str(list(NEW)))
        assert line.kinds() == "fdf"
        assert await follower.follow()
        assert (follower.serving, follower.fingerprint) == (44, line.store.manifest(44).fingerprint)

    asyncio.run(run())


def test_the_base_of_adapters_is_fetched_once_whatever_is_served_since(tmp_path: Path) -> None:
    line = AdaptersLine(tmp_path)

    async def run() -> None:
        follower = Setup(tmp_path / "cache", line.store).follower
        for version in range(1, 5):
            line.publish(version, logprobs=str(list(OLD)))
            size = line.store.manifest(version).num_bytes
            with (
                fetched("full", lambda v=version, n=size: n * (v == 1)),
                fetched("adapters", lambda v=version, n=size: n * (v > 1)),
            ):
                assert await follower.follow()
            assert (follower.serving, follower.fingerprint) == (version, line.store.manifest(version).fingerprint)
        assert {p.name for p in (tmp_path / "cache").glob("v*")} == {"v00000001", "v00000003", "v00000004"}

    asyncio.run(run())


def test_an_engine_that_kept_its_old_weights_is_found_out_by_the_probe(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        follower = setup.follower
        await follower.follow()
        store.published[2] = NEW
        setup.lies.add(2)
        assert not await follower.follow()
        assert (follower.serving, setup.engine.weight_version) == (1, 1)
        assert await setup.engine.score(()) == list(OLD)
        assert "loaded but not proven: of 2 probe logprobs the worst is 0.5 off" in follower.warning()
        setup.lies.clear()
        assert await follower.follow()
        assert follower.serving == 2

    asyncio.run(run())


def test_a_proof_that_the_end_of_a_run_cuts_short_is_not_one_that_failed(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> list[dict[str, object]]:
        setup, scoring = Setup(tmp_path, store), asyncio.Event()
        await setup.server.serve(1)

        class Slow(FakeEngine):
            async def score(self, token_ids: object) -> list[float]:
                scoring.set()
                await asyncio.sleep(60)
                return list(OLD)

        setup.server.engine = Slow(tmp_path / "v00000001", 1)
        serving = asyncio.create_task(setup.server.serve(1))
        await scoring.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return [json.loads(line) for line in (tmp_path / PROOFS).read_text().splitlines()]

    assert [(line["version"], line["exact"]) for line in asyncio.run(run())] == [(1, True)]


def test_the_version_before_comes_back_even_when_the_store_is_away(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        await setup.follower.follow()
        store.published[2] = NEW

        class LastBreath(FakeEngine):
            async def score(self, token_ids: object) -> list[float]:
                store.is_down = True
                return list(OLD)

        setup.server.engine = LastBreath(tmp_path / "v00000001", 1)
        await setup.follower.follow()
        assert (setup.follower.serving, setup.server.loaded) == (1, 1)

    asyncio.run(run())


def test_versions_in_between_are_passed_over(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        await setup.follower.follow()
        store.published |= {2: NEW, 3: NEW, 4: NEWER}
        await setup.follower.follow()
        assert setup.follower.serving == 4
        assert {p.name for p in tmp_path.glob("v*")} == {"v00000001", "v00000004"}

    asyncio.run(run())


def test_beyond_the_staleness_bound_nothing_may_start(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store, max_staleness=3)
        await setup.follower.follow()
        store.published |= dict.fromkeys((2, 3, 4), NEW)
        store.broken |= {2, 3, 4, 5}
        await setup.follower.follow()
        assert setup.follower.blocked() == ""  # 4 - 1 = 3, at the bound
        store.published[5] = NEW
        await setup.follower.follow()
        assert "serving version 1 is 4 behind 5, more than loop.max_staleness 3" in setup.follower.blocked()
        assert "SHA-256 differs" in setup.follower.blocked()
        store.broken.clear()
        await setup.follower.follow()
        assert setup.follower.blocked() == ""

    asyncio.run(run())


def test_without_any_version_nothing_may_start(tmp_path: Path) -> None:
    async def run() -> None:
        follower = Setup(tmp_path, FakeStore({})).follower
        await follower.follow()
        assert follower.blocked() == "no weights are served: no version has been published yet"

    asyncio.run(run())


def test_a_store_that_cannot_be_read_for_too_long_stops_dispatch_with_its_reason(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        setup = Setup(tmp_path, store, timeout_s=1e-9)
        patient = Setup(tmp_path, store, timeout_s=60)
        for each in (setup, patient):
            await each.follower.follow()
        store.is_down = True
        for each in (setup, patient):
            await each.follower.follow()
        assert "no readable manifest for" in setup.follower.blocked()
        assert "the weight store cannot be read: connection refused" in setup.follower.blocked()
        assert patient.follower.blocked() == ""
        assert patient.follower.serving == 1

    asyncio.run(run())


def test_a_task_gets_the_version_that_it_demands_or_an_answer(tmp_path: Path) -> None:
    store = FakeStore({1: OLD})

    async def run() -> None:
        follower = Setup(tmp_path, store).follower
        await follower.follow()
        assert await follower.at_least(1, timeout_s=0)
        assert not await follower.at_least(2, timeout_s=0.02)
        waiting = asyncio.create_task(follower.at_least(2, timeout_s=30))
        store.published[2] = NEW
        await follower.follow()
        assert await waiting

    asyncio.run(run())


def test_an_engine_that_died_is_brought_back_with_what_it_served_and_proven_again(tmp_path: Path) -> None:
    store = FakeStore({1: OLD, 2: NEW})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        follower = setup.follower
        await follower.follow()
        setup.engine.die("killed")
        assert await follower.follow() is False  # nothing newer
        assert (follower.serving, setup.engine.fault, follower.warning()) == (2, "", "")

        setup.engine.die("killed again", starts=False)
        await follower.follow()
        assert follower.blocked() == "no weights are served: version 2 cannot be loaded again: killed again"
        setup.engine.starts = True
        assert await follower.follow()
        assert (follower.serving, follower.blocked()) == (2, "")

    asyncio.run(run())


def test_an_engine_that_does_not_start_is_not_tried_with_every_older_version(tmp_path: Path) -> None:
    store = FakeStore({1: OLD, 2: NEW})

    async def run() -> None:
        setup = Setup(tmp_path, store)
        follower = setup.follower
        store.published[1] = OLD
        await follower.follow()
        setup.engine.die("no room", starts=False)
        await follower.follow()
        loads = setup.engine.num_loads
        await follower.follow()
        assert setup.engine.num_loads == loads + 1

    asyncio.run(run())
