"""A run in its new place: addresses and folders of the old one are not taken for its own."""

import re
import time
from pathlib import Path

from infra.stack import ports, programs
from infra.stack.bring_up import resolve
from infra.weights import WeightStore
from schemas.errors import SettingsError
from schemas.names import Service
from schemas.run_manifest import RunManifest
from schemas.settings import Settings

_OF_A_LIFE = re.compile(r"life\d+\.$")
_FLOWS = (Service.CURATE, Service.DISPATCH, Service.RECORDS)


def settled(settings: Settings, saved: Settings) -> Settings:
    """`settings` with servers of this data folder where they name those of the folder that the run was copied from.

    An address on this machine that comes from the `saved` settings, and that this folder's stack does not remember, is
    such a one.
    """
    updates: dict[str, object] = {}
    brokers, uri = settings.kafka.brokers, settings.tracking.uri
    is_old = brokers.startswith(ports.HOST) and brokers == saved.kafka.brokers
    if is_old and not programs.is_local(settings, programs.KAFKA):
        updates["kafka"] = settings.kafka.model_copy(update={"brokers": ""})
    if ports.HOST in uri and uri == saved.tracking.uri and not programs.is_local(settings, programs.MLFLOW):
        updates["tracking"] = settings.tracking.model_copy(update={"uri": ""})
    return resolve(settings.model_copy(update=updates))


def with_policy(settings: Settings, manifest: RunManifest) -> Settings:
    """`settings` with the starting policy from the weight store where its folder is gone; version 1 is that policy.

    Raises:
        SettingsError: version 1 has been retired, and the learner builds on it.
    """
    if settings.policy.path and Path(settings.policy.path).exists():
        return settings
    weights = WeightStore.of(settings)
    version = 1 if 1 in weights.versions() else manifest.weight_version
    if version != 1 and settings.builds_on_start:
        raise SettingsError(
            f"the starting policy {settings.policy.path} is gone, and version 1 from the weight store as well; the "
            "objective refers to it, or adapters (learner.lora_rank) change it: name its folder with --policy.path=…; "
            "an objective goes on without with --objective.kl=0"
        )
    folder = weights.fetch(version, settings.run.folder / "policy")
    return settings.model_copy(update={"policy": settings.policy.model_copy(update={"path": str(folder)})})


def has_flow_state(settings: Settings) -> bool:
    """Whether every flow's recovery store is there."""
    return all(any((settings.run.folder / "recovery" / flow).glob("part-*.sqlite3")) for flow in _FLOWS)


def on_new_log(settings: Settings, life: int) -> Settings:
    """`settings` of life `life`, with topics of its own."""
    prefix = f"{_OF_A_LIFE.sub('', settings.kafka.topic_prefix)}life{life}."
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"life": life}),
            "kafka": settings.kafka.model_copy(update={"topic_prefix": prefix}),
        }
    )


def set_aside(path: Path) -> Path | None:
    """Rename what belongs to a state that the run does not go on from; returns where it lies now, if it was there."""
    if not path.exists():
        return None
    target = path.with_name(f"undone-{time.time_ns() // 1_000_000}-{path.name}")
    path.rename(target)
    return target
