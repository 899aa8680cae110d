"""Offer to instance to started agent; a failed launch undoes itself.

    check -> intent in the ledger -> lease in the store -> inputs pushed by hash -> begin_create -> provider.create
          -> id in the ledger -> is the lease still ours? -> first heartbeat in the store -> the laptop may close

Each arrow is a place where we may be killed. Before `begin_create` nothing exists that costs money; after it the mark
finds whatever exists. Anything that fails after the intent ends in a destroy that the provider confirms, or in
StillBilling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import boot as booting
from homing.cloud import lease as leases
from homing.cloud import meter
from homing.cloud.age import tell_age
from homing.cloud.clock import follow_clock
from homing.cloud.destroy import destroy_lines
from homing.cloud.draft import Draft, LaunchOrder, draft
from homing.cloud.from_hub import check_hub, tell_way
from homing.cloud.guards import LEAST, check_armed, count_alive, guards
from homing.cloud.home import LEDGER, Home
from homing.cloud.inputs import told_inputs
from homing.cloud.ledger import ADOPTED, REFUSED, UNDONE, LedgerLine, RunRow
from homing.cloud.papers import inputs_of, line_of, push_code, push_papers, request_of, row_of, write_home
from homing.cloud.plan import relay_of
from homing.cloud.providers.base import Instance, Preparing, Request, wait_until
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.receipt import at_its_rate, seen_spend
from homing.cloud.reconcile import note_twin
from homing.cloud.record import keep_record, write_record
from homing.cloud.resume import clear_wishes
from homing.cloud.signs import read_signs
from homing.cloud.store_dry import DryStore
from homing.cloud.timing import pushing
from homing.errors import (
    CreateFailed,
    EndedElsewhere,
    HomingError,
    IntegrityError,
    NeverCame,
    NoOffer,
    NotOwner,
    ProviderRefused,
    StartTimeout,
    StillBilling,
    StoreError,
    UsageError,
)
from homing.store import Store, open_store, run_key
from homing.store.preflight import preflight
from homing.units import format_duration
from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.limit import LAND, allowed_s, reserve_s
from homing.wire.record import Lease

__all__ = ["Draft", "LaunchOrder", "Launched", "draft", "dry_run", "guards", "hold_lock", "launch"]

GUARDS_S = 60.0  # from the first heartbeat to the second guard
_POLL_S = 0.3
_CLOCK_S = 120.0  # a heartbeat may be so old when it is read; what is more is a clock


@dataclass(frozen=True)
class Launched:
    run: RunRow
    instance: Instance
    heartbeat: Heartbeat
    worst_case_usd: Decimal


def dry_run(draft: Draft, home: Home) -> Request:
    """--dry-run: the real path up to the first side effect."""
    preflight(draft.run.store, home.world, needs_write=False)
    check_hub(draft.run, home.world)
    store = DryStore(open_store(draft.run.store, home.world))
    inputs = inputs_of(draft, home, store, lambda text: None)
    return request_of(draft, home, inputs, home.world.now(), is_rehearsal=True)


def launch(
    draft: Draft,
    home: Home,
    *,
    tell: Callable[[str], None] = lambda text: None,
    last: RunRow | None = None,
) -> Launched:
    """`last` is the run as it was judged by whoever goes on with it, a guard or the launch on the offer before: only if
    nobody has changed that since, or asked for a stop."""
    check_armed(draft, home)
    # A store that cannot be used is found out while nothing is rented and nothing is written down.
    found = preflight(draft.run.store, home.world, create=not draft.order.resume)
    check_hub(draft.run, home.world)
    account = home.provider(draft.order.offer.provider).account()  # nobody rents who could not say where to look for it
    row, line = row_of(draft, home), line_of(draft, home, account)
    hold_lock(draft.mark, draft.run.id, draft.run.name, home)
    try:
        home.ledger.intend(row, line, last)
    except BaseException:
        # A guard lives on after this, and would hold it over an attempt that another one has launched.
        home.world.remove(home.launch_lock(draft.mark))
        raise
    try:
        relay = relay_of(draft.run, draft.order.offer, draft.timing.whole_s(draft.run))
        for note in filter(None, [*found, *_left_open(draft, home), relay, tell_way(draft.run, home.world)]):
            tell(note)
        tell(f"Pushing inputs to {draft.run.store}: {pushing(draft.run)}")
        store = open_store(draft.run.store, home.world)
        write_home(draft, home)
        lease = _take_lease(draft, home, store)
        if draft.order.resume and not clear_wishes(home, store, draft.run.id, draft.attempt, is_stop_over=last is None):
            raise EndedElsewhere(f"{draft.run.id} is not launched again: a stop was asked for meanwhile.")
        _prepare(draft, home, tell)
        inputs = inputs_of(draft, home, store, tell)
        tell(told_inputs(draft.run, [item.num_bytes for item in inputs if item.key]))
        request = request_of(draft, home, inputs, home.world.now(), lease.number)
        keep_record(home, draft.run.id)
        # With the intent in it, before anything exists: whoever adopts this run looks for this mark.
        push_papers(home, store, request)
        push_code(home, store, request, tell)
        write_record(home, draft.run.id, store, leases.check(store, lease))
        began = home.world.boottime()
        instance = _create(draft, home, request, store, lease, tell)
        _hand_over(draft, home, store, request, instance, _start_within_s(request, home, began))
        within_s = _start_within_s(request, home, began)
        heartbeat = _first_heartbeat(draft, home, store, instance, within_s, tell)
        _check_guards(draft, home, store, heartbeat)
        _tell_clock(home, heartbeat, tell)
        if _tell_age(home, store, request.order.boot, heartbeat, began):
            tell("The instance's clock is behind; it was told how long it has billed")
        if _is_taken_down(draft, home):
            raise EndedElsewhere(f"{draft.mark} was destroyed while it was being launched.")
    except BaseException as exc:
        # Also on Ctrl-C: what was started here is ended here.
        is_meant = _is_destroy_asked(draft, home)  # looked at before the undo asks for it too
        _undo(draft, home, exc, tell, line)
        if is_meant and isinstance(exc, Exception):
            raise _destroyed_elsewhere(draft, (str(exc) or type(exc).__name__).splitlines()[0]) from exc
        if isinstance(exc, OSError):
            raise HomingError(
                what=f"This computer failed while launching {draft.run.id}; what was started is ended.",
                why=f"{type(exc).__name__}: {exc}",
                fix="Check the disk's space and permissions, then launch again.",
            ) from exc
        raise
    row = dataclasses.replace(row, state="running")
    try:
        home.world.remove(home.launch_lock(draft.mark))
        home.ledger.set_run(draft.run.id, only_live=True, state=row.state)
        write_record(home, draft.run.id, store, leases.check(store, lease))
    except (HomingError, OSError) as exc:
        # The run goes on by itself, and the next verb that looks brings the ledger up to date.
        tell(f"It runs, but this could not be written down: {str(exc).splitlines()[0]}")
    if _is_taken_down(draft, home):  # in the last moment: whoever asked confirms that it is gone
        raise _destroyed_elsewhere(draft, "Another homing asked for its end, and sees to it.")
    return Launched(row, instance, heartbeat, draft.worst_case_usd)


# --- what is written before the create call ---


def hold_lock(what: str, run_id: str, run_name: str, home: Home) -> None:
    """How others know that this launch still lives: the lock goes when this process does, however it ends."""
    path = home.launch_lock(what)
    home.world.mkdir(path.parent)
    if not home.world.lock(path):
        raise UsageError(
            what=f"{run_id} is being launched by another homing of this home.",
            why=f"It holds {path}.",
            fix=f"homing watch {run_name}",
        )


def _left_open(draft: Draft, home: Home) -> list[str]:
    """Earlier attempts in another account, which nobody here could see end; a sentence each."""
    lines = [line for line in home.ledger.lines(draft.run.id) if line.mark != draft.mark]
    return [
        f"The end of {line.provider} {line.instance_id or line.mark} could not be confirmed, and it may bill beside"
        f" this one: it is in another account, {line.account}. With its key: homing destroy {line.mark}"
        for line in lines
        if line.destroyed_at is None and line.created_at is not None
    ]


def _take_lease(draft: Draft, home: Home, store: Store) -> Lease:
    """The next number, under this attempt's mark. A run that goes on must be ours: launched or adopted here."""
    last = None
    if draft.order.resume:
        last = leases.newest(store, draft.run.id)
        if last is not None and last.owner != home.owner:
            raise leases.taken_elsewhere(store, last, home.owner)
    after = last.number if last is not None else 0
    who = {"owner": home.owner, "host": home.world.host(), "mark": draft.mark}
    return leases.take(store, draft.run.id, **who, after=after, world=home.world)


