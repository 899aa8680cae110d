"""Instance to gone, confirmed by the provider, with the volumes and keys that were made for it.

    ask (written down) -> provider.destroy, again and again -> absent in several looks -> its volumes, keys -> receipt
                                                            -> deadline: StillBilling, the loudest error we have
                                                            -> not shown to the key of another account: the same

All are tried before anything is raised: one stubborn machine must not leave the others billing. Whose lease a run is
under does not matter here: ending what bills is never refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.ask import HURRY_S, ask_store
from homing.cloud.clock import follow_clock
from homing.cloud.home import Home
from homing.cloud.ledger import REFUSED, LedgerLine, RunRow
from homing.cloud.providers.base import Instance, Provider
from homing.cloud.receipt import at_its_rate, receipt, seen_spend
from homing.cloud.reconcile import CREATE_GRACE_S, add_twin, end_resources, is_absent, note_twin, refresh
from homing.cloud.signs import read_signs
from homing.cloud.whose import check_account, note_account
from homing.errors import HomingError, OtherAccount, StillBilling
from homing.wire.codec import WireError

__all__ = [
    "Destroyed",
    "Problem",
    "destroy_lines",
    "destroy_run",
    "end_each",
    "end_twins",
    "open_lines",
    "still_billing",
    "would_be_lost",
]

log = logging.getLogger(__name__)
DEADLINE_S = 60.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_LAST_TRY_S = 150.0  # one that began before the deadline: each of its questions has timeouts and repetitions of its own


@dataclass(frozen=True)
class Destroyed:
    """What destroy did: the closed lines, and the dollars of them."""

    lines: list[LedgerLine]
    spend_usd: Decimal


def open_lines(home: Home, run: RunRow | None) -> list[LedgerLine]:
    if run is None:
        return home.ledger.open_lines()
    return [line for line in home.ledger.lines(run.id) if line.destroyed_at is None]


def would_be_lost(home: Home, run: RunRow) -> str:
    """What only the instance has, in a sentence; "" when everything worth keeping is in the store."""
    lines = [line for line in open_lines(home, run) if line.created_at is not None]
    if not lines:
        return ""
    try:
        name = f"The store of {run.id}"
        signs = ask_store(run.store, lambda: read_signs(home.store_of(run), run.id, lines[-1]), name, home.world)
    except (HomingError, WireError, OSError) as exc:
        return f"the store could not be read ({exc}), so it is not known what was pushed"
    if signs.heartbeat is None:
        return ""  # nothing was trained yet
    beat = signs.heartbeat
    if beat.is_pushed and signs.outcome is not None:
        return ""
    at = f" at step {beat.step:,} of {beat.num_steps:,}" if beat.num_steps else ""  # before its first line of numbers
    return f"it is {beat.state}{at}; what it has not pushed is lost"


def destroy_run(home: Home, run: RunRow, *, deadline_s: float = DEADLINE_S) -> Destroyed:
    """Ends every instance of a run. What is gone already is success."""
    closed = [line for line in home.ledger.lines(run.id) if line.destroyed_at is not None]
    done = destroy_lines(home, open_lines(home, run), deadline_s=deadline_s)
    _end_left_resources(home, closed)
    before = home.ledger.run(run.id) or run
    if not done.lines and not before.is_live and not home.may_go_on(before):
        return done  # it had ended, and nothing of it was left
    refresh(home)
    after = home.ledger.run(run.id)
    if after is not None and (after.is_live or home.may_go_on(after)):
        home.ledger.set_run(
            run.id, state="stopped", reason="destroyed by hand", exit_code=None, ended_at=home.world.now()
        )
    # From here on no guard goes on with it; one that was at it until now has left a line.
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
    """What stands in the way of an end, by mark; nothing of those that are gone. `by`, in Unix seconds, is when whoever
    asks has something else to do: what has not answered until then goes on by itself, and counts as not confirmed."""
    with _bookkeeping():  # before anything gets a time: after a clock was set back a receipt would be too small
        follow_clock(home)
    for line in lines:
        # Written first: if we die now, every later verb says that this end is unconfirmed. A ledger that cannot be
        # written (a full disk) must not keep a machine billing: we go on, and the receipt fails loudly.
        with _bookkeeping():
            home.ledger.ask_destroy(line.mark, home.world.now())
    return _destroy_each(home, _as_written(home, lines), deadline_s, by)


@dataclass(frozen=True)
class Problem:
    """What stands in the way of an end; "" where nothing does. `fix` is there where to ask again would not help."""

    text: str
    fix: str = ""
    may_pass: bool = False  # it is worth another try


def _destroy_each(home: Home, lines: list[LedgerLine], deadline_s: float, by: float) -> dict[str, Problem]:
    """What stands in the way, by mark. Providers side by side: one that says nothing holds up no other's end."""
    by_provider: dict[str, list[LedgerLine]] = {}
    for line in lines:
        by_provider.setdefault(line.provider, []).append(line)

    calls = [lambda own=own: _destroy_in_turn(home, own, deadline_s) for own in by_provider.values()]
    # With one provider there is nobody to wait for, and nothing may be given up before its own deadlines are over.
    longest_s = min(_longest_s(by_provider, deadline_s), max(HURRY_S, by - home.world.now()))
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


