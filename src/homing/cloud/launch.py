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
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import boot as booting
from homing.cloud import lease as leases
from homing.cloud import meter
from homing.cloud.age import tell_age
from homing.cloud.bundle import tree_state
from homing.cloud.destroy import REFUSED, destroy_lines
from homing.cloud.furnish import furnish
from homing.cloud.guards import LEAST, count_alive, guards
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import ADOPTED, LIVE_STATES, LedgerLine, RunRow
from homing.cloud.mark import make_mark, new_run_id
from homing.cloud.providers.base import InputFile, Instance, Offer, Order, Request, wait_until
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.record import write_record
from homing.cloud.resume import clear_wishes, resume_inputs
from homing.cloud.signs import read_signs
from homing.cloud.speed import estimate
from homing.cloud.store_dry import DryStore
from homing.cloud.timing import Timing, timing_of
from homing.errors import (
    CreateFailed,
    DataError,
    HomingError,
    IntegrityError,
    NoOffer,
    NotOwner,
    StartTimeout,
    StillBilling,
    StoreError,
    UsageError,
)
from homing.store import SCHEMES, Store, open_store, pace_of, run_key
from homing.store.credentials import secrets
from homing.store.preflight import preflight
from homing.store.s3 import S3Store
from homing.units import format_duration
from homing.wire import codec, names
from homing.wire.boot import Boot, Input
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.limit import allowed_s
from homing.wire.record import Lease
from homing.wire.run import Run

__all__ = ["Draft", "LaunchOrder", "Launched", "draft", "dry_run", "guards", "launch"]

FIRST_HEARTBEAT_S = 120.0  # at least; a provider that boots slowly gets a multiple of its usual time
GUARDS_S = 60.0  # from there to the second guard
_BOOT_FACTOR = 5.0
_POLL_S = 0.3


@dataclass(frozen=True)
class LaunchOrder:
    """What a person asked for, complete: nothing below this asks again."""

    run: Run  # without an id, or with that of the run to resume
    run_file_text: str
    is_prepared: bool
    offer: Offer
    spend_limit_usd: Decimal | None
    resume: bool = False
    is_smoke: bool = False
    trainer_argv: tuple[str, ...] | None = None  # another program in the trainer's place, to try the control plane
    heartbeat_s: float | None = None  # None: what suits the store
    timing: Timing | None = None  # as planned for this offer; None: as far as it is known without trying
    keep_on_failure_s: float = 0.0  # so long a failed instance stays for a person to look at
    is_one_guard_enough: bool = False


@dataclass(frozen=True)
class Draft:
    """A launch that passed every check and has touched nothing."""

    order: LaunchOrder
    run: Run  # with id, limit and what the offer decides
    attempt: int
    mark: str
    spend_limit_usd: Decimal
    spent_before_usd: Decimal
    timing: Timing

    @property
    def worst_case_usd(self) -> Decimal:
        rate = self.order.offer.rate_usd_per_hour
        return meter.worst_case(rate, self.spend_limit_usd, self.run.limits.time_s, self.spent_before_usd)


@dataclass(frozen=True)
class Launched:
    run: RunRow
    instance: Instance
    heartbeat: Heartbeat
    worst_case_usd: Decimal