def _prepare(draft: Draft, home: Home, tell: Callable[[str], None]) -> None:
    """What a provider can do while nothing bills, such as building an image: counted from the request on, it would
    be time of the limit."""
    provider = home.provider(draft.order.offer.provider)
    if isinstance(provider, Preparing):
        tell(f"Making ready what {provider.name} needs before it rents anything")
        provider.prepare(draft.run.store)


# --- the create call and what follows ---


def _create(
    draft: Draft, home: Home, request: Request, store: Store, lease: Lease, tell: Callable[[str], None]
) -> Instance:
    booting.build_agent_zip(request.order.files[0].source, home.world)
    provider = home.provider(request.provider)
    tell(f"Starting {request.offer.name} on {request.provider}")
    follow_clock(home)  # before the line has a beginning: one that is written after a step must not move with it
    home.ledger.begin_create(draft.mark, request.order.boot.started_at)
    try:
        instance = provider.create(request)
    except (NoOffer, Unwelcome) as exc:
        # The provider itself said no: nothing was made, so the undo need not wait for something to appear.
        home.ledger.update(draft.mark, state=REFUSED, note=exc.what)
        raise
    except CreateFailed as exc:
        if exc.instance_id is not None:  # the undo finds it by its id, also where the list is late
            home.ledger.update(draft.mark, instance_id=exc.instance_id)
        raise
    # Before any wait: from here on the ledger alone finds it.
    home.ledger.update(draft.mark, instance_id=instance.id, state=instance.state, billing=instance.billing)
    line = _line(draft, home)
    seen_spend(home, line)  # begins its stop watch: the clock may be set back before this launch ends it again
    for twin in instance.twins:
        note_twin(home, line, dataclasses.replace(instance, id=twin, state="destroying", billing="maybe"))
    if line.instance_id != instance.id:
        # Somebody destroyed this launch while its create call was under way and saw nothing yet.
        home.ledger.reopen(
            draft.mark, instance_id=instance.id, note="created after it was destroyed", now=home.world.now()
        )
    if _is_destroy_asked(draft, home) or line.instance_id != instance.id:
        raise CreateFailed(f"{draft.mark} was destroyed while it was being created.", instance_id=instance.id)
    at_its_rate(home, line, instance)
    if instance.rate_usd_per_hour != draft.order.offer.rate_usd_per_hour:
        raise CreateFailed(
            what=f"{request.provider} started it at {meter.show_usd(instance.rate_usd_per_hour)}/h, not at the rate"
            f" it offered, {meter.show_usd(draft.order.offer.rate_usd_per_hour)}/h.",
            fix=f"See the offers of now: {draft.order.words.to('plan')}",
            instance_id=instance.id,
        )
    try:
        write_record(home, draft.run.id, store, leases.check(store, lease))
    except (StoreError, IntegrityError) as exc:
        # Not known is not superseded; and the mark, which the record has, finds the instance without its id.
        tell(f"It is started, but the store could not be asked about its lease: {exc.what}")
    return instance


