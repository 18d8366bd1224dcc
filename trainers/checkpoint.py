"""Checkpoints: all that a learner needs to go on, made whole by a manifest that is written last.

<root>/step-00000020-v00000003/    deepspeed/ (DeepSpeed), rng-*.pt, policy/ (Hugging Face folder), cursor.json, and
                                   model.adapters.safetensors, where adapters are trained
<root>/step-00000020-v00000003/MANIFEST.json    state, and size and SHA-256 of every other file: written last

A learner that lost its lease may wake up and finish a checkpoint. So one that takes over from a learner not proven
dead first writes down which checkpoint it goes on from (`from-00000007`, by the fence of its lease), and adds the fence
to the names of its own (`step-...-f00000007`). What an earlier fence made beyond that checkpoint does not count.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field, ValidationError

from infra import disk
from schemas.errors import LagoonError, SettingsError
from schemas.messages import Count, M, Manifest, Message
from schemas.settings import Learner
from trainers.credit import ProcessScale
from trainers.stream import Cursor

MANIFEST = "MANIFEST.json"
CURSOR = "cursor.json"
POLICY = "policy"
ADAPTERS = "model.adapters.safetensors"


class CheckpointError(LagoonError):
    """A checkpoint that is altered or cut off: going on from it would lose or repeat training data."""


class Incarnation(Message):
    """One life of a learner, from its start or resume to its end."""

    name: str
    resumed_from_step: Count
    started_at: datetime


class Stored(Message):
    """A file of a checkpoint, by its path inside: relative, and without `..`."""

    path: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$", max_length=512)
    num_bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class State(Message):
    """What a learner is at a step. `publication` is the weight version that this checkpoint makes visible, if any."""

    step: Count = 0
    weight_version: Count = 0
    published_step: Count = 0
    incarnations: tuple[Incarnation, ...] = ()
    mlflow_run: str | None = None
    world_size: int = Field(default=1, ge=1)
    kl_coefficient: float | None = None
    publication: Manifest | None = None
    value_head: bool = False
    lora: str = ""
    zero_stage: int = Field(default=0, ge=0, le=3)
    process_scale: ProcessScale = ProcessScale()


def check_stage(zero_stage: int, learner: Learner, checkpoint: str) -> None:
    """Refuse a checkpoint whose weights and moments are cut in a way that `learner.zero_stage` cannot take up.

    Raises:
        SettingsError: one of the two stages is 3, and the other is not.
    """
    if (zero_stage == 3) != (learner.zero_stage == 3):
        raise SettingsError(
            f"checkpoint {checkpoint} was saved under ZeRO {zero_stage}, the settings ask for {learner.zero_stage}; 3 "
            "cuts weights in another way than all others. Set learner.zero_stage back, or start a new run whose "
            "policy.path is the checkpoint's folder `policy`"
        )


class Complete(Message):
    """Content of a checkpoint's MANIFEST.json."""

    state: State
    files: tuple[Stored, ...]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint whose files are what its manifest says."""

    folder: Path
    state: State
    cursor: Cursor

    @property
    def policy(self) -> Path:
        """Its weights, as a Hugging Face folder."""
        return self.folder / POLICY

    @property
    def adapters(self) -> Path | None:
        """What of its weights was trained, where those are adapters."""
        path = self.folder / ADAPTERS
        return path if path.exists() else None


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Write a checkpoint into `folder` inside. On a full disk what was written of it goes, for it would never count.

    Raises:
        LagoonError: the disk is full; says which.
    """
    try:
        with disk.room(folder, f"checkpoint {folder.name}"):
            yield
    except LagoonError:
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


