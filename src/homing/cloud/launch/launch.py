"""Launches a run: rents an instance for a checked draft and starts the agent. A failed launch destroys what it started.

    check -> intent in the ledger -> lease in the store -> push inputs by hash -> begin_create -> provider.create
          -> instance id in the ledger -> recheck the lease -> first heartbeat in the store -> the laptop may close

The process may be killed at any arrow. Before `begin_create`, nothing exists that costs money. Afterwards, whatever was
created can be found by its mark (its name or tag). After any failure that follows the intent, either the provider
confirms that everything is destroyed, or the launch raises StillBilling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing import progress
from homing.cloud.artifacts.hub_weights import check_hub, describe_hub_download
from homing.cloud.contact.control_request import send_age
from homing.cloud.contact.heartbeats import read_reports
from homing.cloud.destroy import destroy_lines
from homing.cloud.home import LEDGER, Home
from homing.cloud.launch.armed_guards import LEAST, check_armed, count_alive, guards
from homing.cloud.launch.draft import Draft, LaunchOrder, draft
from homing.cloud.launch.inputs import DryStore, describe_inputs
from homing.cloud.launch.resume import clear_requests
from homing.cloud.launch.run_documents import (
    inputs_of,
    line_of,
    push_code,
    push_documents,
    request_of,
    row_of,
    write_home,
)
from homing.cloud.ledger import meter, run_lease
from homing.cloud.ledger.ledger import ADOPTED, REFUSED, UNDONE, LedgerLine, RunRow
from homing.cloud.ledger.meter import follow_clock
from homing.cloud.ledger.run_lease import keep_record, write_record
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.plan.plan import relay_of
from homing.cloud.plan.timing import pushing
from homing.cloud.providers.base import Instance, Preparing, Request, wait_until
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.reconcile.receipt import at_its_rate, seen_spend
from homing.cloud.reconcile.reconcile import note_duplicate
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
from homing.wire import file_names
from homing.wire.boot_json import Boot
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat
from homing.wire.guard_timing import LAND, allowed_s, reserve_s
from homing.wire.run_record import Lease

__all__ = ["Draft", "LaunchOrder", "Launched", "draft", "dry_run", "guards", "hold_lock", "launch"]

GUARDS_S = 60.0  # how long to wait for the second guard after the first heartbeat
_POLL_S = 0.3
_CLOCK_S = 120.0  # if the heartbeat's time differs more than this from our clock, the clocks disagree


@dataclass(frozen=True)
class Launched:
    run: RunRow
    instance: Instance
    heartbeat: Heartbeat
    worst_case_usd: Decimal


def dry_run(draft: Draft, home: Home) -> Request:
    """Return the create request that this launch would send, for --dry-run, without any side effects."""
    preflight(draft.run.store, home.world, needs_write=False)
    check_hub(draft.run, home.world)
    store = DryStore(open_store(draft.run.store, home.world))
    inputs = inputs_of(draft, home, store, lambda text: None)
    return request_of(draft, home, inputs, home.world.now(), is_rehearsal=True)


def launch(
    draft: Draft,
    home: Home,
    *,
    notify: Callable[[str], None] = lambda text: None,
    last: RunRow | None = None,
) -> Launched:
    """Rent the instance, start the agent on it and wait for its first heartbeat.

    `last` is the run's ledger row as it was when the caller (a guard, or a launch on the previous offer) decided to
    launch. If that row has changed since then, or a stop was requested, the launch aborts. On any failure, including
    Ctrl-C, whatever was started is destroyed before the exception propagates.
    """
    check_armed(draft, home)
    # Detect an unusable store before anything is rented or written to the ledger.
    found = preflight(draft.run.store, home.world, create=not draft.order.resume)
    check_hub(draft.run, home.world)
    # Raise before anything is rented if the account cannot be identified.
    account = home.provider(draft.order.offer.provider).account()
    row, line = row_of(draft, home), line_of(draft, home, account)
    hold_lock(draft.mark, draft.run.id, draft.run.name, home)
    try:
        home.ledger.intend(row, line, last)
    except BaseException:
        # A guard process keeps running after this failure. If it kept holding the lock, no other process could launch
        # this run.
        home.world.remove(home.launch_lock(draft.mark))
        raise
    try:
        relay = relay_of(draft.run, draft.order.offer, draft.timing.whole_s(draft.run))
        for note in filter(
            None, [*found, *_left_open(draft, home), relay, describe_hub_download(draft.run, home.world)]
        ):
            notify(note)
        notify(f"Pushing inputs to {draft.run.store}: {pushing(draft.run)}")
        store = open_store(draft.run.store, home.world)
        write_home(draft, home)
        lease = _take_lease(draft, home, store)
        if draft.order.resume and not clear_requests(
            home, store, draft.run.id, draft.attempt, is_stop_over=last is None
        ):
            raise EndedElsewhere(f"{draft.run.id} was not launched again: a stop was requested in the meantime.")
        _prepare(draft, home, notify)
        inputs = inputs_of(draft, home, store, notify)
        notify(describe_inputs(draft.run, [item.num_bytes for item in inputs if item.key]))
        request = request_of(draft, home, inputs, home.world.now(), lease.number)
        keep_record(home, draft.run.id)
        # Push the record, with the new attempt's mark, before anything is created, because another computer that adopts
        # this run uses the mark to find the instance.
        push_documents(home, store, request)
        push_code(home, store, request, notify)
        write_record(home, draft.run.id, store, run_lease.check(store, lease))
        began = home.world.boottime()
        instance = _create(draft, home, request, store, lease, notify)
        _hand_over(draft, home, store, request, instance, _start_within_s(request, home, began))
        within_s = _start_within_s(request, home, began)
        heartbeat = _first_heartbeat(draft, home, store, instance, within_s, notify)
        _check_guards(draft, home, store, heartbeat)
        _report_clock(home, heartbeat, notify)
        if _send_age(home, store, request.order.boot, heartbeat, began):
            notify("The instance's clock is behind, so homing sent the agent the instance's actual uptime")
        if _is_taken_down(draft, home):
            raise EndedElsewhere(f"{draft.mark} was destroyed while it was being launched.")
    except BaseException as exc:
        # A launch that fails destroys whatever it started, even after Ctrl-C.
        is_meant = _is_destroy_asked(draft, home)  # read this before _undo, which requests a destroy itself
        _undo(draft, home, exc, notify, line)
        if is_meant and isinstance(exc, Exception):
            raise _destroyed_elsewhere(draft, (str(exc) or type(exc).__name__).splitlines()[0]) from exc
        if isinstance(exc, OSError):
            raise HomingError(
                what=f"A local error stopped the launch of {draft.run.id}; everything it started was shut down.",
                why=f"{type(exc).__name__}: {exc}",
                fix="Check disk space and permissions, then launch again.",
            ) from exc
        raise
    row = dataclasses.replace(row, state="running")
    try:
        home.world.remove(home.launch_lock(draft.mark))
        home.ledger.set_run(draft.run.id, only_live=True, state=row.state)
        write_record(home, draft.run.id, store, run_lease.check(store, lease))
    except (HomingError, OSError) as exc:
        # The run continues without this process. The next command that reads the run's status updates the ledger.
        notify(f"The run is live, but its state could not be saved: {str(exc).splitlines()[0]}")
    # If another process requested a destroy at the last moment, that process also confirms that the instance is gone.
    if _is_taken_down(draft, home):
        raise _destroyed_elsewhere(draft, "Another homing process requested the destroy and is confirming it.")
    return Launched(row, instance, heartbeat, draft.worst_case_usd)


# --- written before the create call ---


def hold_lock(what: str, run_id: str, run_name: str, home: Home) -> None:
    """Take the lock that shows other processes that this launch is alive. The OS releases it when this process exits.

    Raises UsageError if another process with the same $HOMING_HOME holds it.
    """
    path = home.launch_lock(what)
    home.world.mkdir(path.parent)
    if not home.world.lock(path):
        raise UsageError(
            what=f"Another homing process is already launching {run_id}.",
            why=f"It holds the lock {path}.",
            fix=f"Watch it: homing watch {run_name}",
        )


def _left_open(draft: Draft, home: Home) -> list[str]:
    """Return a warning for each earlier attempt that may still bill in an account that this key cannot access."""
    lines = [line for line in home.ledger.lines(draft.run.id) if line.mark != draft.mark]
    return [
        f"Could not confirm that {line.provider} {line.instance_id or line.mark} has ended; it may be billing"
        f" at the same time as this run. It is in another account, {line.account}. With that account's key, run:"
        f" homing destroy {line.mark}"
        for line in lines
        if line.destroyed_at is None and line.created_at is not None
    ]


def _take_lease(draft: Draft, home: Home, store: Store) -> Lease:
    """Take the run's next lease for this attempt. To resume a run, this $HOMING_HOME must hold its newest lease."""
    last = None
    if draft.order.resume:
        last = run_lease.newest(store, draft.run.id)
        if last is not None and last.owner != home.owner:
            raise run_lease.taken_elsewhere(store, last, home.owner)
    after = last.number if last is not None else 0
    who = {"owner": home.owner, "host": home.world.host(), "mark": draft.mark}
    return run_lease.take(store, draft.run.id, **who, after=after, world=home.world)


