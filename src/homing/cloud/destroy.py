"""Destroys instances and their volumes and keys, and retries until the provider confirms that they are gone.

    record the request -> provider.destroy, repeated -> not listed any more -> its volumes and keys -> receipt
                                                     -> deadline: StillBilling, our most severe error
                                                     -> in a different account, invisible to this key: same error

We try to destroy every instance before raising any error, so that one failure leaves no other machine billing.
Which computer holds the run's lease does not matter here, because a billing instance may always be destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.ask_providers import NEAR_LIMIT_TIMEOUT_S, ask_store
from homing.cloud.contact.heartbeats import read_reports
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import REFUSED, LedgerLine, RunRow
from homing.cloud.ledger.mark import owner_in, owner_prefix
from homing.cloud.ledger.meter import follow_clock
from homing.cloud.providers.base import Instance, Provider, Resource, wait_until
from homing.cloud.reconcile.inventory import Finding
from homing.cloud.reconcile.receipt import at_its_rate, receipt, seen_spend
from homing.cloud.reconcile.reconcile import (
    CREATE_GRACE_S,
    add_duplicate,
    end_resources,
    is_absent,
    note_duplicate,
    refresh,
)
from homing.cloud.reconcile.renting_account import check_account, note_account
from homing.errors import HomingError, OtherAccount, StillBilling
from homing.wire.codec import WireError

__all__ = [
    "Destroyed",
    "Problem",
    "destroy_lines",
    "destroy_run",
    "end_duplicates",
    "end_each",
    "end_finding",
    "open_lines",
    "still_billing",
    "would_be_lost",
]

log = logging.getLogger(__name__)
DEADLINE_S = 60.0
_RESOURCE_S = 60.0  # timeout for destroying a volume, key or group that no instance uses
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
# extra time for an attempt that began before the deadline, because each request has its own timeout and retries
_LAST_TRY_S = 150.0


@dataclass(frozen=True)
class Destroyed:
    """The ledger lines of the destroyed instances, now closed, and their total spend."""

    lines: list[LedgerLine]
    spend_usd: Decimal


def open_lines(home: Home, run: RunRow | None) -> list[LedgerLine]:
    if run is None:
        return home.ledger.open_lines()
    return [line for line in home.ledger.lines(run.id) if line.destroyed_at is None]


def would_be_lost(home: Home, run: RunRow) -> str:
    """Describe the work that exists only on the instance, or return "" if everything of value is in the store."""
    lines = [line for line in open_lines(home, run) if line.created_at is not None]
    if not lines:
        return ""
    try:
        name = f"The store of {run.id}"
        reports = ask_store(run.store, lambda: read_reports(home.store_of(run), run.id, lines[-1]), name, home.world)
    except (HomingError, WireError, OSError) as exc:
        return f"could not read the store ({exc}), so it is unknown what was pushed"
    if reports.heartbeat is None:
        return ""  # nothing was trained yet
    beat = reports.heartbeat
    if beat.is_pushed and reports.outcome is not None:
        return ""
    # The step is unknown until the first metrics arrive.
    at = f" at step {beat.step:,} of {beat.num_steps:,}" if beat.num_steps else ""
    return f"it is {beat.state}{at}; anything not pushed is lost"


def destroy_run(home: Home, run: RunRow, *, deadline_s: float = DEADLINE_S) -> Destroyed:
    """Destroy every instance of a run. An instance that is already gone is not an error."""
    closed = [line for line in home.ledger.lines(run.id) if line.destroyed_at is not None]
    done = destroy_lines(home, open_lines(home, run), deadline_s=deadline_s)
    _end_left_resources(home, closed)
    before = home.ledger.run(run.id) or run
    if not done.lines and not before.is_live and not home.may_go_on(before):
        return done  # the run had already ended, and nothing is left of it
    refresh(home)
    after = home.ledger.run(run.id)
    if after is not None and (after.is_live or home.may_go_on(after)):
        home.ledger.set_run(
            run.id, state="stopped", reason="destroyed manually", exit_code=None, ended_at=home.world.now()
        )
    # From now on, no guard resumes the run. If a guard was just relaunching it, that attempt is in the ledger by now.
    late = destroy_lines(home, open_lines(home, run), deadline_s=deadline_s)
    return Destroyed(done.lines + late.lines, done.spend_usd + late.spend_usd)


def destroy_lines(home: Home, lines: list[LedgerLine], *, deadline_s: float = DEADLINE_S) -> Destroyed:
    problems = end_each(home, lines, deadline_s=deadline_s)
    after = _as_written(home, lines)
    if problems:
        left = [line for line in after if line.mark in problems]
        raise still_billing(home, left, problems)
    return Destroyed(after, meter.total_spend(after, home.world.now()))


def end_each(home: Home, lines: list[LedgerLine], *, deadline_s: float, by: float = math.inf) -> dict[str, Problem]:
    """Destroy these lines' instances. Return a dict, by mark, of the problems with those not confirmed gone.

    `by` (Unix seconds) is the time by which the caller must move on. A request that is still unanswered then continues
    in the background, and its instance counts as not confirmed gone.
    """
    # Do this before using the time. If the clock was set back, the amount on the receipt would otherwise be too low.
    with _bookkeeping():
        follow_clock(home)
    for line in lines:
        # Record the request first: if this process dies now, every later command reports that the instance was not
        # confirmed gone. If the ledger cannot be written (full disk), continue anyway, because the machine must not
        # keep billing. Writing the receipt then fails with an error.
        with _bookkeeping():
            home.ledger.ask_destroy(line.mark, home.world.now())
    return _destroy_each(home, _as_written(home, lines), deadline_s, by)


@dataclass(frozen=True)
class Problem:
    """The reason why an instance is not confirmed gone. An empty `text` means that there is no problem.

    `fix` tells the user what to do if a retry cannot help.
    """

    text: str
    fix: str = ""
    may_pass: bool = False  # worth retrying


def _destroy_each(home: Home, lines: list[LedgerLine], deadline_s: float, by: float) -> dict[str, Problem]:
    """Destroy the instances, with all providers in parallel, so that an unresponsive one does not delay the others."""
    by_provider: dict[str, list[LedgerLine]] = {}
    for line in lines:
        by_provider.setdefault(line.provider, []).append(line)

    calls = [lambda own=own: _destroy_in_turn(home, own, deadline_s) for own in by_provider.values()]
    # With only one provider and no limit to enforce, waiting delays nothing else, so the call gets its full deadline.
    longest_s = min(_longest_s(by_provider, deadline_s), max(NEAR_LIMIT_TIMEOUT_S, by - home.world.now()))
    is_alone = len(calls) == 1 and math.isinf(by)
    found = [calls[0]()] if is_alone else home.world.together(calls, longest_s)
    problems: dict[str, Problem] = {}
    for own, answer in zip(by_provider.values(), found, strict=True):
        if isinstance(answer, TimeoutError):
            answer = {line.mark: Problem(f"{line.provider} has not answered yet.") for line in own}
        elif isinstance(answer, Exception):
            raise answer
        problems.update(answer)
    return {mark: problem for mark, problem in problems.items() if problem.text}


def _longest_s(by_provider: dict[str, list[LedgerLine]], deadline_s: float) -> float:
    return max((len(own) for own in by_provider.values()), default=0) * (deadline_s + _LAST_TRY_S)


def end_duplicates(home: Home, line: LedgerLine, list_owned: Callable[[], list[Instance]] | None = None) -> list[str]:
    """Destroy all instances with the line's mark except the one in the ledger. Return one sentence for each of them.

    Such a duplicate appears if a create call that seemed lost takes effect late. If it cannot be destroyed now, the
    next pass tries again. A caller that checks many lines passes `list_owned`, so that each provider is queried once.
    """
    ended = []
    with contextlib.suppress(HomingError, OSError):
        provider = home.provider_of(line)
        for each in (list_owned or provider.list_owned)() if line.instance_id is not None else []:
            if each.mark == line.mark and each.id != line.instance_id:
                with _bookkeeping():
                    add_duplicate(home, line, each)
                provider.destroy(each.id)
                with _bookkeeping():
                    note_duplicate(home, line, each)
                ended.append(f"Destroyed {each.id}, a duplicate of {line.instance_id}: both were named {line.mark}.")
    return ended


def still_billing(home: Home, lines: list[LedgerLine], problems: Mapping[str, Problem] | None = None) -> StillBilling:
    assert lines, "no line to report"
    said, problems = [], problems or {}
    for line in lines:
        page, costs = _page(home, line), ""
        with _bookkeeping():  # the error must be reported even if the spend cannot be computed
            spend = meter.show_usd(meter.line_spend(line, home.world.now()))
            if meter.is_charged(line):
                costs = f" at {meter.show_usd(Decimal(line.rate_usd_per_hour))}/h, {spend} so far"
        words = [
            f"{line.provider} {line.instance_id or line.mark}{costs}.",
            problems[line.mark].text if line.mark in problems else "",
            f"See {page}" if page else "",
        ]
        said.append(" ".join(word for word in words if word))
    run_ids = list(dict.fromkeys(line.run_id for line in lines))
    target = run_ids[0] if len(run_ids) == 1 and run_ids[0] else "--all"
    count = "1 instance" if len(lines) == 1 else f"{len(lines)} instances"
    fix = next((each.fix for each in problems.values() if each.fix), "")
    costs_money = any(meter.is_charged(line) for line in lines)
    return StillBilling(
        what=f"{count} may still be billing: the provider has not confirmed the destroy."
        if costs_money
        else f"{count} on this computer may still be running: the destroy is not confirmed. It costs no money.",
        why="\n".join(said),
        fix=fix or f"homing destroy {target}",
    )


def _page(home: Home, line: LedgerLine) -> str:
    try:
        return home.provider_of(line).page
    except Exception:
        return ""  # the error must be reported even if the provider cannot be used from this computer


def _as_written(home: Home, lines: list[LedgerLine]) -> list[LedgerLine]:
    """Return the current ledger rows for these lines, or the lines themselves if the ledger cannot be read."""
    marks = {line.mark for line in lines}
    try:
        found = list(home.ledger.lines_marked(list(marks)).values())
    except Exception:
        return lines
    known = {line.mark for line in found}
    return found + [line for line in lines if line.mark not in known]


def _destroy_in_turn(home: Home, lines: list[LedgerLine], deadline_s: float) -> dict[str, Problem]:
    """Try to destroy each instance, retrying those that remain until the deadline. Return the problems by mark."""
    problems = {line.mark: _try(home, line) for line in lines}
    until, pause_s = home.world.monotonic() + deadline_s, _FIRST_PAUSE_S
    while True:
        waiting = [line for line in lines if problems[line.mark].may_pass]
        left_s = until - home.world.monotonic()
        if not waiting or left_s <= 0:
            return problems
        home.world.sleep(min(pause_s, left_s))
        problems |= {line.mark: _try(home, line) for line in waiting}
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _try(home: Home, line: LedgerLine) -> Problem:
    if line.destroyed_at is not None:
        return Problem("")
    if line.created_at is None:
        # The provider was never asked for an instance, and begin_create refuses a line with a destroy request.
        try:
            receipt(home, line, None, "never created")
        except Exception as exc:  # the line stays open; report the problem and continue with the other instances
            return Problem(_words(exc))
        return Problem("")
    try:
        problem = _try_once(home, line)
    except OtherAccount as exc:  # waiting cannot help
        with _bookkeeping():
            home.ledger.update(line.mark, state="unknown", billing="maybe", note=exc.what)
        return Problem(exc.why, exc.fix)
    except Exception as exc:  # whatever the error, continue with the other instances and retry this one
        problem = _words(exc)
    if problem and line.state != REFUSED:
        with _bookkeeping():
            home.ledger.update(line.mark, state="destroying", billing="maybe", note=problem[:300])
    return Problem(problem, may_pass=bool(problem))


def _words(exc: Exception) -> str:
    is_ours = isinstance(exc, (HomingError, OSError))
    return (str(exc) if is_ours else f"{type(exc).__name__}: {exc}").replace("\n", " ") or type(exc).__name__


@contextlib.contextmanager
def _bookkeeping() -> Iterator[None]:
    """Suppress errors from ledger writes and cost computations.

    A full disk, a damaged ledger row or an absurd figure must not keep the destroy request from being sent.
    """
    try:
        yield
    except Exception as exc:
        log.info("The ledger is not up to date: %s", _words(exc))


def _try_once(home: Home, line: LedgerLine) -> str:
    provider = home.provider_of(line)
    line = next(iter(_as_written(home, [line])), line)  # the previous try may have updated the line
    shown = _shown(provider, line)
    ids = [instance.id for instance in shown]
    instance_id = line.instance_id or (ids[0] if ids else None)
    _note_ids(home, line, shown, instance_id)
    blind = None if ids else _account_problem(home, provider, line)
    refusal = _ask_each(provider, list(dict.fromkeys([*ids, *([instance_id] if instance_id else [])])))
    # Compute costs only after the destroy request, so that no computation can delay it.
    line = _count(home, line, shown, instance_id)
    if refusal is not None:
        raise refusal
    if ids:
        with _bookkeeping():
            note_account(home, provider, [line])
    if blind is not None:
        raise blind
    if not is_absent(provider, home, line.mark, instance_id):
        return f"{provider.name} still lists it."
    if instance_id is None and _may_still_appear(home, provider, line):
        return f"The response to its create call was lost: it may still appear on {provider.name}."
    problem = end_resources(provider, line.mark)
    if problem:
        return problem
    instance = provider.describe(instance_id) if instance_id is not None else None
    now = next(iter(_as_written(home, [line])), line)
    if now.instance_id not in (None, instance_id):  # the launch has repeated the create call in the meantime
        return f"{now.instance_id} appeared with the same mark."
    receipt(home, line, instance, _note(line, instance))
    return ""


def _shown(provider: Provider, line: LedgerLine) -> list[Instance]:
    """Return the instances with the line's mark. If a create call got no answer, only the mark can identify them."""
    try:
        return [instance for instance in provider.list_owned() if instance.mark == line.mark]
    except Exception:
        if line.instance_id is not None:
            provider.destroy(line.instance_id)  # destroy the instance even if the list call fails
        raise