class Checkpoints:
    """The checkpoints of a run under `root`, of which the newest `keep` complete ones stay.

    `fence` is that of the learner's lease; `take_over` comes before anything else under a new one.
    """

    def __init__(self, root: Path, keep: int, now: Callable[[], datetime], fence: int = 0):
        self._root, self._keep, self._now, self._fence = root, keep, now, fence

    def take_over(self) -> None:
        """From here on nothing counts that a learner with a lower fence completes."""
        note = self._root / f"from-{self._fence:08d}"
        if self._fence and not note.exists():
            last = next((p.name for p in self._folders() if (p / MANIFEST).exists()), "")
            self._root.mkdir(parents=True, exist_ok=True)
            temporary = note.with_name(f".{note.name}")
            temporary.write_text(last)
            _sync(temporary)
            temporary.replace(note)
            _sync(self._root)

    def begin(self, step: int, version: int) -> Path:
        """An empty folder to write a checkpoint into; what an earlier try left there is removed."""
        folder = self._root / _name(step, version, self._fence)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def complete(self, folder: Path, state: State, cursor: Cursor) -> Checkpoint:
        """Make the checkpoint in `folder` whole, and remove what it makes superfluous."""
        (folder / CURSOR).write_bytes(cursor.to_bytes())
        files = tuple(_stored(folder, path) for path in sorted(_files(folder)))
        body = Complete(state=state, files=files, created_at=self._now()).to_bytes()
        temporary = folder / f".{MANIFEST}"
        temporary.write_bytes(body)
        _sync(temporary)
        temporary.replace(folder / MANIFEST)
        _sync(folder)
        _sync(self._root)
        self._remove_older(folder)
        return Checkpoint(folder, state, cursor)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, verified, and the names of the incomplete ones that are newer.

        Raises:
            CheckpointError: its manifest or one of its files is altered or cut off; names the file.
        """
        incomplete: list[str] = []
        for folder in self._folders():
            if (folder / MANIFEST).exists():
                return _load(folder), incomplete
            incomplete.append(folder.name)
        return None, incomplete

    def _folders(self) -> list[Path]:
        """Newest first."""
        cuts = {int(p.name[5:]): _key(p.read_text()) for p in self._root.glob("from-*")}
        return [p for p in self._all() if all(_key(p.name) <= cut for f, cut in cuts.items() if f > _key(p.name)[0])]

    def _all(self) -> list[Path]:
        return sorted((p for p in self._root.glob("step-*-v*") if p.is_dir()), key=lambda p: _key(p.name), reverse=True)

    def _remove_older(self, newest: Path) -> None:
        older = [p for p in self._all() if _key(p.name) < _key(newest.name)]
        complete = [p for p in self._folders() if p in older and (p / MANIFEST).exists()]
        for folder in {*older} - {*complete[: self._keep - 1]}:
            (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a crash leaves an incomplete one, not a broken
            shutil.rmtree(folder, ignore_errors=True)


def _load(folder: Path) -> Checkpoint:
    complete = _read(Complete, folder / MANIFEST)
    names = {file.path for file in complete.files}
    named = _name(complete.state.step, complete.state.weight_version, _key(folder.name)[0])
    if CURSOR not in names or folder.name != named:
        raise CheckpointError(
            f"{folder / MANIFEST} is of step {complete.state.step}, version {complete.state.weight_version} and lists "
            f"{len(names)} files; expected those of the folder's name, and {CURSOR} among the files; {_MEND}"
        )
    for file in complete.files:
        path = folder / file.path
        plain = path.is_file() and path.resolve() == folder.resolve() / file.path
        found = _stored(folder, path) if plain else None
        if found != file:
            observed = f"{found.num_bytes} bytes, SHA-256 {found.sha256[:12]}" if found else "missing or a link"
            raise CheckpointError(
                f"checkpoint file {path} is {observed}; its manifest says {file.num_bytes} bytes, {file.sha256[:12]}. "
                + _MEND
            )
    return Checkpoint(folder, complete.state, _read(Cursor, folder / CURSOR))


def _read(type_: type[M], path: Path) -> M:
    try:
        return type_.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:800]}; {_MEND}") from error


def _name(step: int, version: int, fence: int) -> str:
    return f"step-{step:08d}-v{version:08d}" + (f"-f{fence:08d}" if fence else "")


def _key(name: str) -> tuple[int, ...]:
    """Order of checkpoints by name: fence, step, version. The empty name comes before all."""
    match = _NAME.fullmatch(name)
    return (int(match["fence"] or 0), int(match["step"]), int(match["version"])) if match else (-1,)


_NAME = re.compile(r"step-(?P<step>\d+)-v(?P<version>\d+)(-f(?P<fence>\d+))?")


_MEND = "Restore it from a backup, or let `lagoon resume RUN` go on from the run manifest before it"


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.name not in {MANIFEST, f".{MANIFEST}"}]


def _stored(folder: Path, path: Path) -> Stored:
    _sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Stored(path=path.relative_to(folder).as_posix(), num_bytes=path.stat().st_size, sha256=digest)


def _sync(path: Path) -> None:
    """Survive a power cut, not only a kill."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