def draft(order: LaunchOrder, home: Home) -> Draft:
    """Every check that needs no side effect; each refusal says what to change."""
    home.configure(order.run)
    run, limit = order.run, order.spend_limit_usd
    if limit is None:
        raise UsageError(
            what="No spend limit is set, and nobody rents without saying how much.",
            why="Neither limits.spend in the run file nor --spend-limit names one.",
            fix=f"homing launch {run.name} --spend-limit DOLLARS" + (" --resume" if order.resume else ""),
        )
    if not order.is_prepared:
        raise DataError(
            what=f"{run.name} is not ready to launch.",
            why=f"Its text has not been made into tokens: {run.data.dir} has no finished shards.",
            fix=f"homing prep {run.name} && homing verify {run.name} && homing launch {run.name}",
        )
    _check_rate(order)
    earlier = _run_to_resume(order, home) if order.resume else None
    live = next((r for r in home.ledger.runs() if r.name == run.name and r.state in LIVE_STATES), None)
    if live is not None:
        raise UsageError(
            what=f"A run named {run.name} is already live: {live.id}.",
            why="Two runs of one name would write over each other's model.",
            fix=f"homing watch {run.name}   or end it: homing stop {run.name}, homing destroy {run.name}"
            "   or launch under another name: --name OTHER",
        )
    _check_reach(order, home)
    lines = home.ledger.lines(earlier.id) if earlier else []
    spent = meter.total_spend(lines, home.world.now())
    # Without a plan nothing is probed: this computer may be at work, and the figures are rather too long anyway.
    speed = estimate(run, order.offer, home, may_probe=False)
    timing = order.timing or timing_of(run, order.offer, speed, home)
    _check_minimum(order, timing, limit, spent)
    run_id = earlier.id if earlier else new_run_id(run.name, home.world)
    attempt = max((line.attempt for line in lines), default=0) + 1
    final = dataclasses.replace(
        run,
        id=run_id,
        limits=dataclasses.replace(run.limits, spend_usd=str(limit)),
        train=dataclasses.replace(run.train, needs_gpu=run.train.needs_gpu or order.offer.num_gpus > 0),
    )
    return Draft(order, final, attempt, make_mark(home.owner, run_id, attempt), limit, spent, timing)


def dry_run(draft: Draft, home: Home) -> Request:
    """--dry-run: the real path up to the first side effect."""
    preflight(draft.run.store, home.world, needs_write=False)
    store = DryStore(open_store(draft.run.store, home.world))
    inputs = _inputs(draft, home, store, lambda text: None)
    return _request(draft, home, inputs, home.world.now(), is_rehearsal=True)


def launch(draft: Draft, home: Home, *, tell: Callable[[str], None] = lambda text: None) -> Launched:
    # A store that cannot be used is found out while nothing is rented and nothing is written down.
    found = preflight(draft.run.store, home.world, create=not draft.order.resume)
    row = _row(draft, home)
    _hold_lock(draft, home)
    try:
        home.ledger.intend(row, _line(draft, home))
    except BaseException:
        # A guard lives on after this, and would hold it over an attempt that another one has launched.
        home.world.remove(home.launch_lock(draft.mark))
        raise
    try:
        for note in found:
            tell(note)
        tell(f"Pushing inputs to {draft.run.store}")
        store = open_store(draft.run.store, home.world)
        _write_home(draft, home)
        lease = _take_lease(draft, home, store)
        if draft.order.resume:
            clear_wishes(store, draft.run.id, draft.attempt, home.world)
        request = _request(draft, home, _inputs(draft, home, store, tell), home.world.now(), lease.number)
        # With the intent in it, before anything exists: whoever adopts this run looks for this mark.
        _push_papers(home, store, request)
        _push_code(home, store, request, tell)
        write_record(home, draft.run.id, store, leases.check(store, lease))
        began = home.world.monotonic()
        instance = _create(draft, home, request, store, lease, tell)
        home.provider(request.provider).hand_over(request, instance.id)
        heartbeat = _first_heartbeat(draft, home, store, instance, tell)
        _check_guards(draft, home, store, heartbeat)
        if tell_age(store, request.order.boot, heartbeat, began, home.world):
            tell("The instance's clock is behind; it was told how long it has billed")
    except BaseException as exc:
        # Also on Ctrl-C: what was started here is ended here.
        _undo(draft, home, exc, tell)
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
    return Launched(row, instance, heartbeat, draft.worst_case_usd)


# --- checks ---


def _check_rate(order: LaunchOrder) -> None:
    most, rate = order.run.limits.rate_usd_per_hour, order.offer.rate_usd_per_hour
    if most is not None and rate > Decimal(most):
        raise UsageError(
            what=f"{order.offer.provider} {order.offer.name} costs {meter.show_usd(rate)}/h, more than allowed.",
            why=f"limits.rate is {meter.show_usd(Decimal(most))}/h.",
            fix="Raise limits.rate in the run file, or take another offer: homing plan " + order.run.name,
        )


