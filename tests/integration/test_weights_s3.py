"""Weight store and lake on S3: a real server, real requests."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from safetensors.numpy import save_file

from flows.connectors.delta_sink import DeltaSink
from flows.connectors.items import Tick
from flows.steps.decode import decode
from infra import sql
from infra.claims import Claims
from infra.cli import doctor
from infra.lake import Lake
from infra.stack.ports import free_port
from infra.tables import prepare
from infra.tail import Tail
from infra.weights import WeightStore, describe, exclusive_create_works, fingerprint_file
from schemas.errors import LakeError, WeightStoreError
from schemas.messages import Manifest
from schemas.names import Header
from schemas.settings import Settings
from schemas.tables import TABLES
from schemas.wire import decode as wire_decode
from schemas.wire import pack
from tests.rows import row
from tests.samples import group, message
from tests.snapshots import Line, fetched

BUCKET = "lagoon"
WRITERS = 8


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    port = free_port()
    with serving(["moto.server", "-H", "127.0.0.1", "-p", str(port)], port, tmp_path_factory.mktemp("moto")) as found:
        yield found


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A store that takes every create, also of what is there."""
    port = free_port()
    with serving(["tests.careless_s3", str(port)], port, tmp_path) as found:
        yield found


@contextmanager
def serving(module: list[str], port: int, folder: Path) -> Iterator[dict[str, str]]:
    # a process of its own: delta-rs holds the interpreter lock during some requests
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", *module], stdout=log, stderr=log)
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    try:
        _create_bucket(options)
        yield options
    finally:
        server.kill()
        server.wait(10)


