"""Everything at every provider that carries our mark, against the ledger: what `homing reconcile` shows.

    instances   known | reopened (was closed, still there) | forgotten (no run knows it) | waiting (not shown yet)
                absent (closed now, with its receipt) | unborn (a launch that died before its create call)
    resources   in use (its instance lives) | kept (by wish, with its rate) | left over (belongs to nothing that lives)

Looking changes only the ledger. What is not ours is never listed, and what cannot be asked is said, not left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

from homing.cloud import diary, meter
from homing.cloud.ask import ask_all
from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine
from homing.cloud.mark import make_mark, owner_in, owner_prefix
from homing.cloud.providers.base import Provider, Resource, wait_until
from homing.cloud.providers.registry import HERE_ONLY
from homing.cloud.reconcile import providers_in_use, refresh, unasked
from homing.cloud.whose import accounts_unseen
from homing.errors import HomingError, StillBilling, UsageError

__all__ = ["Finding", "Survey", "billing_things", "end", "keep", "kept_key", "survey"]

_RESOURCE_S = 60.0


@dataclass(frozen=True)
class Finding:
    kind: str  # as above: known, reopened, forgotten, waiting, absent, unborn, in use, kept, left over
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
    problems: list[str]  # who could not be asked, one sentence each
    is_blind: bool  # something may bill at a provider that could not be asked

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
        elif not isinstance(answer, UsageError):  # not set up here; a line of its would have been told of by refresh
            problems.append(_not_asked(name, answer))
            is_blind = True  # also where the ledger knows of nothing there: that is what this verb is for
    return Survey(shown, problems + accounts_unseen(home, lines), is_blind)


def billing_things(home: Home, known_problems: list[str]) -> tuple[list[Resource], list[str]]:
    """What costs money beside instances, at every provider, and who else could not be asked for it."""
    found: list[Resource] = []
    problems: list[str] = []
    for name, answer in _list_resources(home, _of_others(home), known_problems).items():
        if isinstance(answer, list):
            found += [each for each in answer if each.rate_usd_per_hour > 0]
        elif not isinstance(answer, UsageError):
            problems.append(_not_asked(name, answer))
    return found, problems


def end(home: Home, finding: Finding) -> str:
    """ "" when the provider shows it absent; otherwise what stands in the way."""
    try:
        if finding.line is not None:
            destroy_lines(home, [finding.line])
            return ""
        assert finding.resource is not None, finding
        return _end_resource(home, finding.resource)
    except StillBilling as exc:
        return exc.why
    except (HomingError, OSError) as exc:
        return str(exc).replace("\n", " ")


def keep(home: Home, finding: Finding) -> str:
    """Into the ledger for good: under its run where the mark tells it, else under the mark's own words.

    Returns until when, in a sentence. A person's word: the guard does not end it for being left over of a run that has
    ended or gone on elsewhere, but the limit of that run counts its dollars too.
    """
    assert finding.line is not None, finding
    mark = finding.mark
    for run in home.ledger.runs():
        if mark == make_mark(home.owner, run.id, finding.line.attempt):
            diary.note(home, run.id, kept_key(mark), "kept", "It is kept: reconcile was told so.")
            home.ledger.update(mark, run_id=run.id, run_name=run.name, limit_usd=run.spend_limit_usd)
            limit = "no spend limit" if run.spend_limit_usd is None else meter.show_usd(Decimal(run.spend_limit_usd))
            return f"it bills until the limit of {run.id}, {limit}, or until: homing destroy {run.id}"
    home.ledger.update(mark, run_name=mark.removeprefix(owner_prefix(home.owner)).rpartition("-")[0])
    return "no run and no limit is known for it, so nobody but you ends it: homing destroy --all"


def kept_key(mark: str) -> str:
    """Under which the diary of its run says that a person keeps this one."""
    return f"kept-{mark}"


def _instance(home: Home, line: LedgerLine, before: LedgerLine | None) -> Finding | None:
    """None for what was closed before and is closed now: a receipt needs no further look."""
    if line.destroyed_at is not None:
        if before is not None and before.destroyed_at is not None:
            return None
        kind, text = ("unborn" if line.created_at is None else "absent"), line.note
    elif line.created_at is None:
        kind, text = "waiting", "its launch is under way"
    elif before is not None and before.destroyed_at is not None:
        kind, text = "reopened", line.note
    elif not line.run_id and line.run_name == "?":
        kind, text = "forgotten", line.note
    elif line.instance_id is None or line.state == "unknown":
        kind, text = "waiting", line.note or "not shown by its provider yet"
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
    """Of all but those of whom `problems` says that they did not answer a moment ago."""
    silent = _silent(home, problems)
    questions = {
        name: lambda open_=open_: open_().list_resources()
        for name, open_ in _askable(home, lines)
        if name not in silent
    }
    return ask_all(questions, home.world)


def _silent(home: Home, problems: list[str]) -> set[str]:
    """Far ones: to wait for them a second time tells nobody more. What is on this computer is asked again at once."""
    far = [name for name in providers_in_use(home) if name not in HERE_ONLY]
    return {name for name in far if any(each.startswith(unasked(name)) for each in problems)}


def _not_asked(name: str, exc: HomingError | OSError) -> str:
    return f"{name} could not be asked for volumes, keys and groups: {str(exc).splitlines()[0]}"


def _askable(home: Home, lines: list[LedgerLine]) -> list[tuple[str, Callable[[], Provider]]]:
    """Our own view of each provider, and one of each adopted mark's."""
    found: dict[str, Callable[[], Provider]] = {}
    for name in providers_in_use(home):
        found[name] = partial(home.provider, name)
    for line in lines:
        if not home.is_ours(line.mark):
            theirs = owner_prefix(owner_in(line.mark))
            found[f"{line.provider} ({theirs}...)"] = partial(home.provider_of, line)
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
    """Lines of adopted instances: their providers are asked through them, and ours are asked by name."""
    return home.ledger.lines_of_others(owner_prefix(home.owner))


def _end_resource(home: Home, resource: Resource) -> str:
    # What another home made is reached through whatever was adopted of it.
    lines = [line for line in _of_others(home) if owner_in(line.mark) == owner_in(resource.mark) != home.owner]
    line = next((each for each in lines if each.provider == resource.provider), None)
    provider = home.provider_of(line) if line is not None else home.provider(resource.provider)

    def is_gone() -> bool:
        provider.destroy_resource(resource)
        return not any((each.kind, each.id) == (resource.kind, resource.id) for each in provider.list_resources())

    if wait_until(is_gone, timeout_s=_RESOURCE_S, every_s=2.0, world=home.world):
        return ""
    return f"{provider.name} still shows the {resource.kind} {resource.id}."
