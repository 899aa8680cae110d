"""Brings the ledger up to date with the providers and the store, which are authoritative.

    list_owned of all providers  ->  open lines get state and spend; an instance that has ended gets its receipt;
                                     an instance without a line, or with a closed line, gets an open line
    heartbeat, outcome           ->  the run's state; the lease: whether another computer has adopted it
    changes                      ->  the run's record in its store

If a provider or store cannot be queried, the problem is reported and no instance counts as gone, because its state is
unknown. The same is true of an instance in an account that this key cannot see (renting_account.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

from homing.cloud.ask_providers import ask_all, cause, patience_s
from homing.cloud.contact.heartbeats import RunReports, read_reports
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, CUT_SHORT, LOST, PREEMPTED, REFUSED, SILENT, LedgerLine, RunRow
from homing.cloud.ledger.mark import duplicate_mark, owner_prefix, shown_mark
from homing.cloud.ledger.meter import follow_clock
from homing.cloud.ledger.run_lease import describe, is_recorded, newest, other_owner, write_record
from homing.cloud.providers.base import Instance, Provider, Resource
from homing.cloud.providers.registry import NEAR, configured
from homing.cloud.reconcile.lost_ledger import remembered
from homing.cloud.reconcile.receipt import at_its_rate, last_beat, note_bill, receipt, seen_spend, their_spend
from homing.cloud.reconcile.renting_account import check_account, note_account, say
from homing.errors import (
    HomingError,
    IntegrityError,
    LimitReached,
    NotChecked,
    OtherAccount,
    ProviderSilent,
    UsageError,
)
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat
from homing.wire.run_record import Lease

__all__ = [
    "CREATE_GRACE_S",
    "LOOKS",
    "add_duplicate",
    "end_resources",
    "is_absent",
    "note_duplicate",
    "providers_in_use",
    "refresh",
    "unasked",
    "unread",
]

# Lists may be stale, so an instance counts as gone only after it was missing from this many lists in a row, spread
# over the settle time.
LOOKS = 3
_RECORD_S = 86400.0  # how long a run's record is still updated after the run has ended
CREATE_GRACE_S = 900.0  # how long a create call without a response may still take effect


@dataclass(frozen=True)
class _View:
    """A provider as one owner sees it, with the open ledger lines that are compared with the provider's list."""

    name: str
    open_: Callable[[], Provider]
    lines: list[LedgerLine]
    title: str  # unique among the views
    is_used: bool  # True if the ledger has an open or closed line for this provider
    num_lines: int  # number of lines in the ledger when `lines` were read

    def look(self) -> list[Instance]:
        return sorted(self.open_().list_owned(), key=lambda instance: instance.created_at or 0.0)


def refresh(
    home: Home, *, by: float = math.inf, silent: set[str] | None = None, reached: set[str] | None = None
) -> list[str]:
    """Bring the ledger up to date. Return a sentence for each provider or store that could not be queried.

    `by` is the time by which the caller must enforce a limit. Calls wait for answers only until then, or for
    NEAR_LIMIT_TIMEOUT_S if that is longer. The marks of instances at providers that did not answer are added to
    `silent`, and the names of the providers that did answer are added to `reached`.
    """
    home.ledger.file.look_again()
    follow_clock(home)
    _close_unborn(home)
    views, problems = _views(home), list[str]()
    for view, listed in zip(views, _list_owned(home, views, by), strict=True):
        if reached is not None and isinstance(listed, list):
            reached.add(view.name)
        if silent is not None and isinstance(listed, ProviderSilent):
            silent |= {line.mark for line in view.lines}
        problems += _refresh_lines(home, view, listed, by)
    problems += _refresh_runs(home, home.ledger.live_runs(), by)
    return problems + _write_records(home, problems, by) + home.ledger.damage()


def unread(run: RunRow) -> str:
    """Return the opening words of each message that says this run's store could not be read."""
    return f"Could not read the store of {run.id}:"


def unasked(name: str) -> str:
    """Return the opening words of each message that says this provider could not be queried."""
    return f"Could not query {name}, so its instances may be billing:"


def is_absent(provider: Provider, home: Home, mark: str, instance_id: str | None) -> bool:
    """Return True if several consecutive checks find no instance with this mark or id at the provider."""
    for look in range(LOOKS):
        if look and provider.settle_s:
            home.world.sleep(provider.settle_s / (LOOKS - 1))
        if any(instance.mark == mark for instance in provider.list_owned()):
            return False
        if instance_id is not None and provider.describe(instance_id).state != "gone":
            return False
    return True