def _prepare(draft: Draft, home: Home, notify: Callable[[str], None]) -> None:
    """Let the provider do slow work, such as building an image, before billing starts.

    Time spent after the create request would count against the run's limits.
    """
    provider = home.provider(draft.order.offer.provider)
    if isinstance(provider, Preparing):
        notify(f"Preparing {provider.name} before renting anything")
        provider.prepare(draft.run.store)


# --- the create call and after it ---


def _create(
    draft: Draft, home: Home, request: Request, store: Store, lease: Lease, notify: Callable[[str], None]
) -> Instance:
    booting.build_agent_zip(request.order.files[0].source, home.world)
    provider = home.provider(request.provider)
    notify(f"Starting {request.offer.name} on {request.provider}")
    follow_clock(home)  # must precede recording the line's start time, so that earlier clock changes do not shift it
    home.ledger.begin_create(draft.mark, request.order.boot.started_at)
    try:
        instance = provider.create(request)
    except (NoOffer, Unwelcome) as exc:
        # The provider refused, so nothing was created, and _undo does not have to wait for an instance to appear.
        home.ledger.update(draft.mark, state=REFUSED, note=exc.what)
        raise
    except CreateFailed as exc:
        # Record the id, so that _undo finds the instance even if the provider's list is stale.
        if exc.instance_id is not None:
            home.ledger.update(draft.mark, instance_id=exc.instance_id)
        raise
    # Record the id before waiting for anything. From now on, the ledger alone is enough to find the instance.
    home.ledger.update(draft.mark, instance_id=instance.id, state=instance.state, billing=instance.billing)
    line = _line(draft, home)
    seen_spend(home, line)  # start tracking the spend now, because the clock may be set back during the launch
    for duplicate in instance.twins:
        note_duplicate(home, line, dataclasses.replace(instance, id=duplicate, state="destroying", billing="maybe"))
    if line.instance_id != instance.id:
        # Another process destroyed this run while the create call was in flight and no instance was visible yet.
        home.ledger.reopen(
            draft.mark, instance_id=instance.id, note="created after it was destroyed", now=home.world.now()
        )
    if _is_destroy_asked(draft, home) or line.instance_id != instance.id:
        raise CreateFailed(f"{draft.mark} was destroyed while it was being created.", instance_id=instance.id)
    at_its_rate(home, line, instance)
    if instance.rate_usd_per_hour != draft.order.offer.rate_usd_per_hour:
        raise CreateFailed(
            what=f"{request.provider} started the instance at {meter.show_usd(instance.rate_usd_per_hour)}/h, not at"
            f" the offered rate of {meter.show_usd(draft.order.offer.rate_usd_per_hour)}/h.",
            fix=f"See current offers: {draft.order.words.to('plan')}",
            instance_id=instance.id,
        )
    try:
        write_record(home, draft.run.id, store, run_lease.check(store, lease))
    except (StoreError, IntegrityError) as exc:
        # An unreadable store does not mean that the lease was lost. The record already contains the mark, which is
        # enough to find the instance without its id.
        notify(f"The instance has started, but its lease could not be checked in the store: {exc.what}")
    return instance


