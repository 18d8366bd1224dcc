"""Hostile weight versions into a real store and the real engine: each is refused by name, and nothing else happens.

python -m tests.fuzz.weights [--count 1500] [--seed 1]

A version is served only if it is proven; nothing is written outside the store and the cache, and no code that came
with it runs: whatever of it did would leave a file behind.
"""

import asyncio
import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from inference.engines.llama import Llama
from inference.engines.torch_engine import TorchEngine
from inference.serving import Server
from inference.tokenizer import ChatTokenizer, make_tokenizer
from infra.fingerprints import fingerprint_files
from infra.weight_files import MANIFEST
from infra.weights import WeightStore, describe
from schemas.errors import LagoonError, WeightStoreError
from schemas.messages import Manifest, Probe
from tests.fuzz.tally import Tally, main
from tests.fuzz.values import HOSTILE, as_json, mutated
from tests.policies import write_policy

AT = datetime(2026, 11, 1, tzinfo=UTC)
PROBE = (1, 38, 75, 112)
Body = dict[str, Any]
OUTSIDE = ("../outside.json", "../../outside.json", "/etc/passwd", "a/../../outside.json", "..", ".hidden.json", "")


class Mine:
    """The places of one run: a sound version, the store, the cache, and a place where nothing may change."""

    def __init__(self, root: Path) -> None:
        self.root, self.sound = root, root / "sound"
        self.store, self.cache, self.outside = root / "store", root / "cache", root / "outside"
        self.outside.mkdir()
        (self.outside / "secret.json").write_text("{}")
        write_policy(self.sound, hidden=32, layers=1, mlp=32)
        (self.sound / "tokenizer.json").write_text(make_tokenizer(["1 + 1 = 2"]).to_str())
        (self.sound / "tokenizer_config.json").write_text('{"model_max_length": 512}')
        probe = Probe(token_ids=PROBE, logprobs=tuple(Llama(self.sound).logprobs(list(PROBE))))
        files, print_ = describe(self.sound), fingerprint_files([self.sound / "model.safetensors"])
        self.body: Body = json.loads(
            Manifest(version=1, files=files, fingerprint=print_, probe=probe, created_at=AT).to_bytes()
        )

    @property
    def folder(self) -> Path:
        """The version in the store."""
        return self.store / "v00000001"

    def renew(self) -> Body:
        """A store that holds the sound version, an empty cache; returns a manifest to change."""
        for place in (self.store, self.cache):
            shutil.rmtree(place, ignore_errors=True)
        self.store.mkdir()
        shutil.copytree(self.sound, self.folder)
        return json.loads(json.dumps(self.body))

    def listed(self, body: Body) -> Body:
        """`body` with sizes, hashes and fingerprint of what the version holds now, so that these are no obstacle."""
        plain = [p for p in sorted(self.folder.iterdir()) if p.name != MANIFEST]
        body["files"] = [_entry(path) for path in plain]
        with suppress(WeightStoreError):
            body["fingerprint"] = fingerprint_files(p for p in plain if p.suffix == ".safetensors")
        return body

    def elsewhere(self) -> dict[str, bytes]:
        """All files outside the store and the cache."""
        own = (self.store, self.cache)
        found = (p for p in self.root.rglob("*") if p.is_file() and not any(p.is_relative_to(o) for o in own))
        return {str(path): path.read_bytes() for path in found}


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def sound(mine: Mine, body: Body, rng: random.Random) -> Body:
    """Nothing is wrong with it."""
    return body


