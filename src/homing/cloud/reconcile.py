"""What the ledger says against what the providers and the store say; theirs is the truth.

    list_owned of all providers  ->  open lines get state and spend; one that ended by itself gets its receipt
                                     a machine that no line knows, or that a line calls gone, is written down
    heartbeat, outcome           ->  the run's state; the lease: whether another home has adopted it
    what changed                 ->  the run's record in its store

A provider or store that cannot be asked is reported and leaves everything as it was: unknown, never gone. So is what a
key of another account does not show (whose.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

from homing.cloud.ask import ask_all, patience_s
from homing.cloud.clock import follow_clock
from homing.cloud.home import Home
from homing.cloud.lease import describe, newest, other_owner
from homing.cloud.ledger import ADOPTED, CUT_SHORT, LOST, PREEMPTED, REFUSED, SILENT, LedgerLine, RunRow
from homing.cloud.lost import remembered
from homing.cloud.mark import owner_prefix, shown_mark, twin_mark
from homing.cloud.providers.base import Instance, Provider, Resource
from homing.cloud.providers.registry import NEAR, configured
from homing.cloud.receipt import at_its_rate, last_beat, note_bill, receipt, seen_spend, their_spend
from homing.cloud.record import is_recorded, write_record
from homing.cloud.signs import Signs, read_signs
from homing.cloud.status import cause
from homing.cloud.whose import check_account, note_account, say
from homing.errors import HomingError, IntegrityError, LimitReached, OtherAccount, ProviderSilent, UsageError
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.record import Lease

__all__ = [
    "CREATE_GRACE_S",
    "LOOKS",
    "add_twin",
    "end_resources",
    "is_absent",
    "note_twin",
    "providers_in_use",
    "refresh",
    "unasked",
    "unread",
]

LOOKS = 3  # a list may be late: absent means absent in this many looks over the provider's settle time
_RECORD_S = 86400.0  # for so long after its end a run's record is still brought up to date
CREATE_GRACE_S = 900.0  # a create call that never got an answer may still be on its way for so long


@dataclass(frozen=True)
class _View:
    """One provider as one owner sees it, and the open lines of the ledger that are to be compared with that."""

    name: str
    open_: Callable[[], Provider]
    lines: list[LedgerLine]
    title: str  # no two have the same
    is_used: bool  # the ledger has a line of its, open or closed
    num_lines: int  # of the ledger when these were read

    def look(self) -> list[Instance]:
        return sorted(self.open_().list_owned(), key=lambda instance: instance.created_at or 0.0)


def refresh(
    home: Home, *, by: float = math.inf, silent: set[str] | None = None, reached: set[str] | None = None
) -> list[str]:
    """Brings the ledger up to date. Returns what could not be asked, one sentence each. `by` is when a limit needs
    whoever looks: nobody is waited for much longer. `silent` gets the marks of those whose provider did not answer,
    `reached` the names of the providers that listed our instances."""
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
    """How the sentence begins that tells of a store which could not be read."""
    return f"The store of {run.id} could not be read:"


def unasked(name: str) -> str:
    """How the sentence begins that tells of a provider which could not be asked."""
    return f"{name} could not be asked, so its instances may bill:"


def is_absent(provider: Provider, home: Home, mark: str, instance_id: str | None) -> bool:
    """Whether the provider shows nothing of ours under this mark, in several looks."""
    for look in range(LOOKS):
        if look and provider.settle_s:
            home.world.sleep(provider.settle_s / (LOOKS - 1))
        if any(instance.mark == mark for instance in provider.list_owned()):
            return False
        if instance_id is not None and provider.describe(instance_id).state != "gone":
            return False
    return True


def end_resources(provider: Provider, mark: str) -> str:
    """Volumes, keys and groups under the mark; "" when none is left, otherwise what is."""
    for resource in _resources(provider, mark):
        provider.destroy_resource(resource)
    left = _resources(provider, mark)
    return f"{provider.name} still shows its {left[0].kind} {left[0].id}." if left else ""


def _resources(provider: Provider, mark: str) -> list[Resource]:
    return [resource for resource in provider.list_resources() if resource.mark == mark]


def providers_in_use(home: Home) -> list[str]:
    """Those in the ledger under our own mark, and those that can be asked although nobody named them."""
    return sorted(home.ledger.providers(owner_prefix(home.owner)) | set(configured(home.path, home.world)))


def _adopted_groups(home: Home) -> list[list[LedgerLine]]:
    """Lines of other homes, by whom has to be asked about them."""
    lines = home.ledger.lines_of_others(owner_prefix(home.owner))
    adopted = home.ledger.adopted() if lines else {}
    groups: dict[tuple[str, str, str, str], list[LedgerLine]] = {}
    for line in lines:
        its = adopted.get(shown_mark(line.mark))
        if its is not None:
            groups.setdefault((line.provider, its.owner, its.host, its.home), []).append(line)
    return list(groups.values())


def _close_unborn(home: Home) -> None:
    """Launches whose process is gone and that never came to their create call: nothing exists, nothing will."""
    for line in home.ledger.open_lines():
        if line.created_at is not None:
            continue
        if not home.world.is_locked(home.launch_lock(line.mark)):
            home.ledger.close_unborn(line.mark, home.world.now())
            with contextlib.suppress(OSError):  # a lock that nobody holds does no harm
                home.world.remove(home.launch_lock(line.mark))


def _views(home: Home) -> list[_View]:
    # Thousands of lines may be closed: of those only the few that a provider shows are read, in `_refresh_lines`.
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
    """Those far away at once, each with a deadline: a cloud that says nothing must not keep the guard from its work.

    What is on this computer answers at once or not at all, and is asked one after another: an order is worth more.
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
            return []  # never used here and not set up
        for line in lines.values():
            if line.created_at is not None and line.state != REFUSED:
                home.ledger.update(line.mark, state="unknown", billing="maybe")
        return [f"{unasked(name)} {_first_line(listed)}"]
    problems: list[str] = []
    shown = {mark for each in listed for mark in (each.mark, twin_mark(each.mark, each.id))}
    known = home.ledger.lines_marked(shown, of_first=view.num_lines) if shown else {}
    # As they were before the provider was asked: one that another client has closed since is not reopened.
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
                problems.append(f"{line.mark} on {name} could not be looked at: {_first_line(exc)}")
    if ours := [lines[mark] for mark in owned if mark in lines]:
        note_account(home, view.open_(), ours, patience_s=patience_s(home.world, by))
    return problems