def end_twins(home: Home, line: LedgerLine, list_owned: Callable[[], list[Instance]] | None = None) -> list[str]:
    """A create call that seemed lost may take effect late: of two under one mark the one in the ledger stays.

    What was done, in sentences. Asked for again in the next round where it could not be done now. `list_owned`: for a
    caller that looks at many lines and lists each provider once.
    """
    ended = []
    with contextlib.suppress(HomingError, OSError):
        provider = home.provider_of(line)
        for each in (list_owned or provider.list_owned)() if line.instance_id is not None else []:
            if each.mark == line.mark and each.id != line.instance_id:
                with _bookkeeping():
                    add_twin(home, line, each)
                provider.destroy(each.id)
                with _bookkeeping():
                    note_twin(home, line, each)
                ended.append(f"{each.id} is ended: {line.instance_id} has its mark, {line.mark}, too.")
    return ended


def still_billing(home: Home, lines: list[LedgerLine], problems: Mapping[str, Problem] | None = None) -> StillBilling:
    assert lines, "nobody is billing"
    said, problems = [], problems or {}
    for line in lines:
        page, costs = _page(home, line), ""
        with _bookkeeping():  # the alarm must be heard, whatever it costs
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
        what=f"{count} may still cost money: the end is not confirmed."
        if costs_money
        else f"{count} on this computer may still be running: the end is not confirmed. Nobody charges for it.",
        why="\n".join(said),
        fix=fix or f"homing destroy {target}",
    )


def _page(home: Home, line: LedgerLine) -> str:
    try:
        return home.provider_of(line).page
    except Exception:
        return ""  # a provider that cannot be opened here must not silence the alarm


def _as_written(home: Home, lines: list[LedgerLine]) -> list[LedgerLine]:
    """The lines as they stand now; as they were given where the ledger cannot be read."""
    marks = {line.mark for line in lines}
    try:
        found = list(home.ledger.lines_marked(list(marks)).values())
    except Exception:
        return lines
    known = {line.mark for line in found}
    return found + [line for line in lines if line.mark not in known]


def _destroy_in_turn(home: Home, lines: list[LedgerLine], deadline_s: float) -> dict[str, Problem]:
    """One try each, and from there on until the deadline again with those that are left: a stubborn one keeps no other
    waiting for its first."""
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
        # Never asked of the provider, and begin_create refuses a line whose end was asked for.
        try:
            receipt(home, line, None, "never created")
        except Exception as exc:  # that could not be written, so its launch may go on; the others are still to end
            return Problem(_words(exc))
        return Problem("")
    try:
        problem = _try_once(home, line)
    except OtherAccount as exc:  # no wait will change that
        with _bookkeeping():
            home.ledger.update(line.mark, state="unknown", billing="maybe", note=exc.what)
        return Problem(exc.why, exc.fix)
    except Exception as exc:  # whatever it is, the other instances are still to end, and this one is tried again
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
    """Around what is only written down or counted: a full disk, a damaged ledger row or an absurd figure must not keep
    the request to end from being sent."""
    try:
        yield
    except Exception as exc:
        log.info("The ledger is behind: %s", _words(exc))