def end_resources(provider: Provider, mark: str) -> str:
    """Destroy the volumes, keys and groups with this mark. Return "" if none is left, otherwise a sentence."""
    for resource in _resources(provider, mark):
        provider.destroy_resource(resource)
    left = _resources(provider, mark)
    return f"{provider.name} still lists its {left[0].kind} {left[0].id}." if left else ""


def _resources(provider: Provider, mark: str) -> list[Resource]:
    return [resource for resource in provider.list_resources() if resource.mark == mark]


def providers_in_use(home: Home) -> list[str]:
    """Return the providers that have ledger lines with our own mark, plus those configured on this machine."""
    return sorted(home.ledger.providers(owner_prefix(home.owner)) | set(configured(home.path, home.world)))


def _adopted_groups(home: Home) -> list[list[LedgerLine]]:
    """Return the lines of adopted instances, grouped by provider and by the previous owner and its computer."""
    lines = home.ledger.lines_of_others(owner_prefix(home.owner))
    adopted = home.ledger.adopted() if lines else {}
    groups: dict[tuple[str, str, str, str], list[LedgerLine]] = {}
    for line in lines:
        its = adopted.get(shown_mark(line.mark))
        if its is not None:
            groups.setdefault((line.provider, its.owner, its.host, its.home), []).append(line)
    return list(groups.values())


def _close_unborn(home: Home) -> None:
    """Close the lines of launches that died before their create call, so that no instance was ever requested."""
    for line in home.ledger.open_lines():
        if line.created_at is not None:
            continue
        if not home.world.is_locked(home.launch_lock(line.mark)):
            home.ledger.close_unborn(line.mark, home.world.now())
            with contextlib.suppress(OSError):  # a stale lock does no harm
                home.world.remove(home.launch_lock(line.mark))


def _views(home: Home) -> list[_View]:
    # There may be thousands of closed lines, so `_refresh_lines` reads only those whose instance is still listed.
    num_lines, used = home.ledger.num_lines(), home.ledger.providers(owner_prefix(home.owner))
    lines = [line for line in home.ledger.open_lines() if home.is_ours(line.mark)]
    own = {name: [line for line in lines if line.provider == name] for name in providers_in_use(home)}
    found = [_View(name, partial(home.provider, name), of, name, name in used, num_lines) for name, of in own.items()]
    for group in _adopted_groups(home):
        first, open_ = group[0], [line for line in group if line.destroyed_at is None]
        title = f"{first.provider} of {first.mark}"
        found.append(_View(first.provider, partial(home.provider_of, first), open_, title, True, num_lines))
    return found


def _list_owned(home: Home, views: list[_View], by: float) -> list[list[Instance] | HomingError | OSError]:
    """Return what each provider lists as ours, or its error, in the order of `views`.

    Remote providers are queried in parallel with a deadline, so that none blocks the guard.

    Local providers answer immediately or not at all. They are queried one after another, so that the order is
    deterministic.
    """
    far = {view.title: view.look for view in views if view.name not in NEAR}
    answers = ask_all(far, home.world, patience_s(home.world, by))
    for view in views:
        if view.title not in answers:
            try:
                answers[view.title] = view.look()
            except (HomingError, OSError) as exc:
                answers[view.title] = exc
    return [answers[view.title] for view in views]


def _refresh_lines(home: Home, view: _View, listed: list[Instance] | HomingError | OSError, by: float) -> list[str]:
    name, lines = view.name, {line.mark: line for line in view.lines}
    if not isinstance(listed, list):
        if isinstance(listed, UsageError) and not view.is_used:
            return []  # this provider is not set up here and was never used
        for line in lines.values():
            if line.created_at is not None and line.state != REFUSED:
                home.ledger.update(line.mark, state="unknown", billing="maybe")
        said = f"{unasked(name)} {_first_line(listed)}"
        return [NotChecked(said, name) if isinstance(listed, UsageError) and not lines else said]
    problems: list[str] = []
    shown = {mark for each in listed for mark in (each.mark, duplicate_mark(each.mark, each.id))}
    known = home.ledger.lines_marked(shown, of_first=view.num_lines) if shown else {}
    # Compare with the lines as they were before the query. Otherwise, a line that another process has closed since then
    # would be reopened.
    lines = {**{mark: line for mark, line in known.items() if line.provider == name}, **lines}
    others = {mark: line.provider for mark, line in known.items() if line.provider != name}
    owned = _by_line(listed, lines)
    with home.ledger.at_once():
        problems += _note_all_owned(home, name, owned, lines, others)
    for line in lines.values():
        if line.destroyed_at is None and line.created_at is not None and line.mark not in owned:
            try:
                problems += _note_absent(home, view.open_(), line)
            except (HomingError, OSError) as exc:
                problems.append(f"Could not check {line.mark} on {name}: {_first_line(exc)}")
    if ours := [lines[mark] for mark in owned if mark in lines]:
        note_account(home, view.open_(), ours, patience_s=patience_s(home.world, by))
    return problems


