"""What `homing eval --out` has kept, beside the run that it is of: by the hash of the weights, never by a name."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

from homing.errors import UsageError
from homing.report.facts import Eval, Report

__all__ = ["add_evals"]

_SCHEMA = "homing.eval/1"


def add_evals(report: Report, file: Path) -> Report:
    """With the figures in `file` that are of weights of this run; one that has none of those is refused."""
    document = _read(file)
    ours = {sha256 for each in report.kept for sha256 in each.weights.values()}
    try:
        found = [
            each
            for model, sets in zip(document["models"], document["results"], strict=True)
            if ours & set(model["files"].values())
            for each in _figures(model, sets)
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise _not_an_eval(file, f"{type(exc).__name__}: {exc}") from exc
    if not found:
        raise UsageError(
            what=f"{file} has no figures of {report.run}.",
            why="No weights that it measured have the hash of a checkpoint or model of this run that is still kept.",
            fix=f"homing eval {report.run} --out {shlex.quote(str(file))}",
        )
    return dataclasses.replace(report, evals=[*report.evals, *found])


def _figures(model: dict[str, Any], sets: list[dict[str, Any]]) -> list[Eval]:
    return [
        Eval(
            phase=str(model["phase"] or ""),
            step=None if model["step"] is None else int(model["step"]),
            name=str(one["name"]),
            figure=str(score["name"]),
            value=_number(score["value"]),
            low=_number(score["low"]),
            high=_number(score["high"]),
            num_units=int(score["num_units"]),
            num_tokens=None if (counted := one.get("counts", {}).get("tokens")) is None else int(counted),
        )
        for one in sets
        for score in one["scores"]
    ]


def _number(value: Any) -> float | None:
    """None: the model gave no number, or there is no interval."""
    number = None if value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as exc:
        raise UsageError(
            what=f"{file} cannot be read.", why=exc.strerror or str(exc), fix="homing eval RUN --out evals.md"
        ) from exc
    except ValueError as exc:
        raise _not_an_eval(file, str(exc)) from exc
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise _not_an_eval(file, f"It is no {_SCHEMA} document.")
    return document


def _not_an_eval(file: Path, why: str) -> UsageError:
    return UsageError(
        what=f"{file} is not what homing eval keeps.",
        why=why,
        fix="homing eval RUN --out evals.md   writes evals.json beside it, which is meant here",
    )
