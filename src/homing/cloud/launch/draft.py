"""Checks a launch without side effects and computes everything that it needs.

    LaunchOrder -> draft -> Draft        with run id, mark, limit, earlier spend and timing

A machine that cannot end its own billing gets a time limit here. If such a machine finishes while no guard runs on the
user's computer, it bills until a limit ends it. With only a spend limit, that may cost far more than the run needs.
Unless the user sets a time limit, it is derived from a pessimistic estimate of the run's duration. The derived limit
works like any other: the agent ends training in time, the provider's guard receives it as an end time, the worst case
takes it into account, and `homing limit RUN --time` changes it. run.json records that it was derived, so that the next
attempt, on a different machine, gets a new one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.cloud.launch.inputs import Hashes, travelling
from homing.cloud.ledger import meter, run_lease
from homing.cloud.ledger.ledger import LIVE_STATES, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark, new_run_id
from homing.cloud.plan.speed import estimate
from homing.cloud.plan.timing import Timing, timing_of
from homing.cloud.providers.base import Offer, Provider, can_end_itself
from homing.cloud.reconcile.inventory import check_lost
from homing.cloud.reconcile.receipt import at_their_most
from homing.cloud.reconcile.renting_account import is_elsewhere, use_again
from homing.errors import DataError, OtherAccount, UsageError
from homing.store import SCHEMES
from homing.units import format_duration
from homing.wire.control_files import Heartbeat
from homing.wire.guard_timing import allowed_s
from homing.wire.run_json import Phase, Run

__all__ = ["Draft", "LaunchOrder", "check_order", "draft", "waits_for_home", "with_time", "without_time"]

_FIRST_HEARTBEAT_S = 120.0  # minimum timeout; a provider that boots slowly gets a multiple of its usual boot time
_BOOT_FACTOR = 5.0
_TIME_KEY = "limits.time_s"
_TIME_ORIGIN = "derived: the instance cannot end its own billing"


@dataclass(frozen=True)
class LaunchOrder:
    """The user's complete launch request; no later step asks for more input."""

    run: Run  # the run to launch; it already has an id only if it is to be resumed
    run_file_text: str
    is_prepared: bool
    offer: Offer
    spend_limit_usd: Decimal | None
    resume: bool = False
    is_smoke: bool = False
    trainer_argv: tuple[str, ...] | None = None  # command to run instead of the trainer, to test the control plane
    heartbeat_s: float | None = None  # heartbeat interval; None to choose one that suits the store
    timing: Timing | None = None  # the plan's timing for this offer; None to estimate it without probing the speed
    keep_on_failure_s: float = 0.0  # how long to keep a failed instance for inspection
    is_one_guard_enough: bool = False
    project: str = ""  # folder from which the run is launched; "" if unknown, or to keep the previous attempt's folder
    typed: str = ""  # run file and overrides as typed on the command line; "" to use the run's name

    @property
    def words(self) -> Words:
        return Words(self.run.name, self.typed, self.resume)


@dataclass(frozen=True)
class Draft:
    """A launch that passed every check and has had no side effects yet."""

    order: LaunchOrder
    run: Run  # the run with its id, its limit and the settings that depend on the offer
    attempt: int
    mark: str
    spend_limit_usd: Decimal
    spent_before_usd: Decimal
    timing: Timing
    is_spent_at_most: bool = False  # True if the spend includes an upper bound for attempts of unknown cost

    @property
    def worst_case_usd(self) -> Decimal:
        rate = self.order.offer.rate_usd_per_hour
        return meter.worst_case(rate, self.spend_limit_usd, self.run.limits.time_s, self.spent_before_usd)

    @property
    def boot_timeout_s(self) -> float:
        """Return the maximum number of seconds from the create call to the agent's first heartbeat in the store."""
        return max(_FIRST_HEARTBEAT_S, self.order.offer.boot_s * _BOOT_FACTOR)


def draft(order: LaunchOrder, home: Home) -> Draft:
    """Run every check that needs no side effect and return the draft. Each error says what to change."""
    home.configure(order.run)
    order = dataclasses.replace(order, run=without_time(order.run))
    run, limit = order.run, order.spend_limit_usd
    if not order.is_prepared:
        raise DataError(
            what=f"{run.name} is not ready to launch.",
            why=" ".join(_unprepared(run)),
            fix=" && ".join(order.words.to(verb) for verb in ("prep", "verify", "launch"))
            + (f" --spend-limit {limit}" if limit is not None else ""),
        )
    _check_rate(order)
    earlier = _run_to_resume(order, home) if order.resume else None
    if earlier is None:
        check_lost(home, run.name, run.store)
    _check_name(order, home)
    _check_reach(order, home)
    lines = at_their_most(home, home.ledger.lines(earlier.id)) if earlier else []
    _check_bounded(home, lines)
    spent = meter.total_spend(lines, home.world.now())
    # Do not probe this computer's speed here. It may be busy, and without a probe the estimate is pessimistic anyway.
    speed = estimate(run, order.offer, home, may_probe=False)
    timing = order.timing or timing_of(run, order.offer, speed, home)
    if limit is None:
        raise _without_limit(order, timing, spent)
    _check_minimum(order, timing, limit, spent, lines)
    run_id = earlier.id if earlier else new_run_id(run.name, home.world)
    attempt = max((line.attempt for line in lines), default=0) + 1
    final = dataclasses.replace(
        run,
        id=run_id,
        limits=dataclasses.replace(run.limits, spend_usd=str(limit)),
        train=dataclasses.replace(run.train, needs_gpu=run.train.needs_gpu or order.offer.num_gpus > 0),
        inputs=run.inputs or travelling(run, home.world, Hashes(home).sha256, words=order.words),
    )
    if not can_end_itself(home.provider(order.offer.provider)):
        final = with_time(final, order.offer, timing, limit, spent)
    is_at_most = any(line.is_at_most for line in lines)
    return Draft(order, final, attempt, make_mark(home.owner, run_id, attempt), limit, spent, timing, is_at_most)


