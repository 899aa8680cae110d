"""Find problems before they cost money. Implements `homing doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api.data.stale_shards import stale_shards
from homing.api.lookup.find_runs import open_home
from homing.cloud.home import Home
from homing.cloud.providers.registry import PROVIDERS
from homing.config import find_run_file, load_run, run_files, typed_name
from homing.config.load import as_typed
from homing.doctor.check import Check
from homing.doctor.run_checks import examine
from homing.doctor.subject import Examined
from homing.errors import HomingError, UsageError

__all__ = ["Diagnosis", "run_doctor"]


@dataclass(frozen=True)
class Diagnosis:
    checks: list[Check]
    typed: str  # the run as the user typed it; "" if none was given

    @property
    def faults(self) -> list[Check]:
        return [check for check in self.checks if check.state == "fault"]

    @property
    def next(self) -> str:
        """The next command: for the given run, for the newest run file, or to write a first run file."""
        if not self.typed and not run_files():
            return "homing new first --from tiny"
        return f"homing plan {self.typed}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        return {"checks": [dataclasses.asdict(check) for check in self.checks], "num_faults": len(self.faults)}


def run_doctor(
    run: str | None = None,
    *,
    providers: Sequence[str] = (),
    sets: Sequence[str] = (),
    on_check: Callable[[Check], None] = lambda check: None,
    notify: Callable[[str], None] = lambda subject: None,
) -> Diagnosis:
    """Check keys, permissions, clients, SSH, disk, clock, ledger and store; for a run, also its file, data and store.

    Creates nothing, except for a probe file in the store of the run, which is deleted again. `on_check` is called with
    each result, and `notify` with the subject of the check in progress.
    """
    checks = list[Check]()
    with open_home() as home:
        examined = _examined(home, run, list(sets), list(providers), notify)
        for check in examine(examined):
            checks.append(check)
            on_check(check)
    return Diagnosis(checks, examined.typed)


def _examined(
    home: Home, run: str | None, sets: list[str], named: list[str], notify: Callable[[str], None]
) -> Examined:
    examined = Examined(home, Path.cwd(), named=tuple(named), notify=notify)
    if run is None:
        return examined
    if run in PROVIDERS and run not in run_files():
        raise UsageError(
            what=f"No run called {run!r} found.",
            why=f"{run} is a provider.",
            fix=f"homing doctor --provider {run}",
        )
    examined.run_text = _text(run)
    try:
        loaded = load_run(run, sets)
    except HomingError as exc:
        return dataclasses.replace(examined, run_error=exc)
    typed = f"{typed_name(loaded.file)}{as_typed(sets)}"
    is_prepared = loaded.is_prepared and not any(stale_shards(loaded))
    return dataclasses.replace(examined, run=loaded.run, is_prepared=is_prepared, typed=typed)


def _text(run: str) -> str:
    """Return the run file's text, which is searched for placeholders even if the file is invalid."""
    try:
        return find_run_file(run).read_text(encoding="utf-8", errors="replace")
    except (HomingError, OSError):
        return ""