def path_outside(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A listed file lies outside the version's folder."""
    (mine.store / "outside.json").write_text("{}")
    body["files"][0]["name"] = rng.choice(OUTSIDE)
    return body


def link(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A file, the manifest or the folder is a link to one with the right content."""
    name = rng.choice([*(f["name"] for f in body["files"]), MANIFEST, ""])
    path, target = mine.folder / name, mine.outside / "target"
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    if name == MANIFEST:
        target.write_text(json.dumps(body))
    else:
        path.rename(target)
    (mine.folder if name == "" else path).symlink_to(target)
    return body if name != MANIFEST else {}


def wrong_hash(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A byte is not what the manifest says."""
    path = mine.folder / rng.choice(body["files"])["name"]
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return body


def wrong_size(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A declared size is smaller, larger, enormous or none."""
    rng.choice(body["files"])["num_bytes"] = rng.choice([0, 1, 2**40, 2**62, 2**70, -1, 1e300, None])
    return body


def pickled(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A pickle lies beside the weights or in place of them, with its right hash."""
    name = rng.choice(["pytorch_model.bin", "model.pt", "model.pkl", "x.safetensors", "model.safetensors", "a.json"])
    (mine.folder / name).write_bytes(pickle.dumps(Bomb(mine.root / "ran")))
    return mine.listed(body)


def code(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A configuration names code that comes along."""
    name = rng.choice(["config.json", "tokenizer_config.json", "generation_config.json"])
    path = mine.folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    key = rng.choice(["auto_map", "trust_remote_code", "custom_pipelines"])
    value = {"AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    path.write_text(json.dumps(rng.choice([config | {key: value}, config | {"text_config": {key: value}}])))
    if rng.random() < 0.5:
        (mine.folder / "evil.py").write_text(f"open({str(mine.root / 'ran')!r}, 'w')")
    return mine.listed(body)


def hostile_header(mine: Mine, body: Body, rng: random.Random) -> Body:
    """The header of the tensors is enormous, nested, overlapping, or not finite."""
    path = mine.folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensors = [name for name in header if name != "__metadata__"]
    how = rng.randrange(5)
    if how == 0:
        path.write_bytes(rng.choice([2**63, 2**40, len(content), 0]).to_bytes(8, "little") + content[8:])
        return mine.listed(body)
    if how == 1:
        header[rng.choice(tensors)]["data_offsets"] = rng.choice([[0, len(data)], [0, 2**62], [-8, 8], [8, 0]])
    if how == 2:
        header[rng.choice(tensors)]["shape"] = rng.choice([[2**40, 2**40], [float("inf")], [float("nan")], ["a"], -1])
    text = json.dumps(header).encode()
    text = b'{"a": ' + b"[" * 200_000 if how == 3 else b'{"a":{}}' if how == 4 else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return mine.listed(body)


def not_finite(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A weight is NaN or infinite, with its right hash; or a logprob of the probe is."""
    if rng.random() < 0.3:
        body["probe"]["logprobs"][rng.randrange(3)] = rng.choice([float("nan"), float("inf")])
        return body
    tensors = load_file(mine.folder / "model.safetensors")
    changed = tensors[rng.choice(sorted(tensors))]
    changed[...] = rng.choice([np.nan, np.inf])
    save_file(tensors, mine.folder / "model.safetensors")
    return mine.listed(body)


def unknown_kind(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A kind that this code does not know, or a delta without its base."""
    return body | {"kind": rng.choice(["patch", "delta", "", None, 1, ["full"]])}


def deep(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A configuration nested deeper than anybody reads."""
    depth = 200_000
    text = rng.choice(['{"a":' * depth + "1" + "}" * depth, "[" * depth])
    (mine.folder / rng.choice(["config.json", "tokenizer_config.json"])).write_text(text)
    return mine.listed(body)


def hostile_config(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A configuration that means another model: sizes that are wrong, enormous, or no numbers."""
    config = json.loads((mine.folder / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    name = rng.choice([*sizes, "head_dim", "num_key_value_heads", "max_position_embeddings"])
    usual = config[name]
    config[name] = rng.choice([value for value in HOSTILE if value not in (None, usual)])
    (mine.folder / "config.json").write_text(json.dumps(config))
    return mine.listed(body)


def mutated_manifest(mine: Mine, body: Body, rng: random.Random) -> Body:
    """One thing in the manifest is something else."""
    return mutated(rng, body)


def replaced_file(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A file is noise, with its right hash."""
    (mine.folder / rng.choice(body["files"])["name"]).write_bytes(rng.randbytes(rng.randrange(1, 5000)))
    return mine.listed(body)


def twice(mine: Mine, body: Body, rng: random.Random) -> Body:
    """A file or a tensor comes twice."""
    if rng.random() < 0.5:
        return body | {"files": [*body["files"], rng.choice(body["files"])]}
    shutil.copy(mine.folder / "model.safetensors", mine.folder / "model-2.safetensors")
    return mine.listed(body)


Make = Callable[[Mine, Body, random.Random], Body]
MAKERS = (sound, path_outside, link, wrong_hash, wrong_size, pickled, code, hostile_header, not_finite, unknown_kind)
CLASSES: dict[str, Make] = {
    make.__name__: make for make in (*MAKERS, deep, hostile_config, mutated_manifest, replaced_file, twice)
}
MAY_SERVE = frozenset({"sound", "hostile_config", "mutated_manifest", "replaced_file", "hostile_header", "not_finite"})
"""Classes whose change may be one that means nothing: a time, an unused field, a header with the same content."""


def fuzz(count: int, seed: int) -> Tally:
    """Put `count` versions into a store, a class after the other, and let an engine serve them."""
    tally, rng, kinds = Tally(), random.Random(seed), list(CLASSES)
    with tempfile.TemporaryDirectory(prefix="lagoon-fuzz-") as name:
        mine = Mine(Path(name))
        for number in range(count):
            kind = kinds[number % len(kinds)]
            tally.sent[kind] += 1
            body = CLASSES[kind](mine, mine.renew(), rng)
            if body and not (mine.folder / MANIFEST).is_symlink():
                text = as_json(rng, body) if kind == "mutated_manifest" else json.dumps(body).encode()
                (mine.folder / MANIFEST).write_bytes(text)
            before = mine.elsewhere()
            outcome = _served(mine)
            tally.note(kind, outcome)
            expected = {"served"} if kind == "sound" else {"refused", "served"} if kind in MAY_SERVE else {"refused"}
            if outcome not in expected:
                tally.faults.append(f"{kind} {number}: {outcome}")
            if mine.elsewhere() != before or (mine.root / "ran").exists():
                tally.faults.append(f"{kind} {number}: something outside the store and the cache has changed")
    return tally


def _served(mine: Mine) -> str:
    """What became of the version: served, refused by name, or what else was raised."""
    server = Server(
        WeightStore(str(mine.store)),
        lambda folder, version: TorchEngine(folder, version, max_sessions=1, max_tokens=64),
        mine.cache,
        "fp32",
    )

    async def serve() -> None:
        try:
            await server.serve(1)
            ChatTokenizer.load(server.current[1])
        finally:
            await server.close()

    try:
        asyncio.run(serve())
    except LagoonError as error:
        return "refused" if str(error) else "refused without a word"
    except Exception as error:  # whatever it is, it is the fault that is looked for
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "served"


def _entry(path: Path) -> Body:
    content = path.read_bytes()
    return {"name": path.name, "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


if __name__ == "__main__":
    sys.exit(main("weights", fuzz, 1500))