def _note_all_owned(
    home: Home, name: str, owned: dict[str, Instance], lines: dict[str, LedgerLine], others: dict[str, str]
) -> list[str]:
    problems: list[str] = []
    for mark, instance in owned.items():
        first = owned.get(shown_mark(mark))
        if first is not None and first is not instance:
            problems.append(
                f"{name} lists both {first.id} and {instance.id} under the name {first.mark},"
                " and both are being billed."
            )
        if shown_mark(mark) in others:
            # Writing one provider's id to a different provider's line would make that line's instance unknown.
            where = others[shown_mark(mark)]
            problems.append(
                f"{name} lists {instance.id} under the name {mark}, but that name belongs to an instance on {where}."
            )
            continue
        if shown_mark(mark) != mark:
            problems += note_duplicate(home, lines.get(shown_mark(mark)), instance)
            continue
        problems += _note_owned(home, lines.get(mark), instance)
    return problems


def _by_line(listed: list[Instance], lines: dict[str, LedgerLine]) -> dict[str, Instance]:
    """Map ledger marks to instances, with a separate mark for each duplicate.

    If two instances have the same mark, the one in the ledger (or else the older one) gets the line with that mark. The
    other was created by a call that seemed lost but took effect late. It gets its own line, even if the first is gone.
    """
    found: dict[str, Instance] = {}
    for instance in listed:
        known, first, mark = lines.get(instance.mark), found.get(instance.mark), instance.mark
        is_another = known is not None and known.instance_id not in (None, instance.id)
        if duplicate_mark(mark, instance.id) in lines or (first is None and is_another):
            found[duplicate_mark(mark, instance.id)] = instance
        elif first is None or first.id == instance.id:  # a list may contain an instance twice
            found[mark] = instance
        elif known is not None and known.instance_id == instance.id:
            found[mark], found[duplicate_mark(mark, first.id)] = instance, first
        else:
            found[duplicate_mark(mark, instance.id)] = instance
    return found


def note_duplicate(home: Home, line: LedgerLine | None, instance: Instance) -> list[str]:
    """Record a duplicate of the instance in this ledger line, as billing since the create call.

    Returns a sentence for each implausible figure that the provider reports for the duplicate.
    """
    duplicate = at_its_rate(home, add_duplicate(home, line, instance), instance)
    return _note_owned(home, duplicate, replace(instance, mark=duplicate.mark))


def add_duplicate(home: Home, line: LedgerLine | None, instance: Instance) -> LedgerLine:
    """Return the duplicate's line. If there is none yet, create it at the original's rate, without any spend."""
    mark, now = duplicate_mark(instance.mark, instance.id), home.world.now()
    duplicate = home.ledger.lines_marked([mark]).get(mark)
    if duplicate is None:
        original = line or _forgotten(instance, now)
        duplicate = replace(
            original,
            mark=mark,
            instance_id=instance.id,
            created_at=original.created_at or now,
            destroyed_at=None,
            spend_usd="0",
        )
        home.ledger.adopt(duplicate)
    return duplicate


def _note_owned(home: Home, line: LedgerLine | None, instance: Instance) -> list[str]:
    """Record what the provider reports about an instance. Skip implausible figures, returning a sentence for each."""
    if line is None:
        _note_unknown(home, instance)
    elif line.destroyed_at is not None:
        note = "was closed, but the provider still lists it"
        home.ledger.reopen(line.mark, instance_id=instance.id, note=note, now=home.world.now())
    if line is not None and line.damaged:
        # Replace damaged columns with the provider's data, so that the instance's cost can be counted again.
        line = at_its_rate(home, line, instance)
        home.ledger.update(line.mark, created_at=line.created_at, offer=line.offer, account=line.account)
    known = line or _forgotten(instance, home.world.now())
    billed, problems = their_spend(home, known, instance)
    note_bill(home, instance.mark, billed)
    home.ledger.update(
        instance.mark,
        instance_id=instance.id,
        state=instance.state,
        billing=instance.billing,
        spend_usd=str(max(seen_spend(home, line) if line else Decimal(0), billed or Decimal(0))),
        note=instance.detail,
    )
    return [f"{instance.provider} {instance.id}: {problem}" for problem in problems]