def _note_ids(home: Home, line: LedgerLine, shown: list[Instance], instance_id: str | None) -> None:
    """Record the ids of all instances with the mark, so that each has a ledger line even if this process dies now.

    No costs are computed here, because that could delay the destroy request.
    """
    for each in shown:
        with _bookkeeping():
            if each.id == instance_id:
                home.ledger.update(line.mark, instance_id=each.id)
            else:
                add_duplicate(home, line, each)  # a second instance with the same mark, which is destroyed as well


def _count(home: Home, line: LedgerLine, shown: list[Instance], instance_id: str | None) -> LedgerLine:
    """Record the spend up to now, regardless of the agent's reports, because the instance was alive a moment ago."""
    with _bookkeeping():  # after this, setting the clock back can no longer reduce the amount on the receipt
        seen_spend(home, line)
    for each in shown:
        with _bookkeeping():
            if each.id != instance_id:
                note_duplicate(home, line, each)
                continue
            line = at_its_rate(home, line, each)
            home.ledger.update(line.mark, spend_usd=str(meter.line_spend(line, home.world.now())))
    return line


def _ask_each(provider: Provider, ids: list[str]) -> Exception | None:
    """Ask the provider to destroy each of these instances, and return the first error or None."""
    refusals: list[Exception] = []
    for instance_id in ids:
        try:
            provider.destroy(instance_id)
        except Exception as exc:
            refusals.append(exc)
    return refusals[0] if refusals else None


