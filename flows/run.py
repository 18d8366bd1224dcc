"""How a flow is run: recovery store, epochs, health, clean stop."""

from pathlib import Path

from bytewax.dataflow import Dataflow
from infra.telemetry import Stop, Telemetry

from schemas.settings import Settings


def run(flow: Dataflow, name: str, settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Run `flow` until it ends or `stop` is set, with its recovery store in `<run>/recovery/<name>`.

    Give `stop` to the flow's source as well: it then drains, commits what is pending, and the flow ends by itself.
    """
    raise NotImplementedError


def recovery_store(folder: Path) -> Path:
    """The recovery store in `folder`, created where there is none."""
    raise NotImplementedError
