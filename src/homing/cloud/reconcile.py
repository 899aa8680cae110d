"""What the ledger says against what the providers and the store say; theirs is the truth.

    list_owned of all providers  ->  open lines get state and spend; one that ended by itself gets its receipt
                                     a machine that no line knows, or that a line calls gone, is written down
    heartbeat, outcome           ->  the run's state; the lease: whether another home has adopted it
    what changed                 ->  the run's record in its store

A provider or store that cannot be asked is reported and leaves everything as it was: unknown, never gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.ask import ask_all
from homing.cloud.guards import can_end_itself
from homing.cloud.home import Home
from homing.cloud.lease import describe, other_owner
from homing.cloud.ledger import ADOPTED, CUT_SHORT, PREEMPTED, SILENT, LedgerLine, RunRow
from homing.cloud.mark import owner_prefix
from homing.cloud.providers.base import Instance, Provider, Resource
from homing.cloud.providers.registry import HERE_ONLY, configured
from homing.cloud.record import is_recorded, write_record
from homing.cloud.signs import read_document, read_signs
from homing.errors import HomingError, LimitReached, UsageError
from homing.store import run_key
from homing.wire import names
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat

__all__ = ["CREATE_GRACE_S", "LOOKS", "end_resources", "is_absent", "providers_in_use", "receipt", "refresh", "unasked"]

LOOKS = 3  # a list may be late: absent means absent in this many looks over the provider's settle time
_RECORD_S = 86400.0  # for so long after its end a run's record is still brought up to date
CREATE_GRACE_S = 900.0  # a create call that never got an answer may still be on its way for so long


@dataclass(frozen=True)
class _View:
    """One provider as one owner sees it, and the lines of the ledger that are to be compared with that."""

    name: str
    open_: Callable[[], Provider]
    lines: list[LedgerLine]
    title: str  # no two have the same

    def look(self) -> list[Instance]:
        return sorted(self.open_().list_owned(), key=lambda instance: instance.created_at or 0.0)


def refresh(home: Home) -> list[str]:
    """Brings the ledger up to date. Returns what could not be asked, one sentence each."""
    _close_unborn(home)
    lines = home.ledger.lines()
    views, problems = _views(home, lines), list[str]()
    for view, listed in zip(views, _list_owned(home, views), strict=True):
        problems += _refresh_lines(home, view, listed)
    for run in home.ledger.runs():
        if run.is_live:
            problems += _refresh_run(home, run)
    return problems + _write_records(home, problems)


def unasked(name: str) -> str:
    """How the sentence begins that tells of a provider which did not answer."""
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


def receipt(home: Home, line: LedgerLine, instance: Instance | None, note: str) -> None:
    """Closes a line: ends when the provider says it ended, else when its agent said goodbye, else now; costs the larger
    of their figure and ours. One that neither a provider nor its agent has told of costs what stands in the ledger."""
    ended_at, heard = instance.ended_at if instance is not None else None, Decimal(0)
    if ended_at is None:
        beat = None
        with contextlib.suppress(HomingError, WireError, OSError):  # blind: then it counts until now
            beat = _last_beat(home, line)
        if instance is None and beat is None:
            home.ledger.close(line.mark, at=home.world.now(), spend_usd=Decimal(line.spend_usd), note=note)
            return
        heard = _counted(home, line, beat)
        ended_at = _goodbye(home, line, beat, heard)
    assert line.created_at is not None, line
    began = [line.created_at]
    if instance is not None and instance.ended_at is not None and instance.created_at is not None:
        # By the clock that tells its end too: ours may be ahead of it by more than the whole life.
        began.append(instance.created_at)
    until = ended_at if ended_at is not None else home.world.now()
    ours = max(meter.cost(Decimal(line.rate_usd_per_hour), until - at) for at in began)
    if heard > ours:  # the clock at home was set back: and from its last word to its end it billed too
        ours = heard + meter.cost(Decimal(line.rate_usd_per_hour), meter.MARGIN_S)
    seen = _written(home, line) if ended_at is not None else _seen_spend(home, line)
    theirs = (instance.spend_usd if instance is not None else None) or Decimal(0)
    if instance is not None:
        _note_bill(home, line.mark, instance)
    home.ledger.close(line.mark, at=until, spend_usd=max(ours, seen, theirs), note=note)


def _written(home: Home, line: LedgerLine) -> Decimal:
    """What the ledger holds now: somebody may have seen it alive since this line was read."""
    now = next((each for each in home.ledger.lines(line.run_id) if each.mark == line.mark), line)
    return max(Decimal(line.spend_usd), Decimal(now.spend_usd))


def _last_beat(home: Home, line: LedgerLine) -> Heartbeat | None:
    """What the agent of this attempt last said; None where it never spoke. Raises when blind."""
    run = home.ledger.run(line.run_id)
    if run is None or line.created_at is None:
        return None
    beat = read_document(home.store_of(run), run_key(run.id, names.HEARTBEAT), Heartbeat)
    return beat if beat is not None and beat.mark == line.mark else None


def _counted(home: Home, line: LedgerLine, beat: Heartbeat | None) -> Decimal:
    """Dollars of this attempt by its agent's own count, which no clock at home can set back."""
    try:
        told = Decimal(beat.spend_usd if beat is not None else 0)
    except ArithmeticError:  # damaged: a look must not end by it
        told = Decimal(0)
    if not told.is_finite():
        return Decimal(0)
    before = [each for each in home.ledger.lines(line.run_id) if each.attempt < line.attempt]
    return max(Decimal(0), told - meter.total_spend(before, home.world.now()))