def _start_within_s(request: Request, home: Home, began: float) -> float:
    """How long its start may still be waited for: until the moment at which it would have to land.

    Until the machine's own programs are there, perhaps nobody but this process could end it. `began` is the boot clock
    at the create call: it goes on while this computer sleeps, and cannot be set.
    """
    boot = request.order.boot
    limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
    allowed = allowed_s(Decimal(boot.rate_usd_per_hour), limit, Decimal(boot.spent_before_usd), boot.time_limit_s)
    if math.isinf(allowed):
        return allowed
    passed_s = home.world.boottime() - began
    return max(1.0, allowed - reserve_s(LAND, allowed, boot.stop_grace_s) - passed_s)


def _hand_over(draft: Draft, home: Home, store: Store, request: Request, instance: Instance, within_s: float) -> None:
    order = dataclasses.replace(request.order, start_within_s=within_s, start_by=home.world.boottime() + within_s)
    try:
        home.provider(request.provider).hand_over(dataclasses.replace(request, order=order), instance.id)
    except ProviderRefused as exc:
        with contextlib.suppress(HomingError):  # the undo takes the machine, and its log with it
            _boot_log(draft, home, store, instance)
        if isinstance(exc, StartTimeout):
            raise NeverCame(exc.what, exc.why, exc.fix) from exc
        raise