def _note_unknown(home: Home, instance: Instance) -> None:
    """Add an instance to the ledger that is missing there, with its run and limit if this computer knows them."""
    found = remembered(home, instance)
    if found is None:
        home.ledger.adopt(_forgotten(instance, home.world.now()))
        return
    run, lines = found
    home.ledger.adopt_run(run, lines, [], must_last=False)


def _note_absent(home: Home, provider: Provider, line: LedgerLine) -> list[str]:
    """Write the receipt if nothing is left of the instance. Otherwise, return sentences that say what is left."""
    assert line.created_at is not None, line
    if line.instance_id is None and home.world.now() - line.created_at < CREATE_GRACE_S:
        return []  # the create call may be in progress in another process
    if home.world.is_locked(home.launch_lock(line.mark)):
        return []  # the launch is still waiting for the instance, and destroys it if it does not start in time
    try:
        check_account(home, provider, line)
    except OtherAccount as exc:
        home.ledger.update(line.mark, state="unknown", billing="maybe", note=exc.what)
        return [say(exc)]
    if not is_absent(provider, home, line.mark, line.instance_id):
        return []
    # Resources created for this attempt are no longer needed, and a volume would keep billing.
    left = end_resources(provider, line.mark)
    if left:
        home.ledger.update(line.mark, note=left)
        return [f"{line.mark} has ended, but {left}"]
    if line.instance_id is None:
        # The instance may have run and ended without ever being listed, so look for a heartbeat. If the store cannot be
        # read, this raises an error, and the line stays open.
        beat = last_beat(home, line)
        receipt(home, line, None, "never seen at the provider" if beat is None else "seen only through its heartbeats")
    else:
        instance = provider.describe(line.instance_id)
        receipt(home, line, instance, instance.detail or "ended on its own")
        return [f"{line.provider} {line.instance_id}: {text}" for text in their_spend(home, line, instance)[1]]
    return []


def _forgotten(instance: Instance, now: float) -> LedgerLine:
    """Return a line for an instance that is not in the ledger.

    The attempt number is taken from the end of the mark. The run id in the mark is not used: it may be truncated.
    """
    number = instance.mark.rsplit("-", 1)[-1]
    return LedgerLine(
        mark=instance.mark,
        run_id="",
        run_name="?",
        attempt=int(number) if number.isdigit() else 1,
        provider=instance.provider,
        offer="?",
        rate_usd_per_hour=str(instance.rate_usd_per_hour),
        limit_usd=None,
        intent_at=instance.created_at or now,
        instance_id=instance.id,
        created_at=instance.created_at or now,
        note="found at the provider; not in the ledger",
    )


def _refresh_runs(home: Home, runs: list[RunRow], by: float) -> list[str]:
    """Update the runs from their stores. Remote stores are read in parallel with a deadline, like the providers.

    Without a deadline, retries for one store could keep the guard from enforcing limits. The parallel part only reads,
    because a response that arrives after the deadline must not change anything.
    """
    lines = home.ledger.lines_of(run.id for run in runs)
    reads = {run.id: partial(_read_run, home, run, lines[run.id]) for run in runs}
    far = {run.id: reads[run.id] for run in runs if not run.store.startswith("file:")}
    answers, problems = ask_all(far, home.world, patience_s(home.world, by)), list[str]()
    for run in runs:
        found = answers[run.id] if run.id in answers else reads[run.id]()
        if isinstance(found, ProviderSilent):
            found = f"{unread(run)} {_first_line(found)}"
        elif isinstance(found, Exception):
            raise found
        if isinstance(found, str):
            problems.append(found)
        else:
            _note_run(home, run, lines[run.id], found)
    return problems


def _read_run(home: Home, run: RunRow, lines: list[LedgerLine]) -> Lease | RunReports | str | None:
    """Return the newest lease if another owner holds it, otherwise the run's reports.

    If the reports cannot be read, return a sentence that says so. If there are no reports yet, return None.
    """
    if all(line.created_at is None for line in lines):  # nothing was written yet, and there may be no store
        return None
    other = other_owner(home, run)
    if other is not None:
        return other
    last = lines[-1]
    try:
        return read_reports(home.store_of(run), run.id, last)
    except (HomingError, WireError, OSError) as exc:
        is_over = last.destroyed_at is not None and last.instance_id is None
        return None if is_over else f"{unread(run)} {cause(exc)}"


