"""Fetch a model from the store to models/NAME, verified by hash. Implements `homing fetch` and `Run.fetch()`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api import notices
from homing.api.lookup.find_models import MODELS
from homing.api.lookup.find_runs import find_run, is_stranger, name_here, open_home
from homing.api.notices import say_problems
from homing.cloud.artifacts.checkpoints import Fetched, Shown, best_step, choose, fetch, place_of, show
from homing.cloud.contact.heartbeats import phases_of
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.plan.speed import remember_speed
from homing.cloud.reconcile.reconcile import refresh
from homing.config.home_and_run_files import manifest_in
from homing.errors import UsageError

__all__ = ["FetchedModel", "fetch_model", "list_checkpoints"]


@dataclass(frozen=True)
class FetchedModel:
    run: RunRow
    got: Fetched
    folder: Path
    best_step: int | None = None  # set if the latest checkpoint was fetched and another one is better

    def to_dict(self) -> dict[str, Any]:
        got, manifest = self.got, self.got.manifest
        return {
            "run": self.run.id,
            "phase": manifest.phase,
            "step": manifest.step,
            "val_loss": manifest.val_loss,
            "val_bits_per_byte": manifest.val_bits_per_byte,
            "num_bytes": got.num_bytes,
            "model_dir": str(self.folder),
            "run_dir": str(got.run_dir),
            "is_new": got.is_new,
            "passed_over": got.passed_over,
        }


def fetch_model(
    run: str | None = None,
    *,
    checkpoint: str = "latest",
    to: Path | None = None,
    force: bool = False,
    or_older: bool = False,
    home: Home | None = None,
) -> FetchedModel:
    """Fetch a checkpoint (latest, best, a step or PHASE:STEP) to `to`, by default models/NAME; check every hash.

    `force`: replace another model there. `or_older`: fall back to an older checkpoint if this one is damaged.
    """
    with open_home(home) as opened:
        row = _find(opened, run)
        folder = to or _place(opened, row, checkpoint, force=force)
        try:
            got = fetch(
                opened,
                row,
                folder.absolute(),
                which=checkpoint,
                force=force,
                or_older=or_older,
                notify=lambda text: notices.say(f"  {text}"),
            )
        except PermissionError as exc:
            raise _unwritable(exc, row, folder) from exc
        store, manifest = opened.store_of(row), got.manifest
        remember_speed(opened, row, store)
        best = best_step(store, row.id, manifest.phase) if checkpoint == "latest" else None
        return FetchedModel(row, got, folder, best if best != manifest.step else None)


def list_checkpoints(run: str | None = None, *, home: Home | None = None) -> tuple[RunRow, list[Shown], float]:
    """Return the run, its checkpoints in the store, oldest first, and the time now."""
    with open_home(home) as opened:
        row = _find(opened, run)
        return row, show(opened, row), opened.world.now()


def _find(home: Home, run: str | None) -> RunRow:
    say_problems(refresh(home))
    return find_run(home, run, brings="fetch {}")


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
        notices.say(f"{MODELS / row.name} contains a model from another run with the same name; saving to {target}")
    return target
