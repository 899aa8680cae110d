"""`homing doctor`: every check that is possible before money is spent. The checks rent nothing.

computer    this computer: Python, packages, torch and GPU, SSH, disk, home directory, .env, clock
home        the homing home directory: ledger, owner id, guard, instances not confirmed as destroyed
run         the run file, its placeholders, data and store (writes a probe to the store, then deletes it)
providers   every provider that is configured or named: key, permissions, quota, offers

This module contains the checks of the home directory and of a run, the table CHECKS, which lists all checks, and
`examine`, which runs them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from homing.cloud.contact.home_guard import is_on_duty, out_of_reach
from homing.cloud.home import LEDGER
from homing.cloud.ledger.meter import line_spend, show_usd
from homing.cloud.reconcile.lost_ledger import lost_owner, unknown_runs, what_is_lost
from homing.config.schema.value_types import is_placeholder
from homing.doctor.check import Check, fault, ok, skipped, warning
from homing.doctor.computer import (
    check_clock,
    check_container,
    check_disk,
    check_env_file,
    check_env_values,
    check_extras,
    check_home_folder,
    check_packages,
    check_python,
    check_ssh,
    check_ssh_keys,
    check_tools,
    check_torch,
)
from homing.doctor.provider_accounts import check_hub, check_providers
from homing.doctor.subject import Examined
from homing.errors import HomingError
from homing.store.preflight import TO_BE_CREATED, preflight, try_out
from homing.units import counted, format_duration

__all__ = ["CHECKS", "check_data", "check_limit", "check_placeholders", "check_run_file", "check_store", "examine"]

_NO_RUN = "No run was specified. To check one: homing doctor RUN"
_STORES = "docs/guides/stores.md"


# --- the homing home directory ---


def check_owner(examined: Examined) -> list[Check]:
    """Check the owner id, six characters that are part of the name (the mark) of every instance that homing creates.

    If the owner id changed, homing would not recognize its own instances.
    """
    home, path = examined.home, examined.home.owner_path
    text = home.world.read(path).decode("utf-8", "replace").strip() if home.has_owner else ""
    if home.has_owner and not re.fullmatch(r"[a-z0-9]{6}", text):
        fix = f"Copy the six characters XXXXXX from the name of any of your instances (homing-XXXXXX-...) to {path}"
        return [fault("home.owner", f"{path} does not consist of six characters from a-z and 0-9.", fix)]
    try:
        owner, runs, lost = lost_owner(home), unknown_runs(home), " ".join(what_is_lost(home))
    except HomingError:
        owner, runs, lost = "", {}, ""  # the ledger cannot be read; `check_ledger` reports that
    if lost:
        fix = (
            f"homing adopt {shlex.quote(runs[next(iter(runs))])}   lists what is there"
            if runs
            else "homing runs   recreates it"
        )
        return [warning("home.owner", lost, fix) if text or owner else fault("home.owner", lost, fix)]
    if not text:
        return [skipped("home.owner", f"No owner id yet: nothing has been launched from {home.path}.")]
    return [ok("home.owner", f"The name of everything that homing creates from here begins with homing-{text}-.")]


def check_privacy(examined: Examined) -> list[Check]:
    """Check that only the owner can read the homing home directory. Fix and report permissions that are too loose."""
    home, world = examined.home, examined.home.world
    if not world.is_dir(home.path):
        return [skipped("home.private", f"{home.path} does not exist yet.")]
    path = home.path / LEDGER
    files = [
        home.owner_path,
        home.ledger.file.backup,
        *(path.with_name(path.name + end) for end in ("", "-wal", "-shm")),
    ]
    loose, stuck = list[str](), list[str]()
    for each, most in [(home.path, 0o700), *((file, 0o600) for file in files if world.exists(file))]:
        if world.mode(each) & ~most:
            loose.append(str(each))
            try:
                world.chmod(each, most)
            except OSError as exc:
                stuck.append(f"{each}: {exc.strerror or exc}")
    if stuck:
        fix = f"chmod 700 {shlex.quote(str(home.path))}"
        return [
            fault("home.private", f"Other users have access, and homing could not fix that: {', '.join(stuck)}", fix)
        ]
    if loose:
        return [
            warning(
                "home.private",
                f"Other users could read {', '.join(loose)}; homing has fixed the permissions.",
                "Nothing to do.",
            )
        ]
    return [ok("home.private", "Only you can read the homing home directory.")]


def check_ledger(examined: Examined) -> list[Check]:
    """Check that the ledger can be opened and read, and that its database pages are intact."""
    world, path = examined.home.world, examined.home.path / LEDGER
    if not examined.home.has_ledger:
        return [skipped("ledger.sound", "No ledger yet: nothing has been launched from this homing home directory.")]
    file = examined.home.ledger.file
    fix = f"rm {shlex.quote(str(path))}   The next homing command restores it from its backup, {file.backup}"
    try:
        lines = examined.home.ledger.lines()
        rows = world.database(path).execute(("PRAGMA integrity_check", ()))
    except HomingError as exc:
        return [fault("ledger.sound", " ".join(f"{exc.what} {exc.why}".split()), exc.fix or fix)]
    except OSError as exc:
        return [fault("ledger.sound", f"{path} cannot be read: {exc}", fix)]
    if file.said:  # an earlier access restored the ledger, or read it from a copy
        text = " ".join(file.said)
        is_whole = "restored from its backup" in text
        return [(warning if is_whole else fault)("ledger.sound", text, "homing runs   compares it with your providers")]
    said = [str(next(iter(row.values()))) for row in rows]
    if said != ["ok"]:
        return [fault("ledger.sound", f"{path} is damaged: {said[0] if said else 'no answer'}", fix)]
    return [ok("ledger.sound", f"The ledger is intact. Number of lines: {len(lines)}.")]


def check_unconfirmed(examined: Examined) -> list[Check]:
    if not examined.home.has_ledger:
        return [skipped("ledger.ends", "Nothing has been launched from this homing home directory.")]
    try:
        lines = examined.home.ledger.unconfirmed()
    except HomingError:
        return [skipped("ledger.ends", "The ledger cannot be read.")]  # `check_ledger` reports the fault
    if lines:
        marks = ", ".join(line.mark for line in lines)
        text = f"No provider has confirmed that these are destroyed, so they may still be billing: {marks}."
        return [fault("ledger.ends", text, f"homing destroy {lines[0].run_id or '--all'}")]
    return [ok("ledger.ends", "Providers have confirmed the end of every destroyed instance.")]


def check_guard(examined: Examined) -> list[Check]:
    """Warn if an instance may be billing and no local guard is running.

    This is not a fault, because the instance also runs guards of its own.
    """
    try:
        open_ = examined.home.ledger.open_lines() if examined.home.has_ledger else []
    except HomingError:
        return [skipped("guard.duty", "The ledger cannot be read.")]
    blind = sorted({line.provider for line in open_ if not is_on_duty(examined.home, line.provider)})
    if is_on_duty(examined.home) and not blind:
        return [ok("guard.duty", "A guard is running.")]
    if is_on_duty(examined.home):
        text = " ".join(out_of_reach(examined.home, name) for name in blind)
        fix = "Run homing guard in an environment that has the missing API keys"
        return [warning("guard.duty", f"{text} The guard cannot end these instances.", fix, "docs/guides/guards.md")]
    if open_:
        oldest, now = min(open_, key=lambda line: line.created_at or line.intent_at), examined.home.world.now()
        age = format_duration(now - (oldest.created_at or oldest.intent_at))
        spent = f"{show_usd(line_spend(oldest, now))} so far"
        name = oldest.run_name or oldest.mark
        text = f"{counted(len(open_), 'instance')} may be billing, the oldest ({name}) for {age}, {spent};"
        return [
            warning(
                "guard.duty",
                f"{text} no local guard is running.",
                "homing guard   or in cron: homing guard --once",
                "docs/guides/guards.md",
            )
        ]
    return [ok("guard.duty", "Nothing is billing, so no guard is needed.")]


# --- the run ---


def check_run_file(examined: Examined) -> list[Check]:
    error = examined.run_error
    if error is not None:
        why = "; ".join(error.why.splitlines())
        return [fault("run.file", f"{error.what} {why}".strip(), error.fix, "docs/reference/run-file.md")]
    if examined.run is None:
        return [skipped("run.file", _NO_RUN)]
    return [ok("run.file", f"The run file of {examined.run.name} is valid.")]


def check_placeholders(examined: Examined) -> list[Check]:
    """Find placeholders such as YOUR_BUCKET in the run file, so that a launch does not fail later. Ignore comments."""
    if not examined.run_text:
        return [skipped("run.placeholders", _NO_RUN)]
    lines = [line.partition(" #")[0] for line in examined.run_text.splitlines()]
    bad = [
        f"line {number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if is_placeholder(line) and not line.lstrip().startswith("#")
    ]
    if bad:
        return [
            fault("run.placeholders", "; ".join(bad), "Replace them with your own names.", "docs/reference/run-file.md")
        ]
    return [ok("run.placeholders", "The run file has no placeholders.")]


def check_data(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.data", _NO_RUN)]
    if not examined.is_prepared:
        text = f"The training text for {examined.run.name} has not been prepared yet."
        return [warning("run.data", text, f"homing prep {examined.typed or examined.run.name}")]
    return [ok("run.data", f"{examined.run.data.num_train_tokens:,} tokens are prepared.")]


def check_limit(examined: Examined) -> list[Check]:
    if examined.run is None:
        return [skipped("run.limit", _NO_RUN)]
    if examined.run.limits.spend_usd is None:
        text = "No spend limit is set; launch requires one."
        plan = f"homing plan {examined.typed or examined.run.name}"
        fix = f"{plan}   suggests an amount for launch --spend-limit or limits.spend"
        return [skipped("run.limit", text, fix)]
    return [ok("run.limit", f"The spend limit is ${examined.run.limits.spend_usd}.")]


def check_store(examined: Examined) -> list[Check]:
    """Check that the store is reachable.

    If the store exists, write a probe, read it back, test create-if-absent, and delete the probe.
    """
    if examined.run is None:
        return [skipped("store.reached", _NO_RUN), skipped("store.probe", _NO_RUN)]
    url, world = examined.run.store, examined.home.world
    if url.startswith("file:") and not world.exists(url.removeprefix("file:")):
        return _check_folder_to_be(url, examined)
    try:
        notes = preflight(url, world, needs_write=False)
    except HomingError as exc:
        text = " ".join(f"{exc.what} {exc.why}".split())
        return [fault("store.reached", text, exc.fix, _STORES), skipped("store.probe", "The store is not reachable.")]
    found = [ok("store.reached", "; ".join(notes) or f"{url} exists.")]
    if any(TO_BE_CREATED in note for note in notes):
        return [*found, skipped("store.probe", "The store does not exist yet, and doctor does not create it.")]
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
    probe = skipped("store.probe", "The store does not exist yet, and doctor does not create it.")
    if not examined.home.world.may_write(path):
        text = f"{url} does not exist and cannot be created: {path} is not writable."
        return [
            fault("store.reached", text, "Change `store:` in the run file, or the folder's permissions.", _STORES),
            probe,
        ]
    return [ok("store.reached", f"{url} does not exist yet; {TO_BE_CREATED}."), probe]


# All checks, in order. Each row contains the text that the user sees while the check runs, and the check function.
CHECKS: list[tuple[str, Callable[[Examined], list[Check]]]] = [
    ("Python", check_python),
    ("packages", check_packages),
    ("optional packages (extras)", check_extras),
    ("torch and its GPUs (loading torch takes a few seconds)", check_torch),
    ("the SSH client", check_ssh),
    ("SSH keys", check_ssh_keys),
    ("git, docker and uv", check_tools),
    ("Docker's engine", check_container),
    ("the homing home directory", check_home_folder),
    ("the disk", check_disk),
    (".env", check_env_file),
    ("keys in the environment", check_env_values),
    ("the owner id", check_owner),
    ("the permissions of the homing home directory", check_privacy),
    ("the ledger", check_ledger),
    ("instances not confirmed as destroyed", check_unconfirmed),
    ("the guard", check_guard),
    ("the run file", check_run_file),
    ("placeholders", check_placeholders),
    ("the data", check_data),
    ("the spend limit", check_limit),
    ("the store", check_store),
    ("the Hub", check_hub),
    ("the clock, compared with a provider's", check_clock),
    ("providers", check_providers),
]


def examine(examined: Examined) -> Iterator[Check]:
    """Run all checks. Yield each result as soon as it is known, because checks that use the network may be slow."""
    for subject, question in CHECKS:
        examined.notify(subject)
        yield from question(examined)
