"""The learning half of the loop: the real buffer, credit, objective and DeepSpeed engine, one version an update."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path

from schemas.messages import Directive
from schemas.settings import Settings
from tests.experiments.curation import Curated
from trainers.batches import Tokens, num_action_tokens
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
    """Trains version after version. `version` is that of the weights now; folders of the newest `kept` are kept."""

    def __init__(self, settings: Settings, ranks: Ranks, policy: Path, folder: Path, kept: int):
        self.version, self.orders = 1, Orders()
        self._settings, self._ranks = settings, ranks
        self._start, self._folder, self._kept = policy, folder, kept
        self._engine = Engine(settings, ranks, policy)
        self._buffer = LiveBuffer(rule(settings))
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
        rows = curated.rows.select([*SCALARS, "turns"]).combine_chunks()
        self._buffer.add(self.version, Chunk(rows, Tokens.of(curated.rows)))
        self._buffer.discard(curated.gone)

    def update(self) -> StepMetrics | None:
        """One optimizer step on at most a batch, and a new version; None where there was nothing to learn from."""
        loop, step = self._settings.loop, self.version
        self._buffer.prune(self.version - loop.max_staleness)
        picks = self._buffer.choose(loop.batch_size, self.version, self.orders.bucket_weights, step)
        self._buffer.use(picks)
        rows = sorted((pick.row for pick in picks), key=attrgetter("num_tokens", "arrival"))
        metrics = self._train(gather(rows), step) if rows else None
        self.version += 1
        self._publish()
        return metrics

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
        return summarize(recorder.trained.sums)[0]

    def _credit(self, batch: Chunk, step: int) -> Signals:
        turns, weight = Turns.of(batch.rows, batch.tokens), process_weight(step, self._settings.credit)
        if weight:
            self._scale = self._scale.after(batch.rows["reward"].to_numpy(), turns.rewards)
        return signals(batch.rows, batch.tokens, turns, self._settings, weight * self._scale.factor)

    def _publish(self) -> None:
        tensors = self._engine.tensors()
        self._engine.anchor(tensors)
        export(self._engine.model, tensors, self._start, self.weights(self.version))
        shutil.rmtree(self.weights(self.version - self._kept), ignore_errors=True)
