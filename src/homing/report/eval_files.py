"""Adds results of `homing eval --out` to a report; they are matched by the hash of the weights, never by name."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

from homing.errors import UsageError
from homing.report.report_data import Eval, Report

__all__ = ["add_evals"]

_SCHEMA = "homing.eval/1"


def add_evals(report: Report, file: Path) -> Report:
    """Return the report with the results in `file` for weights of this run; raises UsageError if there are none."""
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
            what=f"{file} has no results for {report.run}.",
            why="The weights it measured do not match any stored checkpoint or model of this run.",
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
    """Return a float, or None: the model gave no number, or there is no interval. Raises ValueError if not finite."""
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
        raise _not_an_eval(file, f"It is not a {_SCHEMA} document.")
    return document


def _not_an_eval(file: Path, why: str) -> UsageError:
    return UsageError(
        what=f"{file} is not a result file of homing eval.",
        why=why,
        fix="homing eval RUN --out evals.md   also writes evals.json; use that file",
    )