def _note_all_owned(
    home: Home, name: str, owned: dict[str, Instance], lines: dict[str, LedgerLine], others: dict[str, str]
) -> list[str]:
    problems: list[str] = []
    for mark, instance in owned.items():
        beside = owned.get(shown_mark(mark))
        if beside is not None and beside is not instance:
            problems.append(f"{name} shows {beside.id} and {instance.id} under the one mark {beside.mark}: both bill.")
        if shown_mark(mark) in others:
            # An id of one provider in the line of another would make a stranger of the machine that is there.
            where = others[shown_mark(mark)]
            problems.append(f"{name} shows {instance.id} under the mark {mark}, which is on {where}.")
            continue
        if shown_mark(mark) != mark:
            problems += note_twin(home, lines.get(shown_mark(mark)), instance)
            continue
        problems += _note_owned(home, lines.get(mark), instance)
    return problems


def _by_line(listed: list[Instance], lines: dict[str, LedgerLine]) -> dict[str, Instance]:
    """Mark in the ledger -> machine. Of two under one mark the one that stands there, else the older, has its line; the
    other, of a create call that seemed lost and took effect late, gets one of its own, also after the first is gone."""
    found: dict[str, Instance] = {}
    for instance in listed:
        known, beside, mark = lines.get(instance.mark), found.get(instance.mark), instance.mark
        is_another = known is not None and known.instance_id not in (None, instance.id)
        if twin_mark(mark, instance.id) in lines or (beside is None and is_another):
            found[twin_mark(mark, instance.id)] = instance
        elif beside is None or beside.id == instance.id:  # a list may show one twice
            found[mark] = instance
        elif known is not None and known.instance_id == instance.id:
            found[mark], found[twin_mark(mark, beside.id)] = instance, beside
        else:
            found[twin_mark(mark, instance.id)] = instance
    return found