def _try_once(home: Home, line: LedgerLine) -> str:
    provider = home.provider_of(line)
    line = next(iter(_as_written(home, [line])), line)  # with what the try before has found
    shown = _shown(provider, line)
    ids = [instance.id for instance in shown]
    instance_id = line.instance_id or (ids[0] if ids else None)
    _note_ids(home, line, shown, instance_id)
    blind = None if ids else _whose(home, provider, line)
    refusal = _ask_each(provider, list(dict.fromkeys([*ids, *([instance_id] if instance_id else [])])))
    # Only from here on is anything counted: no figure may stand between an instance and its end.
    line = _count(home, line, shown, instance_id)
    if refusal is not None:
        raise refusal
    if ids:
        with _bookkeeping():
            note_account(home, provider, [line])
    if blind is not None:
        raise blind
    if not is_absent(provider, home, line.mark, instance_id):
        return f"{provider.name} still shows it."
    if instance_id is None and _may_still_appear(home, provider, line):
        return f"The answer to its create call was lost: it may still appear at {provider.name}."
    problem = end_resources(provider, line.mark)
    if problem:
        return problem
    instance = provider.describe(instance_id) if instance_id is not None else None
    now = next(iter(_as_written(home, [line])), line)
    if now.instance_id not in (None, instance_id):  # its launch, which asked twice, has had an answer meanwhile
        return f"{now.instance_id} has come under its mark."
    receipt(home, line, instance, _note(line, instance))
    return ""


def _shown(provider: Provider, line: LedgerLine) -> list[Instance]:
    """What there is under its mark: a create whose answer was lost left no id."""
    try:
        return [instance for instance in provider.list_owned() if instance.mark == line.mark]
    except Exception:
        if line.instance_id is not None:
            provider.destroy(line.instance_id)  # a list that is out of order is no reason to pay on
        raise


def _note_ids(home: Home, line: LedgerLine, shown: list[Instance], instance_id: str | None) -> None:
    """What lives under its mark, before it is ended: if we die now, each has a line. Nothing is counted yet."""
    for each in shown:
        with _bookkeeping():
            if each.id == instance_id:
                home.ledger.update(line.mark, instance_id=each.id)
            else:
                add_twin(home, line, each)  # it goes with the line here, and costs as much beside it


def _count(home: Home, line: LedgerLine, shown: list[Instance], instance_id: str | None) -> LedgerLine:
    """What it costs so far, written down: it lived a moment ago, whatever its agent has said."""
    with _bookkeeping():  # from here on a clock that is set back takes back no dollar of its receipt
        seen_spend(home, line)
    for each in shown:
        with _bookkeeping():
            if each.id != instance_id:
                note_twin(home, line, each)
                continue
            line = at_its_rate(home, line, each)
            home.ledger.update(line.mark, spend_usd=str(meter.line_spend(line, home.world.now())))
    return line


def _ask_each(provider: Provider, ids: list[str]) -> Exception | None:
    """Requests the end of all of them, and returns the first refusal."""
    refusals: list[Exception] = []
    for instance_id in ids:
        try:
            provider.destroy(instance_id)
        except Exception as exc:
            refusals.append(exc)
    return refusals[0] if refusals else None


def _whose(home: Home, provider: Provider, line: LedgerLine) -> Exception | None:
    """Why it is not known whose account is asked: then it is asked to end it all the same, and not taken for gone."""
    try:
        check_account(home, provider, line)
    except OtherAccount:
        raise
    except Exception as exc:
        return exc
    return None


def _may_still_appear(home: Home, provider: Provider, line: LedgerLine) -> bool:
    """Until the grace is over, unless the provider itself refused the create, or its list is never late."""
    assert line.created_at is not None, line
    if provider.settle_s <= 0 or line.state == REFUSED:
        return False
    # Its end was wanted after it was asked for: if that reads earlier, the clock was set back, and counts from there.
    asked_at = home.ledger.destroy_asked_at(line.mark)
    since = line.created_at if asked_at is None else min(line.created_at, asked_at)
    return home.world.now() - since < CREATE_GRACE_S


def _note(line: LedgerLine, instance: Instance | None) -> str:
    if instance is not None:
        return instance.detail or "destroyed"
    return line.note if line.state == REFUSED else "never seen at the provider"


def _end_left_resources(home: Home, closed: list[LedgerLine]) -> None:
    """Of attempts whose instance ended by itself. Tried once: `homing reconcile` shows what stays."""
    for line in closed:
        with contextlib.suppress(HomingError, OSError):
            end_resources(home.provider_of(line), line.mark)