def _goodbye(home: Home, line: LedgerLine, beat: Heartbeat | None, counted_usd: Decimal) -> float | None:
    """By when a machine that has said goodbye had ended its billing, by its own count; None where none is said.

    Not every provider tells when one ended, or remembers it for long, and a laptop may have been closed for days.
    """
    if beat is None or beat.state != "ended" or not can_end_itself(home.provider_of(line)):
        return None
    assert line.created_at is not None, line
    rate = Decimal(line.rate_usd_per_hour)
    # By its clock, and by its dollars, which count what home told it of its age: the larger.
    lived_s = max(0.0, beat.t - beat.started_at, float(counted_usd / rate * 3600) if rate > 0 else 0.0)
    return min(home.world.now(), line.created_at + lived_s + meter.MARGIN_S)


def _seen_spend(home: Home, line: LedgerLine) -> Decimal:
    """What stands in the ledger, and of a process that looks again, never less than has passed before its eyes.

    A clock that is set back takes no dollar back: who looks on, as the guard does, counts by a stop watch and writes it
    down. One look alone writes nothing: its clock may be the one that is wrong.
    """
    spend, at = meter.line_spend(line, home.world.now()), home.world.monotonic()
    before = home.seen_spend.get(line.mark)
    if before is not None:
        spend = max(spend, before[0] + meter.cost(Decimal(line.rate_usd_per_hour), at - before[1]))
    home.seen_spend[line.mark] = (spend, at)
    return Decimal(line.spend_usd) if before is None else spend


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
    ours = owner_prefix(home.owner)
    named = {line.provider for line in home.ledger.lines() if line.mark.startswith(ours)}
    return sorted(named | set(configured(home.path, home.world)))


def _adopted_groups(home: Home, lines: list[LedgerLine]) -> list[list[LedgerLine]]:
    """Lines of other homes, by whom has to be asked about them."""
    adopted = home.ledger.adopted() if any(not line.mark.startswith(owner_prefix(home.owner)) for line in lines) else {}
    groups: dict[tuple[str, str, str, str], list[LedgerLine]] = {}
    for line in lines:
        its = adopted.get(line.mark)
        if its is not None:
            groups.setdefault((line.provider, its.owner, its.host, its.home), []).append(line)
    return list(groups.values())


