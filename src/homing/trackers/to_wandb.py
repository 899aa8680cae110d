"""Sends metrics to Weights & Biases. Without a key it records offline, and `wandb sync` uploads it later.

Steps are a separate metric (`PHASE/step`) and not W&B's own step: that may only increase, and a run that rolls back
logs some steps again.
"""

from __future__ import annotations

import importlib
from typing import Any

from homing.api_address import check_address
from homing.trackers.tracker import What, values_of
from homing.wire.event_lines import Metric

__all__ = ["ToWandb", "mode_of"]

KEY_ENV, MODE_ENV, URL_ENV = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"
_START_S = 60.0


def mode_of(environment: dict[str, str]) -> str:
    """Return WANDB_MODE if set; else offline without a key, because prompting for one would block forever."""
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
        """Do nothing: steps that are logged again appear next to the first ones."""

    def flush(self) -> None:
        """Do nothing: W&B's own process has the values as soon as `log` returns."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)
