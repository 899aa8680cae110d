"""Compares the ledger with all resources that carry our mark at any provider, for the report of `homing reconcile`.

    instances   known | reopened (the ledger had closed it too early) | forgotten (it belongs to no known run)
                waiting (the provider does not list it yet) | absent (it is gone, so its ledger line is closed)
                unborn (the launch died before it asked the provider for an instance)
    resources   in use (its instance lives) | kept (on request, with its rate) | left over (no live instance uses it)

The comparison changes nothing but the ledger. It lists only our own resources, and reports providers that cannot be
queried.

`check_lost` finds out whether an instance of a run may be billing although it is not in the ledger:

    the ledger has lines, and there is no other trace of it  it was never launched from here
    it has a local folder, or a record in the store          look for its instance at its provider
    the ledger is empty                                      look for our instances at every configured provider

`draft` calls `check_lost` so that a launch does not rent a second instance, and the commands call it before they report
that a run was never launched. `is_lost` is for commands that follow a run until it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

from homing.cloud.ask_providers import ask_all
from homing.cloud.contact import action_log
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark, owner_in, owner_prefix, plain_name
from homing.cloud.ledger.run_lease import stored_runs
from homing.cloud.providers.base import Provider, Resource
from homing.cloud.providers.registry import HERE_ONLY
from homing.cloud.reconcile.lost_ledger import LostRun, is_called, read_lost, unknown_ids
from homing.cloud.reconcile.reconcile import is_absent, providers_in_use, refresh, unasked
from homing.cloud.reconcile.renting_account import accounts_unseen
from homing.errors import HomingError, StillBilling, UsageError
from homing.store import open_store
from homing.wire.codec import WireError

__all__ = ["Finding", "Survey", "billing_things", "check_lost", "is_lost", "keep", "kept_key", "survey"]


@dataclass(frozen=True)
class Finding:
    # one of the kinds in the module's docstring: known, reopened, forgotten, waiting, absent, unborn, in use, kept or
    # left over
    kind: str
    thing: str  # instance | volume | key | group
    provider: str
    id: str
    mark: str
    run_id: str
    age_s: float
    rate_usd_per_hour: Decimal
    spend_usd: Decimal
    text: str = ""
    line: LedgerLine | None = None
    resource: Resource | None = None

    @property
    def needs_answer(self) -> bool:
        return self.kind in ("forgotten", "left over")

    @property
    def may_bill(self) -> bool:
        return self.thing == "instance" or self.rate_usd_per_hour > 0


@dataclass(frozen=True)
class Survey:
    findings: list[Finding]
    problems: list[str]  # a sentence for each provider that could not be queried
    is_blind: bool  # True if something may be billing at a provider that could not be queried

    @property
    def to_answer(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.needs_answer]


def survey(home: Home) -> Survey:
    before = {line.mark: line for line in home.ledger.lines()}
    problems = refresh(home)
    lines = home.ledger.lines()
    findings = [_instance(home, line, before.get(line.mark)) for line in lines]
    shown = [finding for finding in findings if finding is not None]
    live = {line.mark for line in lines if line.destroyed_at is None}
    is_blind = bool(problems) and any(line.destroyed_at is None and line.state == "unknown" for line in lines)
    is_blind |= bool(_silent(home, problems))
    for name, answer in _list_resources(home, lines, problems).items():
        if isinstance(answer, list):
            shown += [_resource(home, each, each.mark in live, before) for each in answer]
        # A UsageError means that the provider is not set up here. `refresh` reports that if the ledger has lines with
        # this provider.
        elif not isinstance(answer, UsageError):
            problems.append(_not_asked(name, answer))
            is_blind = (
                True  # even if the ledger has no line for this provider, an unknown instance may be billing there
            )
    return Survey(shown, problems + accounts_unseen(home, lines), is_blind)


def billing_things(home: Home, known_problems: list[str]) -> tuple[list[Resource], list[str]]:
    """Return all billed resources except instances, and a sentence for each provider that could not be queried."""
    found: list[Resource] = []
    problems: list[str] = []
    for name, answer in _list_resources(home, _of_others(home), known_problems).items():
        if isinstance(answer, list):
            found += [each for each in answer if each.rate_usd_per_hour > 0]
        elif not isinstance(answer, UsageError):
            problems.append(_not_asked(name, answer))
    return found, problems


def keep(home: Home, finding: Finding) -> str:
    """Keep a forgotten instance: assign it to the run that its mark matches, or else name it after its mark.

    Return a sentence that says how long the instance will keep billing. Even if its run has ended or resumed on another
    instance, the guard does not destroy it, but its cost still counts toward the run's limit.
    """
    assert finding.line is not None, finding
    mark = finding.mark
    for run in home.ledger.runs():
        if mark == make_mark(home.owner, run.id, finding.line.attempt):
            action_log.note(home, run.id, kept_key(mark), "kept", "Kept, as chosen in reconcile.")
            home.ledger.update(mark, run_id=run.id, run_name=run.name, limit_usd=run.spend_limit_usd)
            limit = "no spend limit" if run.spend_limit_usd is None else meter.show_usd(Decimal(run.spend_limit_usd))
            return f"it keeps billing until the limit of {run.id}, {limit}, or until you run: homing destroy {run.id}"
    home.ledger.update(mark, run_name=mark.removeprefix(owner_prefix(home.owner)).rpartition("-")[0])
    return "it has no known run or limit, so only you can end it: homing destroy --all"


def kept_key(mark: str) -> str:
    """Return the key of the action log entry that records the user's decision to keep this instance."""
    return f"kept-{mark}"


