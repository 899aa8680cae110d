"""Check whether an instance that the ledger does not know may be billing, before claiming otherwise.

    the ledger has lines, and nothing here names the run     it was never launched from here
    its folder at home, or its record in the store           ask its provider for its mark
    an empty ledger                                          ask every configured provider for our mark

`draft` calls it before a launch rents a second instance, and the commands call it before they say that a run was never
launched. `is_lost` is for commands that follow a run until it ends.
"""

from __future__ import annotations

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.mark import make_mark, owner_prefix, plain_name
from homing.cloud.reconcile.adopt import stored_runs
from homing.cloud.reconcile.lost_ledger import LostRun, is_called, read_lost, unknown_ids
from homing.cloud.reconcile.reconcile import is_absent, providers_in_use, refresh, unasked
from homing.errors import HomingError, StillBilling
from homing.store import open_store
from homing.wire.codec import WireError

__all__ = ["check_lost", "is_lost"]


def check_lost(home: Home, word: str, store: str = "") -> bool:
    """Raise StillBilling if an instance that the ledger does not know may be billing, or if that could not be checked.

    `word` is a name, an id, or "" for any run; `store` is where its record may be. What can be restored, with its
    limit, is in the ledger afterwards. Return True if the providers were asked.
    """
    suspects = [read_lost(home, each) for each in unknown_ids(home) if is_called(each, word)]
    is_empty = home.has_owner and not home.ledger.lines() and not home.ledger.runs()
    suspects += [each for each in _recorded(home, word, store) if each not in suspects] if is_empty and store else []
    if not suspects and not is_empty:
        _refuse_stray(home, word)
        return False
    problems = refresh(home)
    known = {run.id for run in home.ledger.runs()}
    _refuse_stray(home, word)
    for lost in [each for each in suspects if each.id not in known]:
        if problem := _unchecked(home, lost, problems):
            raise StillBilling(
                what=f"{lost.id} was launched from this computer but is not in the ledger: it may be billing.",
                why=problem,
                fix=f"Restore it: {lost.adopt}   or destroy everything: homing destroy --all",
            )
    unasked_ = [each for each in problems if any(each.startswith(unasked(name)) for name in providers_in_use(home))]
    if not suspects and unasked_ and _was_used(home):
        raise StillBilling(
            what=f"The ledger is empty, and homing cannot check whether an instance of {word or 'yours'} is billing.",
            why="\n".join(unasked_),
            fix="homing runs   once they respond",
        )
    return True


def is_lost(home: Home, run: RunRow) -> bool:
    """Return whether the ledger has lost a run it once had, and no provider shows an instance of it.

    Then nothing here will tell how it ended. Raises StillBilling while an instance may be billing.
    """
    if home.ledger.run(run.id) is not None:
        return False
    check_lost(home, run.id, run.store)
    return home.ledger.run(run.id) is None


def _was_used(home: Home) -> bool:
    """Return whether anything was ever launched from here: then an empty ledger is a lost one."""
    return bool(unknown_ids(home)) or home.world.exists(home.launch_lock("any").parent)


def _recorded(home: Home, word: str, store: str) -> list[LostRun]:
    """Return our runs with an open attempt in their record in the store."""
    try:
        records = stored_runs(open_store(store, home.world, create=False))
    except (HomingError, WireError, OSError):
        return []  # the providers are still searched by mark
    found = []
    for record in records:
        for attempt in record.attempts[-1:]:
            is_open = attempt.ended_at is None and attempt.mark.startswith(owner_prefix(home.owner))
            if is_open and word in ("", record.run_id, record.run_name):
                found.append(LostRun(record.run_id, record.run_name, store, attempt.provider, attempt=attempt.number))
    return found


def _refuse_stray(home: Home, word: str) -> None:
    """Raise StillBilling for an instance with the run's name in its mark but without a known run."""
    begin = owner_prefix(home.owner) + (f"{plain_name(word)}-" if word else "") if home.has_owner else "none"
    for line in home.ledger.lines():
        if line.destroyed_at is None and not line.run_id and line.run_name == "?" and line.mark.startswith(begin):
            raise StillBilling(
                what=f"{line.provider} {line.instance_id or line.mark} "
                "may be billing, and its run is not in the ledger.",
                why=f"Its mark is {line.mark}: it was launched from this computer with a ledger that was lost.",
                fix=f"End it: homing destroy {line.instance_id or line.mark}"
                "   or restore its run from its store: homing adopt STORE",
            )


def _unchecked(home: Home, lost: LostRun, problems: list[str]) -> str:
    """Return why it is unknown whether its provider still shows it; "" if it is known to be gone."""
    if not lost.provider:
        return f"{home.run_dir(lost.id) / LAUNCH_NOTE} does not say which provider it was rented from."
    mark = make_mark(home.owner, lost.id, lost.attempt)
    if home.world.is_locked(home.launch_lock(mark)):
        return "Another process is launching it."
    said = next((problem for problem in problems if problem.startswith(unasked(lost.provider))), "")
    if said:
        return said
    try:
        is_gone = is_absent(home.provider(lost.provider), home, mark, None)
    except (HomingError, OSError) as exc:
        return f"{unasked(lost.provider)} {(str(exc) or type(exc).__name__).splitlines()[0]}"
    return "" if is_gone else f"{lost.provider} lists an instance under its mark {mark}."