def _create_bucket(options: dict[str, str], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urlopen(Request(f"{options['AWS_ENDPOINT_URL']}/{BUCKET}", method="PUT"), timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def model(folder: Path, value: float) -> tuple[Path, Manifest]:
    folder.mkdir()
    save_file({"w": np.full((64, 64), value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    print_ = fingerprint_file(folder / "model.safetensors")
    return folder, Manifest(
        version=1, files=describe(folder), fingerprint=print_, created_at=datetime(2026, 11, 1, tzinfo=UTC)
    )


def test_a_version_is_published_listed_and_fetched(options: dict[str, str], tmp_path: Path):
    store = WeightStore(f"s3://{BUCKET}/weights-a", options)
    folder, manifest = model(tmp_path / "model", 1.0)
    assert (store.versions(), store.latest()) == ([], 0)
    assert store.publish(folder, manifest) is True
    assert store.publish(folder, manifest) is False
    assert (store.versions(), store.latest()) == ([1], 1)
    fetched = store.fetch(1, tmp_path / "cache")
    assert fingerprint_file(fetched / "model.safetensors") == manifest.fingerprint


def test_a_delta_on_s3_is_fetched_with_its_base_and_a_broken_download_goes_on(options: dict[str, str], tmp_path: Path):
    line = Line(tmp_path, WeightStore(f"s3://{BUCKET}/weights-d", options))
    line.publish(1, 2, 3)
    assert line.kinds() == "fdd"
    weights = line.folders[1] / "model.safetensors"
    part = tmp_path / "cache" / ".v00000003.part" / "v00000001" / weights.name
    part.parent.mkdir(parents=True)
    part.write_bytes(weights.read_bytes()[:1_000_000])
    with fetched("full", lambda: line.store.manifest(1).num_bytes - 1_000_000):
        assert line.is_exact(3, line.store.fetch(3, tmp_path / "cache"))
    with fetched("full", lambda: 0), fetched("delta", lambda: line.store.manifest(4).num_bytes):
        line.publish(4)
        assert line.is_exact(4, line.store.fetch(4, tmp_path / "cache"))


def test_a_claim_lies_beside_the_lake_on_s3_and_is_verified(options: dict[str, str]) -> None:
    settings = Settings.model_validate({"lake": {"uri": f"s3://{BUCKET}/lake-c"}})
    assert settings.claims_uri == f"s3://{BUCKET}/lake-c/_lagoon/claims"
    claims = Claims(settings.claims_uri, options)
    body, headers = pack(group("a", [0.0, 1.0]))
    claim = claims.put(body)
    assert claims.put(body) == claim
    raw = dataclasses.replace(
        message(group("a", [0.0, 1.0]), 0), value=claim.to_bytes(), headers=(*headers.items(), *claim.header.items())
    )
    shard = int(headers[Header.SHARD])
    read = decode(shard, [raw], {}, claims.body)
    assert read.rows == wire_decode(body)
    assert read.dead_letters == ()
    claims.store.put(claim.sha256, body[:-1] + b"!")
    [letter] = decode(shard, [raw], {}, claims.body).dead_letters
    assert "its SHA-256 differs" in letter["error"][0].as_py()
    assert claims.remove(claim.sha256, datetime(2100, 1, 1, tzinfo=UTC)) == len(body)
    [letter] = decode(shard, [raw], {}, claims.body).dead_letters
    assert (letter["num_rows"][0].as_py(), letter["num_tokens"][0].as_py()) == (2, 12)
    assert "is missing" in letter["error"][0].as_py()


def test_of_two_writers_of_one_version_exactly_one_wins(options: dict[str, str], tmp_path: Path):
    models = [model(tmp_path / str(n), float(n)) for n in range(WRITERS)]
    barrier = threading.Barrier(len(models))

    def publish(number: int) -> bool:
        barrier.wait(timeout=30)
        try:
            return WeightStore(f"s3://{BUCKET}/weights-b", options).publish(*models[number])
        except WeightStoreError:
            return False

    with ThreadPoolExecutor(len(models)) as pool:
        wins = list(pool.map(publish, range(WRITERS)))
    assert sum(wins) == 1
    assert WeightStore(f"s3://{BUCKET}/weights-b", options).manifest(1) == models[wins.index(True)][1]


def test_exclusive_creates_are_seen_to_work(options: dict[str, str]):
    assert exclusive_create_works(f"s3://{BUCKET}/check", options) is True


def test_an_unreachable_store_is_a_weight_store_error(options: dict[str, str]):
    unreachable = options | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "TIMEOUT": "1s", "CONNECT_TIMEOUT": "1s"}
    with pytest.raises(WeightStoreError, match="cannot be reached"):
        WeightStore(f"s3://{BUCKET}/weights", unreachable).latest()


def test_the_lake_appends_once_and_is_tailed(options: dict[str, str]):
    lake = Lake(f"s3://{BUCKET}/lake-a", options)
    prepare(TABLES["experience"], lake.table_uri("experience"), options)
    rows = [row("experience", trajectory_id=f"t{i}", version_bucket=i % 2, token_ids=[i]) for i in range(4)]
    assert lake.append("experience", rows, "a", 1) == 1
    assert lake.append("experience", rows, "a", 1) is None
    tail = Tail(lake, "experience")
    [(version, found)] = tail.poll()
    assert version == 1
    assert sorted(found["trajectory_id"].to_pylist()) == ["t0", "t1", "t2", "t3"]
    assert tail.poll() == []
    assert lake.app_ids("experience", "") == ["a"]


def test_a_staged_object_that_is_gone_is_refused(options: dict[str, str]):
    lake = Lake(f"s3://{BUCKET}/lake-b", options)
    prepare(TABLES["groups"], lake.table_uri("groups"), options)
    adds = lake.stage("groups", pa.Table.from_pylist([row("groups")], TABLES["groups"].delta_schema))
    lake.store("groups").delete(adds[0]["path"])
    with pytest.raises(LakeError, match="removed or altered"):
        lake.commit("groups", adds, "a", 1)


def test_of_eight_writers_that_stage_and_commit_each_commit_counts_once(options: dict[str, str]):
    uri, sequences = f"s3://{BUCKET}/lake-c", (1, 2)
    prepare(TABLES["groups"], f"{uri}/groups", options)

    def write(number: int) -> list[int | None]:
        lake = Lake(uri, options)
        versions: list[int | None] = []
        for sequence in sequences:
            rows = pa.Table.from_pylist([row("groups", group_id=f"g{number}-{sequence}")], TABLES["groups"].schema)
            adds = lake.stage("groups", rows)
            versions += [lake.commit("groups", adds, f"w{number}", sequence) for _ in range(2)]  # the reply was lost
        return versions

    with ThreadPoolExecutor(WRITERS) as pool:
        written = list(pool.map(write, range(WRITERS)))
    assert all(versions[1::2] == [None, None] for versions in written)
    assert sorted(v for versions in written for v in versions if v is not None) == list(range(1, 17))
    lake, expected = Lake(uri, options), {f"g{n}-{s}" for n in range(WRITERS) for s in sequences}
    tailed = Tail(lake, "groups").poll()
    assert [version for version, _ in tailed] == list(range(1, 17))
    assert sorted(g for _, rows in tailed for g in rows["group_id"].to_pylist()) == sorted(expected)
    assert lake.app_ids("groups", "w") == [f"w{n}" for n in range(WRITERS)]
    query = "select count(*), count(distinct group_id) from groups"
    assert sql.connect(lake).execute(query).fetchone() == (16, 16)


def test_a_sink_restored_from_its_state_finishes_its_commit_once(options: dict[str, str]):
    lake = Lake(f"s3://{BUCKET}/lake-d", options)
    prepare(TABLES["groups"], lake.table_uri("groups"), options)
    sink = DeltaSink(lake, "groups", "flow", 1)
    part = sink.build_part("flow.write", "p000", None)
    rows = pa.RecordBatch.from_pylist([row("groups", group_id="g1")], TABLES["groups"].schema)
    part.write_batch([Tick(), rows])
    state = part.snapshot()
    assert lake.version("groups") == 0
    part.write_batch([Tick()])
    assert lake.version("groups") == 1
    sink.build_part("flow.write", "p000", state)
    assert lake.version("groups") == 1
    assert DeltaTable(lake.table_uri("groups"), storage_options=options).count() == 1


@pytest.fixture
def keys_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


def stored(options: dict[str, str]) -> Settings:
    """Settings with lake, claims and weights in the store; its keys come from the environment."""
    public = {key: value for key, value in options.items() if "KEY" not in key}
    section = {"uri": f"s3://{BUCKET}/run", "storage_options": public}
    claims = {"claims_uri": f"s3://{BUCKET}/claims"}
    return Settings.model_validate({"lake": section | claims, "weights": section})


@pytest.mark.usefixtures("keys_from_environment")
def test_the_doctor_accepts_a_store_with_conditional_creates(options: dict[str, str]):
    settings = stored(options)
    Lake.of(settings).ensure()
    for check in (doctor.lake, doctor.claims, doctor.weight_store):
        assert doctor.examine(check, settings).mend == ""


@pytest.mark.usefixtures("keys_from_environment")
def test_the_doctor_refuses_a_store_that_ignores_conditional_creates(careless: dict[str, str]):
    settings = stored(careless)
    Lake.of(settings).ensure()
    for check in (doctor.lake, doctor.claims, doctor.weight_store):
        assert "conditional creates" in doctor.examine(check, settings).mend
