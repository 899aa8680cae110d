"""The interface of a tracker sink: open -> log each metric -> rewind after a rollback -> flush -> close.

A sink raises whatever its package raises. The follower catches the exception, reopens the sink and sends the metrics
again. Therefore, sending the same metric twice must be as harmless as plotting a point twice.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from homing.errors import MissingExtra, UsageError
from homing.wire.event_lines import Metric

__all__ = ["TRACKERS", "Sink", "What", "check_tracker", "open_sink", "values_of"]

# name -> (module:class, the package that must be installed)
TRACKERS: dict[str, tuple[str, str]] = {
    "mlflow": ("homing.trackers.sinks:ToMlflow", "mlflow"),
    "tensorboard": ("homing.trackers.sinks:ToTensorBoard", "tensorboard"),
    "trackio": ("homing.trackers.sinks:ToTrackio", "trackio"),
    "wandb": ("homing.trackers.sinks:ToWandb", "wandb"),
}


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


def open_sink(name: str, what: What) -> Sink:
    module_name, class_name = TRACKERS[name][0].split(":")
    return cast(Sink, getattr(importlib.import_module(module_name), class_name)(what))


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


def values_of(metric: Metric) -> dict[str, float]:
    """Return a metric's values by name, without missing values and without phase, step and time."""
    found = dataclasses.asdict(metric)
    found.update(found.pop("more"))  # add the values specific to this phase
    return {name: float(value) for name, value in found.items() if name not in _PLACE and value is not None}


_PLACE = ("t", "phase", "step")