def note_twin(home: Home, line: LedgerLine | None, instance: Instance) -> list[str]:
    """A second machine under the mark of a line, for as long as the create call can have made it. Returns the problems
    with its figures."""
    twin = at_its_rate(home, add_twin(home, line, instance), instance)
    return _note_owned(home, twin, replace(instance, mark=twin.mark))


def add_twin(home: Home, line: LedgerLine | None, instance: Instance) -> LedgerLine:
    """Its line, made where there is none yet: at the rate of the one beside it. Nothing is counted."""
    mark, now = twin_mark(instance.mark, instance.id), home.world.now()
    twin = home.ledger.lines_marked([mark]).get(mark)
    if twin is None:
        beside = line or _forgotten(instance, now)
        twin = replace(
            beside,
            mark=mark,
            instance_id=instance.id,
            created_at=beside.created_at or now,
            destroyed_at=None,
            spend_usd="0",
        )
        home.ledger.adopt(twin)
    return twin


def _note_owned(home: Home, line: LedgerLine | None, instance: Instance) -> list[str]:
    """Writes down what its provider shows. Returns the problems with its figures, which are not written."""
    if line is None:
        _note_unknown(home, instance)
    elif line.destroyed_at is not None:
        note = "was closed, but the provider shows it"
        home.ledger.reopen(line.mark, instance_id=instance.id, note=note, now=home.world.now())
    if line is not None and line.damaged:
        # Repaired where the provider knows it: from here on its cost can be counted again.
        line = at_its_rate(home, line, instance)
        home.ledger.update(line.mark, created_at=line.created_at, offer=line.offer, account=line.account)
    known = line or _forgotten(instance, home.world.now())
    theirs, problems = their_spend(home, known, instance)
    note_bill(home, instance.mark, theirs)
    home.ledger.update(
        instance.mark,
        instance_id=instance.id,
        state=instance.state,
        billing=instance.billing,
        spend_usd=str(max(seen_spend(home, line) if line else Decimal(0), theirs or Decimal(0))),
        note=instance.detail,
    )
    return [f"{instance.provider} {instance.id}: {problem}" for problem in problems]


def _note_unknown(home: Home, instance: Instance) -> None:
    """Under its run where the papers of that lie here, with its limit; else as one that no run knows."""
    found = remembered(home, instance)
    if found is None:
        home.ledger.adopt(_forgotten(instance, home.world.now()))
        return
    run, lines = found
    home.ledger.adopt_run(run, lines, [], must_last=False)


def _note_absent(home: Home, provider: Provider, line: LedgerLine) -> list[str]:
    """Its receipt, once nothing of it is left. Returns what is, in a sentence."""
    assert line.created_at is not None, line
    if line.instance_id is None and home.world.now() - line.created_at < CREATE_GRACE_S:
        return []  # its create call may be under way in another process
    if home.world.is_locked(home.launch_lock(line.mark)):
        return []  # its launch waits for it, and ends it where it does not come; a new one may be shown late
    try:
        check_account(home, provider, line)
    except OtherAccount as exc:
        home.ledger.update(line.mark, state="unknown", billing="maybe", note=exc.what)
        return [say(exc)]
    if not is_absent(provider, home, line.mark, line.instance_id):
        return []
    # What was made for this one attempt has no further use, and a volume goes on billing.
    left = end_resources(provider, line.mark)
    if left:
        home.ledger.update(line.mark, note=left)
        return [f"{line.mark} has ended, but {left}"]
    if line.instance_id is None:
        # Perhaps it lived and ended before anybody looked: while its store cannot be read, nothing is known.
        beat = last_beat(home, line)
        receipt(home, line, None, "never seen at the provider" if beat is None else "seen by its heartbeats alone")
    else:
        instance = provider.describe(line.instance_id)
        receipt(home, line, instance, instance.detail or "ended by itself")
        return [f"{line.provider} {line.instance_id}: {text}" for text in their_spend(home, line, instance)[1]]
    return []


def _forgotten(instance: Instance, now: float) -> LedgerLine:
    """The mark ends in the attempt; the run id before it may have been shortened, so it is not taken for one."""
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
        note="found at the provider; the ledger had no line for it",
    )


