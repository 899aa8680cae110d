"""The numbers of a run for the dashboard: its row in the table of runs, and its points on the curves.

    run.json, run.yaml, project.json    -> About      what was planned: model, phases, preset; read once
    last lines of metrics.jsonl         -> figures    loss, validation, speed: newest values of the current phase
    ledger, heartbeat, outcome          -> row        all of it as numbers, with the unit in the name of the key

What is not known is None. Nothing is estimated, and nothing is formatted: the page does that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePath
from typing import Any

from homing.api.lookup.local_runs import Trained
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import Resource
from homing.cloud.reconcile.run_status import BY_REWARD, Status, reached
from homing.config.home_and_run_files import PROJECT_NOTE, preset_of
from homing.store import Store, run_key
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Metric
from homing.wire.run_json import Run

__all__ = [
    "COLUMNS",
    "About",
    "billing_row",
    "local_row",
    "merge_figures",
    "point",
    "read_about",
    "rented_row",
    "resource_row",
]

_FIGURES = (
    "num_tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "val_loss", "val_bits_per_byte",
    "eta_s",
)  # fmt: skip
_RL_FIGURES = ("reward", "length", "val_reward")  # in `Metric.more`
# The columns of a point on the curves. `spend_usd` is added from the ledger.
COLUMNS = (
    "phase", "step", "t", "num_tokens", "loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "tokens_per_s",
    "mfu", "memory_bytes", *_RL_FIGURES, "spend_usd",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """What a run was planned to be."""

    run: Run | None = None
    preset: str | None = None
    project: str | None = None

    def row(self) -> dict[str, Any]:
        run = self.run
        return {
            "project": self.project,
            "preset": self.preset,
            "family": run.model.family if run else None,
            "num_params": run.sizes.num_params if run else None,
            "base": run.base.address if run and run.base else None,
            "phases": [phase.kind for phase in run.phases] if run else [],
            "methods": list(dict.fromkeys(phase.method for phase in run.phases)) if run else [],
        }

    def prompts(self) -> list[str]:
        """Return the prompts that the samples of this run may begin with."""
        if self.run is None:
            return []
        own = [prompt for phase in self.run.phases for prompt in phase.sample_prompts]
        asked = [phase.data.question for phase in self.run.phases if phase.data is not None and phase.data.question]
        return list(dict.fromkeys([*self.run.sampling.prompts, *own, *asked]))


def read_about(home: Home, run_id: str, store: Store | None = None) -> About:
    """Read the plan of a run from its folder on this computer or, if it is not there, from its store."""
    folder, run = home.run_dir(run_id), None
    try:
        run = codec.loads(Run, home.world.read(folder / file_names.RUN))
    except (OSError, WireError):
        if store is not None:
            run = read_document(store, run_key(run_id, file_names.RUN), Run)
    preset = project = None
    with contextlib.suppress(OSError):
        found = preset_of(home.world.read(folder / file_names.RUN_FILE).decode("utf-8", "replace"))
        preset = found.stem if found is not None else None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        project = PurePath(json.loads(home.world.read(folder / PROJECT_NOTE))["folder"]).name or None
    return About(run, preset, project)


def merge_figures(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the newest values of the last phase. In rl, the reward replaces the loss, which has no meaning there."""
    if not metrics:
        return {}
    last = metrics[-1]
    figures: dict[str, Any] = {"phase": last.phase, "step": last.step, "num_steps": last.num_steps, "t": last.t}
    for metric in metrics:
        if metric.phase == last.phase:
            found = _values(metric)
            figures |= {name: value for name, value in found.items() if value is not None}
    return figures


def _values(metric: Metric) -> dict[str, Any]:
    found = {name: getattr(metric, name) for name in _FIGURES}
    if metric.phase == BY_REWARD:
        found |= {"loss": None, "val_loss": None, **{name: metric.more.get(name) for name in _RL_FIGURES}}
    return found


def point(metric: Metric, lines: Sequence[LedgerLine]) -> list[Any]:
    """Return one line of metrics as the values of COLUMNS, because there may be thousands of lines."""
    found = {"phase": metric.phase, "step": metric.step, "t": metric.t, **_values(metric)}
    found["spend_usd"] = _spent_at(lines, metric.t) if lines else None
    return [found.get(name) for name in COLUMNS]


def _spent_at(lines: Sequence[LedgerLine], t: float) -> float:
    """Return our own estimate of the spend as of a past time, ignoring provider figures that arrived later."""
    spent = Decimal(0)
    for line in lines:
        if line.created_at is not None:
            until = t if line.destroyed_at is None else min(t, line.destroyed_at)
            spent += meter.cost(Decimal(line.rate_usd_per_hour), until - line.created_at)
    return round(float(spent), 6)


