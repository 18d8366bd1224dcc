"""The order of a resume: prove, start the servers, close the old books, write down the new state, start the rest."""

from datetime import UTC, datetime

from infra.control import send_directive
from infra.kafka import Producer, cluster_id, ensure_topics
from infra.lake import Lake
from infra.resume import books, place
from infra.resume.choice import Choice, Report, checkpoint_faults, choose
from infra.run_manifests import RunManifests, table_versions
from infra.stack import programs
from infra.stack.bring_up import bring_up, start_servers
from infra.stack.supervise import Supervisor
from infra.weights import WeightStore
from schemas.errors import StackError, WeightStoreError
from schemas.run_manifest import RunManifest
from schemas.settings import Settings
from schemas.topics import CONTROL


def resume(settings: Settings, report: Report) -> Settings:
    """Go on with the run of `settings` (`place.settled`) from its newest consistent state; returns those it now has.

    Raises:
        LakeError: no run manifest can be gone on from.
        StackError: the run is up, or a part of it does not start.
    """
    _refuse_running(settings)
    choice = choose(settings)
    for reason in choice.passed_over:
        report(f"passed over: {reason}")
    manifest = choice.manifest
    report(
        f"going on from run manifest {manifest.sequence}: step {manifest.train_step}, weight version "
        f"{manifest.weight_version}, checkpoint {manifest.checkpoint}"
    )
    settings = place.with_policy(settings, manifest)
    start_servers(settings, report)
    cluster = cluster_id(settings.kafka)
    if cluster == manifest.kafka_cluster and place.has_flow_state(settings):
        report("Kafka's log and the state of the flows are there: they go on from their offsets")
    else:
        settings = _begin_life(settings, manifest, report)
    _set_checkpoints_aside(settings, choice, report)
    _write(settings, manifest, cluster)
    _send_orders(settings, new_log=settings.run.life > manifest.life)
    return bring_up(settings, [], report)


def _refuse_running(settings: Settings) -> None:
    services = programs.service_names(settings)
    up = [s.program for s in Supervisor(settings.run.data_dir).states() if s.is_up and s.program in services]
    if up:
        raise StackError(f"{', '.join(up)} of {settings.run.data_dir} are up; `lagoon down` stops them")


def _begin_life(settings: Settings, manifest: RunManifest, report: Report) -> Settings:
    """A new life of the run, on a log that begins anew: what the old one had in flight is named as lost."""
    life = max(settings.run.life, manifest.life) + 1
    lake = Lake.of(settings)
    lake.ensure()
    trajectories, tokens = books.name_lost(lake, life, manifest.sequence)
    groups = books.abandon_open(lake, life)
    report(
        f"Kafka's log or the state of the flows is gone: life {life} begins. Lost in flight: {trajectories} "
        f"trajectories ({tokens} tokens), {groups} open groups"
    )
    for name in ("recovery", "outbox"):
        if (aside := place.set_aside(settings.run.folder / name)) is not None:
            report(f"{name} belongs to the log that is gone; it lies in {aside}")
    return place.on_new_log(settings, life)


def _set_checkpoints_aside(settings: Settings, choice: Choice, report: Report) -> None:
    """Move checkpoints away that the learner would take instead of the chosen one."""
    later = [p for p in sorted(settings.checkpoints.glob("step-*-v*")) if p.name > choice.manifest.checkpoint]
    for folder in later:
        if choice.passed_over or checkpoint_faults(folder):
            report(f"checkpoint {folder.name} is not gone on from; it lies in {place.set_aside(folder)}")
        else:
            report(f"checkpoint {folder.name} is whole, and later: a crash left out its manifest. The learner takes it")


def _write(settings: Settings, manifest: RunManifest, cluster: str) -> None:
    """Write down the state that the run goes on from. Versions that it undoes keep their numbers."""
    lake, weights = Lake.of(settings), WeightStore.of(settings)
    newest = weights.latest()
    try:
        fingerprint = weights.manifest(newest).fingerprint
    except WeightStoreError:  # damaged, and passed over by all who would serve it; its number is taken all the same
        fingerprint = ""
    changes: dict[str, object] = {
        "reason": "resume",
        "life": settings.run.life,
        "weight_version": newest,
        "weights_sha256": weights.digest(newest),
        "fingerprint": fingerprint,
        "tables": table_versions(lake),
        "kafka_cluster": cluster,
        "created_at": datetime.now(UTC),
    }
    RunManifests(lake).write(manifest.model_copy(update=changes))


def _send_orders(settings: Settings, new_log: bool) -> None:
    """Let dispatch go on, and on a new log tell again what was ordered."""
    ensure_topics(settings.kafka, settings.stack.start_timeout_s)
    if new_log:
        producer = Producer(settings.kafka, "lagoon-resume")
        try:
            for directive in books.orders_in_force(Lake.of(settings)):
                producer.send(CONTROL.name, directive.target, directive.to_bytes())
            producer.flush(settings.kafka.timeout_s)
        finally:
            producer.close()
    send_directive(settings.kafka, target="dispatch", issued_by="resume", reason="the run resumes", pause=False)
