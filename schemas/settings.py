"""Settings: defaults here and nowhere else, then TOML files left to right, then `--section.key=value`.

Unknown keys are errors, bounds stand on the fields, and checks across fields name both values. Secrets come from the
environment (see `Kafka.secrets`), never from a file. The resolved settings are saved with the run.
"""

import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.errors import SettingsError

Positive = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]

ENVIRONMENT_FILE = "LAGOON_SETTINGS"
"""Environment variable that names the settings file of a run."""


_SECRET = re.compile(
    r"secret|password|token$|(storage|account|master|private|encryption)_key|sas_key|\.key\.pem$", re.I
)


def is_secret(key: str) -> bool:
    """Whether what stands under `key`, a setting of librdkafka or an object store, is for no file and no log."""
    return _SECRET.search(key) is not None


def _without_secrets(options: dict[str, str]) -> dict[str, str]:
    secret = sorted(filter(is_secret, options))
    if secret:
        names = ", ".join(key.upper() for key in secret)
        raise ValueError(f"{secret} are secrets, which are saved in no file; remove them and set ${names}")
    return options


StorageOptions = Annotated[dict[str, str], AfterValidator(_without_secrets)]
"""Options of an object store, as delta-rs takes them; secrets are read from the environment."""


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    """Which run this is, and where its files live."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data_dir: str = ".lagoon"
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The run's folder: settings, logs, outboxes, recovery state, checkpoints, summary."""
        return Path(self.data_dir).absolute() / "runs" / self.name


class Kafka(Section):
    """The broker. Without `brokers` the local stack starts one."""

    brokers: str = ""
    topic_prefix: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    partitions: Literal[1, 2, 4, 8, 16] = 4
    replication: Positive = 1
    retention_h: Positive = 168
    max_message_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    timeout_s: Seconds = 30
    client: dict[str, str | int | bool] = {}
    secrets: dict[str, str] = {}
    """librdkafka setting -> environment variable that holds it, e.g. {"sasl.password" = "KAFKA_PASSWORD"}."""

    def topic(self, name: str) -> str:
        """The name of contract topic `name` on this broker."""
        return self.topic_prefix + name

    @model_validator(mode="after")
    def _no_owned_keys(self) -> "Kafka":
        owned = {
            "bootstrap.servers",
            "group.id",
            "enable.idempotence",
            "acks",
            "auto.offset.reset",
            "enable.auto.commit",
        }
        taken = sorted(owned & set(self.client))
        if taken:
            raise ValueError(f"kafka.client sets {taken}, which Lagoon owns; remove them")
        secret = sorted(filter(is_secret, self.client))
        if secret:
            raise ValueError(
                f"kafka.client sets {secret}, which are secrets: name an environment variable for each in kafka.secrets"
            )
        return self


class Lake(Section):
    """The Delta lake. Without `uri` it lies in the run's folder."""

    uri: str = ""
    storage_options: StorageOptions = {}
    sink_partitions: int = Field(default=2, ge=1, le=64)


class Weights(Section):
    """The weight store. Without `uri` it lies in the run's folder."""

    uri: str = ""
    storage_options: StorageOptions = {}
    poll_s: Seconds = 0.25
    timeout_s: Seconds = 60
    """No readable manifest for this long: dispatch stops and health turns red."""


class Tracking(Section):
    """MLflow. Without `uri` the local stack starts a server; `enabled = false` goes without."""

    uri: str = ""
    experiment: str = "lagoon"
    enabled: bool = True


