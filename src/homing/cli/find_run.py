"""RUN, as a person types it, to one run of the ledger, or of those that were trained here.

    id              that very run
    NAME            of the runs of that name begun in this folder one that is live or may be billing, else the newest;
                    where there is none, and only to look at, the newest of that name
    NAME@RUN        that run of NAME: its id, or the end of it
    NAME of a file  the run that ./runs/NAME.yaml describes, which may give it another name; a path likewise
    (left out)      the newest of all

Names are known to the whole home, while a run belongs to the folder that it was begun in. A verb that changes or ends
one takes this folder's, or the one whose id was typed, which works from anywhere; no other. A verb that brings one here
refuses it only where a run file here has its name too; the others say whose it is.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from homing.cli import talk
from homing.cli.find_model import finished_here
from homing.cli.run_at import pick_run, split_run
from homing.cli.trained_here import Trained, trained_here
from homing.cloud.check_lost import check_lost
from homing.cloud.home import Home
from homing.cloud.ledger import RunRow
from homing.config.paths import RUN_SUFFIXES, run_files, typed_name
from homing.config.projects import begun_elsewhere, file_called, is_still_theirs, name_meant
from homing.errors import HomingError, UsageError

__all__ = ["find_any", "find_finished", "find_run", "is_stranger", "name_here"]


def find_finished(home: Home, typed: str | None) -> RunRow | Trained:
    """The newest finished run of a name, by the rule that find_model has for models; without one, as `find_any`."""
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
        talk.say(
            f"{finished[-1][1]} is the newest finished run of {name}."
            f" {newer} is newer and has not finished: {name}@{newer}"
        )
    return finished[-1][3]


def find_any(home: Home, typed: str | None, *, changes: str = "") -> RunRow | Trained:
    """Also a run that `homing train` trained here: where it is at work, or newer than what was launched by its name. A
    launched one that lives, bills or may go on comes first, for it costs money."""
    typed = _by_id(home, typed)
    is_id = typed is not None and home.ledger.run(typed) is not None
    trained = None if is_id else _trained_called(home, typed, _name(home, typed, _file(typed)))
    if trained is None:
        return find_run(home, typed, changes=changes)
    if trained.run == typed:
        return trained
    theirs = begun_elsewhere(trained.run) if typed is not None else None
    rows = _named(home, trained.name)
    if theirs is not None and any(begun_elsewhere(row.id) is None for row in rows):
        return find_run(home, typed, changes=changes)  # a name means a run of this folder
    called = [row for row in rows if theirs or begun_elsewhere(row.id) is None]
    launched = _newest(home)[:1] if typed is None else called
    is_later = not trained.is_live and any(row.created_at >= trained.began_at for row in launched)
    billing = {line.run_id for line in home.ledger.open_lines()}
    if is_later or any(row.is_live or row.may_go_on or row.id in billing for row in launched):
        row = find_run(home, typed, changes=changes)
        if trained.is_live:
            talk.say(f"{row.id} is meant. {trained.run} is being trained on this computer: its id names it.")
        return row
    if theirs is not None and changes:
        command = f"homing {changes.format(trained.run)}"
        raise _of_another_folder(trained.run, trained.name, theirs, file_called(trained.name), command)
    if theirs is not None:
        talk.say(f"{trained.run} was begun in {theirs}.")
    return trained


def find_run(home: Home, typed: str | None, *, brings: str = "", changes: str = "") -> RunRow:
    """`brings`, `changes`: what the caller does with it, as a command for a run: "fetch {}", "destroy {}"."""
    typed = _by_id(home, typed)
    if typed is not None and (named := home.ledger.run(typed)) is not None:
        return named
    file = _file(typed)
    name = _name(home, typed, file)
    called = _newest(home) if name is None else _named(home, name)
    if not called:
        is_asked = _check_lost(home, typed, name, file)
        # With what was found again by its mark.
        called = _newest(home) if name is None else home.ledger.runs_called(name)
    if not called:
        raise _unknown(home, typed, name, file, is_asked=is_asked)
    own = [row for row in called if begun_elsewhere(row.id) is None] if name is not None else []
    billing = home.ledger.billing_runs() if len(own) > 1 else set()
    # Stable: the newest stays first.
    own.sort(key=lambda row: (is_still_theirs(row.id), not row.is_live and row.id not in billing))
    if not own:
        return _from_elsewhere(home, called, brings, changes)
    live = next((row for row in called if row.is_live and row not in own), None)
    if live is not None and not own[0].is_live:
        talk.say(f"{own[0].id} is meant. {live.id}, begun in {begun_elsewhere(live.id)}, is live: its id names it.")
    return own[0]


def _by_id(home: Home, typed: str | None) -> str | None:
    """The id that NAME@RUN means; anything else as it was typed."""
    name, run = split_run(typed or "")
    if not run:
        return typed
    known = home.ledger.run_ids()
    trained = [each.run for each in trained_here(home, known) if each.name == name]
    ids = [*trained, *(row.id for row in _named(home, name))]
    return pick_run(name, run, sorted(ids, reverse=True), fix="All runs: homing runs")


def name_here(row: RunRow) -> str:
    """What a person types in this folder to mean this run: its name, or its id where the name does not reach it."""
    return row.id if begun_elsewhere(row.id) is not None else row.name


def is_stranger(row: RunRow) -> bool:
    """A run of another folder that has the name of a run file here."""
    return begun_elsewhere(row.id) is not None and file_called(row.name) is not None


def _file(typed: str | None) -> Path | None:
    if typed is None:
        return None
    return Path(typed) if typed.endswith(RUN_SUFFIXES) or "/" in typed else run_files().get(typed)


def _name(home: Home, typed: str | None, file: Path | None) -> str | None:
    """A name that a run has is that run's, whatever a file of that name says."""
    if file is None or typed is None or _named(home, typed):
        return typed
    return name_meant(file)