def _check_reach(order: LaunchOrder, home: Home) -> None:
    """A rented machine cannot read a folder on this computer."""
    lacking = home.provider(order.offer.provider).cannot.get("file_store")
    if lacking and order.run.store.startswith("file:"):
        raise UsageError(
            what=f"An instance of {order.offer.provider} could not reach {order.run.store}.",
            why=lacking,
            fix=f"Set in the run file: store: {SCHEMES['s3']}   or   store: {SCHEMES['hf']}",
        )


def _check_minimum(order: LaunchOrder, timing: Timing, limit: Decimal, spent: Decimal) -> None:
    least_s, rate = timing.least_s(order.run), order.offer.rate_usd_per_hour
    allowed = allowed_s(rate, limit, spent, order.run.limits.time_s)
    if allowed >= least_s:
        return
    least = meter.cost(rate, least_s)
    if order.run.limits.time_s == allowed:
        raise UsageError(
            what=f"limits.time of {format_duration(allowed)} is too short to bring a finished model home.",
            why=f"That takes {format_duration(least_s)} on {order.offer.name}: {timing.text}.",
            fix=f"Raise limits.time in the run file to {format_duration(2 * least_s)} or more.",
        )
    enough = meter.show_usd(spent + 2 * least).removeprefix("$").replace(",", "")
    before = f"{meter.show_usd(spent)} of it is spent already; " if spent else ""
    raise UsageError(
        what=f"The spend limit of {meter.show_usd(limit)} is too small to bring a finished model home.",
        why=f"{before}the minimum on {order.offer.name} is {meter.show_usd(least)}: {timing.text}.",
        fix=f"homing launch {order.run.name} --spend-limit {enough}" + (" --resume" if order.resume else ""),
    )


def _run_to_resume(order: LaunchOrder, home: Home) -> RunRow:
    name, wanted = order.run.name, order.run.id or order.run.name
    found = next((run for run in home.ledger.runs() if wanted in (run.name, run.id)), None)
    if found is None:
        raise UsageError(what=f"There is no run {name!r} to resume.", fix=f"Launch it: homing launch {name}")
    if found.state == "done":
        raise UsageError(
            what=f"{found.id} is done; there is nothing to resume.",
            fix=f"homing fetch {name}   or start afresh: homing launch {name}",
        )
    if found.store != order.run.store:
        raise UsageError(
            what=f"{found.id} lies in another store than the run file names.",
            why=f"It was begun in {found.store}, the run file says {order.run.store}: it would begin at nothing.",
            fix=f"Write store: {found.store} into the run file, then: homing launch {name} --resume",
        )
    leases.require_owner(home, found)
    left = [line for line in home.ledger.lines(found.id) if line.destroyed_at is None]
    if left and not found.is_live:
        raise UsageError(
            what=f"{found.id} still has an instance that may bill.",
            why=f"{left[0].provider} {left[0].instance_id or left[0].mark}: {left[0].state}.",
            fix=f"homing destroy {name}",
        )
    return found


# --- what is written before the create call ---


def _hold_lock(draft: Draft, home: Home) -> None:
    """How others know that this launch still lives: the lock goes when this process does, however it ends."""
    path = home.launch_lock(draft.mark)
    home.world.mkdir(path.parent)
    if not home.world.lock(path):
        raise UsageError(
            what=f"{draft.run.id} is being launched by another homing of this home.",
            why=f"It holds {path}.",
            fix=f"homing watch {draft.run.name}",
        )


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


def _row(draft: Draft, home: Home) -> RunRow:
    return RunRow(
        id=draft.run.id,
        name=draft.run.name,
        state="launching",
        created_at=home.world.now(),
        store=draft.run.store,
        run_file_sha256=draft.run.run_file_sha256,
        spend_limit_usd=str(draft.spend_limit_usd),
    )


