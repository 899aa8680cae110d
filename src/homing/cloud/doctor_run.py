"""Questions about one run, asked when it was named: its file, placeholders, data, limit and store."""

from __future__ import annotations

from pathlib import Path

from homing.cloud.checks import Check, fault, ok, skipped, warning
from homing.cloud.examined import Examined
from homing.config.placeholders import is_placeholder
from homing.errors import HomingError
from homing.store.preflight import preflight, try_out

__all__ = ["check_data", "check_limit", "check_placeholders", "check_run_file", "check_store"]

_NO_RUN = "No run was named: homing doctor RUN"
_STORES = "docs/stores.md"


def check_run_file(examined: Examined) -> list[Check]:
    error = examined.run_error
    if error is not None:
        why = "; ".join(error.why.splitlines())
        return [fault("run.file", f"{error.what} {why}".strip(), error.fix, "docs/run-file.md")]
    if examined.run is None:
        return [skipped("run.file", _NO_RUN)]
    return [ok("run.file", f"{examined.run.name} resolves.")]


def check_placeholders(examined: Examined) -> list[Check]:
    """YOUR_BUCKET and its like, anywhere in the file but in a comment: each would be found out later, for money."""
    if not examined.run_text:
        return [skipped("run.placeholders", _NO_RUN)]
    lines = [line.partition(" #")[0] for line in examined.run_text.splitlines()]
    bad = [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if is_placeholder(line) and not line.lstrip().startswith("#")
    ]
    if bad:
        return [fault("run.placeholders", "; ".join(bad), "Write your own names in their place.", "docs/run-file.md")]
    return [ok("run.placeholders", "None in the run file.")]


def check_data(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.data", _NO_RUN)]
    if not examined.is_prepared:
        text = f"The text of {examined.run.name} is not prepared yet."
        return [warning("run.data", text, f"homing prep {examined.typed or examined.run.name}")]
    return [ok("run.data", f"{examined.run.data.num_train_tokens:,} tokens are prepared.")]


def check_limit(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.limit", _NO_RUN)]
    if examined.run.limits.spend_usd is None:
        text = "No spend limit is set; launch will want one."
        plan = f"homing plan {examined.typed or examined.run.name}"
        fix = f"{plan}   names a sum for launch --spend-limit, or for limits.spend"
        return [skipped("run.limit", text, fix)]
    return [ok("run.limit", f"At most ${examined.run.limits.spend_usd}.")]


def check_store(examined: Examined) -> list[Check]:
    """Reached, and, where it is there already, a probe written, read back, made only once and deleted again."""
    if examined.run is None:
        return [skipped("store.reached", _NO_RUN), skipped("store.probe", _NO_RUN)]
    url, world = examined.run.store, examined.home.world
    if url.startswith("file:") and not world.exists(url.removeprefix("file:")):
        return _check_folder_to_be(url, examined)
    try:
        notes = preflight(url, world, needs_write=False)
    except HomingError as exc:
        text = " ".join(f"{exc.what} {exc.why}".split())
        return [fault("store.reached", text, exc.fix, _STORES), skipped("store.probe", "It is not reached.")]
    found = [ok("store.reached", "; ".join(notes) or f"{url} is there.")]
    if any("a launch would make it" in note for note in notes):
        return [*found, skipped("store.probe", "It is not there yet; nothing is made by looking.")]
    try:
        try_out(url, world)
    except HomingError as exc:
        text = " ".join(f"{exc.what} {exc.why}".split())
        return [*found, fault("store.probe", text, exc.fix, _STORES)]
    return [*found, ok("store.probe", "A probe was written, read back and deleted.")]


def _check_folder_to_be(url: str, examined: Examined) -> list[Check]:
    path = Path(url.removeprefix("file:"))
    while not examined.home.world.exists(path) and path != path.parent:
        path = path.parent
    probe = skipped("store.probe", "It is not there yet; nothing is made by looking.")
    if not examined.home.world.may_write(path):
        text = f"{url} is not there and could not be made: {path} cannot be written."
        return [
            fault("store.reached", text, "Change `store:` in the run file, or the folder's rights.", _STORES),
            probe,
        ]
    return [ok("store.reached", f"{url} is not there yet; a launch would make it."), probe]
