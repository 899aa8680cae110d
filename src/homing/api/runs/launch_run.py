"""Launch a run (rent, boot, train, push, end billing). Implements `homing launch` and `Run.launch()`.

load -> plan -> an offer -> draft -> guards -> the user agrees -> local guard -> create -> first heartbeat

`Answers` says yes or no to every question that concerns money; without a yes nothing is created.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from homing.api import notices
from homing.api.data.stale_shards import refuse_stale
from homing.api.extend_run import extending_sets, print_schedule, run_to_extend
from homing.api.extras import need
from homing.api.lookup.find_runs import find_run, meet_host, name_here, open_home, usd
from homing.api.notices import say_problems
from homing.api.runs.refused_launch import Refusal, check_allowed, low_balance, raise_refusals, refused_run
from homing.api.tracking import begin, following, wanted
from homing.cloud.commands_to_type import Words
from homing.cloud.contact import home_guard
from homing.cloud.destroy import still_billing
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import armed, check_armed, guards, would_start
from homing.cloud.launch.launch import Draft, Launched, LaunchOrder, draft, dry_run
from homing.cloud.launch.resume import describe_starts
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.machine_setup.code_bundle import check_committed
from homing.cloud.plan.offers import is_dear, rate_age
from homing.cloud.plan.plan import OfferPlan, Plan, make_plan, suggested_limit
from homing.cloud.providers.base import Offer, can_end_itself
from homing.cloud.providers.ssh.connection import HostKeyUnknown
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.try_offers import Exact, is_within_plan, launch_any, name_of, only, without_spot
from homing.config.home_and_run_files import launch_again, refuse_shared, shares_with, typed_name
from homing.config.load import Loaded, as_typed, load_run
from homing.config.parse.key_suggestions import tidy_name
from homing.config.schema.run_file import NAME_PATTERN
from homing.doctor.computer import clock_warning
from homing.errors import UsageError
from homing.units import format_duration
from homing.wire import file_names

__all__ = [
    "Answers",
    "Confirmed",
    "LaunchInterrupted",
    "LaunchOptions",
    "Started",
    "launch",
    "machine_words",
    "say_plan",
]


def _extended(run: str, asked: LaunchOptions) -> tuple[str, tuple[str, ...]]:
    """Return the run file to launch and its --set changes. With --extend, `run` may also select one run: NAME@RUN."""
    sets, is_smoke = asked.sets, asked.is_smoke
    if not asked.extend:
        return run, sets
    if asked.resume:
        raise UsageError(what="--resume and --extend cannot be combined.", fix="Use only one of them.")
    name, run_id = run_to_extend(run)
    loaded = load_run(name, list(sets), is_smoke=is_smoke)
    more, _ = extending_sets(loaded, asked.extend, None, run_id, verb="launch")
    print_schedule(load_run(name, [*sets, *more], is_smoke=is_smoke).run)
    return name, (*sets, *more)


def ledger_lines(home: Home) -> list[LedgerLine]:
    return home.ledger.lines() if home.has_ledger else []


def conclusion(home: Home, before: set[str], interrupt: KeyboardInterrupt) -> str:
    """Return what happened to this launch's instances. Raises StillBilling if one is not confirmed as destroyed."""
    made = [line for line in ledger_lines(home) if line.mark not in before and line.created_at is not None]
    if not made:
        return "nothing was created."
    row = home.ledger.run(made[-1].run_id)
    # the launch itself was complete; only the final message was missing
    if row is not None and row.is_live and row.state != "launching":
        return f"{row.name} has launched and keeps running. Watch it: homing watch {row.name}"
    left = [line for line in made if line.destroyed_at is None]
    if left:
        raise still_billing(home, left) from interrupt
    gone = ", ".join(line.instance_id or line.mark for line in made)
    spent = meter.at_most(*made) + usd(meter.total_spend(made, home.world.now()))
    return f"{gone} destroyed, confirmed by the provider; spent {spent}."