def check_order(order: LaunchOrder, home: Home) -> None:
    """Raise the UsageError of a new launch that an offer and a limit are enough to find, without asking a provider."""
    assert order.timing is not None, "the plan's timing for this offer"
    assert order.spend_limit_usd is not None, "the limit that the plan recommends"
    _check_rate(order)
    if home.has_ledger:
        _check_name(order, home)
    _check_reach(order, home)
    _check_minimum(order, order.timing, order.spend_limit_usd, Decimal(0), [])


def _check_name(order: LaunchOrder, home: Home) -> None:
    name = order.run.name
    live = next((r for r in home.ledger.runs() if r.name == name and r.state in LIVE_STATES), None)
    if live is not None:
        raise UsageError(
            what=f"A run named {name} is already live: {live.id}.",
            why="Two runs with the same name would overwrite each other's model.",
            fix=f"Watch it: homing watch {live.id}   or end it: homing stop {live.id}, homing destroy {live.id}"
            "   or use another name: --name OTHER",
        )


def _unprepared(run: Run) -> list[str]:
    """Return a sentence for each dataset that must still be tokenized: the shared text and the data of each phase."""
    own = [phase for phase in run.phases if phase.data is not None and not phase.data.manifest_sha256]
    unprepared = [
        f"The {'conversations' if phase.data.kind == 'chat' else 'texts'} of phase {phase.kind} are not tokenized:"
        f" {phase.data.dir} has no finished shards for them."
        for phase in own
        if phase.data is not None
    ]
    if not run.data.manifest_sha256 and any(_reads_run_text(phase) for phase in run.phases):
        unprepared.insert(0, f"Its text is not tokenized: {run.data.dir} has no finished shards.")
    return unprepared or [f"{run.data.dir} has no tokenizer."]


def _reads_run_text(phase: Phase) -> bool:
    return phase.kind in ("pretrain", "mid") and phase.data is None


def _without_limit(order: LaunchOrder, timing: Timing, spent: Decimal) -> UsageError:
    rate, whole_s = order.offer.rate_usd_per_hour, timing.whole_s(order.run)
    planned = meter.cost(rate, whole_s)
    # Suggest 50% more than the plan, which may be inaccurate, and at least twice the minimum.
    enough = spent + max(planned * 3 / 2, meter.cost(rate, timing.least_s(order.run)) * 2)
    estimated = f"On {order.offer.name} it costs about {meter.show_usd(planned)} in {format_duration(whole_s)}."
    return UsageError(
        what="No spend limit is set.",
        why=f"Every launch needs one: limits.spend in the run file, or --spend-limit. {estimated}",
        fix=f"{order.words.to('launch')} --spend-limit {meter.as_limit(enough or Decimal(1))}",
    )


def _check_rate(order: LaunchOrder) -> None:
    most, rate = order.run.limits.rate_usd_per_hour, order.offer.rate_usd_per_hour
    if most is not None and rate > Decimal(most):
        raise UsageError(
            what=f"{order.offer.provider} {order.offer.name} costs {meter.show_usd(rate)}/h, above your rate limit.",
            why=f"limits.rate is {meter.show_usd(Decimal(most))}/h.",
            fix=f"Raise limits.rate in the run file, or choose another offer: {order.words.to('plan')}",
        )


def _check_reach(order: LaunchOrder, home: Home) -> None:
    """Raise UsageError if the instance cannot reach the store, for example because it is a folder on this computer."""
    lacking = home.provider(order.offer.provider).cannot.get("file_store")
    if lacking and order.run.store.startswith("file:"):
        raise UsageError(
            what=f"An instance on {order.offer.provider} cannot reach {order.run.store}.",
            why=lacking,
            fix=f"Set in the run file: store: {SCHEMES['s3']}   or   store: {SCHEMES['hf']}",
        )
    if lacking and order.run.store.startswith("modal:") and order.offer.provider != "modal":
        raise UsageError(
            what=f"An instance on {order.offer.provider} cannot reach {order.run.store}.",
            why="Outside Modal, a Volume needs the account's token, which homing never puts on a rented instance.",
            fix=f"Launch it on modal, or set in the run file: store: {SCHEMES['s3']}   or   store: {SCHEMES['hf']}",
        )