def _first_heartbeat(
    draft: Draft, home: Home, store: Store, instance: Instance, within_s: float, tell: Callable[[str], None]
) -> Heartbeat:
    """Only what the agent itself wrote into the store proves that the run can go on without us."""
    timeout_s, by = min(draft.boot_timeout_s, within_s), home.world.boottime() + within_s
    tell(f"Waiting for the agent's first heartbeat in the store, at most {format_duration(timeout_s)}")
    provider = home.provider(instance.provider)
    page = f"   See {provider.page}" if provider.page else ""
    line = _line(draft, home)
    found: list[Heartbeat] = []
    num_quiet = 0

    def is_there() -> bool:
        nonlocal num_quiet
        # Looked at before the store: an agent that was quick has left its heartbeat before it ended.
        now = provider.describe(instance.id)
        try:
            heartbeat = read_signs(store, draft.run.id, line).heartbeat
        except WireError as exc:
            raise HomingError(
                what=f"The agent of {draft.run.id} wrote what cannot be read.",
                why=str(exc),
                fix=f"Use the same homing here and there, then: {draft.order.words.to('launch')}",
            ) from exc
        if heartbeat is not None:
            found.append(heartbeat)
            return True
        # Two quiet looks: in the midst of its exec a process is nowhere to be seen.
        num_quiet = 0 if now.is_running else num_quiet + 1
        if now.state == "gone" or num_quiet == 2:
            raise StartTimeout(
                what=f"The agent on {instance.id} ended before its first heartbeat.",
                why=_last_words(_boot_log(draft, home, store, instance)) or now.detail,
                fix=f"homing logs {draft.run.name}{page}",
            )
        return False

    if not wait_until(is_there, timeout_s=timeout_s, every_s=_POLL_S, world=home.world, by=by):
        raise StartTimeout(
            what=f"{instance.id} gave no sign of life within {format_duration(timeout_s)}.",
            why=_last_words(_boot_log(draft, home, store, instance)) or "It left no log.",
            fix=f"Try again: {draft.order.words.to('launch')}{page}",
        )
    return found[0]


def _check_guards(draft: Draft, home: Home, store: Store, heartbeat: Heartbeat) -> None:
    """Two that live, or nobody may close the laptop. The dead-man may come a moment after the agent."""
    if draft.order.is_one_guard_enough:
        return
    line = _line(draft, home)

    problem = ""

    def are_enough() -> bool:
        nonlocal problem
        try:
            beat, problem = read_signs(store, draft.run.id, line).heartbeat or heartbeat, ""
        except (HomingError, WireError, OSError) as exc:  # it may answer in a moment, and the machine is well
            beat, problem = heartbeat, (str(exc) or type(exc).__name__).splitlines()[0]
        is_over = beat.state in ("pushing", "ending", "ended")  # it ends itself; nobody needs to
        return is_over or count_alive(draft, home, beat) >= LEAST

    if not wait_until(are_enough, timeout_s=GUARDS_S, every_s=_POLL_S, world=home.world):
        raise StartTimeout(
            what=f"Only one guard is alive on {draft.mark}, and {LEAST} are the least.",
            why=f"Whether another has come since cannot be seen: {problem}"
            if problem
            else "The dead-man process did not start beside the agent; neither the provider nor home has a guard.",
            fix="homing guard   beside it, or with one guard all the same:"
            f" {draft.order.words.to('launch')} --one-guard",
        )


def _tell_clock(home: Home, heartbeat: Heartbeat, tell: Callable[[str], None]) -> None:
    """Times in logs and events are the instance's; limits count by clocks that nobody can set, there and here."""
    ahead_s = heartbeat.t - home.world.now()
    if abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        tell(f"The instance's clock is {format_duration(abs(ahead_s))} {side} this computer's")


