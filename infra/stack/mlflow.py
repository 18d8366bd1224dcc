"""An MLflow server for this machine: SQLite, one worker, on loopback only."""

import sys
from pathlib import Path

from infra.stack import ports
from schemas.settings import Settings

ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its job runner is eight processes, about 600 MB
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def address(settings: Settings) -> str:
    """The tracking URI of this data folder's server."""
    port = ports.remembered(Path(settings.run.data_dir), "mlflow", settings.stack.mlflow_port)
    return f"http://{ports.HOST}:{port}"


def is_local(settings: Settings) -> bool:
    """Whether the run tracks on this data folder's own server, on whatever port it was when the settings were saved."""
    known = ports.all_of(Path(settings.run.data_dir), "mlflow")
    ours = {"", *(f"http://{ports.HOST}:{p}" for p in (settings.stack.mlflow_port, *known))}
    return settings.tracking.enabled and settings.tracking.uri in ours


def command(settings: Settings) -> list[str]:
    """The command that runs the server; its database and artifacts lie in `<data_dir>/mlflow`."""
    folder = Path(settings.run.data_dir).absolute() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    port = address(settings).rpartition(":")[2]
    return [
        *[sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", ports.HOST, "--port", port],
        *[
            "--backend-store-uri",
            f"sqlite:///{folder / 'mlflow.db'}",
            "--artifacts-destination",
            str(folder / "artifacts"),
        ],
    ]
