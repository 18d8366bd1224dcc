"""Hostile checkpoints: a learner goes on from what is whole and unaltered, or stops with the name of the fault.

python -m tests.fuzz.checkpoints [--count 2000] [--seed 1]
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.fuzz.tally import Tally, main
from tests.fuzz.values import as_json, mutated
from trainers.checkpoint import CURSOR, MANIFEST, CheckpointError, Checkpoints, Incarnation, State
from trainers.stream import Cursor

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAME = "step-00000020-v00000002"
Body = dict[str, Any]
OUTSIDE = ("../../secret.pt", "/etc/passwd", "a/../../../secret.pt", "..", "", ".", "deepspeed/../../../secret.pt")


def sound(folder: Path, body: Body, rng: random.Random) -> Body:
    """Nothing is wrong with it."""
    return body


def path_outside(folder: Path, body: Body, rng: random.Random) -> Body:
    """A listed file lies elsewhere."""
    rng.choice(body["files"])["path"] = rng.choice(OUTSIDE)
    return body


def link(folder: Path, body: Body, rng: random.Random) -> Body:
    """A file is a link to one with the right content, outside."""
    path = folder / rng.choice(body["files"])["path"]
    target = folder.parents[1] / "target"
    shutil.move(path, target)
    path.symlink_to(target)
    return body


def wrong_content(folder: Path, body: Body, rng: random.Random) -> Body:
    """A file is cut off, longer, gone, or has one other bit."""
    path = folder / rng.choice(body["files"])["path"]
    content = path.read_bytes()
    place = rng.randrange(len(content))
    changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    path.write_bytes(rng.choice([content[:-1], content + b"x", b"", changed]))
    if rng.random() < 0.2:
        path.unlink()
    return body


def wrong_figures(folder: Path, body: Body, rng: random.Random) -> Body:
    """A declared size or hash is another, enormous, or none."""
    file = rng.choice(body["files"])
    name = rng.choice(["num_bytes", "sha256"])
    file[name] = rng.choice([0, 2**62, 2**70, -1, None, "0" * 64, "x"])
    return body


def other_state(folder: Path, body: Body, rng: random.Random) -> Body:
    """The state is of another step or version than the folder's name, or is none."""
    body["state"][rng.choice(["step", "weight_version"])] = rng.choice([0, 21, 2**63, -1, None, float("nan")])
    return body


def unlisted_cursor(folder: Path, body: Body, rng: random.Random) -> Body:
    """The place in the data is not among the files that are proven, or there is no file at all."""
    others = [file for file in body["files"] if file["path"] != CURSOR]
    return body | {"files": rng.choice([others, []])}


def mutated_manifest(folder: Path, body: Body, rng: random.Random) -> Body:
    """One thing in the manifest is something else."""
    return mutated(rng, body)


CLASSES: dict[str, Callable[[Path, Body, random.Random], Body]] = {
    make.__name__: make
    for make in (sound, path_outside, link, wrong_content, wrong_figures, other_state, unlisted_cursor)
} | {mutated_manifest.__name__: mutated_manifest}


def fuzz(count: int, seed: int) -> Tally:
    """Change `count` checkpoints, a class after the other, and look for the one to go on from."""
    tally, rng, kinds = Tally(), random.Random(seed), list(CLASSES)
    with tempfile.TemporaryDirectory(prefix="lagoon-fuzz-") as name:
        root = Path(name)
        (root / "secret.pt").write_bytes(b"secret")
        sound_root, root = root / "sound", root / "run"
        _write(Checkpoints(sound_root, 2, lambda: NOW))
        for number in range(count):
            kind = kinds[number % len(kinds)]
            tally.sent[kind] += 1
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(sound_root, root)
            manifest = root / NAME / MANIFEST
            body = CLASSES[kind](root / NAME, json.loads(manifest.read_bytes()), rng)
            free = kind == "mutated_manifest"
            manifest.write_bytes(as_json(rng, body) if free else json.dumps(body).encode())
            outcome = _resumed(root)
            tally.note(kind, outcome)
            if outcome not in ({"resumed", "refused"} if free else {"resumed"} if kind == "sound" else {"refused"}):
                tally.faults.append(f"{kind} {number}: {outcome}")
    return tally


def _write(checkpoints: Checkpoints) -> None:
    folder = checkpoints.begin(20, 2)
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "shard.pt").write_bytes(b"weights")
    (folder / "rng-00000.pt").write_bytes(b"random")
    life = Incarnation(name="a", resumed_from_step=0, started_at=NOW)
    state = State(step=20, weight_version=2, incarnations=(life,))
    checkpoints.complete(folder, state, Cursor(experience_version=20, live=(("t", 20, 0),)))


def _resumed(root: Path) -> str:
    """What became of the checkpoint: gone on from, refused by name, or what else was raised."""
    try:
        found, incomplete = Checkpoints(root, 2, lambda: NOW).newest()
    except CheckpointError as error:
        return "refused" if NAME in str(error) else f"refused without its name: {error}"
    except Exception as error:  # whatever it is, it is the fault that is looked for
        return f"{type(error).__name__}: {str(error)[:200]}"
    same = found is not None and found.state.step == 20 and found.cursor.experience_version == 20 and not incomplete
    return "resumed" if same else "resumed as something else"


if __name__ == "__main__":
    sys.exit(main("checkpoints", fuzz, 2000))