def _start_within_s(request: Request, home: Home, began: float) -> float:
    """Return how many more seconds the launch may wait for the instance to start, so that time to train remains.

    Until the agent runs on the instance, this process may be the only one that can destroy it. `began` is the time of
    the create call by the boot clock, which keeps running while this computer sleeps and cannot be set.
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
        with contextlib.suppress(HomingError):  # save the log now, because _undo destroys it together with the machine
            _boot_log(draft, home, store, instance)
        if isinstance(exc, StartTimeout):
            raise NeverCame(exc.what, exc.why, exc.fix) from exc
        raise


def _first_heartbeat(
    draft: Draft, home: Home, store: Store, instance: Instance, within_s: float, notify: Callable[[str], None]
) -> Heartbeat:
    """Wait for the agent's first heartbeat in the store. It proves that the run can continue without this process."""
    timeout_s, by = min(draft.boot_timeout_s, within_s), home.world.boottime() + within_s
    notify(f"Waiting up to {format_duration(timeout_s)} for the agent's first heartbeat in the store")
    provider = home.provider(instance.provider)
    page = f"   See {provider.page}" if provider.page else ""
    line = _line(draft, home)
    found: list[Heartbeat] = []
    num_quiet = 0

    def is_there() -> bool:
        nonlocal num_quiet
        # Query the provider before reading the store: if the agent has exited, its last heartbeat is there by then.
        now = provider.describe(instance.id)
        try:
            heartbeat = read_reports(store, draft.run.id, line).heartbeat
        except WireError as exc:
            raise HomingError(
                what=f"The agent that runs {draft.run.id} wrote an unreadable heartbeat.",
                why=str(exc),
                fix=f"Use the same homing version locally and on the instance, then: {draft.order.words.to('launch')}",
            ) from exc
        if heartbeat is not None:
            found.append(heartbeat)
            return True
        # Require two consecutive checks without a running process, because it is briefly invisible during exec.
        num_quiet = 0 if now.is_running else num_quiet + 1
        if now.state == "gone" or num_quiet == 2:
            raise StartTimeout(
                what=f"The agent on {instance.id} exited before its first heartbeat.",
                why=_last_words(_boot_log(draft, home, store, instance)) or now.detail,
                fix=f"See why: homing logs {draft.run.name}{page}",
            )
        return False

    began = home.world.monotonic()

    def is_there_yet() -> bool:
        waited_s = home.world.monotonic() - began
        progress.report("Waiting for the agent's first heartbeat", waited_s, timeout_s, progress.SECONDS)
        return is_there()

    try:
        is_heard = wait_until(is_there_yet, timeout_s=timeout_s, every_s=_POLL_S, world=home.world, by=by)
    finally:
        progress.finished()
    if not is_heard:
        raise StartTimeout(
            what=f"{instance.id} sent no heartbeat within {format_duration(timeout_s)}.",
            why=_last_words(_boot_log(draft, home, store, instance)) or "It left no log.",
            fix=f"Try again: {draft.order.words.to('launch')}{page}",
        )
    return found[0]


