"""A launch on paper: what a person asked for, every check that needs no side effect, and what comes of it.

LaunchOrder -> draft -> Draft        with id, mark, limit, what was spent before, and how long things take
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import lease as leases
from homing.cloud import meter
from homing.cloud.check_lost import check_lost
from homing.cloud.guards import can_end_itself
from homing.cloud.hashes import Hashes
from homing.cloud.home import Home
from homing.cloud.inputs import travelling
from homing.cloud.ledger import LIVE_STATES, LedgerLine, RunRow
from homing.cloud.mark import make_mark, new_run_id
from homing.cloud.providers.base import Offer
from homing.cloud.receipt import at_their_most
from homing.cloud.speed import estimate
from homing.cloud.timing import Timing, timing_of
from homing.cloud.unattended import with_time, without_time
from homing.cloud.whose import is_elsewhere, use_again
from homing.cloud.words import Words
from homing.errors import DataError, OtherAccount, UsageError
from homing.store import SCHEMES
from homing.units import format_duration
from homing.wire.limit import allowed_s
from homing.wire.run import Phase, Run

__all__ = ["Draft", "LaunchOrder", "draft"]

_FIRST_HEARTBEAT_S = 120.0  # at least; a provider that boots slowly gets a multiple of its usual time
_BOOT_FACTOR = 5.0


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
    project: str = ""  # the folder that it is launched from; "": not known, or kept from the attempt before
    typed: str = ""  # its run file and the changes to it, as a person typed them; "": its name

    @property
    def words(self) -> Words:
        return Words(self.run.name, self.typed, self.resume)


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
    is_spent_at_most: bool = False  # what nobody could count is in it as the most that it can have cost

    @property
    def worst_case_usd(self) -> Decimal:
        rate = self.order.offer.rate_usd_per_hour
        return meter.worst_case(rate, self.spend_limit_usd, self.run.limits.time_s, self.spent_before_usd)

    @property
    def boot_timeout_s(self) -> float:
        """From the create call to the agent's first heartbeat in the store."""
        return max(_FIRST_HEARTBEAT_S, self.order.offer.boot_s * _BOOT_FACTOR)


def draft(order: LaunchOrder, home: Home) -> Draft:
    """Every check that needs no side effect; each refusal says what to change."""
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
    live = next((r for r in home.ledger.runs() if r.name == run.name and r.state in LIVE_STATES), None)
    if live is not None:
        raise UsageError(
            what=f"A run named {run.name} is already live: {live.id}.",
            why="Two runs of one name would write over each other's model.",
            fix=f"homing watch {live.id}   or end it: homing stop {live.id}, homing destroy {live.id}"
            "   or launch under another name: --name OTHER",
        )
    _check_reach(order, home)
    lines = at_their_most(home, home.ledger.lines(earlier.id)) if earlier else []
    _check_bounded(home, lines)
    spent = meter.total_spend(lines, home.world.now())
    # Without a plan nothing is probed: this computer may be at work, and the figures are rather too long anyway.
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


def _unprepared(run: Run) -> list[str]:
    """What has still to be made into tokens, by phase: the text that all share, or what one of them has of its own."""
    own = [phase for phase in run.phases if phase.data is not None and not phase.data.manifest_sha256]
    told = [
        f"The {'conversations' if phase.data.kind == 'chat' else 'texts'} of the phase {phase.kind} have not been made"
        f" into tokens as the run file names them now: {phase.data.dir} has no finished shards of them."
        for phase in own
        if phase.data is not None
    ]
    if not run.data.manifest_sha256 and any(_reads_run_text(phase) for phase in run.phases):
        told.insert(0, f"Its text has not been made into tokens: {run.data.dir} has no finished shards.")
    return told or [f"{run.data.dir} has no tokenizer."]


def _reads_run_text(phase: Phase) -> bool:
    return phase.kind in ("pretrain", "mid") and phase.data is None