def _close_unborn(home: Home) -> None:
    """Launches whose process is gone and that never came to their create call: nothing exists, nothing will."""
    for line in home.ledger.lines():
        if line.created_at is not None or line.destroyed_at is not None:
            continue
        if not home.world.is_locked(home.launch_lock(line.mark)):
            home.ledger.close_unborn(line.mark, home.world.now())
            home.world.remove(home.launch_lock(line.mark))


def _views(home: Home, lines: list[LedgerLine]) -> list[_View]:
    ours = owner_prefix(home.owner)
    own = {name: [line for line in lines if line.provider == name and line.mark.startswith(ours)]
           for name in providers_in_use(home)}  # fmt: skip
    found = [_View(name, lambda name=name: home.provider(name), of, name) for name, of in own.items()]  # type: ignore[misc]
    for group in _adopted_groups(home, lines):
        first = group[0]
        title = f"{first.provider} of {first.mark}"
        found.append(_View(first.provider, lambda line=first: home.provider_of(line), group, title))  # type: ignore[misc]
    return found


def _list_owned(home: Home, views: list[_View]) -> list[list[Instance] | HomingError | OSError]:
    """Those far away at once, each with a deadline: a cloud that says nothing must not keep the guard from its work.

    What is on this computer answers at once or not at all, and is asked one after another: an order is worth more.
    """
    answers = ask_all({view.title: view.look for view in views if view.name not in HERE_ONLY}, home.world)
    for view in views:
        if view.title not in answers:
            try:
                answers[view.title] = view.look()
            except (HomingError, OSError) as exc:
                answers[view.title] = exc
    return [answers[view.title] for view in views]


def _refresh_lines(home: Home, view: _View, listed: list[Instance] | HomingError | OSError) -> list[str]:
    name, lines = view.name, {line.mark: line for line in view.lines}
    if not isinstance(listed, list):
        if isinstance(listed, UsageError) and not lines:
            return []  # never used here and not set up
        for line in lines.values():
            if line.destroyed_at is None and line.created_at is not None:
                home.ledger.update(line.mark, state="unknown", billing="maybe")
        return [f"{unasked(name)} {_first_line(listed)}"]
    problems: list[str] = []
    owned: dict[str, Instance] = {}
    for instance in listed:
        first, known = owned.setdefault(instance.mark, instance), lines.get(instance.mark)
        if first is not instance:
            # A create call that seemed lost took effect late. The ledger has a line per mark, so it is said here.
            problems.append(f"{name} shows {first.id} and {instance.id} under the one mark {instance.mark}: both bill.")
            if known is not None and known.instance_id == instance.id:
                owned[instance.mark] = instance
    others = {line.mark: line.provider for line in home.ledger.lines() if line.provider != name}
    for mark, instance in owned.items():
        if mark in others:
            # An id of one provider in the line of another would make a stranger of the machine that is there.
            problems.append(f"{name} shows {instance.id} under the mark {mark}, which is on {others[mark]}.")
            continue
        _note_owned(home, lines.get(mark), instance)
    for line in lines.values():
        if line.destroyed_at is None and line.created_at is not None and line.mark not in owned:
            try:
                problems += _note_absent(home, view.open_(), line)
            except (HomingError, OSError) as exc:
                problems.append(f"{line.mark} on {name} could not be looked at: {_first_line(exc)}")
    return problems


def _note_owned(home: Home, line: LedgerLine | None, instance: Instance) -> None:
    if line is None:
        home.ledger.adopt(_forgotten(instance, home.world.now()))
    elif line.destroyed_at is not None:
        home.ledger.reopen(line.mark, instance_id=instance.id, note="was closed, but the provider shows it")
    spend = max(_seen_spend(home, line) if line else Decimal(0), instance.spend_usd or Decimal(0))
    _note_bill(home, instance.mark, instance)
    home.ledger.update(
        instance.mark,
        instance_id=instance.id,
        state=instance.state,
        billing=instance.billing,
        spend_usd=str(spend),
        note=instance.detail,
    )


