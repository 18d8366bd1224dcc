"""Lines of weight versions that differ a little from one another, for tests."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from prometheus_client import REGISTRY
from safetensors.numpy import save_file

from infra.weight_adapters import merged
from infra.weights import Adapters, WeightStore, describe, fingerprint_file
from schemas.messages import Manifest, Probe
from tests.rollout_fakes import PROBE_TOKENS

AT = datetime(2026, 11, 1, tzinfo=UTC)
ROWS, COLUMNS = 64, 4096
DELTA, ADAPTERS = "model.delta.safetensors", "model.adapters.safetensors"


class Line:
    """Versions of one policy in a store, each a few rows other than the one before: 64 rows of 16 KiB, 1 MiB in all."""

    def __init__(self, root: Path, store: WeightStore | None = None, full_every: int = 10) -> None:
        self.root, self.store = root, store or WeightStore(str(root / "store"), full_every=full_every)
        self.weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
        self.folders: dict[int, Path] = {}

    def make(self, version: int, rows: int = 1, **files: str) -> Manifest:
        """A version in a folder of its own, `rows` of it new; file `logprobs` is also its probe's."""
        folder = self.root / f"made-{version}"
        folder.mkdir(parents=True)
        save_file(self.tensors(version, rows), folder / "model.safetensors")
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

    def tensors(self, version: int, rows: int) -> dict[str, np.ndarray]:
        """Those of a version."""
        rng = np.random.default_rng(version)
        self.weights = self.weights.copy()
        self.weights[rng.permutation(ROWS)[:rows]] = rng.standard_normal((rows, COLUMNS))
        return {"w": self.weights}

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


class AdaptersLine(Line):
    """Versions after the first are adapters of it, of rank `rows`, published as such."""

    def tensors(self, version: int, rows: int) -> dict[str, np.ndarray]:
        if version == 1:
            return {"x.weight": self.weights}
        rng = np.random.default_rng(version)
        down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, COLUMNS), (ROWS, rows)))
        save_file({"x.lora_A": down, "x.lora_B": up, "scale": np.array(0.5, np.float32)}, self.file(version))
        return {"x.weight": merged(self.weights, down, up, 0.5)}

    def file(self, version: int) -> Path:
        """The adapters of a version as they were made."""
        (folder := self.root / f"adapters-{version}").mkdir(exist_ok=True)
        return folder / ADAPTERS

    def publish(self, *versions: int, rows: int = 2, **files: str) -> None:
        for version in versions:
            made = self.make(version, rows, **files)
            adapters = Adapters(self.file(version), self.folders[1], self.store.manifest(1)) if version > 1 else None
            assert self.store.publish(self.folders[version], made, self.folders.get(version - 1), adapters)


@contextmanager
def fetched(kind: str, num_bytes: Callable[[], int]) -> Generator[None]:
    """Inside, just `num_bytes` are fetched of versions of `kind`."""

    def total() -> float:
        return REGISTRY.get_sample_value("lagoon_weight_fetched_bytes_total", {"kind": kind}) or 0.0

    before = total()
    yield
    assert total() - before == num_bytes()