def _without_limit(order: LaunchOrder, timing: Timing, spent: Decimal) -> UsageError:
    rate, whole_s = order.offer.rate_usd_per_hour, timing.whole_s(order.run)
    planned = meter.cost(rate, whole_s)
    # Half as much again, for a plan may be off by that; and what brings a finished model home at all.
    enough = spent + max(planned * 3 / 2, meter.cost(rate, timing.least_s(order.run)) * 2)
    told = f"On {order.offer.name} it costs about {meter.show_usd(planned)} in {format_duration(whole_s)}."
    return UsageError(
        what="No spend limit is set, and nobody rents without saying how much.",
        why=f"Neither limits.spend in the run file nor --spend-limit names one. {told}",
        fix=f"{order.words.to('launch')} --spend-limit {meter.as_limit(enough or Decimal(1))}",
    )


def _check_rate(order: LaunchOrder) -> None:
    most, rate = order.run.limits.rate_usd_per_hour, order.offer.rate_usd_per_hour
    if most is not None and rate > Decimal(most):
        raise UsageError(
            what=f"{order.offer.provider} {order.offer.name} costs {meter.show_usd(rate)}/h, more than allowed.",
            why=f"limits.rate is {meter.show_usd(Decimal(most))}/h.",
            fix=f"Raise limits.rate in the run file, or take another offer: {order.words.to('plan')}",
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
    if lacking and order.run.store.startswith("modal:") and order.offer.provider != "modal":
        raise UsageError(
            what=f"An instance of {order.offer.provider} could not reach {order.run.store}.",
            why="Only the account's token opens a Modal Volume from outside Modal, and no rented machine gets that.",
            fix=f"Launch it on modal, or set in the run file: store: {SCHEMES['s3']}   or   store: {SCHEMES['hf']}",
        )


def _check_bounded(home: Home, lines: list[LedgerLine]) -> None:
    """What is still open here is in another account: nobody may promise a limit beside a machine that has none. Or
    another process has opened it a moment ago."""
    for line in lines:
        if line.destroyed_at is None and line.created_at is not None:
            if not is_elsewhere(home, line):
                raise _still_there(line)
            destroy = f"homing destroy {line.run_id}"
            raise OtherAccount(
                what=f"{line.run_id} has a machine in another account that may bill without bound: {line.mark}.",
                why=f"{line.provider} itself ends none at a limit, and the key here is not of {line.account}, which"
                " rented it: no spend limit would hold for both.",
                fix=f"{use_again(line.provider)}, then: {destroy}"
                f"   or, if the key here is of that account too: {destroy} --same-account",
            )


def _check_minimum(order: LaunchOrder, timing: Timing, limit: Decimal, spent: Decimal, lines: list[LedgerLine]) -> None:
    least_s, rate = timing.least_s(order.run), order.offer.rate_usd_per_hour
    allowed = allowed_s(rate, limit, spent, order.run.limits.time_s)
    if allowed >= least_s:
        return
    least = meter.cost(rate, least_s)
    if order.run.limits.time_s and order.run.limits.time_s == allowed:  # 0 is none, and all of the dollars may be spent
        raise UsageError(
            what=f"limits.time of {format_duration(allowed)} is too short to bring a finished model home.",
            why=f"That takes {format_duration(least_s)} on {order.offer.name}: {timing.text}.",
            fix=f"Raise limits.time in the run file to {format_duration(2 * least_s)} or more.",
        )
    before = f"{meter.at_most(*lines)}{meter.show_usd(spent)} of it is spent already; " if spent else ""
    raise UsageError(
        what=f"The spend limit of {meter.show_usd(limit)} is too small to bring a finished model home.",
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
            fix=f"homing fetch {name}   or start afresh: homing launch {name}",
        )
    if found.store != order.run.store:
        raise UsageError(
            what=f"{found.id} lies in another store than the run file names.",
            why=f"It was begun in {found.store}, the run file says {order.run.store}: it would begin at nothing.",
            fix=f"Write store: {found.store} into the run file, then: homing launch {name} --resume",
        )
    leases.require_owner(home, found)
    left = [line for line in home.ledger.lines(found.id) if line.destroyed_at is None and not is_elsewhere(home, line)]
    if left and not found.is_live:
        raise _still_there(left[0])
    return found


def _still_there(line: LedgerLine) -> UsageError:
    return UsageError(
        what=f"{line.run_id} still has an instance that may bill.",
        why=f"{line.provider} {line.instance_id or line.mark}: {line.state}.",
        fix=f"homing destroy {line.run_id}",
    )