def _account_problem(home: Home, provider: Provider, line: LedgerLine) -> Exception | None:
    """Return the error if the account behind this key cannot be identified, or None if it is the right account.

    If the account cannot be identified, the caller still requests the destroy, but an instance that is not listed does
    not count as gone. Raises OtherAccount if the key is known to belong to a different account.
    """
    try:
        check_account(home, provider, line)
    except OtherAccount:
        raise
    except Exception as exc:
        return exc
    return None


def _may_still_appear(home: Home, provider: Provider, line: LedgerLine) -> bool:
    """Return True if a create call whose answer was lost may still take effect.

    This is possible until the grace period is over, unless the provider refused the call or always lists new instances
    immediately.
    """
    assert line.created_at is not None, line
    if provider.settle_s <= 0 or line.state == REFUSED:
        return False
    # A destroy request always follows the create call. If its recorded time is earlier, the clock was set back between
    # the two, so count from the time of the request.
    asked_at = home.ledger.destroy_asked_at(line.mark)
    since = line.created_at if asked_at is None else min(line.created_at, asked_at)
    return home.world.now() - since < CREATE_GRACE_S


def _note(line: LedgerLine, instance: Instance | None) -> str:
    if instance is not None:
        return instance.detail or "destroyed"
    return line.note if line.state == REFUSED else "never seen at the provider"


