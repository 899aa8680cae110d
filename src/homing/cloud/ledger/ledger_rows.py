"""Read ledger rows from SQLite defensively, so that one bad row does not hide all the others.

SQLite keeps text, NULL or a blob in any column, and a disk error or a manual edit may have put them there. Each column
is read separately: an invalid value is replaced by one that is safe to act on, and the column's name is reported. Safe
means: what may bill is open, an unknown cost is not counted, and the mark and instance id, which a destroy needs, are
kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from homing.cloud.figures import MOST_USD, MOST_USD_PER_HOUR, read_figure

__all__ = ["read_line", "read_run", "seconds_in", "usd_in"]

_NO_TEXT = "\ufffd"  # replaces bytes that are not text
_FREE = ("note", "reason", "store")  # may quote text from elsewhere


def read_line(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the fields of LedgerLine; `damaged` names the columns that could not be read."""
    bad: list[str] = []
    intent_at = _moment(row, "intent_at", bad)
    # Unreadable text does not mean "never created": it was requested at some time, so it may bill.
    created_at = _moment(row, "created_at", bad, otherwise=intent_at if intent_at is not None else now)
    return {
        "mark": _text(row, "mark", bad),
        "run_id": _text(row, "run_id", bad),
        "run_name": _text(row, "run_name", bad),
        "attempt": _number(row, "attempt", bad, 1),
        "provider": _text(row, "provider", bad),
        "offer": _text(row, "offer", bad),
        "rate_usd_per_hour": _usd(row, "rate_usd_per_hour", bad, int(MOST_USD_PER_HOUR)) or "0",
        "limit_usd": _usd(row, "limit_usd", bad) if row["limit_usd"] is not None else None,
        "intent_at": intent_at if intent_at is not None else now,
        "instance_id": _text(row, "instance_id", bad) if row["instance_id"] is not None else None,
        "created_at": created_at,
        "destroyed_at": _moment(row, "destroyed_at", bad),  # open if it cannot be read
        "state": _text(row, "state", bad),
        "billing": _text(row, "billing", bad),
        "spend_usd": _usd(row, "spend_usd", bad) or "0",
        "note": _text(row, "note", bad),
        "account": _text(row, "account", bad) if row["account"] is not None else None,
        "damaged": tuple(bad),
    }


def read_run(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the fields of RunRow, with `damaged`."""
    bad: list[str] = []
    created_at, ended_at = _moment(row, "created_at", bad), _moment(row, "ended_at", bad)
    state = _text(row, "state", bad)
    if "state" in bad:
        state = "running" if ended_at is None else "failed"  # live, so that it is guarded until its store says more
    return {
        "id": _text(row, "id", bad),
        "name": _text(row, "name", bad),
        "state": state,
        "created_at": created_at if created_at is not None else now,
        "store": _text(row, "store", bad),
        "run_file_sha256": _text(row, "run_file_sha256", bad),
        "spend_limit_usd": _usd(row, "spend_limit_usd", bad) if row["spend_limit_usd"] is not None else None,
        "reason": _text(row, "reason", bad),
        "exit_code": _number(row, "exit_code", bad, None),
        "ended_at": ended_at,
        "fetched_step": _number(row, "fetched_step", bad, None),
        "damaged": tuple(bad),
    }


def seconds_in(value: object, otherwise: float) -> float | None:
    """Return a stored time; None if there is none, `otherwise` if the value is not a time."""
    if value is None:
        return None
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_time and abs(float(value)) < 1e12 else otherwise  # type: ignore[arg-type]


def usd_in(value: object, most: int = int(MOST_USD) * 1000) -> str | None:
    """Return a stored dollar amount as text, or None if it is not one.

    Only text counts: the ledger writes no floats.
    """
    return value if isinstance(value, str) and _is_usd(value, most) else None


@functools.lru_cache(maxsize=4096)  # the same few rates and limits appear in many rows
def _is_usd(text: str, most: int) -> bool:
    return read_figure(text, most) is not None


def _text(row: Mapping[str, Any], name: str, bad: list[str]) -> str:
    value = row[name]
    if isinstance(value, str) and (_NO_TEXT not in value or name in _FREE):
        return value
    bad.append(name)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _usd(row: Mapping[str, Any], name: str, bad: list[str], most: int = int(MOST_USD) * 1000) -> str | None:
    found = usd_in(row[name], most)
    if found is None:
        bad.append(name)
    return found


def _moment(row: Mapping[str, Any], name: str, bad: list[str], otherwise: float | None = None) -> float | None:
    found = seconds_in(row[name], math.nan)
    if found is None or not math.isnan(found):
        return found
    bad.append(name)
    return otherwise


def _number(row: Mapping[str, Any], name: str, bad: list[str], otherwise: int | None) -> int | None:
    value = row[name]
    if isinstance(value, int) or (value is None and otherwise is None):
        return value
    bad.append(name)
    return otherwise
