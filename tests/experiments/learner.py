"""The learning half of the loop: the real buffer, credit, objective and DeepSpeed engine, one version an update."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from schemas.messages import Directive
from schemas.settings import Settings
from tests.experiments.curation import Curated
from trainers.batches import Floats, Ints, Tokens, num_action_tokens
from trainers.branches import Branches
from trainers.buffer import LiveBuffer, gather
from trainers.credit import ProcessScale, Turns, process_weight
from trainers.desk import Order
from trainers.directives import Orders, obey
from trainers.engine import Engine, Trained
from trainers.learn import train
from trainers.metrics import StepMetrics, summarize
from trainers.policy import export
from trainers.ranks import Ranks
from trainers.siblings import Chunk
from trainers.signals import Signals, signals
from trainers.stream import SCALARS, rule


class Recorder:
    """Where a step is written down: the part of a desk that `train` needs."""

    trained: Trained

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, trained: Trained, num_tokens: int, busy_s: float) -> None:
        self.trained = trained


class Learner:
    """Trains version after version. `version` is that of the weights now; folders of the newest `kept` are kept.

    `decisive` has for each optimizer step the share of all credit, as absolute advantages, that went to the turn which
    option `decisive` of the first family names.
    """

    def __init__(self, settings: Settings, ranks: Ranks, policy: Path, folder: Path, kept: int):
        self.version, self.orders, self.decisive = 1, Orders(), list[float]()
        self._settings, self._ranks = settings, ranks
        self._start, self._folder, self._kept = policy, folder, kept
        start = settings.policy.model_copy(update={"path": str(policy)})  # adapters lie on it, a KL is to it
        self._engine = Engine(settings.model_copy(update={"policy": start}), ranks, policy)
        self._buffer = LiveBuffer(rule(settings))
        self._branches = Branches(wait_s=0.0)
        self._scale = ProcessScale()
        self._publish()

    def weights(self, version: int) -> Path:
        """The folder of a version."""
        return self._folder / f"{version}"

    def obey(self, directive: Directive) -> None:
        """Take an order of the evaluator."""
        self.orders = obey(self.orders, directive)

    def take_in(self, curated: Curated) -> None:
        """What curation admitted comes into the buffer, what it evicted leaves."""
        others = self._branches.sort(self.version, curated.rows, 0.0)
        rows = pa.concat_tables([others, *(rows for _, rows in self._branches.ready(0.0))])
        self._buffer.add(self.version, Chunk(rows.select([*SCALARS, "turns"]).combine_chunks(), Tokens.of(rows)))
        self._buffer.discard(curated.gone)

    def update(self, mini_batches: int) -> list[StepMetrics]:
        """Optimizer steps on at most a batch each, as far as there is something to learn from, and a new version."""
        loop, made = self._settings.loop, list[StepMetrics]()
        self._buffer.prune(self.version - loop.max_staleness)
        for step in range((self.version - 1) * mini_batches + 1, self.version * mini_batches + 1):
            picks = self._buffer.choose(loop.batch_size, self.version, self.orders.bucket_weights, step)
            self._buffer.use(picks)
            rows = sorted((pick.row for pick in picks), key=attrgetter("num_tokens", "arrival"))
            made += [self._train(gather(rows), step)] if rows else []
        self.version += 1
        self._publish()
        return made

    def close(self) -> None:
        """Let go of DeepSpeed."""
        self._engine.close()

    def _train(self, batch: Chunk, step: int) -> StepMetrics:
        learner, made = self._settings.learner, self._credit(batch, step)
        num_tokens = int(num_action_tokens(batch.tokens).sum())
        rate = learner.learning_rate * self.orders.learning_rate_scale * min(1.0, step / max(learner.warmup_steps, 1))
        order = Order("train", batch.tokens, made, num_tokens, rate, self._settings.objective.kl)
        recorder = Recorder()
        train(self._engine, self._ranks, recorder, order)
        self._note_credit(np.abs(recorder.trained.turns.advantages), made.turns.numbers)
        return summarize(recorder.trained.sums)[0]

    def _note_credit(self, sizes: Floats, numbers: Ints) -> None:
        decisive = self._settings.families[0].options.get("decisive")
        if decisive is not None and sizes.any():
            self.decisive.append(float(sizes[numbers == decisive].sum() / sizes.sum()))

    def _credit(self, batch: Chunk, step: int) -> Signals:
        rows = self._branches.told(batch.rows)
        turns, weight = Turns.of(rows, batch.tokens), process_weight(step, self._settings.credit)
        if weight:
            self._scale = self._scale.after(rows["reward"].to_numpy(), turns.rewards)
        return signals(rows, batch.tokens, turns, self._settings, weight * self._scale.factor)

    def _publish(self) -> None:
        tensors = self._engine.tensors()
        self._engine.anchor(tensors)
        export(self._engine.model, tensors, self._start, self.weights(self.version))
        shutil.rmtree(self.weights(self.version - self._kept), ignore_errors=True)