def _line(draft: Draft, home: Home) -> LedgerLine:
    offer = draft.order.offer
    return LedgerLine(
        mark=draft.mark,
        run_id=draft.run.id,
        run_name=draft.run.name,
        attempt=draft.attempt,
        provider=offer.provider,
        offer=offer.name,
        rate_usd_per_hour=str(offer.rate_usd_per_hour),
        limit_usd=str(draft.spend_limit_usd),
        intent_at=home.world.now(),
    )


def _write_home(draft: Draft, home: Home) -> None:
    folder = home.run_dir(draft.run.id)
    home.world.mkdir(folder)
    home.world.write(folder / names.RUN_FILE, draft.order.run_file_text.encode())
    home.world.write(folder / names.RUN, codec.dumps(draft.run, indent=1).encode())
    # The device beside the run: what its measured speed will be kept under.
    note = {
        "schema": "homing.launch/1",
        "offer": dataclasses.asdict(draft.order.offer),
        "is_smoke": draft.order.is_smoke,
        "keep_on_failure_s": draft.order.keep_on_failure_s,
        "is_one_guard_enough": draft.order.is_one_guard_enough,
    }
    home.world.write(folder / LAUNCH_NOTE, json.dumps(note, default=str, indent=1).encode())


def _inputs(draft: Draft, home: Home, store: Store, tell: Callable[[str], None]) -> list[Input]:
    inputs = booting.prepare_inputs(
        draft.run, draft.run.data.dir, store, home.world, run_file_text=draft.order.run_file_text
    )
    if not draft.order.resume:
        return inputs
    taken, damaged = resume_inputs(store, draft.run.id, [phase.kind for phase in draft.run.phases])
    for problem in damaged:
        tell(problem)
    if not any(item.path.startswith(f"run/{names.CHECKPOINTS}/") for item in taken):
        tell("No checkpoint is in the store yet: it starts from the beginning")
    return inputs + taken


def _request(
    draft: Draft,
    home: Home,
    inputs: list[Input],
    started_at: float,
    fence: int = 0,
    *,
    is_rehearsal: bool = False,
) -> Request:
    provider = home.provider(draft.order.offer.provider)
    place = provider.place(draft.mark)
    boot: Boot = booting.make_boot(
        draft.run,
        mark=draft.mark,
        attempt=draft.attempt,
        work_dir=place.work_dir,
        inputs=inputs,
        python=place.python,
        end_billing=place.end_billing,
        started_at=started_at,
        rate_usd_per_hour=draft.order.offer.rate_usd_per_hour,
        spend_limit_usd=draft.spend_limit_usd,
        spent_before_usd=draft.spent_before_usd,
        heartbeat_s=draft.order.heartbeat_s or _heartbeat_s(draft.run.store),
    )
    boot = dataclasses.replace(boot, fence=fence, push_s=draft.timing.push_s, home_s=draft.timing.home_s)
    boot = dataclasses.replace(
        boot,
        keep_on_failure_s=draft.order.keep_on_failure_s,
        planned_tokens_per_s=draft.timing.tokens_per_s,
        on_divergence=draft.run.limits.on_divergence,
        on_slow=draft.run.limits.on_slow,
    )
    if draft.order.trainer_argv is not None:
        boot = dataclasses.replace(boot, trainer_argv=list(draft.order.trainer_argv))
    is_stand_in = draft.order.trainer_argv is not None
    boot, brought = furnish(boot, place, draft.run, draft.order.offer, home.world, is_stand_in=is_stand_in)
    if boot.bootstrap is not None and boot.bootstrap.env_dir and not is_rehearsal:
        boot = dataclasses.replace(boot, mailbox=_mailbox(draft, home))
    folder = home.run_dir(draft.run.id)
    for name, data in ({} if is_rehearsal else brought).items():
        home.world.write(folder / name, data)
    files = tuple(InputFile(name, str(folder / name)) for name in (booting.AGENT_ZIP, *brought))
    # How the instance reaches the store: its environment, never a file of ours.
    keys = secrets(draft.run.store, home.world.environment())
    boot = dataclasses.replace(boot, secret_names=sorted(keys))
    order = Order(draft.mark, draft.run.name, boot, files, keys)
    # The dead-man starts a dead agent again as the provider started the first one, so that command goes into boot.json.
    argv = list(provider.plan(draft.order.offer, order).argv)
    order = dataclasses.replace(order, boot=dataclasses.replace(boot, agent_argv=argv))
    return provider.plan(draft.order.offer, order)


