"""The learner. Started by `python trainers/learn.py`, `python -m trainers.learn`, `deepspeed` or `torchrun` alike.

deepspeed --num_accelerators 2 trainers/learn.py --config run.toml --learner.zero_stage=2
"""

import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

if __package__ in {None, ""}:  # started by its path: imports begin at the folder above, not among the trainers
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from infra.failpoints import hit
from infra.lease import FOLDER, Lease, Process
from infra.store import open_store
from infra.telemetry import Stop, Telemetry, logger, main
from infra.weight_cache import prune
from infra.weights import WeightStore
from schemas.errors import SettingsError
from schemas.names import Service
from schemas.settings import Settings
from trainers.checkpoint import ADAPTERS, POLICY, Checkpoint, check_stage, writing
from trainers.desk import Desk, Order, checkpoints
from trainers.engine import Engine, starting_policy
from trainers.lora import check_alike
from trainers.policy import export
from trainers.ranks import Ranks, prepare_environment
from trainers.run_record import agreed
from trainers.signals import share_of


def run(settings: Settings | None, telemetry: Telemetry | None, stop: Stop) -> None:
    """Train until `learner.num_train_steps` are done or `stop` is set; checkpoint and publish on the way.

    Ranks above 0 have no settings and no telemetry of their own, and obey rank 0.

    Raises:
        SettingsError: several ranks where learner and vLLM server share a card.
    """
    ranks = Ranks()
    settings = Settings.model_validate(ranks.share(settings))
    check_card(settings, ranks.size)
    with held(settings, ranks) as lease:
        _run(settings, telemetry, stop, ranks, lease)
    ranks.close()


def _run(settings: Settings, telemetry: Telemetry | None, stop: Stop, ranks: Ranks, lease: Lease | None) -> None:
    found: Checkpoint | None = ranks.share(find(settings, lease) if lease else None)
    engine = start(settings, ranks, found)
    desk = Desk(settings, telemetry, lease, found, ranks.size, engine.max_positions) if telemetry and lease else None
    if found is None:
        save(settings, engine, ranks, desk, publish=True)
    while (order := next_order(settings, ranks, desk, stop)).kind != "end":
        if order.kind == "train":
            train(engine, ranks, desk, order)
        if order.save:
            save(settings, engine, ranks, desk, order.publish)
    if order.save:
        save(settings, engine, ranks, desk, publish=False)
    if desk:
        desk.close()
    engine.close()


def check_card(settings: Settings, num_ranks: int) -> None:
    """Refuse several ranks on a card that is shared: rank 0 alone takes turns, and others would train out of turn.

    Raises:
        SettingsError: see above.
    """
    if settings.vllm.share_device and num_ranks > 1:
        raise SettingsError(
            f"the learner was started with {num_ranks} ranks; with vllm.share_device it has to be 1, which takes turns "
            "with the vLLM server on one card. Start it without a launcher, or set vllm.share_device = false and leave "
            "the server a card of its own"
        )


def next_order(settings: Settings, ranks: Ranks, desk: Desk | None, stop: Stop) -> Order:
    """What all ranks do next. A card that is shared is left for as long as that is to wait."""
    if settings.vllm.share_device:
        torch.cuda.empty_cache()  # what the step has freed, and torch keeps, is the vLLM server's now
    return ranks.share(desk.next(stop) if desk else None)


@contextmanager
def held(settings: Settings, ranks: Ranks) -> Generator[Lease | None]:
    """Rank 0's lease on the weight store, and so on the checkpoints; None on the others, which obey rank 0.

    Raises:
        LakeError: another learner is alive.
    """
    if ranks.rank:
        yield None
        return
    lease = Lease(open_store(f"{settings.weights_uri}/{FOLDER}", settings.weights.storage_options), Service.LEARNER)
    lease.take([Process.this()])
    with lease.kept():
        yield lease


def find(settings: Settings, lease: Lease) -> Checkpoint | None:
    """The checkpoint to go on from, checked against the run manifest, the lake and the weight store.

    Raises:
        CheckpointError: it is altered or cut off, or not the one that the manifest names.
        LakeError: the lake or the weight store lacks what the manifest names.
        SettingsError: it has other adapters than the settings ask for, or ZeRO 3 has come or gone.
        WeightStoreError: the store is ahead of it, or has lost versions.
    """
    saved = checkpoints(settings, lease)
    saved.take_over()
    newest, incomplete = saved.newest()
    log = logger("learner")
    for name in incomplete:
        log.warning("checkpoint is incomplete, passed over", checkpoint=name)
    newest = agreed(settings, newest)
    if newest:
        check_alike(newest.state.lora, settings.learner, newest.folder.name)
        check_stage(newest.state.zero_stage, settings.learner, newest.folder.name)
    log.info("resumed" if newest else "new run", checkpoint=newest.folder.name if newest else None)
    return newest


def start(settings: Settings, ranks: Ranks, found: Checkpoint | None) -> Engine:
    """The engine as `found` left it, or with the starting policy."""
    proximal: Path | None = ranks.share(published(settings, found) if ranks.rank == 0 else None)
    engine = Engine(settings, ranks, found.policy if found else starting_policy(settings), proximal)
    if found and not engine.restore(found.folder, found.state.world_size, found.state.value_head):
        heads = {"before": found.state.value_head, "now": engine.has_values}
        logger("learner").warning("optimizer moments start anew: a value head came or went", **heads)
    return engine


def published(settings: Settings, found: Checkpoint | None) -> Path | None:
    """Weights of the version published last, where `found` was saved later; they are PPO's proximal policy."""
    if found is None or "ppo" not in settings.objective.names or found.state.step == found.state.published_step:
        return None
    cache, version = settings.run.folder / "proximal", found.state.weight_version
    folder = WeightStore.of(settings).fetch(version, cache)
    prune(cache, [version])  # those of earlier starts
    return folder


def train(engine: Engine, ranks: Ranks, desk: Desk | None, order: Order) -> None:
    """One optimizer step, on each rank's share of the batch; rank 0 writes it down."""
    began = time.monotonic()
    if order.tokens is None or order.signals is None:
        raise RuntimeError("an order to train came without a batch")
    batches = list(share_of(order.tokens, order.signals, engine.split, ranks.rank, ranks.size))
    with desk.busy() if desk else nullcontext():
        trained = engine.train_step(batches, order.signals, order.num_tokens, order.learning_rate, order.kl)
    if desk:
        desk.record(trained, order.num_tokens, time.monotonic() - began)


def save(settings: Settings, engine: Engine, ranks: Ranks, desk: Desk | None, publish: bool) -> None:
    """A checkpoint, and after it, if due, a publication."""
    folder: Path = ranks.share(desk.begin_checkpoint(publish) if desk else None)
    with writing(folder):
        engine.save(folder)
        tensors = engine.tensors()
        probe = engine.probe(tensors)
        engine.write_adapters(folder / ADAPTERS)
        if publish:
            engine.anchor(tensors)
        if desk:
            hit("learner.after_shards")
            export(engine.model, tensors, starting_policy(settings), folder / POLICY)
            desk.finish_checkpoint(folder, probe, publish)
    ranks.barrier()


def follow() -> None:
    """A rank above 0: it ends when rank 0 says so."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run(None, None, Stop())


if __name__ == "__main__":
    if prepare_environment() == 0:
        main("learner", run)
    else:
        follow()