def _note_run(home: Home, run: RunRow, lines: list[LedgerLine], found: Lease | RunReports | None) -> None:
    last, now = lines[-1] if lines else None, home.world.now()
    if last is not None and last.destroyed_at is None and isinstance(found, RunReports) and _is_as_noted(run, found):
        return
    if [line.mark for line in home.ledger.lines(run.id)] != [line.mark for line in lines]:
        return  # a new attempt, with its own reports, began while the store was being read
    if isinstance(found, Lease):
        home.ledger.set_run(run.id, only_live=True, state=ADOPTED, reason=f"adopted {describe(found)}")
    elif found is not None and found.outcome is not None and not found.is_saved:
        _note_unsaved(home, run, last, found)
    elif found is not None and found.outcome is not None:
        outcome = found.outcome
        # `homing watch` exits with this code. A requested stop is not a failure, and reaching a limit has its own code.
        code = LimitReached.exit_code if found.is_limit else int(outcome.state == "failed")
        # The guard waits from this time before it destroys the instance. Cap the time at `now`, because the
        # instance's clock may be ahead.
        ended_at = min(outcome.t or now, now)
        # An instance that is destroyed from here receives the same signal as one that is preempted.
        is_cut = outcome.is_preempted or found.is_unasked
        is_taken = is_cut and last is not None and not home.ledger.is_destroy_asked(last.mark)
        reason = f"{PREEMPTED}{outcome.reason}" if is_taken else outcome.reason
        home.ledger.set_run(
            run.id, only_live=True, state=outcome.state, reason=reason, exit_code=code, ended_at=ended_at
        )
    elif last is not None and last.destroyed_at is not None:
        reason = SILENT if last.instance_id else CUT_SHORT
        home.ledger.set_run(
            run.id, only_live=True, state="failed", reason=reason, exit_code=1, ended_at=last.destroyed_at
        )
    elif found is not None and found.heartbeat is not None:
        home.ledger.set_run(run.id, only_live=True, state=_reported_state(found.heartbeat))


def _is_as_noted(run: RunRow, found: RunReports) -> bool:
    """Return True if the run has no outcome yet and the ledger already has its state, so that no write is needed."""
    return found.outcome is None and found.heartbeat is not None and _reported_state(found.heartbeat) == run.state


def _reported_state(beat: Heartbeat) -> str:
    return "landing" if beat.end_step is not None else "running"


def _note_unsaved(home: Home, run: RunRow, last: LedgerLine | None, found: RunReports) -> None:
    """Mark a run as lost if its final model was never verified in the store and its machine has given up or is gone.

    Such a run has trained all its steps. It is not done while its machine is still pushing. If the machine ends without
    a verified push, the work since the newest checkpoint in the store is lost.
    """
    is_gone = last is not None and last.destroyed_at is not None
    has_given_up = found.heartbeat is not None and found.heartbeat.state in ("kept", "ending", "ended")
    if not is_gone and not has_given_up:
        return
    now, why = home.world.now(), "its final model was never verified in the store"
    home.ledger.set_run(run.id, only_live=True, state="failed", reason=f"{LOST}{why}", exit_code=1, ended_at=now)


def _write_records(home: Home, problems: list[str], by: float) -> list[str]:
    """Update the records of live and recently ended runs. Older records are up to date, or their store is gone.

    The leases are read first, from remote stores in parallel and with a deadline, so that nothing is written to a store
    that does not answer.
    """
    failed, now = [], home.world.now()
    worth = home.ledger.recorded_runs(since=now - _RECORD_S)
    lines = home.ledger.lines_of(run.id for run in worth)
    late = [run for run in worth if _is_late(home, run, lines[run.id], problems)]
    far = {run.id: partial(_lease_of, home, run) for run in late if not run.store.startswith("file:")}
    answers = ask_all(far, home.world, patience_s(home.world, by)) if far else {}
    for run in late:
        try:
            lease = answers.get(run.id)
            if isinstance(lease, (HomingError, OSError)):
                raise lease
            write_record(home, run.id, home.store_of(run), lease)
        except (HomingError, WireError, OSError) as exc:
            if not any(run.id in problem for problem in problems):  # the unreadable store was already reported
                failed.append(f"Could not update the record of {run.id} in its store: {_first_line(exc)}")
    return failed


def _is_late(home: Home, run: RunRow, own: list[LedgerLine], problems: list[str]) -> bool:
    """Return True if the run's record in the store is outdated and no problem with reading the store was reported."""
    if run.state in (ADOPTED, "launching") or any(problem.startswith(unread(run)) for problem in problems):
        return False
    try:
        return not is_recorded(home, run, own)
    except OSError:
        return True


def _lease_of(home: Home, run: RunRow) -> Lease | None:
    """Return the newest lease. Raises IntegrityError if it is unreadable, which affects only this run's record."""
    try:
        return newest(home.store_of(run), run.id)
    except WireError as exc:
        raise IntegrityError(str(exc)) from exc


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
