"""Sends metrics to MLflow: a folder at home, or a server behind a tunnel. Servers open to the network are refused."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from homing.errors import UsageError
from homing.trackers.tracker import What, values_of
from homing.wire.event_lines import Metric

__all__ = ["ToMlflow", "check_uri", "uri_of"]

URI_ENV = "MLFLOW_TRACKING_URI"
_TAG = "homing.run"
_BATCH = 900  # below the maximum of 1000 per call
_STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def uri_of(what: What) -> str:
    return what.environment.get(URI_ENV) or f"file://{what.folder / 'mlruns'}"


def check_uri(uri: str) -> None:
    """Raise UsageError unless the server is on loopback: by default MLflow has neither a password nor encryption."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        port = parts.port or 5000
        raise UsageError(
            what=f"Refusing to connect to {uri}: homing connects to MLflow only through a tunnel.",
            why="Anyone who can reach an open MLflow port can read and change everything.",
            fix=f"ssh -N -L {port}:127.0.0.1:{port} {parts.hostname}   then: export {URI_ENV}=http://127.0.0.1:{port}",
        )


class ToMlflow:
    def __init__(self, what: What) -> None:
        uri = uri_of(what)
        check_uri(uri)
        # A folder needs no server and no database; MLflow requires this to be enabled explicitly.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric as Point
        from mlflow.tracking import MlflowClient

        self._point: Any = Point
        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._find(what) or self._create(what)
        self._waiting: list[Any] = []

    def log(self, metric: Metric) -> None:
        at = int(metric.t * 1000)
        for name, value in values_of(metric).items():
            self._waiting.append(self._point(f"{metric.phase}/{name}", value, at, metric.step))

    def rewind(self, metric: Metric) -> None:
        """Do nothing: MLflow's history keeps all values of a step, by time."""

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]

    def close(self, state: str) -> None:
        if state:
            self._client.set_terminated(self._id, status=_STATES.get(state, "FINISHED"))

    def _find(self, what: What) -> str:
        experiment = self._client.get_experiment_by_name(what.project)
        if experiment is None:
            return ""
        found = self._client.search_runs([experiment.experiment_id], filter_string=f"tags.`{_TAG}` = '{what.run_id}'")
        return str(found[0].info.run_id) if found else ""

    def _create(self, what: What) -> str:
        experiment = self._client.get_experiment_by_name(what.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(what.project)
        made = self._client.create_run(number, run_name=what.name, tags={_TAG: what.run_id})
        for name, value in what.config.items():
            self._client.log_param(made.info.run_id, name, value)
        return str(made.info.run_id)