class LaunchInterrupted(KeyboardInterrupt):
    """Raised on Ctrl-C during a launch. The message says what happened to the instances that the launch created."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options for a launch, named as in `homing launch`."""

    spend_limit_usd: Decimal | None = None  # required here or as limits.spend in the run file
    name: str | None = None
    sets: tuple[str, ...] = ()
    is_smoke: bool = False
    resume: bool = False
    extend: int | None = None
    dry_run: bool = False
    keep_on_failure_s: float = 0.0
    one_guard: bool = False
    committed_only: bool = False
    no_spot: bool = False
    cloud: str | None = None  # rent from this cloud only; region and instance type likewise
    region: str | None = None
    instance_type: str | None = None
    trackers: tuple[str, ...] = ()
    tracker_name: str | None = None
    allow: tuple[str, ...] = ()  # what homing would otherwise refuse: keys of refused_launch.ALLOWED


class Answers(Protocol):
    """Answers the questions that a launch asks. Nothing is rented unless every answer is yes."""

    def select(self, plan: Plan) -> OfferPlan | None: ...

    def agrees(self, question: str) -> bool: ...

    def agrees_to_rate(self, row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool: ...

    def agrees_to_next(self, row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None) -> bool: ...

    def agrees_to_host(self, unknown: HostKeyUnknown) -> bool: ...


class Confirmed:
    """Agrees only to the plan, like --yes without a terminal. Refuses everything if `confirm` is False."""

    def __init__(self, *, confirm: bool) -> None:
        self._confirm = confirm

    def select(self, plan: Plan) -> OfferPlan | None:
        return plan.best

    def agrees(self, question: str) -> bool:
        if not self._confirm:
            raise UsageError(
                what="A launch costs money and was not confirmed; nothing was started.",
                why=question,
                fix="Confirm it: run.launch(..., confirm=True)",
            )
        return True

    def agrees_to_rate(self, row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool:
        if is_dear(row.offer, limit_usd_per_hour):
            raise UsageError(
                what=f"{row.offer.name} costs {usd(row.offer.rate_usd_per_hour)}/h; set limits.rate to allow that.",
                why="One hour at this rate costs more than most entire runs.",
                fix=f'Allow the rate: Run(..., sets=["limits.rate={row.offer.rate_usd_per_hour}"])',
            )
        return True

    def agrees_to_next(self, row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None) -> bool:
        return is_within_plan(row, agreed, limit_usd_per_hour)

    def agrees_to_host(self, unknown: HostKeyUnknown) -> bool:
        return False


@dataclass(frozen=True)
class Started:
    """The result of a launch: `done` is None after a dry run."""

    ready: Draft
    done: Launched | None
    request: dict[str, Any] | None = None  # of a dry run

    def to_dict(self) -> dict[str, Any]:
        assert self.done is not None, "a dry run launches nothing"
        return _document(self.done, self.ready)


def launch(
    run: str, options: LaunchOptions | None = None, *, answers: Answers | None = None, home: Home | None = None
) -> Started | None:
    """Launch a run, and return after its first heartbeat. Return None if the user picks no offer or does not confirm.

    Without `answers`, every launch is refused. Ctrl-C destroys what was created and raises LaunchInterrupted, or
    StillBilling if that is not confirmed.
    """
    asked = options or LaunchOptions()
    check_allowed(asked.allow)
    trackers = wanted(list(asked.trackers), wandb=False, verb="launch")
    run, sets = _extended(run, asked)
    asked = dataclasses.replace(asked, sets=sets, trackers=tuple(trackers))
    with open_home(home) as opened:
        if asked.committed_only:
            check_committed(opened.world)
        before = {line.mark for line in ledger_lines(opened)}
        try:
            return _start(run, asked, opened, answers or Confirmed(confirm=False))
        except KeyboardInterrupt as interrupt:
            raise LaunchInterrupted(_interrupted(opened, before, interrupt)) from interrupt


def _interrupted(home: Home, before: set[str], interrupt: KeyboardInterrupt) -> str:
    with contextlib.suppress(OSError):
        return f"Interrupted: {conclusion(home, before, interrupt)}"
    return "Interrupted."


def _start(run: str, asked: LaunchOptions, home: Home, answers: Answers) -> Started | None:
    """Launch a run, step by step. Nothing is created anywhere before `answers` has agreed."""
    loaded = _load(run, asked, home)
    words = _words(loaded, asked)
    plan = _plan(loaded, words, asked, home, answers)
    if not asked.resume:
        raise_refusals(refused_run(loaded, words, is_smoke=asked.is_smoke, allow=asked.allow))
    row = answers.select(plan)
    if row is None:
        notices.say("Nothing was started.")
        return None
    if row.offer.provider == "local":  # trains in this Python environment; other instances install their own packages
        need("lm", verb="launch", where=" on this computer")
    ready = _draft(loaded, words, row, asked, home)
    for sentence in describe_starts(ready, home):
        notices.say(sentence)
    say_plan(ready, home)
    raise_refusals(_low_balance(ready, asked, home))
    if asked.dry_run:
        return Started(ready, None, _request(ready, home))
    starts_guard = would_start(ready, home)
    if not starts_guard:
        check_armed(ready, home)
    if not _agrees(ready, row, answers):
        notices.say("Nothing was started.")
        return None
    if starts_guard:
        _start_guard(ready, home)
    ready, done = _launch(ready, row, plan, asked, home, answers)
    for each in asked.trackers:
        follower = following(each, home.path, done.run.id, asked.tracker_name, run=ready.run, store=done.run.store)
        begin(follower, home.world)
    _say_next(done, home)
    return Started(ready, done)


def _request(ready: Draft, home: Home) -> dict[str, Any]:
    return {
        "run": ready.run.id,
        "worst_case_usd": str(ready.worst_case_usd),
        "starts": describe_starts(ready, home),
        "guards": guards(ready, home, starts_one=would_start(ready, home)),
        "armed": armed(ready, home),
        "request": dry_run(ready, home).to_dict(),
    }


def _start_guard(ready: Draft, home: Home) -> None:
    """Start the second guard before anything is rented."""
    provider = ready.order.offer.provider
    pid = home_guard.start(home, provider)
    notices.say(f"A guard is running in the background (process {pid}, log {home.path / home_guard.LOG}).")
    check_armed(ready, home)


def _load(run: str, asked: LaunchOptions, home: Home) -> Loaded:
    """Load the run with all changes from the flags, so that the plan and the run's record contain them."""
    if asked.resume:
        loaded = _as_launched(home, run, is_changed=bool(asked.sets or asked.name or asked.is_smoke))
    else:
        loaded = load_run(run, list(asked.sets), is_smoke=asked.is_smoke)
        refuse_stale(loaded, f"{typed_name(loaded.file)}{as_typed(asked.sets, is_smoke=asked.is_smoke)}")
    if asked.no_spot:
        loaded = _without_spot(loaded)
    if asked.name is not None:
        loaded = _renamed(loaded, asked.name)
    refuse_shared(loaded.file, loaded.run.name)
    if asked.spend_limit_usd is not None:
        loaded = _limited(loaded, asked.spend_limit_usd)
    say_problems([*loaded.warnings, *refresh(home)])
    return loaded


def _as_launched(home: Home, run: str, *, is_changed: bool) -> Loaded:
    """Load a run that will be resumed, as it was launched, including --set. The current run file is ignored."""
    row = find_run(home, run, changes="launch {} --resume")
    if is_changed:
        raise UsageError(
            what=f"{row.id} resumes exactly as it was launched, without changes.",
            why="Its checkpoints belong to that configuration; --set, --name and --smoke need a new run.",
            fix=f"homing launch {name_here(row)} --resume   or start a new run: {launch_again(row.name)} --set ...",
        )
    if row.state == "done":
        raise UsageError(
            what=f"{row.id} is done; there is nothing to resume.",
            fix=f"Fetch its model: homing fetch {name_here(row)}   or start a new run: {launch_again(row.name)}",
        )
    record = home.run_dir(row.id) / file_names.RUN
    if not home.world.exists(record):
        raise UsageError(
            what=f"No local record of {row.id}.", why=f"{record} does not exist.", fix="Start a new run instead."
        )
    loaded = load_run(str(record))
    return dataclasses.replace(loaded, run=dataclasses.replace(loaded.run, id=row.id))


def _without_spot(loaded: Loaded) -> Loaded:
    """Disable spot instances in the run itself, so that a later resume does not use them either."""
    cloud = loaded.run.cloud
    settings = {name: {**each, "spot": False} if "spot" in each else each for name, each in cloud.settings.items()}
    return dataclasses.replace(
        loaded, run=dataclasses.replace(loaded.run, cloud=dataclasses.replace(cloud, settings=settings))
    )


def _renamed(loaded: Loaded, name: str) -> Loaded:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            what=f"Invalid run name: {name!r}.",
            why="Every provider must accept the name: use a-z, 0-9 and -, at most 32 characters.",
            fix=f"Use --name {tidy_name(name) or 'moss-2'}",
        )
    if (other := shares_with(loaded.file, name)) is not None:
        raise UsageError(
            what=f"--name {name}: {other} already uses this name, so {loaded.file} cannot.",
            why="Data, runs and models are found by run name, so each run file needs its own.",
            fix=f"Use another name: homing launch {typed_name(loaded.file)} --name {name[:30]}-2"
            f"   Or launch that file: homing launch {typed_name(other)}",
        )
    return dataclasses.replace(loaded, run=dataclasses.replace(loaded.run, name=name))


def _limited(loaded: Loaded, limit: Decimal) -> Loaded:
    run = loaded.run
    limits = dataclasses.replace(run.limits, spend_usd=str(limit))
    origin = {**run.origin, "limits.spend_usd": "--spend-limit"}
    return dataclasses.replace(loaded, run=dataclasses.replace(run, limits=limits, origin=origin))


def _words(loaded: Loaded, asked: LaunchOptions) -> Words:
    """Return the run as the user typed it, for the commands that messages suggest; for a resumed run, only its name."""
    changes = as_typed(asked.sets, is_smoke=asked.is_smoke)
    typed = "" if asked.resume else f"{typed_name(loaded.file)}{changes}"
    return Words(loaded.run.name, typed, asked.resume)


def _plan(loaded: Loaded, words: Words, asked: LaunchOptions, home: Home, answers: Answers) -> Plan:
    meet_host(home, loaded.run, answers.agrees_to_host)
    plan = make_plan(loaded.run, home)
    say_problems(plan.warnings)
    plan = only(plan, Exact(asked.cloud, asked.region, asked.instance_type), words)
    plan = without_spot(plan, words) if asked.no_spot else plan
    if loaded.run.limits.spend_usd is None:
        # Drafting the launch would raise an error anyway, but this error suggests a limit before an offer is chosen.
        raise UsageError(
            what="No spend limit is set.",
            why=f"Every launch needs limits.spend in the run file or --spend-limit. {_about_cost(plan.best)}",
            fix=f"{words.to('launch')} --spend-limit {suggested_limit(plan)}",
        )
    return plan


def _about_cost(best: OfferPlan) -> str:
    return f"Estimate on {name_of(best.offer)}: {usd(best.cost_usd)}, {format_duration(best.seconds)}."


def _draft(loaded: Loaded, words: Words, row: OfferPlan, asked: LaunchOptions, home: Home) -> Draft:
    spend = loaded.run.limits.spend_usd
    order = LaunchOrder(
        run=loaded.run,
        run_file_text=loaded.text,
        is_prepared=loaded.is_prepared,
        offer=row.offer,
        timing=row.timing,
        spend_limit_usd=None if spend is None else Decimal(spend),
        resume=asked.resume,
        is_smoke=asked.is_smoke,
        keep_on_failure_s=asked.keep_on_failure_s,
        is_one_guard_enough=asked.one_guard,
        project=str(Path.cwd()),
        typed=words.typed,
    )
    return draft(order, home)


def say_plan(ready: Draft, home: Home) -> None:
    spent = ("at most " if ready.is_spent_at_most else "") + usd(ready.spent_before_usd)
    before = f", including {spent} spent by earlier attempts" if ready.spent_before_usd else ""
    notices.say(f"Worst case: {usd(ready.worst_case_usd)}{before}.")
    age = rate_age(ready.order.offer, home.world.now())
    if age:
        notices.say(f"This rate is not live data from the provider: {age}.")
    for sentence in guards(ready, home, starts_one=would_start(ready, home)):
        notices.say(f"  {sentence}")
    if warning := clock_warning(home, ready.order.offer.provider):
        say_problems([warning])


def _low_balance(ready: Draft, asked: LaunchOptions, home: Home) -> list[Refusal]:
    """Return a refusal if the account holds less than the run may still cost. If that is allowed, only warn."""
    provider, needed = home.provider(ready.order.offer.provider), ready.worst_case_usd - ready.spent_before_usd
    found = low_balance(provider, needed)
    if "low-balance" not in asked.allow:
        return found
    say_problems([str(refusal) for refusal in found])
    return []


def _agrees(ready: Draft, row: OfferPlan, answers: Answers) -> bool:
    offer = ready.order.offer
    rate, limit = usd(offer.rate_usd_per_hour), usd(ready.spend_limit_usd)
    question = f"Start {machine_words(offer)} on {offer.provider} at {rate}/h, limit {limit}?"
    return answers.agrees(question) and answers.agrees_to_rate(row, ready.order.words, _most_per_hour(ready))


def _launch(
    ready: Draft, row: OfferPlan, plan: Plan, asked: LaunchOptions, home: Home, answers: Answers
) -> tuple[Draft, Launched]:
    """Launch on the agreed offer. If it is no longer available, launch on the next offer that the user agrees to."""

    def agree(other: OfferPlan, instead: Draft) -> bool:
        say_plan(instead, home)
        if refused := _low_balance(instead, asked, home):
            say_problems([str(refusal) for refusal in refused])
            return False
        return answers.agrees_to_next(other, row, _most_per_hour(ready))

    return launch_any(ready, plan.offers, home, notify=lambda text: notices.say(f"  {text}"), agree=agree)


def machine_words(offer: Offer) -> str:
    return f"{offer.num_gpus}x {offer.device}" if offer.num_gpus else f"{offer.device}, {offer.num_cores} cores"


def _most_per_hour(ready: Draft) -> Decimal | None:
    rate = ready.run.limits.rate_usd_per_hour
    return None if rate is None else Decimal(rate)


def _document(done: Launched, ready: Draft) -> dict[str, Any]:
    return {
        "run": done.run.id,
        "name": done.run.name,
        "attempt": ready.attempt,
        "mark": ready.mark,
        "instance": done.instance.id,
        "provider": done.instance.provider,
        "rate_usd_per_hour": str(done.instance.rate_usd_per_hour),
        "spend_limit_usd": str(ready.spend_limit_usd),
        "worst_case_usd": str(done.worst_case_usd),
        "has_dead_man": done.heartbeat.has_dead_man,
        "store": done.run.store,
    }


def _say_next(done: Launched, home: Home) -> None:
    notices.say(f"{done.run.id} is running; its first heartbeat is in the store.")
    if done.instance.provider == "local":
        notices.say("You can close this terminal, but keep this computer on: the run is local.")
    elif can_end_itself(home.provider(done.instance.provider)):
        notices.say("You can close your laptop.")
    else:
        notices.say("You can close your laptop: the run trains and pushes on its own.")
        notices.say(
            f"But billing continues until a guard, `homing watch` or the limit of {usd(done.worst_case_usd)} ends it."
        )
        if home_guard.words(home):
            notices.say(
                "While this computer is on, the background guard ends billing after training. See it: homing runs"
            )
    notices.say(f"Watch it: homing watch {done.run.name}")