def _named(home: Home, name: str) -> list[RunRow]:
    """Newest first."""
    return [row for row in home.ledger.runs_called(name) if row.name == name]


def _newest(home: Home) -> list[RunRow]:
    """The newest run of all first, then those that are live, may be billing or may go on: not thousands that ended."""
    return home.ledger.unfinished_runs(last=1)


def _from_elsewhere(home: Home, called: list[RunRow], brings: str, changes: str) -> RunRow:
    row = _still_billing(home, called) if changes else called[0]
    theirs = begun_elsewhere(row.id)
    if theirs is None:  # nobody typed a name
        return row
    file = file_called(row.name)
    if changes or (brings and file is not None):
        raise _of_another_folder(row.id, row.name, theirs, file, f"homing {(changes or brings).format(row.id)}")
    if file is not None:
        talk.say(f"warning: {row.id} was begun in {theirs}; {file} here has not been launched yet.")
    elif brings:  # nothing else here has that name, so it is the one that is meant
        talk.say(f"{row.id} was begun in {theirs}.")
    return row


def _still_billing(home: Home, called: list[RunRow]) -> RunRow:
    """Whose id a person needs who wants to end something; the newest where nothing of them bills."""
    billing = home.ledger.billing_runs()
    return next((row for row in called if row.is_live or row.id in billing), called[0])


def _of_another_folder(run_id: str, name: str, theirs: Path, file: Path | None, command: str) -> UsageError:
    what = f"{run_id} was begun in {theirs}; this is {Path.cwd()}."
    if file is None:
        return UsageError(
            what=what,
            why=f"A name means a run of this folder, and none here is called {name}.",
            fix=f"An id means its run from anywhere: {command}",
        )
    return UsageError(
        what=what,
        why=f"{file} describes another run of that name, which has not been launched yet.",
        fix=f"If you mean that one, as after moving its folder, name it by its id: {command}"
        f"   This one: homing plan {typed_name(file)}",
    )


def _check_lost(home: Home, typed: str | None, name: str | None, file: Path | None) -> bool:
    """Whether the providers were asked; StillBilling where something that the ledger does not know may be billing."""
    store = ""
    if file is not None and file.is_file():
        with contextlib.suppress(HomingError):  # a file that cannot be read names no store
            from homing.config import load_run  # the schema, which no other way through here needs

            store = load_run(str(file)).run.store
    words = dict.fromkeys([name or "", typed or name or ""])
    return any([check_lost(home, word, store) for word in words])


def _unknown(home: Home, typed: str | None, name: str | None, file: Path | None, *, is_asked: bool) -> UsageError:
    trained = _trained_called(home, typed, name)
    if trained is not None:
        return _only_trained(home, trained)
    asked = "No provider that is set up here shows an instance of it. " if is_asked else ""
    if file is not None and file.is_file():
        return UsageError(
            what=f"{typed} has not been launched yet.",
            why=f"There is its run file, {file}, and no run of it in the ledger.",
            fix=f"{asked}What it would cost, and how to begin: homing plan {typed_name(file)}",
        )
    if typed is None and not run_files():
        return UsageError(
            what="There is no run yet.",
            why="Nothing was launched from this home, and there is no run file in ./runs.",
            fix="homing new first --from tiny   or the whole trip on this computer: homing quickstart",
        )
    try:
        home.ledger.find(name)
    except UsageError as exc:
        return exc
    raise AssertionError(name)


def _trained_called(home: Home, typed: str | None, name: str | None) -> Trained | None:
    """Begun in this folder before others, at work before others, the newest before others."""
    found = trained_here(home, home.ledger.run_ids())
    called = [each for each in found if name is None or {typed, name} & {each.name, each.run}]
    # Stable: the newest stays first.
    called.sort(key=lambda each: (name is not None and begun_elsewhere(each.run) is not None, not each.is_live))
    return next(iter(called), None)


def _only_trained(home: Home, run: Trained) -> UsageError:
    at = f", {run.phase} {run.steps}" if run.steps else ""
    return UsageError(
        what=f"{run.name} was trained on this computer and not launched: {run.run}, {run.state}{at}.",
        why=f"Nothing of it bills, and there is no machine. It lies in {home.run_dir(run.run)}",
        fix=f"{'' if run.is_live else f'See it: homing watch {run.run}   '}{run.next_words}   All runs: homing runs",
    )