def _check_guards(draft: Draft, home: Home, store: Store, heartbeat: Heartbeat) -> None:
    """Wait until at least two guards are alive, so that the laptop can be closed.

    The dead-man process may not have started yet when the first heartbeat arrives.
    """
    if draft.order.is_one_guard_enough:
        return
    line = _line(draft, home)

    problem = ""

    def are_enough() -> bool:
        nonlocal problem
        try:
            beat, problem = read_reports(store, draft.run.id, line).heartbeat or heartbeat, ""
        except (HomingError, WireError, OSError) as exc:  # the store may be readable on the next try
            beat, problem = heartbeat, (str(exc) or type(exc).__name__).splitlines()[0]
        is_over = beat.state in ("pushing", "ending", "ended")  # the agent is already ending the instance
        return is_over or count_alive(draft, home, beat) >= LEAST

    if not wait_until(are_enough, timeout_s=GUARDS_S, every_s=_POLL_S, world=home.world):
        raise StartTimeout(
            what=f"Only one guard is alive on {draft.mark}; at least {LEAST} are required.",
            why=f"Could not check whether another one has started since: {problem}"
            if problem
            else "The dead-man process did not start, and there is no guard at the provider or on this computer.",
            fix="Run homing guard in another terminal, or accept one guard:"
            f" {draft.order.words.to('launch')} --one-guard",
        )


def _report_clock(home: Home, heartbeat: Heartbeat, notify: Callable[[str], None]) -> None:
    """Report a clock difference. It affects only the times in logs and events: limits use clocks that cannot be set."""
    ahead_s = heartbeat.t - home.world.now()
    if abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        notify(f"The instance's clock is {format_duration(abs(ahead_s))} {side} this computer's")