def _note_bill(home: Home, mark: str, instance: Instance) -> None:
    if instance.spend_usd is not None:
        home.ledger.note_bill(mark, instance.spend_usd, home.world.now())


def _note_absent(home: Home, provider: Provider, line: LedgerLine) -> list[str]:
    """Its receipt, once nothing of it is left. Returns what is, in a sentence."""
    assert line.created_at is not None, line
    if line.instance_id is None and home.world.now() - line.created_at < CREATE_GRACE_S:
        return []  # its create call may be under way in another process
    if not is_absent(provider, home, line.mark, line.instance_id):
        return []
    # What was made for this one attempt has no further use, and a volume goes on billing.
    left = end_resources(provider, line.mark)
    if left:
        home.ledger.update(line.mark, note=left)
        return [f"{line.mark} has ended, but {left}"]
    if line.instance_id is None:
        # Perhaps it lived and ended before anybody looked: while its store cannot be read, nothing is known.
        beat = _last_beat(home, line)
        receipt(home, line, None, "never seen at the provider" if beat is None else "seen by its heartbeats alone")
    else:
        instance = provider.describe(line.instance_id)
        receipt(home, line, instance, instance.detail or "ended by itself")
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


def _refresh_run(home: Home, run: RunRow) -> list[str]:
    lines = home.ledger.lines(run.id)
    last = lines[-1] if lines else None
    signs = None
    if any(line.created_at is not None for line in lines):  # before that nobody has written, and there may be no store
        other = other_owner(home, run)
        if other is not None:
            home.ledger.set_run(run.id, only_live=True, state=ADOPTED, reason=f"adopted {describe(other)}")
            return []
        try:
            signs = read_signs(home.store_of(run), run.id, last)
        except (HomingError, WireError, OSError) as exc:
            if last is None or last.destroyed_at is None or last.instance_id is not None:
                return [f"The store of {run.id} could not be read: {_first_line(exc)}"]
    now = home.world.now()
    if signs is not None and signs.outcome is not None:
        outcome = signs.outcome
        # What `homing watch` ends with: a stop that a person asked for is no failure, a limit is its own code.
        code = LimitReached.exit_code if signs.is_limit else int(outcome.state == "failed")
        ended_at = min(outcome.t or now, now)  # its clock may be ahead, and the guard waits from here
        # An instance that home itself ends gets the same signal as one that its owner takes away.
        is_taken = outcome.is_preempted and last is not None and not home.ledger.is_destroy_asked(last.mark)
        reason = f"{PREEMPTED}{outcome.reason}" if is_taken else outcome.reason
        home.ledger.set_run(
            run.id, only_live=True, state=outcome.state, reason=reason, exit_code=code, ended_at=ended_at
        )
    elif last is not None and last.destroyed_at is not None:
        reason = SILENT if last.instance_id else CUT_SHORT
        home.ledger.set_run(
            run.id, only_live=True, state="failed", reason=reason, exit_code=1, ended_at=last.destroyed_at
        )
    elif signs is not None and signs.heartbeat is not None:
        is_landing = signs.heartbeat.end_step is not None
        home.ledger.set_run(run.id, only_live=True, state="landing" if is_landing else "running")
    return []


def _write_records(home: Home, problems: list[str]) -> list[str]:
    """Of live runs and of those that ended lately: what is older was written down, or its store is gone for good."""
    failed, now = [], home.world.now()
    worth = [run for run in home.ledger.runs() if run.is_live or now - (run.ended_at or 0.0) < _RECORD_S]
    lines = home.ledger.lines() if worth else []
    for run in worth:
        own = [line for line in lines if line.run_id == run.id]
        try:
            if run.state not in (ADOPTED, "launching") and not is_recorded(home, run, own):
                write_record(home, run.id, home.store_of(run))
        except (HomingError, WireError, OSError) as exc:
            if not any(run.id in problem for problem in problems):  # that its store is away was told
                failed.append(f"The record of {run.id} in its store is not up to date: {_first_line(exc)}")
    return failed


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
