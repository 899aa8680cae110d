"""Weights & Biases. Without a key it records offline, and `wandb sync` sends it when there is one.

Steps are a figure of their own (`PHASE/step`) and not W&B's: theirs may only grow, and a run that falls back tells some
steps again.
"""

from __future__ import annotations

import importlib
from typing import Any

from homing.api_address import check_address
from homing.trackers.base import What, values_of
from homing.wire.event import Metric

__all__ = ["ToWandb", "mode_of"]

KEY_ENV, MODE_ENV, URL_ENV = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"
_START_S = 60.0


def mode_of(environment: dict[str, str]) -> str:
    """As WANDB_MODE says; without a key offline, because asking for one would wait for ever."""
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
        """Nothing to undo: the steps that are told again stand beside the first telling."""

    def flush(self) -> None:
        """Its own process has them as soon as `log` returns."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
