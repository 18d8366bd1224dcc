"""The processes that make up the local stack and a run: how each one is started."""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import infra
from infra import failpoints
from infra.stack import kafka, mlflow
from infra.telemetry import INSTANCE_ENVIRONMENT
from schemas.errors import SettingsError
from schemas.names import Service
from schemas.settings import ENVIRONMENT_FILE, Settings

ROOT = Path(infra.__file__).parents[1]
"""Where the packages lie: the repository, or site-packages."""

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""The interpreter that `make vllm` makes."""

KAFKA, MLFLOW = "kafka", "mlflow"
SERVERS = (KAFKA, MLFLOW)
_PASSED_ON = (failpoints.ENVIRONMENT,)


@dataclass(frozen=True, slots=True)
class Program:
    """One supervised process. `stop_s` is how long it may take to end."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    stop_s: int = 20


def service_names(settings: Settings) -> list[str]:
    """Names of the run's processes, in the order in which they start."""
    rollouts = [f"rollout-{i}" for i in range(settings.rollout.services)]
    singles = [s.value for s in (Service.LEARNER, Service.CURATE, Service.DISPATCH, Service.RECORDS)]
    upkeep = [Service.MAINTENANCE.value] if settings.maintenance.enabled else []
    return [*singles, *rollouts, Service.EVALUATOR.value, *upkeep, Service.WARDEN.value]


def select(settings: Settings, names: Sequence[str]) -> list[str]:
    """The programs that `names` mean, in starting order; none means all, `rollout` means every rollout service.

    Raises:
        SettingsError: an unknown name.
    """
    known = [*SERVERS, *service_names(settings)]
    unknown = [n for n in names if n not in known and n != Service.ROLLOUT]
    if unknown:
        raise SettingsError(f"unknown service {', '.join(unknown)}; there are {', '.join([*known, 'rollout'])}")
    wanted = {
        n for n in known if not names or n in names or (Service.ROLLOUT in names and kind_of(n) == Service.ROLLOUT)
    }
    return [n for n in known if n in wanted]


def stopping_order(names: Sequence[str]) -> list[list[str]]:
    """`names` in the order to stop them, together where in one list: producers, then what reads them, then servers."""
    readers = (Service.CURATE.value, Service.RECORDS.value)
    writers = [n for n in names if n not in (*readers, *SERVERS)]
    stages = [writers, *([n] for n in readers if n in names), [n for n in names if n in SERVERS]]
    return [stage for stage in stages if stage]


def server(settings: Settings, name: str) -> Program:
    """The program of the Kafka or MLflow server, with what it needs prepared."""
    folder = Path(settings.run.data_dir).absolute()
    log = folder / "logs" / f"{name}.log"
    if name == KAFKA:
        broker = kafka.local(settings)
        new = {"LAGOON_PROPERTIES_SHA256": hashlib.sha256(broker.properties.encode()).hexdigest()}  # new: restart
        return Program(name, broker.prepare(), log, new, stop_s=30)
    command = [sys.executable, "-m", "infra.stack.succeed", *mlflow.command(settings)]  # it serves through a child
    return Program(name, command, log, mlflow.ENVIRONMENT | {"PYTHONPATH": python_path()})


def service(settings: Settings, name: str) -> Program:
    """The program of one process of the run; its settings are the file that is saved in the run's folder."""
    kind = kind_of(name)
    saved = settings.run.folder / "settings.json"
    environment = {
        ENVIRONMENT_FILE: str(saved),
        INSTANCE_ENVIRONMENT: name,
        "LAGOON_SETTINGS_SHA256": _fingerprint(settings),  # new: restart
        "OMP_NUM_THREADS": str(_threads(settings, kind)),
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }
    if not has_gpu():
        environment["DS_ACCELERATOR"] = "cpu"
    log = settings.run.folder / "logs" / f"{name}.log"
    stop_s = round(settings.rollout.drain_s) + 10 if kind == Service.ROLLOUT else 30
    stop_s = 60 if kind == Service.LEARNER else stop_s  # a step of a larger policy, and its checkpoint
    return Program(name, _command(kind), log, environment, stop_s)


def is_local(settings: Settings, name: str) -> bool:
    """Whether server `name` is this data folder's own, not one that the settings give the address of."""
    return kafka.is_local(settings) if name == KAFKA else mlflow.is_local(settings)


def python_path() -> str:
    """$PYTHONPATH by which a process finds these packages, from whatever folder it is started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA device."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def kind_of(name: str) -> str:
    """The service that program `name` is an instance of: `rollout-1` is one of rollout."""
    return name.partition("-")[0]


def _fingerprint(settings: Settings) -> str:
    """Of what a process depends on; how many rollout services there are is nothing to any of them."""
    alone = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"services": 1})})
    return hashlib.sha256(alone.model_dump_json().encode()).hexdigest()


def _command(kind: str) -> list[str]:
    if kind == Service.LEARNER:
        return [sys.executable, str(ROOT / "trainers" / "learn.py")]
    modules = {
        Service.ROLLOUT: "inference.serve",
        Service.EVALUATOR: "inference.evaluate",
        Service.MAINTENANCE: "infra.maintain",
        Service.WARDEN: "infra.warden",
    }
    return [sys.executable, "-m", modules.get(Service(kind), f"flows.{kind}")]


def _threads(settings: Settings, kind: str) -> int:
    sections = {
        Service.ROLLOUT: settings.rollout.threads,
        Service.LEARNER: settings.learner.threads,
        Service.EVALUATOR: settings.evaluator.threads,
    }
    return sections.get(Service(kind), 1)
