"""Resolve RUN, as the user types it, to one run in the ledger or one trained on this computer.

  id              exactly that run
  NAME            among the runs of that name started in this folder: one that is live or may be billing, else the
                  newest. If this folder has none, verbs that only read use the newest run of that name
  NAME@RUN        one run of NAME: RUN is its id, or the end of its id
  NAME of a file  the run that ./runs/NAME.yaml describes, which may give the run another name. The path of a run file
                  selects its run in the same way
  (omitted)       the newest of all

All runs in $HOMING_HOME share one set of names, but each run belongs to the folder it was started in. A verb that
changes or ends a run accepts a run from another folder only by its id. A verb that fetches a model also accepts its
name, unless a run file here has that name; a verb that only reads then prints a warning.

This module also has `open_home`, which every such verb calls first, and `last_word`, which returns the final error if
something may still be billing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

from homing.api import notices
from homing.api.lookup.find_models import finished_here
from homing.api.lookup.local_runs import Trained, trained_here
from homing.cloud.destroy import still_billing
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.providers.ssh.connection import HostKeyUnknown
from homing.cloud.reconcile.inventory import check_lost
from homing.config.home_and_run_files import (
    RUN_SUFFIXES,
    begun_elsewhere,
    belongs_to_other_folder,
    file_called,
    name_meant,
    pick_run,
    run_files,
    split_run,
    typed_name,
)
from homing.config.home_and_run_files import home as home_path
from homing.errors import HomingError, UsageError
from homing.units import parse_usd
from homing.wire.run_json import Run
from homing.world import World

__all__ = [
    "find_any",
    "find_finished",
    "find_run",
    "is_stranger",
    "last_word",
    "meet_host",
    "name_here",
    "open_home",
    "parse_limit",
    "still_running",
    "usd",
]


def find_finished(home: Home, typed: str | None) -> RunRow | Trained:
    """Return the newest finished run with this name, by the same rule as find_model, or else what `find_any` finds."""
    typed = _by_id(home, typed)
    name = _name(home, typed, _file(typed))
    if typed is None or name is None or home.ledger.run(typed) is not None:
        return find_any(home, typed)
    trained = [each for each in trained_here(home, home.ledger.run_ids()) if {typed, name} & {each.name, each.run}]
    if any(each.run == typed for each in trained):
        return find_any(home, typed)
    found = [(row.created_at, row.id, row.state, row) for row in _named(home, name)]
    called: list[tuple[float, str, str, RunRow | Trained]] = [*found]
    called += [(each.began_at, each.run, each.state, each) for each in trained]
    called = sorted((each for each in called if begun_elsewhere(each[1]) is None), key=lambda each: each[:2])
    with_model = finished_here(name)
    finished = [each for each in called if each[2] == "done" or each[1] in with_model]
    if not finished:
        return find_any(home, typed)
    if called[-1] is not finished[-1]:
        newer = called[-1][1]
        notices.say(
            f"{finished[-1][1]} is the newest finished run of {name}."
            f" {newer} is newer but not finished; to use it: {name}@{newer}"
        )
    return finished[-1][3]


def find_any(home: Home, typed: str | None, *, changes: str = "") -> RunRow | Trained:
    """Return a launched run, or a run of `homing train` if that run is live or newer.

    A launched run that is live, is billing or may resume takes precedence, because it costs money.
    """
    typed = _by_id(home, typed)
    is_id = typed is not None and home.ledger.run(typed) is not None
    trained = None if is_id else _trained_called(home, typed, _name(home, typed, _file(typed)))
    if trained is None:
        return find_run(home, typed, changes=changes)
    if trained.run == typed:
        return trained
    other_folder = begun_elsewhere(trained.run) if typed is not None else None
    rows = _named(home, trained.name)
    if other_folder is not None and any(begun_elsewhere(row.id) is None for row in rows):
        return find_run(home, typed, changes=changes)  # a name means a run that was started in this folder
    called = [row for row in rows if other_folder or begun_elsewhere(row.id) is None]
    launched = _newest_here(home)[:1] if typed is None else called
    is_later = not trained.is_live and any(row.created_at >= trained.began_at for row in launched)
    billing = {line.run_id for line in home.ledger.open_lines()}
    if is_later or any(row.is_live or row.may_go_on or row.id in billing for row in launched):
        row = find_run(home, typed, changes=changes)
        if trained.is_live:
            notices.say(f"Using {row.id}. {trained.run} is training on this computer; use its id to select it.")
        return row
    if other_folder is not None and changes:
        command = f"homing {changes.format(trained.run)}"
        raise _of_another_folder(trained.run, trained.name, other_folder, file_called(trained.name), command)
    if other_folder is not None:
        notices.say(f"{trained.run} was started in {other_folder}.")
    return trained


def find_run(home: Home, typed: str | None, *, brings: str = "", changes: str = "") -> RunRow:
    """Find a launched run.

    `brings` or `changes`: the command that the caller runs, with {} in place of the run, as in "destroy {}".
    """
    typed = _by_id(home, typed)
    if typed is not None and (named := home.ledger.run(typed)) is not None:
        return named
    file = _file(typed)
    name = _name(home, typed, file)
    called = _newest_here(home) if name is None else _named(home, name)
    if not called:
        is_asked = _check_lost(home, typed, name, file)
        # This includes runs that were just recovered from the names or tags of their instances.
        called = _newest_here(home) if name is None else home.ledger.runs_called(name)
    if not called and name is None and (newest := _newest(home)):
        raise _none_here(newest[0])
    if not called:
        raise _unknown(home, typed, name, file, is_asked=is_asked)
    own = [row for row in called if begun_elsewhere(row.id) is None] if name is not None else []
    billing = home.ledger.billing_runs() if len(own) > 1 else set()
    # Stable sort: the newest stays first.
    own.sort(key=lambda row: (belongs_to_other_folder(row.id), not row.is_live and row.id not in billing))
    if not own:
        return _from_elsewhere(home, called, brings, changes)
    live = next((row for row in called if row.is_live and row not in own), None)
    if live is not None and not own[0].is_live:
        notices.say(
            f"Using {own[0].id}. Another run, {live.id}, is live; it was started in {begun_elsewhere(live.id)}."
            " To select it, use its id."
        )
    return own[0]


def _by_id(home: Home, typed: str | None) -> str | None:
    """Return the run id for NAME@RUN; return anything else unchanged."""
    name, run = split_run(typed or "")
    if not run:
        return typed
    known = home.ledger.run_ids()
    trained = [each.run for each in trained_here(home, known) if each.name == name]
    ids = [*trained, *(row.id for row in _named(home, name))]
    return pick_run(name, run, sorted(ids, reverse=True), fix="List all runs: homing runs")


def name_here(row: RunRow) -> str:
    """Return the name that selects this run in the current folder, or its id if it was started in another folder."""
    return row.id if begun_elsewhere(row.id) is not None else row.name


def is_stranger(row: RunRow) -> bool:
    """Return True if the run was started in another folder but has the same name as a run file here."""
    return begun_elsewhere(row.id) is not None and file_called(row.name) is not None


def _file(typed: str | None) -> Path | None:
    if typed is None:
        return None
    return Path(typed) if typed.endswith(RUN_SUFFIXES) or "/" in typed else run_files().get(typed)


def _name(home: Home, typed: str | None, file: Path | None) -> str | None:
    """Return the run name. A run with the typed name takes precedence over a file of that name."""
    if file is None or typed is None or _named(home, typed):
        return typed
    return name_meant(file)


def _named(home: Home, name: str) -> list[RunRow]:
    """Return runs of exactly this name, newest first."""
    return [row for row in home.ledger.runs_called(name) if row.name == name]


def _newest(home: Home) -> list[RunRow]:
    """Return the newest run, and every run that is live, may be billing or may resume, but no other ended runs."""
    return home.ledger.unfinished_runs(last=1)


def _newest_here(home: Home) -> list[RunRow]:
    """Return runs of this folder: every run that is live, may be billing or may resume, or else the newest one."""
    here = [row for row in _newest(home) if begun_elsewhere(row.id) is None]
    if here or not home.has_ledger:
        return here
    return list(itertools.islice((row for row in home.ledger.runs() if begun_elsewhere(row.id) is None), 1))


def _none_here(newest: RunRow) -> UsageError:
    return UsageError(
        what="No run was started in this folder.",
        why=f"The newest run, {newest.id}, was started in {begun_elsewhere(newest.id)}."
        " Without a name, homing uses only runs of the current folder.",
        fix=f"Use its id: {newest.id}   List all runs: homing runs",
    )


def _from_elsewhere(home: Home, called: list[RunRow], brings: str, changes: str) -> RunRow:
    row = _still_billing(home, called) if changes else called[0]
    other_folder = begun_elsewhere(row.id)
    if other_folder is None:  # the user typed no name
        return row
    file = file_called(row.name)
    if changes or (brings and file is not None):
        raise _of_another_folder(row.id, row.name, other_folder, file, f"homing {(changes or brings).format(row.id)}")
    if file is not None:
        notices.say(
            f"warning: {row.id} was started in {other_folder}; {file} in this folder has not been launched yet."
        )
    elif brings:  # no run file here has that name, so the user means this run
        notices.say(f"{row.id} was started in {other_folder}.")
    return row


def _still_billing(home: Home, called: list[RunRow]) -> RunRow:
    """Return the run that is live or billing, because the user needs its id; if there is none, the newest run."""
    billing = home.ledger.billing_runs()
    return next((row for row in called if row.is_live or row.id in billing), called[0])


def _of_another_folder(run_id: str, name: str, other_folder: Path, file: Path | None, command: str) -> UsageError:
    what = f"{run_id} was started in {other_folder}; the current folder is {Path.cwd()}."
    if file is None:
        return UsageError(
            what=what,
            why=f"A name selects a run started in this folder, and no such run is called {name}.",
            fix=f"Use the id, which works from any folder: {command}",
        )
    return UsageError(
        what=what,
        why=f"{file} describes another run with the same name, which has not been launched yet.",
        fix=f"If you mean {run_id} (for example because you moved its folder), use its id: {command}"
        f"   For the run file in this folder: homing plan {typed_name(file)}",
    )


def _check_lost(home: Home, typed: str | None, name: str | None, file: Path | None) -> bool:
    """Search the providers for a run that is missing from the ledger. Return True if any provider was queried.

    Raises StillBilling if something unknown to the ledger may be billing.
    """
    store = ""
    if file is not None and file.is_file():
        with contextlib.suppress(HomingError):  # an unreadable run file cannot name its store
            from homing.config.load import load_run  # imported here, because only this path needs the schema

            store = load_run(str(file)).run.store
    words = dict.fromkeys([name or "", typed or name or ""])
    return any([check_lost(home, word, store) for word in words])


def _unknown(home: Home, typed: str | None, name: str | None, file: Path | None, *, is_asked: bool) -> UsageError:
    trained = _trained_called(home, typed, name)
    if trained is not None:
        return _only_trained(home, trained)
    asked = "No configured provider lists an instance of this run. " if is_asked else ""
    if file is not None and file.is_file():
        return UsageError(
            what=f"{typed} has not been launched yet.",
            why=f"Its run file {file} exists, but the ledger has no run from it.",
            fix=f"{asked}See what it costs: homing plan {typed_name(file)}",
        )
    if typed is None and not run_files():
        return UsageError(
            what="No runs yet.",
            why="Nothing was launched from this homing home directory, and there is no run file in ./runs.",
            fix="homing new first --from tiny   or try everything locally: homing quickstart",
        )
    try:
        home.ledger.find(name)
    except UsageError as exc:
        return exc
    raise AssertionError(name)


def _trained_called(home: Home, typed: str | None, name: str | None) -> Trained | None:
    """Return the best match among runs trained here: prefer those of this folder, then live ones, then the newest."""
    found = trained_here(home, home.ledger.run_ids())
    if name is None:
        called = [each for each in found if begun_elsewhere(each.run) is None]
    else:
        called = [each for each in found if {typed, name} & {each.name, each.run}]
    # Stable sort: the newest stays first.
    called.sort(key=lambda each: (name is not None and begun_elsewhere(each.run) is not None, not each.is_live))
    return next(iter(called), None)


def _only_trained(home: Home, run: Trained) -> UsageError:
    at = f", {run.phase} {run.steps}" if run.steps else ""
    return UsageError(
        what=f"{run.name} was trained locally and not launched: {run.run}, {run.state}{at}.",
        why=f"It has no instance and is not billing. Folder: {home.run_dir(run.run)}",
        fix=f"{'' if run.is_live else f'Watch it: homing watch {run.run}   '}{run.next_words}   All runs: homing runs",
    )


@contextmanager
def open_home(given: Home | None = None) -> Iterator[Home]:
    """Open $HOMING_HOME for one verb, unless a home is `given`. Warn if the ledger had to be repaired or recovered."""
    if given is not None:
        yield given
        return
    home = Home(home_path(), World())
    say = notices.listener()  # the ledger may be repaired in another thread
    home.ledger.file.notify = lambda text: say(f"warning: {text}")
    yield home


def last_word() -> HomingError | None:
    """Return the error for instances that no provider has confirmed as destroyed; None if there are none.

    `run_verb` checks for it after every verb, prints it last and exits with its code.
    """
    home = Home(home_path(), World())
    try:
        # Runs on this computer cost nothing, so this error ignores them; `runs` lists those that have not ended.
        lines = [line for line in home.ledger.unconfirmed() if meter.is_charged(line)] if home.has_ledger else []
        return still_billing(home, lines) if lines else None
    except HomingError as exc:  # the ledger is unreadable, so something may be billing
        return exc


def still_running() -> list[str]:
    """After Ctrl-C: return a line for each run that continues, with the command to end it."""
    home = Home(home_path(), World())
    try:
        live = home.ledger.live_runs()
    except HomingError:  # `last_word` reports this error after the verb
        return []
    return [
        f"{row.name} is still running, as far as is known. Watch it: homing watch {name_here(row)}"
        f"   End it: homing destroy {name_here(row)}"
        for row in live
    ]


def meet_host(home: Home, run: Run, agrees: Callable[[HostKeyUnknown], bool] | None = None) -> None:
    """On first contact with an ssh host, pin its key if `agrees` confirms the fingerprint.

    Without `agrees`, or if it returns False, raise HostKeyUnknown.
    """
    home.configure(run)
    try:
        home.meet(run)
    except HostKeyUnknown as unknown:
        if agrees is None or not agrees(unknown):
            raise
        unknown.host.trust(unknown.line)


def parse_limit(text: str | None, flag: str = "--spend-limit") -> Decimal | None:
    if text is None:
        return None
    try:
        limit = parse_usd(text)
    except ValueError as exc:
        raise UsageError(what=f"{flag}: {exc}.", fix=f"{flag} 12") from exc
    if limit <= 0:
        raise UsageError(what=f"{flag}: the limit must be more than 0.", fix=f"{flag} 12")
    return limit


def usd(amount: Decimal | str) -> str:
    return meter.show_usd(Decimal(amount))