def _tell_age(home: Home, store: Store, boot: Boot, heartbeat: Heartbeat, began: float) -> bool:
    """Tried for a while: a machine is not ended for one failed write, but one that cannot be told ends too late."""
    problems: list[HomingError] = []
    told = False

    def is_settled() -> bool:
        nonlocal told
        try:
            told = tell_age(home, store, boot, heartbeat, began)
        except (StoreError, IntegrityError) as exc:
            problems.append(exc)
            return False
        return True

    if not wait_until(is_settled, timeout_s=GUARDS_S, every_s=_POLL_S, world=home.world):
        raise problems[-1]
    return told


def _is_destroy_asked(draft: Draft, home: Home) -> bool:
    """By somebody else: of a launch that this process has not begun to undo."""
    with contextlib.suppress(Exception):  # whatever it is, the undo comes next
        return home.ledger.is_destroy_asked(draft.mark)
    return False


def _is_taken_down(draft: Draft, home: Home) -> bool:
    """Somebody asked for its end although it was not done: a guard may end a run that was quick."""
    with contextlib.suppress(HomingError, OSError):  # a ledger that cannot be read says nothing of the kind
        run = home.ledger.run(draft.run.id)
        return home.ledger.is_destroy_asked(draft.mark) and (run is None or run.state != "done")
    return False


def _destroyed_elsewhere(draft: Draft, why: str) -> EndedElsewhere:
    return EndedElsewhere(
        what=f"{draft.run.id} was destroyed from elsewhere while it was launched.",
        why=why,
        fix=f"Launch it again if you still want it: {draft.order.words.to('launch')}",
    )


def _line(draft: Draft, home: Home) -> LedgerLine:
    found = [line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark]
    if not found:
        raise IntegrityError(
            what=f"The ledger lost {draft.run.id} while it was launched.",
            why=f"{home.path / LEDGER} does not know {draft.mark} any more: it was removed or replaced.",
            fix=f"Launch it again: {draft.order.words.to('launch')}",
        )
    return found[0]


def _undo(draft: Draft, home: Home, exc: BaseException, tell: Callable[[str], None], intent: LedgerLine) -> None:
    is_interrupted = isinstance(exc, KeyboardInterrupt)
    reason = "interrupted" if is_interrupted else (str(exc) or type(exc).__name__).splitlines()[0]
    with contextlib.suppress(OSError):  # a closed terminal may be why we are here
        tell(f"{'Interrupted' if is_interrupted else 'The launch failed'}; ending what it started")
    try:
        lines = [line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark]
        if not lines:  # lost meanwhile: written down again, so that its end and its receipt are too
            lines = [dataclasses.replace(intent, created_at=intent.intent_at)]
            home.ledger.adopt_run(row_of(draft, home), lines, [], must_last=False)
    except HomingError:
        # The ledger cannot be read (a full disk): the mark still finds what there is.
        lines = [dataclasses.replace(line_of(draft, home, None), created_at=home.world.now())]
    try:
        destroy_lines(home, lines)
    except StillBilling as still:
        raise still from exc
    finally:
        with contextlib.suppress(HomingError, OSError):  # the error that brought us here is the one to tell
            state = ADOPTED if isinstance(exc, NotOwner) else "failed"
            why, now = f"{UNDONE}{reason}", home.world.now()
            # By a person, while this was undone: then it stays so.
            home.ledger.set_run(draft.run.id, unless_stopped=True, state=state, reason=why, exit_code=1, ended_at=now)
        with contextlib.suppress(HomingError, OSError):
            # Also where that could not be written: a guard lives on, and while it holds this no look closes the line.
            home.world.remove(home.launch_lock(draft.mark))
            write_record(home, draft.run.id, open_store(draft.run.store, home.world, create=False))


def _boot_log(draft: Draft, home: Home, store: Store, instance: Instance) -> str:
    """What its mailbox took, which is there also when the provider forgot the log with the machine; else its log."""
    with contextlib.suppress(StoreError):
        return store.read(run_key(draft.run.id, names.LOGS, "boot.log")).decode("utf-8", "replace")
    text = home.provider(instance.provider).log(instance.id)
    with contextlib.suppress(OSError):
        home.world.write(home.kept_log(draft.run.id, draft.mark), text.encode())
    return text


def _last_words(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-5:])