def _instance(home: Home, line: LedgerLine, before: LedgerLine | None) -> Finding | None:
    """Return the finding for a ledger line, or None if the line was already closed before this survey."""
    if line.destroyed_at is not None:
        if before is not None and before.destroyed_at is not None:
            return None
        kind, text = ("unborn" if line.created_at is None else "absent"), line.note
    elif line.created_at is None:
        kind, text = "waiting", "its launch is in progress"
    elif before is not None and before.destroyed_at is not None:
        kind, text = "reopened", line.note
    elif not line.run_id and line.run_name == "?":
        kind, text = "forgotten", line.note
    elif line.instance_id is None or line.state == "unknown":
        kind, text = "waiting", line.note or "not yet listed by its provider"
    else:
        kind, text = "known", line.note
    now = home.world.now()
    began = line.created_at if line.created_at is not None else line.intent_at
    return Finding(
        kind,
        "instance",
        line.provider,
        line.instance_id or line.mark,
        line.mark,
        line.run_id,
        max(0.0, now - began),
        Decimal(line.rate_usd_per_hour),
        meter.line_spend(line, now),
        text,
        line,
    )


def _list_resources(
    home: Home, lines: list[LedgerLine], problems: list[str]
) -> dict[str, list[Resource] | HomingError | OSError]:
    """List the resources at all providers except those that, according to `problems`, have just failed to answer."""
    silent = _silent(home, problems)
    questions = {
        name: lambda open_=open_: open_().list_resources()
        for name, open_ in _askable(home, lines)
        if name not in silent
    }
    return ask_all(questions, home.world)


def _silent(home: Home, problems: list[str]) -> set[str]:
    """Return the remote providers that have just failed to answer. Querying them again would not help.

    Local providers are never included.
    """
    far = [name for name in providers_in_use(home) if name not in HERE_ONLY]
    return {name for name in far if any(each.startswith(unasked(name)) for each in problems)}


def _not_asked(name: str, exc: HomingError | OSError) -> str:
    return f"Could not list volumes, keys and groups on {name}: {str(exc).splitlines()[0]}"


def _askable(home: Home, lines: list[LedgerLine]) -> list[tuple[str, Callable[[], Provider]]]:
    """Return functions that open providers: one per provider, plus one per provider and owner of adopted lines."""
    found: dict[str, Callable[[], Provider]] = {}
    for name in providers_in_use(home):
        found[name] = partial(home.provider, name)
    for line in lines:
        if not home.is_ours(line.mark):
            prefix = owner_prefix(owner_in(line.mark))
            found[f"{line.provider} ({prefix}...)"] = partial(home.provider_of, line)
    return list(found.items())