class Family(Section):
    """Tasks of one kind; task i is built from (name, i, seed) by the environment."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    environment: str = "calculator"
    options: dict[str, Any] = {}
    num_tasks: Positive = 200
    weight: float = Field(default=1.0, ge=0)
    held_out_ratio: Ratio = 0.2

    @property
    def num_train(self) -> int:
        """Tasks [0, num_train) are trained on; the rest are held out."""
        return self.num_tasks - round(self.num_tasks * self.held_out_ratio)


class Loop(Section):
    """What the three loops agree on."""

    max_staleness: int = Field(default=3, ge=0)
    bucket_width: Positive = 1
    group_size: int = Field(default=16, ge=1, le=1024)
    batch_size: Positive = 128
    success_reward: float = 1.0


class Dispatch(Section):
    """Which task next, and how many groups are open."""

    updates_ahead: float = Field(default=2.5, gt=0)
    lease_s: Seconds = 120
    max_attempts: Positive = 3
    tick_s: Seconds = 0.5
    exploration: Ratio = 0.1
    """Share of draws that ignore difficulty, so that no task starves."""


class Curate(Section):
    """Curation: groups, staleness, priority, eviction."""

    capacity: Positive = 4096
    """Live trajectories over all shards."""
    eviction: Literal["reward_priority", "fifo", "stalest_first"] = "reward_priority"
    max_evicted_share: Ratio = 0.5
    group_timeout_s: Seconds = 60
    epoch_s: Seconds = 1
    epoch_bytes: Positive = 64 * 1024 * 1024
    posterior_discount: Ratio = 0.9
    """Weight that a posterior keeps per weight version."""
    hard_below: Ratio = 0.4
    hopeless_below: Ratio = 0.05
    mastered_above: Ratio = 0.95
    hard_bonus: float = Field(default=0.25, ge=0)
    freshness_weight: float = Field(default=0.25, ge=0)
    completion_bonus: float = Field(default=0.1, ge=0)
    skip_expired_offsets: bool = False
    """Go on after offsets that have expired; the hole becomes a row in dead_letters."""

    @model_validator(mode="after")
    def _ordered(self) -> "Curate":
        if not self.hopeless_below < self.hard_below < self.mastered_above:
            raise ValueError(
                f"expected hopeless_below < hard_below < mastered_above, "
                f"got {self.hopeless_below}, {self.hard_below}, {self.mastered_above}"
            )
        return self


class Rollout(Section):
    """A rollout service."""

    engine: Literal["torch"] = "torch"
    max_episodes: Positive = 128
    max_turns: Positive = 6
    max_turn_tokens: Positive = 24
    max_tokens: Positive = 480
    temperature: float = Field(default=1.0, ge=0)
    episode_timeout_s: Seconds = 60
    tool_timeout_s: Seconds = 2
    pack_linger_s: Seconds = 0.5
    outbox_bytes: Positive = 256 * 1024 * 1024
    """Above this an outbox takes no new tasks until Kafka has taken some."""
    drain_s: Seconds = 10
    services: Positive = 1
    threads: Positive = 1


class Learner(Section):
    """The learner."""

    objective: Literal["grpo"] = "grpo"
    num_train_steps: Positive = 1000
    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    clip: float = Field(default=0.2, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    kl: float = Field(default=0.1, ge=0)
    micro_batches: Positive = 4
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_uses: Positive = 1
    old_bucket_weight: Ratio = 0.05
    sync_interval_start: Positive = 5
    sync_interval: Positive = 20
    sync_anneal_steps: Positive = 200
    min_update_s: float = Field(default=0.0, ge=0)
    watchdog_s: Seconds = 120
    poll_s: Seconds = 0.1
    keep_checkpoints: int = Field(default=2, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    zero_stage: Literal[0, 1, 2, 3] = 1
    deepspeed: dict[str, Any] = {}
    """Passed through to DeepSpeed; keys that Lagoon owns are refused."""
    threads: Positive = 1

    @model_validator(mode="after")
    def _checks(self) -> "Learner":
        owned = {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "optimizer",
            "zero_optimization",
            "bf16",
            "fp16",
        }
        taken = sorted(owned & set(self.deepspeed))
        if taken:
            raise ValueError(f"learner.deepspeed sets {taken}, which Lagoon derives from [learner]; remove them")
        if self.sync_interval_start > self.sync_interval:
            raise ValueError(
                f"sync_interval_start {self.sync_interval_start} is above sync_interval {self.sync_interval}; "
                "publishing anneals from frequent to sparse"
            )
        return self


class Evaluator(Section):
    """The evaluator and curator."""

    samples_per_family: Positive = 40
    full_samples_per_family: Positive = 160
    full_every: Positive = 25
    temperature: float = Field(default=1.0, ge=0)
    max_unscored_ratio: Ratio = 0.1
    """More than this share unscored keeps a version from becoming champion."""
    fall_z: float = Field(default=2.0, gt=0)
    """Two-proportion z value beyond which a falling score is significant."""
    learning_rate_scale: float = Field(default=0.5, gt=0, le=1)
    recent_bucket_weight: float = Field(default=4.0, ge=1)
    threads: Positive = 1


class Policy(Section):
    """The starting policy: `path` to a Hugging Face folder, or a tiny Llama made here and warmed up."""

    path: str = ""
    hidden: Positive = 64
    layers: Positive = 2
    intermediate: Positive = 192
    max_positions: Positive = 512
    warm_start_steps: int = Field(default=800, ge=0)
    warm_start_batch: Positive = 64
    warm_start_learning_rate: float = Field(default=3e-3, gt=0)
    warm_start_noise: Ratio = 0.5


class Cost(Section):
    """Prices, for cost per effective sample."""

    accelerator_hour: float = Field(default=2.0, ge=0)
    """Price of one accelerator for one hour, in `currency`."""
    currency: str = "USD"


class Telemetry(Section):
    """Logs, metrics, health. Port 0 takes a free one and writes it to the run's `services` folder."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    usage_s: Seconds = 2