def _refresh_runs(home: Home, runs: list[RunRow], by: float) -> list[str]:
    """Far stores at once, each with a deadline, as the providers: minutes of tries at one of them would keep the guard
    from every limit. They are only read there: one that answers when nobody waits any more must not change a thing."""
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


def _read_run(home: Home, run: RunRow, lines: list[LedgerLine]) -> Lease | Signs | str | None:
    """Who else owns it, or what it says of itself, or why that cannot be read; None where there is nothing to read."""
    if all(line.created_at is None for line in lines):  # nobody has written yet, and there may be no store
        return None
    other = other_owner(home, run)
    if other is not None:
        return other
    last = lines[-1]
    try:
        return read_signs(home.store_of(run), run.id, last)
    except (HomingError, WireError, OSError) as exc:
        is_over = last.destroyed_at is not None and last.instance_id is None
        return None if is_over else f"{unread(run)} {cause(exc)}"


def _note_run(home: Home, run: RunRow, lines: list[LedgerLine], found: Lease | Signs | None) -> None:
    last, now = lines[-1] if lines else None, home.world.now()
    if last is not None and last.destroyed_at is None and isinstance(found, Signs) and _is_as_noted(run, found):
        return
    if [line.mark for line in home.ledger.lines(run.id)] != [line.mark for line in lines]:
        return  # another attempt has followed, while a store was waited for: it has signs of its own
    if isinstance(found, Lease):
        home.ledger.set_run(run.id, only_live=True, state=ADOPTED, reason=f"adopted {describe(found)}")
    elif found is not None and found.outcome is not None and not found.is_saved:
        _note_unsaved(home, run, last, found)
    elif found is not None and found.outcome is not None:
        outcome = found.outcome
        # What `homing watch` ends with: a stop that a person asked for is no failure, a limit is its own code.
        code = LimitReached.exit_code if found.is_limit else int(outcome.state == "failed")
        ended_at = min(outcome.t or now, now)  # its clock may be ahead, and the guard waits from here
        # An instance that home itself ends gets the same signal as one that its owner takes away.
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
        home.ledger.set_run(run.id, only_live=True, state=_state_told(found.heartbeat))


def _is_as_noted(run: RunRow, found: Signs) -> bool:
    """It is at work, as the ledger says: most runs in most looks. Nothing is to be written."""
    return found.outcome is None and found.heartbeat is not None and _state_told(found.heartbeat) == run.state


def _state_told(beat: Heartbeat) -> str:
    return "landing" if beat.end_step is not None else "running"


def _note_unsaved(home: Home, run: RunRow, last: LedgerLine | None, found: Signs) -> None:
    """Every step is trained, and nobody has seen the final model whole in the store: while its machine pushes it is not
    done, and afterwards the work since the newest checkpoint is lost."""
    is_gone = last is not None and last.destroyed_at is not None
    has_given_up = found.heartbeat is not None and found.heartbeat.state in ("kept", "ending", "ended")
    if not is_gone and not has_given_up:
        return
    now, why = home.world.now(), "its final model was never verified in the store"
    home.ledger.set_run(run.id, only_live=True, state="failed", reason=f"{LOST}{why}", exit_code=1, ended_at=now)


def _write_records(home: Home, problems: list[str], by: float) -> list[str]:
    """Of live runs and of those that ended lately: what is older was written down, or its store is gone for good.

    Who owns each is asked first, of far stores at once and with the deadline: one that hangs is not written to.
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
            if not any(run.id in problem for problem in problems):  # that its store is away was told
                failed.append(f"The record of {run.id} in its store is not up to date: {_first_line(exc)}")
    return failed


def _is_late(home: Home, run: RunRow, own: list[LedgerLine], problems: list[str]) -> bool:
    """Whether its record in the store tells less than the ledger, and the store is not one that was just not heard."""
    if run.state in (ADOPTED, "launching") or any(problem.startswith(unread(run)) for problem in problems):
        return False
    try:
        return not is_recorded(home, run, own)
    except OSError:
        return True


def _lease_of(home: Home, run: RunRow) -> Lease | None:
    """One that cannot be read is told as damage: it must keep no other run's record from being written."""
    try:
        return newest(home.store_of(run), run.id)
    except WireError as exc:
        raise IntegrityError(str(exc)) from exc


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
