"""Recovers a lost owner or ledger. homing needs both to recognize its instances.

owner lost    recovered from the marks in the ledger and written to disk again on the next use
ledger lost   restored from its backup (ledger_file.py). If a run is not in the backup, its instance's mark and its
              local documents identify the run and its limit, and `refresh` records them again; the rest can be
              restored from the store with `homing adopt`
both lost     instances carry an unknown mark: only the runs' own records in their stores identify them
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import AT_MOST, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Instance
from homing.units import counted
from homing.wire import codec, file_names
from homing.wire.run_json import Run

__all__ = [
    "LostRun",
    "is_called",
    "lost_owner",
    "read_lost",
    "remembered",
    "unknown_ids",
    "unknown_runs",
    "what_is_lost",
]

_SHOWN = 5
_RUN_ID = r"-\d{8}-\d{6}-[0-9a-f]{4}"  # matches what follows the name in a run id; see mark.new_run_id


@dataclass(frozen=True)
class LostRun:
    """What the local folder of a run shows, for a run launched from this computer that is not in the ledger."""

    id: str
    name: str
    store: str
    provider: str = ""  # "" if unknown
    offer: str = "?"
    attempt: int = 1
    spent_before_usd: Decimal = Decimal(0)
    spend_limit_usd: str | None = None
    run_file_sha256: str = ""

    @property
    def adopt(self) -> str:
        return f"homing adopt {shlex.quote(self.store or 'STORE')} {self.id}"


def what_is_lost(home: Home) -> list[str]:
    """Describe any lost owner and lost runs. Call this before `Home.owner`, which restores a lost owner."""
    owner, runs = lost_owner(home), unknown_runs(home)
    said = [f"{home.owner_path} was lost; the marks in the ledger show that the owner is {owner}."] if owner else []
    if not runs:
        return said
    adopt = "   ".join(f"homing adopt {shlex.quote(store)} {run_id}" for run_id, store in list(runs.items())[:_SHOWN])
    text = f"The ledger has no record of {counted(len(runs), 'run')} launched from this computer."
    if not home.has_owner and not owner:
        text += f" {home.owner_path} is missing too, so rented instances may be billing under an unknown mark."
    return [*said, f"{text} To restore from the store: {adopt}"]


def lost_owner(home: Home) -> str:
    """If the owner file is lost, return the owner id found in the ledger's marks.

    Return "" if the file is not lost, or if the ledger shows no owner id.
    """
    return "" if home.has_owner else home.owner_in_ledger()


def unknown_runs(home: Home) -> dict[str, str]:
    """Return the runs launched from here that are not in the ledger, as a dict from run id to store, newest first."""
    return {run_id: read_lost(home, run_id).store or "STORE" for run_id in unknown_ids(home)}


def remembered(home: Home, instance: Instance) -> tuple[RunRow, list[LedgerLine]] | None:
    """Return the run and lines of an instance that is not in the ledger, from the run's local documents, or None.

    The run includes its limit, so that the guard can enforce it. Any earlier attempts are returned as one line with
    their total cost.
    """
    number = instance.mark.rpartition("-")[2]
    attempt = int(number) if number.isdigit() and int(number) >= 1 else 1
    found = [each for each in unknown_ids(home) if make_mark(home.owner, each, attempt) == instance.mark]
    if not found:
        return None
    lost, now = read_lost(home, found[0]), home.world.now()
    began_at = min(instance.created_at or now, now)
    line = LedgerLine(
        mark=instance.mark,
        run_id=lost.id,
        run_name=lost.name,
        attempt=attempt,
        provider=instance.provider,
        offer=lost.offer,
        rate_usd_per_hour=str(instance.rate_usd_per_hour),
        limit_usd=lost.spend_limit_usd,
        intent_at=began_at,
        instance_id=instance.id,
        created_at=began_at,
        note="missing from the ledger; recognized by its mark",
    )
    run = RunRow(lost.id, lost.name, "running", began_at, lost.store, lost.run_file_sha256, lost.spend_limit_usd)
    if attempt == 1 or not lost.spent_before_usd:
        return run, [line]
    before = LedgerLine(
        mark=make_mark(home.owner, lost.id, attempt - 1),
        run_id=lost.id,
        run_name=lost.name,
        attempt=attempt - 1,
        provider=instance.provider,
        offer=lost.offer,
        rate_usd_per_hour="0",
        limit_usd=lost.spend_limit_usd,
        intent_at=began_at,
        created_at=began_at,
        destroyed_at=began_at,
        state="gone",
        billing="no",
        spend_usd=str(lost.spent_before_usd),
        note=f"{AT_MOST}all earlier attempts, as counted by the last launch",
    )
    return run, [before, line]


def is_called(run_id: str, word: str) -> bool:
    """Return True if `word` is the id or the name of this run. An empty `word` matches every run."""
    return word in ("", run_id) or re.fullmatch(re.escape(word) + _RUN_ID, run_id) is not None


def unknown_ids(home: Home) -> list[str]:
    """Return the ids of launched runs that are not in the ledger, newest first. Runs of `homing train` do not count."""
    folder = home.path / "runs"
    ids = home.world.listdir(folder) if home.world.is_dir(folder) else []
    known = home.ledger.run_ids() if ids else set()
    unknown = [each for each in sorted(ids, reverse=True) if each not in known]
    return [each for each in unknown if home.world.exists(folder / each / LAUNCH_NOTE)]


def read_lost(home: Home, run_id: str) -> LostRun:
    """Return what is known about the run from its local documents. Damaged documents are skipped."""
    folder = home.run_dir(run_id)
    name = re.sub(_RUN_ID + "$", "", run_id)
    lost = LostRun(run_id, name, "")
    try:
        run = codec.loads(Run, home.world.read(folder / file_names.RUN))
        lost = LostRun(
            run_id, run.name, run.store, spend_limit_usd=run.limits.spend_usd, run_file_sha256=run.run_file_sha256
        )
    except (OSError, codec.WireError):
        pass
    try:
        note: dict[str, Any] = json.loads(home.world.read(folder / LAUNCH_NOTE))
        offer = note.get("offer", {})
        source = {"provider": str(offer.get("provider", "")), "offer": str(offer.get("name", "?"))}
        spent = Decimal(str(note.get("spent_before_usd", "0")))
        counts = {"attempt": max(1, int(note.get("attempt", 1))), "spent_before_usd": max(Decimal(0), spent)}
    except (OSError, ValueError, TypeError, AttributeError, InvalidOperation):
        return lost
    return LostRun(**{**vars(lost), **source, **counts})