class Stack(Section):
    """Servers that `lagoon up` starts on this machine where no address is set. Port 0 takes a free one."""

    kafka_port: int = Field(default=0, ge=0, le=65535)
    mlflow_port: int = Field(default=0, ge=0, le=65535)
    start_timeout_s: Seconds = 180
    min_free_bytes: int = Field(default=2 * 1024**3, ge=0)


class Maintenance(Section):
    """Upkeep of the lake and the weight store beside the running loop."""

    enabled: bool = True
    every_s: Seconds = 300
    min_files: int = Field(default=32, ge=2)
    """Small files that a partition may have; with more they are merged."""
    target_bytes: int = Field(default=128 * 1024 * 1024, ge=1024 * 1024)
    """Size of merged files."""
    vacuum_every_s: Seconds = 3600
    vacuum_retention_h: int = Field(default=168, ge=24)
    """Files that were rewritten, or never committed, stay this long; a flow that stood still may yet commit them."""
    log_retention_h: int = Field(default=24, ge=1)
    """Commits stay in a table's log at least this long, and until every checkpoint of the learner is past them.

    On a local folder a commit lists the whole log, so a long one makes it slow.
    """
    keep_weight_versions: int = Field(default=20, ge=2)
    """Newest versions that stay, beside those that a checkpoint, a best eval or an open service names."""


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
    learner: Learner = Learner()
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
    def weights_uri(self) -> str:
        """Where the weight store is."""
        return self.weights.uri or str(self.run.folder / "weights")

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
        if self.rollout.tool_timeout_s >= self.rollout.episode_timeout_s:
            raise ValueError(
                f"rollout.tool_timeout_s {self.rollout.tool_timeout_s} must be below "
                f"rollout.episode_timeout_s {self.rollout.episode_timeout_s}"
            )
        if self.kafka.retention_h * 3600 < 10 * self.curate.group_timeout_s:
            raise ValueError(
                f"kafka.retention_h {self.kafka.retention_h} is below ten times curate.group_timeout_s "
                f"{self.curate.group_timeout_s} s; members of open groups could expire"
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

    def save(self, path: Path) -> None:
        """Write the resolved settings as JSON, replacing the file in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.model_dump_json(indent=2) + "\n")
        temporary.replace(path)


def load(files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Settings:
    """Settings from `files` (TOML or JSON, left to right) and `overrides` (`--section.key=value`).

    Values of overrides are read as TOML (`3`, `true`, `[1, 2]`), else as text.

    Raises:
        SettingsError: a file that is missing or malformed, an unknown key, a value out of bounds, a contradiction.
    """
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, _read(Path(file)))
    for override in overrides:
        _merge(merged, _parse(override))
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError("\n".join(_fault(e) for e in error.errors())) from error


def current(data_dir: str = ".lagoon", overrides: Sequence[str] = ()) -> Settings:
    """Settings of the run in `$LAGOON_SETTINGS`, else of the run that `lagoon up` or `lagoon demo` started last.

    `overrides` as for `load`.

    Raises:
        SettingsError: there is no such run.
    """
    path = os.environ.get(ENVIRONMENT_FILE) or os.path.join(data_dir, "current", "settings.json")
    if not Path(path).exists():
        raise SettingsError(
            f"no settings at {path}; run `lagoon up` first, or name a file with --config or ${ENVIRONMENT_FILE}"
        )
    return load([path], overrides)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"settings file {path} is malformed: {error}") from error


def _parse(override: str) -> dict[str, Any]:
    name, equals, text = override.removeprefix("--").partition("=")
    if not equals or "." not in name:
        raise SettingsError(f"cannot read {override!r}; expected --section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    section, *path = name.split(".")
    for part in reversed(path):
        value = {part: value}
    return {section: value}


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _fault(error: Any) -> str:
    where = ".".join(map(str, error["loc"])) or "settings"
    observed = "" if isinstance(error.get("input"), dict) else f" (got {error.get('input')!r})"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}{observed}"
