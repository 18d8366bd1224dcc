"""One MLflow run and its registered model, synchronously: every call is one or more requests and may fail."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from infra.store import local_path
from infra.tracking import Point
from schemas.settings import Settings

SECTIONS = ("loop", "dispatch", "curate", "rollout", "learner", "evaluator", "policy")
"""Sections of the settings that become parameters; the others hold addresses, and may hold credentials."""

_MAX_PARAMS = 100


class Experiment:
    """A run of `tracking.experiment`, and the registered model `<experiment>-policy`."""

    def __init__(self, settings: Settings, run_name: str):
        self._client = MlflowClient(settings.tracking.uri)
        self._settings = settings
        self._run_name = run_name
        self._model = f"{settings.tracking.experiment}-policy"
        self._newest: dict[str, int] = {}
        self._known: dict[str, set[int]] = {}

    def start(self, resume_run_id: str | None) -> str:
        """The id of the run: `resume_run_id` where MLflow still has it, else a new one, with settings as parameters.

        Tag `lagoon.continues` of a new one names the run that is gone.
        """
        if resume_run_id is not None and self._resume(resume_run_id):
            return resume_run_id
        tags = {"lagoon.run": self._settings.run.name}
        if resume_run_id is not None:
            tags["lagoon.continues"] = resume_run_id
        run = self._client.create_run(self._experiment_id(), run_name=self._run_name, tags=tags)
        params = [Param(key, value[:6000]) for key, value in parameters(self._settings)]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + _MAX_PARAMS], synchronous=True)
        return run.info.run_id

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Log points; those whose step an earlier life of the run had logged are left out: one value per step."""
        fresh = [Metric(p.key, p.value, p.at_ms, p.step) for p in points if not self._is_logged(run_id, p)]
        if fresh:
            self._client.log_batch(run_id, metrics=fresh, synchronous=True)

    def register(self, run_id: str | None, version: int, uri: str, tags: Mapping[str, str]) -> None:
        """A model version for a weight version; one that is there already, with the same fingerprint, is left alone.

        A run that is begun again under its old name has other weights under the same numbers.
        """
        found = self._model_version(version)
        if found is not None and found.tags.get("fingerprint") == tags.get("fingerprint"):
            return
        try:
            self._client.create_registered_model(self._model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        self._client.create_model_version(
            self._model, _source(uri), run_id, tags=self._identity(version) | {"uri": uri, **tags}, await_creation_for=0
        )

    def alias(self, name: str, version: int) -> bool:
        """Point alias `name` at a weight version; False while that version is not registered."""
        found = self._model_version(version)
        if found is not None:
            self._client.set_registered_model_alias(self._model, name, str(found.version))
        return found is not None

    def finish(self, run_id: str) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(run_id, "FINISHED")

    @staticmethod
    def is_permanent(error: Exception) -> bool:
        """Whether MLflow refuses the request itself, so that repeating it is no use."""
        return isinstance(error, MlflowException) and 400 <= error.get_http_status_code() < 500

    def _resume(self, run_id: str) -> bool:
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self._client.update_run(run_id, status="RUNNING")
        self._newest = {m.key: m.step for m in run.data.to_proto().metrics}
        return True

    def _experiment_id(self) -> str:
        name = self._settings.tracking.experiment
        for _ in range(2):
            found = self._client.get_experiment_by_name(name)
            if found is not None:
                return found.experiment_id
            try:
                return self._client.create_experiment(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise MlflowException(f"experiment {name!r} exists but cannot be found; it may be deleted: restore it")

    def _is_logged(self, run_id: str, point: Point) -> bool:
        if point.step > self._newest.get(point.key, -1):
            return False
        if point.key not in self._known:
            history = self._client.get_metric_history(run_id, point.key)
            self._known[point.key] = {metric.step for metric in history}
        return point.step in self._known[point.key]

    def _model_version(self, version: int) -> ModelVersion | None:
        """The newest model version of a weight version of this run."""
        tags = " and ".join(f"tags.`{key}` = '{value}'" for key, value in self._identity(version).items())
        query = f"name = '{self._model}' and {tags}"
        found = self._client.search_model_versions(query, max_results=1, order_by=["version_number DESC"])
        return found[0] if found else None

    def _identity(self, version: int) -> dict[str, str]:
        return {"lagoon.run": self._settings.run.name, "weight_version": str(version)}


def parameters(settings: Settings) -> Iterator[tuple[str, str]]:
    """The settings that shape a run, as (dotted name, value)."""
    for section in SECTIONS:
        values: dict[str, Any] = getattr(settings, section).model_dump(mode="json")
        yield from ((f"{section}.{name}", str(value)) for name, value in values.items())


def _source(uri: str) -> str:
    """MLflow refuses local paths outside its artifacts as a source of models; under a scheme of ours it takes them."""
    path = local_path(uri)
    return uri if path is None else f"lagoon-weights:{path}"
