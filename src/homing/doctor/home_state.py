"""Checks of the homing home directory: whether the ledger is intact, and whether an instance may still be billing."""

from __future__ import annotations

import re
import shlex

from homing.cloud.contact.home_guard import is_on_duty, out_of_reach
from homing.cloud.home import LEDGER
from homing.cloud.ledger.meter import line_spend, show_usd
from homing.cloud.reconcile.lost_ledger import lost_owner, unknown_runs, what_is_lost
from homing.doctor.check import Check, fault, ok, skipped, warning
from homing.doctor.subject import Examined
from homing.errors import HomingError
from homing.units import counted, format_duration

__all__ = ["check_guard", "check_ledger", "check_owner", "check_privacy", "check_unconfirmed"]


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