def _check_bounded(home: Home, lines: list[LedgerLine]) -> None:
    """Raise an error if an earlier attempt may still bill without a bound on its cost.

    Either that attempt is in a different account, so that no spend limit could cover both machines, or another process
    has just started it.
    """
    for line in lines:
        if line.destroyed_at is None and line.created_at is not None:
            if not is_elsewhere(home, line):
                raise _still_there(line)
            destroy = f"homing destroy {line.run_id}"
            raise OtherAccount(
                what=f"{line.run_id} has an instance in another account that may keep billing without a limit:"
                f" {line.mark}.",
                why=f"{line.provider} enforces no limit itself. That instance was rented by {line.account}, and the"
                " current key belongs to another account, so no spend limit could cover both instances.",
                fix=f"{use_again(line.provider)}, then: {destroy}"
                f"   or, if the current key is from the same account: {destroy} --same-account",
            )


def _check_minimum(order: LaunchOrder, timing: Timing, limit: Decimal, spent: Decimal, lines: list[LedgerLine]) -> None:
    least_s, rate = timing.least_s(order.run), order.offer.rate_usd_per_hour
    allowed = allowed_s(rate, limit, spent, order.run.limits.time_s)
    if allowed >= least_s:
        return
    least = meter.cost(rate, least_s)
    if order.run.limits.time_s and order.run.limits.time_s == allowed:  # 0 means no time limit
        raise UsageError(
            what=f"limits.time of {format_duration(allowed)} is too short to finish, push the model and end billing.",
            why=f"That takes {format_duration(least_s)} on {order.offer.name}: {timing.text}.",
            fix=f"Raise limits.time in the run file to {format_duration(2 * least_s)} or more.",
        )
    before = f"{meter.at_most(*lines)}{meter.show_usd(spent)} is already spent; " if spent else ""
    raise UsageError(
        what=f"The spend limit of {meter.show_usd(limit)} is too low to finish, push the model and end billing.",
        why=f"{before}the minimum on {order.offer.name} is {meter.show_usd(least)}: {timing.text}.",
        fix=f"{order.words.to('launch')} --spend-limit {meter.as_limit(spent + 2 * least)}",
    )


def _run_to_resume(order: LaunchOrder, home: Home) -> RunRow:
    name, wanted = order.run.name, order.run.id or order.run.name
    found = next(iter(home.ledger.called(wanted)), None)
    if found is None:
        raise UsageError(what=f"There is no run {name!r} to resume.", fix=f"Launch it: homing launch {name}")
    if found.state == "done":
        raise UsageError(
            what=f"{found.id} is done; there is nothing to resume.",
            fix=f"Fetch its model: homing fetch {name}   or start over: homing launch {name}",
        )
    if found.store != order.run.store:
        raise UsageError(
            what=f"{found.id} is not in the store that the run file names.",
            why=f"It started in {found.store}, but the run file says {order.run.store}, where it has no checkpoints.",
            fix=f"Set store: {found.store} in the run file, then: homing launch {name} --resume",
        )
    run_lease.require_owner(home, found)
    left = [line for line in home.ledger.lines(found.id) if line.destroyed_at is None and not is_elsewhere(home, line)]
    if left and not found.is_live:
        raise _still_there(left[0])
    return found


def _still_there(line: LedgerLine) -> UsageError:
    return UsageError(
        what=f"{line.run_id} still has an instance that may be billing.",
        why=f"{line.provider} {line.instance_id or line.mark}: {line.state}.",
        fix=f"Destroy it: homing destroy {line.run_id}",
    )


# --- the time limit for a machine that cannot end its own billing ---


def without_time(run: Run) -> Run:
    """Return the run as the user requested it: without a time limit that was derived for an earlier attempt."""
    if run.origin.get(_TIME_KEY) != _TIME_ORIGIN:
        return run
    origin = {name: text for name, text in run.origin.items() if name != _TIME_KEY}
    return dataclasses.replace(run, limits=dataclasses.replace(run.limits, time_s=0.0), origin=origin)


def with_time(run: Run, offer: Offer, timing: Timing, spend_limit_usd: Decimal, spent_usd: Decimal) -> Run:
    """Return the run with a time limit derived for this offer.

    A run that already has a time limit, or whose spend limit is reached sooner, is returned unchanged.
    """
    time_s = timing.enough_s(run)
    if run.limits.time_s or time_s >= allowed_s(offer.rate_usd_per_hour, spend_limit_usd, spent_usd, 0.0):
        return run
    limits = dataclasses.replace(run.limits, time_s=time_s)
    return dataclasses.replace(run, limits=limits, origin={**run.origin, _TIME_KEY: _TIME_ORIGIN})


def waits_for_home(provider: Provider, mark: str, beat: Heartbeat | None) -> bool:
    """Return True if the agent has finished but its machine keeps billing until a local guard destroys it."""
    return not can_end_itself(provider) and beat is not None and beat.mark == mark and beat.state == "ended"