def _send_age(home: Home, store: Store, boot: Boot, heartbeat: Heartbeat, began: float) -> bool:
    """Tell the agent how long its instance has been billing. Return True if the agent's own count was too low.

    An agent whose count is too low would end the instance too late. A failed attempt is retried, and the launch fails
    only if all retries fail.
    """
    problems: list[HomingError] = []
    was_needed = False

    def is_settled() -> bool:
        nonlocal was_needed
        try:
            was_needed = send_age(home, store, boot, heartbeat, began)
        except (StoreError, IntegrityError) as exc:
            problems.append(exc)
            return False
        return True

    if not wait_until(is_settled, timeout_s=GUARDS_S, every_s=_POLL_S, world=home.world):
        raise problems[-1]
    return was_needed


def _is_destroy_asked(draft: Draft, home: Home) -> bool:
    """Return True if another process has requested that this attempt be destroyed. Call this before `_undo`."""
    with contextlib.suppress(Exception):  # errors are ignored, because the caller undoes the launch anyway
        return home.ledger.is_destroy_asked(draft.mark)
    return False


def _is_taken_down(draft: Draft, home: Home) -> bool:
    """Return True if a destroy was requested and the run is not done.

    A guard may request a destroy after a run is done, which does not mean that the launch was canceled.
    """
    with contextlib.suppress(HomingError, OSError):  # an unreadable ledger is no evidence of a destroy request
        run = home.ledger.run(draft.run.id)
        return home.ledger.is_destroy_asked(draft.mark) and (run is None or run.state != "done")
    return False


def _destroyed_elsewhere(draft: Draft, why: str) -> EndedElsewhere:
    return EndedElsewhere(
        what=f"{draft.run.id} was destroyed by another process during its launch.",
        why=why,
        fix=f"To run it after all, launch it again: {draft.order.words.to('launch')}",
    )


def _line(draft: Draft, home: Home) -> LedgerLine:
    found = [line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark]
    if not found:
        raise IntegrityError(
            what=f"{draft.run.id} disappeared from the ledger during its launch.",
            why=f"{home.path / LEDGER} no longer contains {draft.mark}: the file was removed or replaced.",
            fix=f"Launch it again: {draft.order.words.to('launch')}",
        )
    return found[0]


def _undo(draft: Draft, home: Home, exc: BaseException, notify: Callable[[str], None], intent: LedgerLine) -> None:
    is_interrupted = isinstance(exc, KeyboardInterrupt)
    reason = "interrupted" if is_interrupted else (str(exc) or type(exc).__name__).splitlines()[0]
    with contextlib.suppress(OSError):  # the launch may have failed because the terminal was closed
        notify(f"The launch {'was interrupted' if is_interrupted else 'failed'}; destroying everything it started")
    try:
        lines = [line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark]
        if not lines:  # the ledger has lost the line, so insert it again to record the instance's end and its cost
            lines = [dataclasses.replace(intent, created_at=intent.intent_at)]
            home.ledger.adopt_run(row_of(draft, home), lines, [], must_last=False)
    except HomingError:
        # The ledger cannot be read (for example, the disk is full), but whatever exists can still be found by its mark.
        lines = [dataclasses.replace(line_of(draft, home, None), created_at=home.world.now())]
    try:
        destroy_lines(home, lines)
    except StillBilling as still:
        still.why = f"The launch failed: {reason}\n{still.why}"
        raise still from exc
    finally:
        with contextlib.suppress(HomingError, OSError):  # ignore these errors, so that the original one is reported
            state = ADOPTED if isinstance(exc, NotOwner) else "failed"
            why, now = f"{UNDONE}{reason}", home.world.now()
            # If the user stopped the run in the meantime, keep that state.
            home.ledger.set_run(draft.run.id, unless_stopped=True, state=state, reason=why, exit_code=1, ended_at=now)
        with contextlib.suppress(HomingError, OSError):
            # Remove the lock even if the ledger could not be updated. A guard process would otherwise keep holding it,
            # and until it is released, no status check closes the ledger line.
            home.world.remove(home.launch_lock(draft.mark))
            write_record(home, draft.run.id, open_store(draft.run.store, home.world, create=False))


def _boot_log(draft: Draft, home: Home, store: Store, instance: Instance) -> str:
    """Return the boot log from the store if the instance has uploaded it, otherwise from the provider.

    The copy in the store survives if the provider deletes the log together with the machine.
    """
    with contextlib.suppress(StoreError):
        return store.read(run_key(draft.run.id, file_names.LOGS, "boot.log")).decode("utf-8", "replace")
    text = home.provider(instance.provider).log(instance.id)
    with contextlib.suppress(OSError):
        home.world.write(home.kept_log(draft.run.id, draft.mark), text.encode())
    return text


def _last_words(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-5:])