def _resource(home: Home, resource: Resource, is_live: bool, lines: dict[str, LedgerLine]) -> Finding:
    now = home.world.now()
    age_s = max(0.0, now - resource.created_at) if resource.created_at is not None else 0.0
    line = lines.get(resource.mark)
    return Finding(
        "in use" if is_live else "kept" if resource.is_kept else "left over",
        resource.kind,
        resource.provider,
        resource.id,
        resource.mark,
        line.run_id if line is not None else "",
        age_s,
        resource.rate_usd_per_hour,
        meter.cost(resource.rate_usd_per_hour, age_s),
        resource.detail,
        resource=resource,
    )


def _of_others(home: Home) -> list[LedgerLine]:
    """Return the lines of adopted instances. They show which previous owners' resources must also be listed."""
    return home.ledger.lines_of_others(owner_prefix(home.owner))


# --- instances that are not in the ledger ---


def check_lost(home: Home, word: str, store: str = "") -> bool:
    """Raise StillBilling if an instance that is not in the ledger may be billing, or if that could not be checked.

    `word` is a run's name or id, or "" for any run. `store` is the store that may contain the run's record. After the
    call, every run that could be restored is in the ledger again, with its limit. Returns True if the providers were
    queried.
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
            what="The ledger is empty, and homing cannot check whether"
            f" an instance of {word or 'yours'} is being billed.",
            why="\n".join(unasked_),
            fix="Try again once the providers respond: homing runs",
        )
    return True


def is_lost(home: Home, run: RunRow) -> bool:
    """Return True if the ledger has lost a run that it once had, and no provider lists an instance for it.

    In that case, nothing in $HOMING_HOME shows how the run ended. Raises StillBilling while an instance may be billing.
    """
    if home.ledger.run(run.id) is not None:
        return False
    check_lost(home, run.id, run.store)
    return home.ledger.run(run.id) is None


def _was_used(home: Home) -> bool:
    """Return True if anything was ever launched from here. If so, an empty ledger means that the ledger was lost."""
    return bool(unknown_ids(home)) or home.world.exists(home.launch_lock("any").parent)


def _recorded(home: Home, word: str, store: str) -> list[LostRun]:
    """Return the runs launched from here that, according to their record in the store, have an open attempt."""
    try:
        records = stored_runs(open_store(store, home.world, create=False))
    except (HomingError, WireError, OSError):
        return []  # if the store cannot be read, the caller still searches the providers by mark
    found = []
    for record in records:
        for attempt in record.attempts[-1:]:
            is_open = attempt.ended_at is None and attempt.mark.startswith(owner_prefix(home.owner))
            if is_open and word in ("", record.run_id, record.run_name):
                found.append(LostRun(record.run_id, record.run_name, store, attempt.provider, attempt=attempt.number))
    return found


def _refuse_stray(home: Home, word: str) -> None:
    """Raise StillBilling for an instance whose mark contains the run's name but belongs to no known run."""
    begin = owner_prefix(home.owner) + (f"{plain_name(word)}-" if word else "") if home.has_owner else "none"
    for line in home.ledger.lines():
        if line.destroyed_at is None and not line.run_id and line.run_name == "?" and line.mark.startswith(begin):
            raise StillBilling(
                what=f"{line.provider} {line.instance_id or line.mark} "
                "may be billing, and its run is not in the ledger.",
                why=f"Its name, {line.mark}, shows that it was launched from this computer,"
                " so the ledger must have lost its record of the run.",
                fix=f"Destroy it: homing destroy {line.instance_id or line.mark}"
                "   or restore its run from its store: homing adopt STORE",
            )


def _unchecked(home: Home, lost: LostRun, problems: list[str]) -> str:
    """Return the reason why the lost run's instance may still exist, or "" if it is known to be gone."""
    if not lost.provider:
        return f"{home.run_dir(lost.id) / LAUNCH_NOTE} does not say which provider the instance was rented from."
    mark = make_mark(home.owner, lost.id, lost.attempt)
    if home.world.is_locked(home.launch_lock(mark)):
        return "Another process is launching the run."
    said = next((problem for problem in problems if problem.startswith(unasked(lost.provider))), "")
    if said:
        return said
    try:
        is_gone = is_absent(home.provider(lost.provider), home, mark, None)
    except (HomingError, OSError) as exc:
        return f"{unasked(lost.provider)} {(str(exc) or type(exc).__name__).splitlines()[0]}"
    return "" if is_gone else f"{lost.provider} lists an instance under its mark {mark}."
