"""Lines of weight versions that differ a little from one another, for tests."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from prometheus_client import REGISTRY
from safetensors.numpy import save_file

from infra.weights import WeightStore, describe, fingerprint_file
from schemas.messages import Manifest, Probe
from tests.rollout_fakes import PROBE_TOKENS

AT = datetime(2026, 11, 1, tzinfo=UTC)
ROWS, COLUMNS = 64, 4096
DELTA = "model.delta.safetensors"


class Line:
    """Versions of one policy in a store, each a few rows other than the one before: 64 rows of 16 KiB, 1 MiB in all."""

    def __init__(self, root: Path, store: WeightStore | None = None, full_every: int = 10) -> None:
        self.root, self.store = root, store or WeightStore(str(root / "store"), full_every=full_every)
        self.weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
        self.folders: dict[int, Path] = {}

    def make(self, version: int, rows: int = 1, **files: str) -> Manifest:
        """A version in a folder of its own, `rows` of it new; file `logprobs` is also its probe's."""
        rng, folder = np.random.default_rng(version), self.root / f"made-{version}"
        self.weights = self.weights.copy()
        self.weights[rng.permutation(ROWS)[:rows]] = rng.standard_normal((rows, COLUMNS))
        folder.mkdir(parents=True)
        save_file({"w": self.weights}, folder / "model.safetensors")
        for name, text in ({"config": "{}", "tokenizer": '{"a": 0}'} | files).items():
            (folder / f"{name}.json").write_text(text)
        self.folders[version] = folder
        return Manifest(
            version=version,
            parent=version - 1 or None,
            files=describe(folder),
            fingerprint=fingerprint_file(folder / "model.safetensors"),
            probe=Probe(token_ids=PROBE_TOKENS, logprobs=json.loads(files["logprobs"]))
            if "logprobs" in files
            else None,
            created_at=AT,
        )

    def publish(self, *versions: int, rows: int = 1, **files: str) -> None:
        """Versions on those before, as a delta where the store finds that right."""
        for version in versions:
            made = self.make(version, rows, **files)
            assert self.store.publish(self.folders[version], made, self.folders.get(version - 1))

    def kinds(self) -> str:
        return "".join(self.store.manifest(version).kind[0] for version in self.store.versions())

    def place(self, version: int, name: str = DELTA) -> Path:
        """A file in the store."""
        return self.root / "store" / f"v{version:08d}" / name

    def is_exact(self, version: int, folder: Path) -> bool:
        """Whether `folder` is the version as it was made, all files byte for byte and none beside them."""
        made = {p.name: p.read_bytes() for p in self.folders[version].iterdir()}
        return made == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "MANIFEST.json"}


@contextmanager
def fetched(kind: str, num_bytes: Callable[[], int]) -> Generator[None]:
    """Inside, just `num_bytes` are fetched of versions of `kind`."""

    def total() -> float:
        return REGISTRY.get_sample_value("lagoon_weight_fetched_bytes_total", {"kind": kind}) or 0.0

    before = total()
    yield
    assert total() - before == num_bytes()
