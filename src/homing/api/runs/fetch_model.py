"""Fetch a model from the store to models/NAME, verified by hash: what `homing fetch` and `Run.fetch()` do."""

from __future__ import annotations

from pathlib import Path

from homing.api import notices
from homing.api.lookup.find_models import MODELS
from homing.api.lookup.find_runs import is_stranger, name_here
from homing.cloud.artifacts.fetch import Fetched, choose, fetch, place_of
from homing.cloud.contact.heartbeats import phases_of
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.plan.timing import remember_speed
from homing.config.paths import manifest_in
from homing.errors import UsageError

__all__ = ["fetch_model"]


def fetch_model(
    home: Home,
    row: RunRow,
    *,
    checkpoint: str = "latest",
    to: Path | None = None,
    force: bool = False,
    or_older: bool = False,
) -> tuple[Fetched, Path]:
    """Fetch a checkpoint. Return what was fetched, and its folder."""
    target = to or _place(home, row, checkpoint, force=force)
    try:
        got = fetch(
            home,
            row,
            target.absolute(),
            which=checkpoint,
            force=force,
            or_older=or_older,
            notify=lambda text: notices.say(f"  {text}"),
        )
    except PermissionError as exc:
        raise _unwritable(exc, row, target) from exc
    remember_speed(home, row, home.store_of(row))
    return got, target


def _unwritable(exc: PermissionError, row: RunRow, target: Path) -> Exception:
    """Return a usage error if the target folder cannot be written; any other PermissionError is returned unchanged."""
    named = Path(str(exc.filename)).absolute()
    if not named.is_relative_to(target.absolute().parent) and not target.absolute().is_relative_to(named):
        return exc
    return UsageError(
        what=f"Cannot write to {target}.",
        why=f"{exc.strerror}: {exc.filename}",
        fix=f"homing fetch {name_here(row)} --to FOLDER",
    )


def _place(home: Home, row: RunRow, checkpoint: str, *, force: bool) -> Path:
    there = manifest_in(MODELS / row.name)
    is_there = there is not None and there.run_id == row.id
    if is_stranger(row) and not is_there:
        notices.say(
            f"{MODELS / row.name} is reserved for the run {row.name} of this folder; saving to {MODELS / row.id}"
        )
        return MODELS / row.id
    if force:
        return MODELS / row.name
    store = home.store_of(row)
    phase = choose(store, row, checkpoint, phases_of(store, row))[0].manifest.phase
    target = place_of(home, row, phase, MODELS)
    if target != MODELS / row.name:
        notices.say(f"{MODELS / row.name} holds another run of that name; saving to {target}")
    return target
