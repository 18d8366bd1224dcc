"""Weight store and lake on S3: a real server, real requests."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from safetensors.numpy import save_file

from infra.lake import Lake
from infra.stack.ports import free_port
from infra.tables import prepare
from infra.tail import Tail
from infra.weights import WeightStore, describe, exclusive_create_works, fingerprint_file
from schemas.errors import LakeError, WeightStoreError
from schemas.messages import Manifest
from schemas.tables import TABLES
from tests.rows import row

BUCKET = "lagoon"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    # a process of its own: delta-rs holds the interpreter lock during some requests
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path_factory.mktemp("moto") / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
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


def _create_bucket(options: dict[str, str], timeout_s: float = 60) -> None:
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


def test_of_two_writers_of_one_version_exactly_one_wins(options: dict[str, str], tmp_path: Path):
    models = [model(tmp_path / str(n), float(n)) for n in range(4)]
    barrier = threading.Barrier(len(models))

    def publish(number: int) -> bool:
        barrier.wait(timeout=30)
        try:
            return WeightStore(f"s3://{BUCKET}/weights-b", options).publish(*models[number])
        except WeightStoreError:
            return False

    with ThreadPoolExecutor(len(models)) as pool:
        assert sorted(pool.map(publish, range(len(models)))) == [False, False, False, True]


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


def test_concurrent_appends_lose_no_row(options: dict[str, str]):
    uri = f"s3://{BUCKET}/lake-c"
    prepare(TABLES["groups"], f"{uri}/groups", options)

    def append(number: int) -> None:
        lake = Lake(uri, options)
        for sequence in range(1, 4):
            lake.append("groups", [row("groups", group_id=f"g{number}-{sequence}")], f"w{number}", sequence)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    assert DeltaTable(f"{uri}/groups", storage_options=options).count() == 12
