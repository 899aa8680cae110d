"""One sink per tracker: MLflow, TensorBoard, trackio, Weights & Biases. Each loads its package when it is opened.

    open -> log each metric -> rewind after a rollback -> flush -> close

MLflow        a local folder, or a server reached through an SSH tunnel; other addresses are rejected
TensorBoard   event files, written by tensorboard's own writer; loads neither torch nor tensorflow
trackio       a local SQLite file, opened with `trackio show --project homing`; no server, no account
W&B           records offline if there is no key; `wandb sync` uploads the records later. The step is a separate metric
              (`PHASE/step`), because W&B's own step can only increase, and a run that rolls back logs some steps again

A sink raises whatever its package raises. The follower catches the exception, reopens the sink and sends the metrics
again. Therefore, sending the same metric twice must be as harmless as plotting a point twice.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from homing.api_address import check_address
from homing.errors import MissingExtra, UsageError
from homing.wire.event_lines import Metric

__all__ = [
    "TRACKERS",
    "Sink",
    "ToMlflow",
    "ToTensorBoard",
    "ToTrackio",
    "ToWandb",
    "What",
    "check_tracker",
    "check_uri",
    "mode_of",
    "open_sink",
    "uri_of",
    "values_of",
]


@dataclass(frozen=True)
class What:
    """What a sink needs to know about the run that it tracks."""

    run_id: str
    name: str
    folder: Path  # folder in which a tracker may keep its own files
    project: str = "homing"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict, repr=False)


class Sink(Protocol):
    def __init__(self, what: What) -> None: ...

    def log(self, metric: Metric) -> None: ...

    # called after training rolled back to an earlier step; everything from this metric's step on will be logged again
    def rewind(self, metric: Metric) -> None: ...

    def flush(self) -> None: ...  # blocks until no logged value would be lost if this process crashed

    def close(self, state: str) -> None: ...  # done | failed | stopped, or "" if the run may continue


def values_of(metric: Metric) -> dict[str, float]:
    """Return a metric's values by name, without missing values and without phase, step and time."""
    found = dataclasses.asdict(metric)
    found.update(found.pop("more"))  # add the values specific to this phase
    return {name: float(value) for name, value in found.items() if name not in _PLACE and value is not None}


_PLACE = ("t", "phase", "step")
URI_ENV = "MLFLOW_TRACKING_URI"
_TAG = "homing.run"
_BATCH = 900  # number of metrics per call; MLflow allows at most 1000
_STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def uri_of(what: What) -> str:
    return what.environment.get(URI_ENV) or f"file://{what.folder / 'mlruns'}"