def _mailbox(draft: Draft, home: Home) -> str:
    """Where a boot can leave its last words before anything is installed there that could push; "" where nowhere."""
    store = open_store(draft.run.store, home.world)
    if not isinstance(store, S3Store):
        return ""
    key = run_key(draft.run.id, names.LOGS, "boot.log")
    return store.put_url(key, max(FIRST_HEARTBEAT_S, draft.order.offer.boot_s * _BOOT_FACTOR))


def _push_code(home: Home, store: Store, request: Request, tell: Callable[[str], None]) -> None:
    """The wheel and the versions that this run began with, by their hash: whoever repeats it can have the same."""
    told = request.order.boot.bootstrap
    if told is None:
        return
    for file in request.order.files[1:]:  # the first is the agent, which is made from the wheel's own files
        key = f"{names.STORE_OBJECTS}/{home.world.sha256(file.source)}"
        if not store.exists(key):
            store.put(key, file.source)
    commit, changed = tree_state(home.world)
    own = f", with {len(changed)} changes that are not committed" if changed else ""
    tell(f"Sending this homing, {commit[:12] or 'as installed'}{own}; wheel {told.code_sha256[:12]}")


def _push_papers(home: Home, store: Store, request: Request) -> None:
    """All that lies in the run's folder here, beside its record: it may be adopted before its instance has spoken."""
    run_id = request.order.boot.run_id
    papers = {f"run/{name}": name for name in (names.RUN, names.RUN_FILE)}
    for item in request.order.boot.inputs:
        if item.path in papers:
            store.put_bytes(run_key(run_id, papers[item.path]), store.read(item.key))
    store.put_bytes(run_key(run_id, LAUNCH_NOTE), home.world.read(home.run_dir(run_id) / LAUNCH_NOTE))


def _heartbeat_s(store: str) -> float:
    """How often the agent speaks on its own disk; a store that takes fewer writes gets every so manieth word."""
    return min(max(pace_of(store), 1.0), 5.0)


# --- the create call and what follows ---


def _create(
    draft: Draft, home: Home, request: Request, store: Store, lease: Lease, tell: Callable[[str], None]
) -> Instance:
    booting.build_agent_zip(request.order.files[0].source, home.world)
    provider = home.provider(request.provider)
    tell(f"Starting {request.offer.name} on {request.provider}")
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
    (line,) = (line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark)
    if line.instance_id != instance.id:
        # Somebody destroyed this launch while its create call was under way and saw nothing yet.
        home.ledger.reopen(draft.mark, instance_id=instance.id, note="created after it was destroyed")
        raise CreateFailed(f"{draft.mark} was destroyed while it was being created.", instance_id=instance.id)
    if instance.rate_usd_per_hour != draft.order.offer.rate_usd_per_hour:
        raise CreateFailed(
            what=f"{request.provider} started it at {meter.show_usd(instance.rate_usd_per_hour)}/h, not at the rate"
            f" it offered, {meter.show_usd(draft.order.offer.rate_usd_per_hour)}/h.",
            fix=f"See the offers of now: homing plan {draft.run.name}",
            instance_id=instance.id,
        )
    try:
        write_record(home, draft.run.id, store, leases.check(store, lease))
    except (StoreError, IntegrityError) as exc:
        # Not known is not superseded; and the mark, which the record has, finds the instance without its id.
        tell(f"It is started, but the store could not be asked about its lease: {exc.what}")
    return instance