def _end_left_resources(home: Home, closed: list[LedgerLine]) -> None:
    """Try once to destroy the resources of ended attempts. `homing reconcile` shows any that remain."""
    for line in closed:
        with contextlib.suppress(HomingError, OSError):
            end_resources(home.provider_of(line), line.mark)


def end_finding(home: Home, finding: Finding) -> str:
    """Destroy an instance or resource found by `survey`. Return "" once it is gone, otherwise the reason why not."""
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


def _end_resource(home: Home, resource: Resource) -> str:
    # A resource of another $HOMING_HOME is accessed through the provider of an instance adopted from there.
    others = home.ledger.lines_of_others(owner_prefix(home.owner))
    lines = [line for line in others if owner_in(line.mark) == owner_in(resource.mark) != home.owner]
    line = next((each for each in lines if each.provider == resource.provider), None)
    provider = home.provider_of(line) if line is not None else home.provider(resource.provider)

    def is_gone() -> bool:
        provider.destroy_resource(resource)
        return not any((each.kind, each.id) == (resource.kind, resource.id) for each in provider.list_resources())

    if wait_until(is_gone, timeout_s=_RESOURCE_S, every_s=2.0, world=home.world):
        return ""
    return f"{provider.name} still lists the {resource.kind} {resource.id}."