def check_uri(uri: str) -> None:
    """Raise UsageError if the server is not on loopback, because MLflow has no password or encryption by default."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        port = parts.port or 5000
        raise UsageError(
            what=f"Refusing to connect to {uri}: homing connects to a remote MLflow only through a tunnel.",
            why="Anyone who can reach an open MLflow port can read and change everything.",
            fix=f"Open a tunnel: ssh -N -L {port}:127.0.0.1:{port} {parts.hostname}   then: export {URI_ENV}=http://127.0.0.1:{port}",
        )


class ToMlflow:
    def __init__(self, what: What) -> None:
        uri = uri_of(what)
        check_uri(uri)
        # MLflow can write to a folder without a server or a database, but only if this variable allows it.
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
        """Do nothing: MLflow keeps every value that was logged for a step, each with its time."""

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


class ToTensorBoard:
    def __init__(self, what: What) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._folder = str(what.folder / "tensorboard" / what.run_id)
        self._new: Any = EventFileWriter
        self._writers: dict[str, Any] = {}  # one writer per phase, because each phase starts again at step 0

    def log(self, metric: Metric) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in values_of(metric).items()]
        event = self._event(wall_time=metric.t, step=metric.step, summary=self._summary(value=values))
        self._writer(metric.phase).add_event(event)

    def rewind(self, metric: Metric) -> None:
        """Write an event that makes TensorBoard discard the values from this step on."""
        session = self._session(status=self._session.START)
        event = self._event(wall_time=metric.t, step=metric.step, session_log=session)
        self._writer(metric.phase).add_event(event)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self, state: str) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, phase: str) -> Any:
        if phase not in self._writers:
            self._writers[phase] = self._new(f"{self._folder}/{phase}")
        return self._writers[phase]


class ToTrackio:
    def __init__(self, what: What) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._what = what
        self._waiting: list[Metric] = []

    def log(self, metric: Metric) -> None:
        self._waiting.append(metric)

    def rewind(self, metric: Metric) -> None:
        """Do nothing: each line has its own id, so trackio keeps both the original and the repeated values."""

    def flush(self) -> None:
        if not self._waiting:
            return
        self._storage.bulk_log(
            self._what.project,
            self._what.name,
            [{f"{m.phase}/{name}": value for name, value in values_of(m).items()} for m in self._waiting],
            steps=[m.step for m in self._waiting],
            timestamps=[datetime.datetime.fromtimestamp(m.t, tz=datetime.UTC).isoformat() for m in self._waiting],
            config=self._what.config,
            # These ids prevent trackio from inserting the same line twice.
            log_ids=[f"{self._what.run_id}-{m.phase}-{m.step}-{m.t}" for m in self._waiting],
            run_id=self._what.run_id,
        )
        self._waiting.clear()

    def close(self, state: str) -> None:
        self.flush()


KEY_ENV, MODE_ENV, URL_ENV = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"
_START_S = 60.0


def mode_of(environment: dict[str, str]) -> str:
    """Return WANDB_MODE if set, else "online" if there is a key, else "offline", so that W&B never asks for a key."""
    return environment.get(MODE_ENV) or ("online" if environment.get(KEY_ENV) else "offline")


class ToWandb:
    def __init__(self, what: What) -> None:
        if what.environment.get(URL_ENV):
            check_address(what.environment[URL_ENV], URL_ENV)
        wandb: Any = importlib.import_module("wandb")
        folder = what.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=what.project,
            id=what.run_id,
            name=what.name,
            config=what.config,
            dir=str(folder),
            mode=mode_of(what.environment),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=_START_S, x_disable_stats=True),
        )
        self._phases: set[str] = set()

    def log(self, metric: Metric) -> None:
        if metric.phase not in self._phases:
            self._phases.add(metric.phase)
            self._run.define_metric(f"{metric.phase}/*", step_metric=f"{metric.phase}/step")
        values = {f"{metric.phase}/{name}": value for name, value in values_of(metric).items()}
        self._run.log({**values, f"{metric.phase}/step": metric.step, f"{metric.phase}/t": metric.t})

    def rewind(self, metric: Metric) -> None:
        """Do nothing: after a rollback, W&B shows the repeated steps in addition to the original ones."""

    def flush(self) -> None:
        """Do nothing, because W&B's own process has the values as soon as `log` returns."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)


# name -> (sink, the package that must be installed)
TRACKERS: dict[str, tuple[type[Sink], str]] = {
    "mlflow": (ToMlflow, "mlflow"),
    "tensorboard": (ToTensorBoard, "tensorboard"),
    "trackio": (ToTrackio, "trackio"),
    "wandb": (ToWandb, "wandb"),
}


def open_sink(name: str, what: What) -> Sink:
    return TRACKERS[name][0](what)


def check_tracker(name: str, *, verb: str) -> None:
    """Raise UsageError if the tracker is unknown, or MissingExtra if its package is not installed."""
    if name not in TRACKERS:
        raise UsageError(
            what=f"Unknown tracker: {name!r}.",
            why=f"Known trackers: {', '.join(TRACKERS)}.",
            fix="Use --tracker tensorboard",
        )
    if find_spec(TRACKERS[name][1]) is None:
        raise MissingExtra(f"{verb} --tracker {name}", "trackers", TRACKERS[name][1])