def _first_heartbeat(
    draft: Draft, home: Home, store: Store, instance: Instance, tell: Callable[[str], None]
) -> Heartbeat:
    """Only what the agent itself wrote into the store proves that the run can go on without us."""
    timeout_s = max(FIRST_HEARTBEAT_S, draft.order.offer.boot_s * _BOOT_FACTOR)
    tell(f"Waiting for the agent's first heartbeat in the store, at most {format_duration(timeout_s)}")
    provider = home.provider(instance.provider)
    (line,) = (line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark)
    found: list[Heartbeat] = []

    def is_there() -> bool:
        # Looked at before the store: an agent that was quick has left its heartbeat before it ended.
        now = provider.describe(instance.id)
        try:
            heartbeat = read_signs(store, draft.run.id, line).heartbeat
        except WireError as exc:
            raise HomingError(
                what=f"The agent of {draft.run.id} wrote what cannot be read.",
                why=str(exc),
                fix=f"Use the same homing here and there, then: homing launch {draft.run.name}",
            ) from exc
        if heartbeat is not None:
            found.append(heartbeat)
            return True
        if now.state == "gone" or not now.is_running:
            raise StartTimeout(
                what=f"The agent on {instance.id} ended before its first heartbeat.",
                why=_last_words(provider.log(instance.id)) or now.detail,
                fix=f"homing logs {draft.run.name}",
            )
        return False

    if not wait_until(is_there, timeout_s=timeout_s, every_s=_POLL_S, world=home.world):
        raise StartTimeout(
            what=f"{instance.id} gave no sign of life within {format_duration(timeout_s)}.",
            why=_last_words(provider.log(instance.id)) or "It left no log.",
            fix=f"Try again: homing launch {draft.run.name}" + (f"   See {provider.page}" if provider.page else ""),
        )
    return found[0]


def _check_guards(draft: Draft, home: Home, store: Store, heartbeat: Heartbeat) -> None:
    """Two that live, or nobody may close the laptop. The dead-man may come a moment after the agent."""
    if draft.order.is_one_guard_enough:
        return
    (line,) = (line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark)

    def are_enough() -> bool:
        beat = read_signs(store, draft.run.id, line).heartbeat or heartbeat
        is_over = beat.state in ("pushing", "ending", "ended")  # it ends itself; nobody needs to
        return is_over or count_alive(draft, home, beat) >= LEAST

    if not wait_until(are_enough, timeout_s=GUARDS_S, every_s=_POLL_S, world=home.world):
        raise StartTimeout(
            what=f"Only one guard is alive on {draft.mark}, and {LEAST} are the least.",
            why="The dead-man process did not start beside the agent; neither the provider nor home has a guard.",
            fix=f"homing guard   beside it, or with one guard all the same: homing launch {draft.run.name} --one-guard",
        )


def _undo(draft: Draft, home: Home, exc: BaseException, tell: Callable[[str], None]) -> None:
    reason = (str(exc) or type(exc).__name__).splitlines()[0]
    with contextlib.suppress(OSError):  # a closed terminal may be why we are here
        tell("The launch failed; ending what it started")
    try:
        lines = [line for line in home.ledger.lines(draft.run.id) if line.mark == draft.mark]
    except HomingError:
        # The ledger cannot be read (a full disk): the mark still finds what there is.
        lines = [dataclasses.replace(_line(draft, home), created_at=home.world.now())]
    try:
        destroy_lines(home, lines)
    except StillBilling as still:
        raise still from exc
    finally:
        with contextlib.suppress(HomingError, OSError):  # the error that brought us here is the one to tell
            state = ADOPTED if isinstance(exc, NotOwner) else "failed"
            home.ledger.set_run(
                draft.run.id, state=state, reason=f"launch: {reason}", exit_code=1, ended_at=home.world.now()
            )
            home.world.remove(home.launch_lock(draft.mark))
            write_record(home, draft.run.id, open_store(draft.run.store, home.world, create=False))


def _last_words(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-5:])
