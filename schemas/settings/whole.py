"""All settings of a run, and the checks across sections."""

from pathlib import Path

from pydantic import model_validator

from schemas.names import NUM_SHARDS
from schemas.settings.base import Section
from schemas.settings.credit import Credit
from schemas.settings.data import Family, Kafka, Lake, Run, Tracking, Weights
from schemas.settings.loops import Curate, Dispatch, Evaluator, Learner, Loop, Policy, Rollout
from schemas.settings.objective import Objective
from schemas.settings.upkeep import Cost, Maintenance, Stack, Telemetry
from schemas.settings.vllm import Vllm

_SYNC = {
    "loop.max_staleness": 0,
    "loop.bucket_width": 1,
    "learner.sync_interval_start": 1,
    "learner.sync_interval": 1,
    "learner.max_uses": 1,
    "evaluator.train_groups_per_family": 0,
}
"""What `loop.mode = "sync"` means, in settings that have a meaning of their own without it."""


class Settings(Section):
    """All settings of a run."""

    run: Run = Run()
    kafka: Kafka = Kafka()
    lake: Lake = Lake()
    weights: Weights = Weights()
    tracking: Tracking = Tracking()
    families: tuple[Family, ...] = ()
    loop: Loop = Loop()
    dispatch: Dispatch = Dispatch()
    curate: Curate = Curate()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    learner: Learner = Learner()
    objective: Objective = Objective()
    credit: Credit = Credit()
    evaluator: Evaluator = Evaluator()
    policy: Policy = Policy()
    cost: Cost = Cost()
    telemetry: Telemetry = Telemetry()
    maintenance: Maintenance = Maintenance()
    stack: Stack = Stack()

    @property
    def lake_uri(self) -> str:
        """Where the lake is."""
        return self.lake.uri or str(self.run.folder / "lake")

    @property
    def claims_uri(self) -> str:
        """Where bodies lie that are too large for a message."""
        return self.lake.claims_uri or f"{self.lake_uri.rstrip('/')}/_lagoon/claims"

    @property
    def weights_uri(self) -> str:
        """Where the weight store is."""
        return self.weights.uri or str(self.run.folder / "weights")

    @property
    def checkpoints(self) -> Path:
        """Where the learner's checkpoints are."""
        return Path(self.learner.checkpoints) if self.learner.checkpoints else self.run.folder / "checkpoints"

    @property
    def builds_on_start(self) -> bool:
        """Whether the learner needs its starting policy for good: as the reference, or as what adapters change."""
        return self.objective.has_reference or self.learner.lora_rank > 0

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        names = [f.name for f in self.families]
        if len(names) != len(set(names)):
            raise ValueError(f"families repeat a name: {sorted(names)}")
        if self.loop.batch_size % self.loop.group_size:
            raise ValueError(
                f"loop.batch_size {self.loop.batch_size} is not a multiple of loop.group_size {self.loop.group_size}"
            )
        if not self.loop.batch_size * 2 <= self.curate.capacity:
            raise ValueError(
                f"curate.capacity {self.curate.capacity} is below twice loop.batch_size {self.loop.batch_size}; "
                "a batch would be evicted before it is read"
            )
        if self.dispatch.lease_s <= self.curate.group_timeout_s:
            raise ValueError(
                f"dispatch.lease_s {self.dispatch.lease_s} must be above curate.group_timeout_s "
                f"{self.curate.group_timeout_s}, or groups are issued again while members may still come"
            )
        if self.credit.fork_budget and self.credit.fork_wait_s >= self.learner.watchdog_s:
            raise ValueError(
                f"credit.fork_wait_s {self.credit.fork_wait_s} must be below learner.watchdog_s "
                f"{self.learner.watchdog_s}, or a learner that waits for branches looks like one without data"
            )
        if self.rollout.tool_timeout_s >= self.rollout.episode_timeout_s:
            raise ValueError(
                f"rollout.tool_timeout_s {self.rollout.tool_timeout_s} must be below "
                f"rollout.episode_timeout_s {self.rollout.episode_timeout_s}"
            )
        if self.rollout.token_budget < self.rollout.max_tokens:
            raise ValueError(
                f"rollout.token_budget {self.rollout.token_budget} is below rollout.max_tokens "
                f"{self.rollout.max_tokens}; an episode could wait for ever"
            )
        if self.kafka.retention_h * 3600 < 10 * self.curate.group_timeout_s:
            raise ValueError(
                f"kafka.retention_h {self.kafka.retention_h} is below ten times curate.group_timeout_s "
                f"{self.curate.group_timeout_s} s; members of open groups could expire"
            )
        return self

    @model_validator(mode="after")
    def _sync_is_sync(self) -> "Settings":
        if self.loop.mode == "async":
            return self
        sections = self.model_dump(include={"loop", "learner", "evaluator"})
        found = {name: sections[name.split(".")[0]][name.split(".")[1]] for name in _SYNC}
        if wrong := [f"{name} = {_SYNC[name]} (got {value})" for name, value in found.items() if value != _SYNC[name]]:
            raise ValueError(
                "loop.mode sync trains one step on what the newest weights sampled and publishes what it made, so it "
                f"needs {', '.join(wrong)}; infra/profiles/sync.toml sets them all"
            )
        if self.curate.capacity < NUM_SHARDS * self.loop.batch_size:
            raise ValueError(
                f"curate.capacity {self.curate.capacity} is below {NUM_SHARDS} times loop.batch_size "
                f"{self.loop.batch_size}: in mode sync one shard may have to hold a whole batch"
            )
        return self

    @model_validator(mode="after")
    def _nothing_needed_is_removed(self) -> "Settings":
        upkeep = self.maintenance
        if not upkeep.enabled:
            return self
        if upkeep.vacuum_retention_h < self.kafka.retention_h:
            raise ValueError(
                f"maintenance.vacuum_retention_h {upkeep.vacuum_retention_h} is below kafka.retention_h "
                f"{self.kafka.retention_h}; a flow that stands still can go on for as long as Kafka keeps its input, "
                "and then commits files that it had staged before"
            )
        if upkeep.keep_weight_versions <= self.loop.max_staleness:
            raise ValueError(
                f"maintenance.keep_weight_versions {upkeep.keep_weight_versions} must be above loop.max_staleness "
                f"{self.loop.max_staleness}, or versions go that services may still be told to serve"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_fit(self) -> "Settings":
        evaluator, rollout = self.evaluator, self.rollout
        if evaluator.train_groups_per_family and evaluator.temperature != rollout.temperature:
            raise ValueError(
                f"evaluator.train_groups_per_family is {evaluator.train_groups_per_family}, but "
                f"evaluator.temperature {evaluator.temperature} is not rollout.temperature {rollout.temperature}, at "
                "which the learner scores; importance ratios would be wrong"
            )
        if evaluator.engine == "vllm" and self.vllm.url:
            raise ValueError(
                f'evaluator.engine is "vllm" and vllm.url names one server, {self.vllm.url}, whose weights rollouts '
                'and evaluations would swap under one another; set evaluator.engine = "torch", or no vllm.url'
            )
        return self

    @model_validator(mode="after")
    def _turns_are_taken(self) -> "Settings":
        if not self.vllm.share_device:
            return self
        wanted = {
            "loop.mode": (self.loop.mode, "sync"),
            "rollout.engine": (self.rollout.engine, "vllm"),
            "rollout.services": (self.rollout.services, 1),
            "vllm.url": (self.vllm.url, ""),
            "evaluator.engine": (self.evaluator.engine, "torch"),
        }
        if wrong := [f"{name} = {right!r} (got {got!r})" for name, (got, right) in wanted.items() if got != right]:
            raise ValueError(
                "with vllm.share_device one vLLM server and the learner take turns on a card, which asynchronous "
                f"rollouts would never leave, so it needs {', '.join(wrong)}"
            )
        return self

    def save(self, path: Path) -> None:
        """Write the resolved settings as JSON, replacing the file in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.model_dump_json(indent=2) + "\n")
        temporary.replace(path)