def rented_row(status: Status, figures: dict[str, Any], about: About, *, line: str, problem: str) -> dict[str, Any]:
    run, lines, reports = status.run, status.lines, status.reports
    beat = reports.heartbeat if reports else None
    open_, charged = billing_lines(lines), [each for each in lines if meter.is_charged(each)]
    last = lines[-1] if lines else None
    ended_at = run.ended_at if not run.is_live else None
    until = status.at if run.is_live else ended_at
    use = beat.use if beat is not None and run.is_live else {}
    return {
        **_row(run.id, run.name, run.state, run.reason, about),
        **_newest(figures, reached(status, beat) if beat is not None else None),
        "exit_code": run.exit_code,
        "problem": problem,
        "line": line,
        "is_live": run.is_live,
        "is_billing": status.is_billing,
        "billing": meter.billing_word(open_[-1]) if open_ else "no",
        "is_trained_here": False,
        "gpu_share": use.get("gpu"),
        "gpu_memory_share": use.get("gpu_memory"),
        "spend_usd": _usd(status.spend_usd),
        "is_at_most": any(each.is_at_most for each in lines),
        "spend_limit_usd": None if status.limit_usd is None else float(status.limit_usd),
        "rate_usd_per_hour": float(sum(Decimal(each.rate_usd_per_hour) for each in open_)) if open_ else None,
        "created_at": run.created_at,
        "ended_at": ended_at,
        "duration_s": None if until is None else round(max(0.0, until - run.created_at)),
        "provider": last.provider if last else None,
        "offer": last.offer if last else None,
        "instance_id": open_[-1].instance_id if open_ else None,
        "instance_state": open_[-1].state if open_ else None,
        "num_attempts": len({each.attempt for each in lines}),
        "is_charged": bool(charged),
        "heartbeat_age_s": None if status.heartbeat_age_s is None or not run.is_live else round(status.heartbeat_age_s),
    }


def local_row(run: Trained, figures: dict[str, Any], about: About, now: float, *, line: str) -> dict[str, Any]:
    """Return the same keys for a run that `homing train` started on this computer, which costs nothing."""
    ended_at = None if run.is_live else run.ended_at or figures.get("t")
    until = now if run.is_live else ended_at
    found = _newest(figures, None)
    if run.step is not None and run.phase in ("", found["phase"], None):
        found["step"] = max(run.step, found["step"] or 0)
    return {
        **_row(run.run, run.name, run.state, run.reason, about),
        **found,
        "phase": found["phase"] or run.phase or None,
        "num_steps": found["num_steps"] or run.num_steps,
        "exit_code": None,
        "problem": "",
        "line": line,
        "is_live": run.is_live,
        "is_billing": False,
        "billing": "no",
        "is_trained_here": True,
        "gpu_share": None,
        "gpu_memory_share": None,
        "spend_usd": None,
        "is_at_most": False,
        "spend_limit_usd": None,
        "rate_usd_per_hour": None,
        "created_at": run.began_at,
        "ended_at": ended_at,
        "duration_s": None if until is None else round(max(0.0, until - run.began_at)),
        "provider": None,
        "offer": None,
        "instance_id": None,
        "instance_state": None,
        "num_attempts": 1,
        "is_charged": False,
        "heartbeat_age_s": None,
    }


def _row(run_id: str, name: str, state: str, reason: str, about: About) -> dict[str, Any]:
    return {"run": run_id, "name": name, "state": state, "reason": reason, **about.row()}


def _newest(figures: dict[str, Any], beat: Heartbeat | None) -> dict[str, Any]:
    """Return the newest figures: those of the metrics, or those of the heartbeat if it is newer."""
    names = ("phase", "step", "num_steps", *_FIGURES, *_RL_FIGURES)
    found = {name: figures.get(name) for name in names}
    if beat is None or not beat.phase:
        return found
    is_same = beat.phase == found["phase"]
    if is_same and beat.step < (found["step"] or 0):
        return found
    if not is_same and beat.t < figures.get("t", 0.0):
        return found
    if not is_same:
        found = dict.fromkeys(names)
    loss = None if beat.phase == BY_REWARD else beat.loss
    said = {"phase": beat.phase, "step": beat.step, "num_steps": beat.num_steps or None, "loss": loss,
            "tokens_per_s": beat.tokens_per_s, "mfu": beat.mfu, "eta_s": beat.eta_s}  # fmt: skip
    return found | {name: value for name, value in said.items() if value is not None}


def billing_row(line: LedgerLine, now: float) -> dict[str, Any]:
    """Return an instance that may be billing and belongs to no known run."""
    return {
        "kind": "instance",
        "provider": line.provider,
        "id": line.instance_id,
        "state": line.state,
        "billing": line.billing,
        "rate_usd_per_hour": float(line.rate_usd_per_hour),
        "spend_usd": _usd(meter.line_spend(line, now)),
        "created_at": line.intent_at,
    }


def resource_row(thing: Resource, now: float) -> dict[str, Any]:
    """Return another resource that is billed, such as a volume."""
    age_s = max(0.0, now - thing.created_at) if thing.created_at is not None else None
    return {
        "kind": thing.kind,
        "provider": thing.provider,
        "id": thing.id,
        "state": "kept" if thing.is_kept else None,
        "billing": "yes",
        "rate_usd_per_hour": float(thing.rate_usd_per_hour),
        "spend_usd": None if age_s is None else _usd(meter.cost(thing.rate_usd_per_hour, age_s)),
        "created_at": thing.created_at,
    }


def _usd(amount: Decimal) -> float:
    return round(float(amount), 6)
