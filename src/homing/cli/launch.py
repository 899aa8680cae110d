"""`homing launch`: rent, boot, train, push, end billing. The question names the money."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import find_run, meet_host, open_home, parse_limit, say_problems, usd
from homing.cli.offers import rate_age
from homing.cli.options import Json, Phases, RunRequired, Sets, TrackerName, Trackers, Wandb, Yes, with_phases
from homing.cli.pick import agrees_to_next, agrees_to_rate, select
from homing.cli.tracking import begin, following, wanted
from homing.cloud.bundle import check_committed
from homing.cloud.choose import launch_any
from homing.cloud.exact import Exact, only, without_spot
from homing.cloud.guards import armed, can_end_itself, check_armed, guards
from homing.cloud.home import Home
from homing.cloud.launch import Draft, Launched, LaunchOrder, draft, dry_run
from homing.cloud.plan import OfferPlan, Plan, make_plan
from homing.cloud.reconcile import refresh
from homing.config import Loaded, has_smoke_passed, load_run, needs_smoke_first
from homing.config.schema import NAME_PATTERN
from homing.errors import UsageError
from homing.units import parse_duration
from homing.wire import names

__all__ = ["command"]


def command(
    run: RunRequired,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="The most it may cost, over all attempts.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Another name for this run.")] = None,
    sets: Sets = None,
    phase: Phases = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The same file, shrunk to minutes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest run of this name.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Everything up to the first side effect.")] = False,
    keep_on_failure: Annotated[
        str | None,
        typer.Option("--keep-on-failure", metavar="TIME", help="So long a failed instance stays to be looked at: 30m."),
    ] = None,
    one_guard: Annotated[
        bool, typer.Option("--one-guard", help="Go on with a single guard alive, where two are the least.")
    ] = False,
    committed_only: Annotated[
        bool, typer.Option("--committed-only", help="Refuse to send a tree with changes that are not committed.")
    ] = False,
    no_spot: Annotated[
        bool, typer.Option("--no-spot", help="Only machines that are not taken away; they cost more.")
    ] = False,
    cloud: Annotated[
        str | None, typer.Option("--cloud", metavar="NAME", help="For scripts: this cloud's machine and no other.")
    ] = None,
    region: Annotated[str | None, typer.Option("--region", metavar="NAME", help="... in this region.")] = None,
    instance_type: Annotated[
        str | None, typer.Option("--instance-type", metavar="NAME", help="... of this kind.")
    ] = None,
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Rent, boot, train, push, end billing. The laptop may close once the agent has spoken."""
    sets = with_phases(sets, phase)
    limit, keep_s = parse_limit(spend_limit), _keep_s(keep_on_failure)
    trackers = wanted(tracker, wandb=wandb, verb="launch")
    with open_home() as home:
        if committed_only:
            check_committed(home.world)
        if resume:
            loaded = _as_launched(home, run, is_changed=bool(sets or name or smoke))
        else:
            loaded = load_run(run, sets, is_smoke=smoke)
        if no_spot:
            loaded = _without_spot(loaded)
        if name is not None:
            loaded = _renamed(loaded, name)
        if limit is not None:
            loaded = _limited(loaded, limit)
        say_problems([*loaded.warnings, *refresh(home)])
        plan = only(_plan(loaded, home), Exact(cloud, region, instance_type))
        plan = without_spot(plan) if no_spot else plan
        row = select(plan, yes=yes or dry_run)
        if row is None:
            talk.say("Nothing was started.")
            return
        ready = _draft(loaded, row, home, resume=resume, smoke=smoke)
        ready = _with_wishes(ready, keep_on_failure_s=keep_s, is_one_guard_enough=one_guard)
        _say_plan(ready, home)
        if dry_run:
            _show_request(ready, home)
            return
        check_armed(ready, home)
        most = None if loaded.run.limits.rate_usd_per_hour is None else Decimal(loaded.run.limits.rate_usd_per_hour)
        if not _agreed(ready, loaded, smoke=smoke, yes=yes) or not agrees_to_rate(row, loaded.run.name, most):
            talk.say("Nothing was started.")
            return

        def agree(other: OfferPlan, instead: Draft) -> bool:
            _say_plan(instead, home)
            return agrees_to_next(other, row, most, yes=yes)

        ready, done = launch_any(ready, plan.offers, home, tell=lambda text: talk.say(f"  {text}"), agree=agree)
        for each in trackers:
            told = following(each, home.path, done.run.id, run_name, run=ready.run, store=done.run.store)
            begin(told, home.world)
        talk.emit("launch/1", _document(done, ready))
        _say_next(done, ready, home)


def _as_launched(home: Home, run: str, *, is_changed: bool) -> Loaded:
    """A run goes on as it was launched, --set and all: from its record, whatever the run file says by now."""
    row = find_run(home, run)
    if is_changed:
        raise UsageError(
            what=f"{row.id} goes on as it was launched.",
            why="Its checkpoints belong to that configuration; --set, --name and --smoke would be another run.",
            fix=f"homing launch {row.name} --resume   or start a new run: homing launch {row.name} --set ...",
        )
    record = home.run_dir(row.id) / names.RUN
    if not home.world.exists(record):
        raise UsageError(
            what=f"The record of {row.id} is not at home.", why=f"There is no {record}.", fix="Start a new run instead."
        )
    loaded = load_run(str(record))
    return dataclasses.replace(loaded, run=dataclasses.replace(loaded.run, id=row.id))


def _without_spot(loaded: Loaded) -> Loaded:
    """Into the run itself: whoever goes on with it later keeps to it."""
    cloud = loaded.run.cloud
    settings = {name: {**each, "spot": False} if "spot" in each else each for name, each in cloud.settings.items()}
    return dataclasses.replace(
        loaded, run=dataclasses.replace(loaded.run, cloud=dataclasses.replace(cloud, settings=settings))
    )


def _renamed(loaded: Loaded, name: str) -> Loaded:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            what=f"{name!r} cannot be the name of a run.", why=f"It must match {NAME_PATTERN}", fix="--name moss-2"
        )
    return dataclasses.replace(loaded, run=dataclasses.replace(loaded.run, name=name))


def _limited(loaded: Loaded, limit: Decimal) -> Loaded:
    """Into the run itself, so that the plan warns of it and the run's record tells it."""
    run = loaded.run
    limits = dataclasses.replace(run.limits, spend_usd=str(limit))
    origin = {**run.origin, "limits.spend_usd": "--spend-limit"}
    return dataclasses.replace(loaded, run=dataclasses.replace(run, limits=limits, origin=origin))


def _plan(loaded: Loaded, home: Home) -> Plan:
    meet_host(home, loaded.run)
    plan = make_plan(loaded.run, home)
    say_problems(plan.warnings)
    return plan


def _draft(loaded: Loaded, row: OfferPlan, home: Home, *, resume: bool, smoke: bool) -> Draft:
    spend = loaded.run.limits.spend_usd
    order = LaunchOrder(
        run=loaded.run,
        run_file_text=loaded.text,
        is_prepared=loaded.is_prepared,
        offer=row.offer,
        timing=row.timing,
        spend_limit_usd=None if spend is None else Decimal(spend),
        resume=resume,
        is_smoke=smoke,
    )
    return draft(order, home)


def _keep_s(text: str | None) -> float:
    try:
        return 0.0 if text is None else parse_duration(text)
    except ValueError as exc:
        raise UsageError(what=f"--keep-on-failure: {exc}.", fix="--keep-on-failure 30m") from exc


def _with_wishes(ready: Draft, *, keep_on_failure_s: float, is_one_guard_enough: bool) -> Draft:
    order = dataclasses.replace(
        ready.order, keep_on_failure_s=keep_on_failure_s, is_one_guard_enough=is_one_guard_enough
    )
    return dataclasses.replace(ready, order=order)


def _say_plan(ready: Draft, home: Home) -> None:
    before = f", {usd(ready.spent_before_usd)} of it spent by earlier attempts" if ready.spent_before_usd else ""
    talk.say(f"Worst case: {usd(ready.worst_case_usd)}{before}.")
    age = rate_age(ready.order.offer, home.world.now())
    if age:
        talk.say(f"Not told by the provider just now: {age}.")
    for sentence in guards(ready, home):
        talk.say(f"  {sentence}")


def _show_request(ready: Draft, home: Home) -> None:
    request = dry_run(ready, home).to_dict()
    document = {
        "run": ready.run.id,
        "worst_case_usd": str(ready.worst_case_usd),
        "guards": guards(ready, home),
        "armed": armed(ready, home),
        "request": request,
    }
    talk.emit("dry-run/1", document)
    rows = [(key, value) for key, value in _flat(request)]
    talk.table(["", ""], rows, title=f"Would create {ready.mark}")
    talk.say("Nothing was created, pushed or entered in the ledger.")


def _flat(request: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in request.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{name}", str(inner)) for name, inner in value.items()]
        elif isinstance(value, list) and key != "argv":
            rows += [(f"{key}.{number}", str(inner)) for number, inner in enumerate(value)]
        else:
            rows.append((key, " ".join(value) if isinstance(value, list) else str(value)))
    return rows


def _agreed(ready: Draft, loaded: Loaded, *, smoke: bool, yes: bool) -> bool:
    run, offer = ready.run, ready.order.offer
    if needs_smoke_first(run) and not smoke and not has_smoke_passed(loaded.file):
        talk.say(f"This is a big run and its smoke profile has not passed: homing launch {run.name} --smoke")
        if not talk.ask("Launch the big run without it?", yes=yes):
            return False
    machine = f"{offer.num_gpus}x {offer.device}" if offer.num_gpus else f"{offer.device}, {offer.num_cores} cores"
    question = (
        f"Start {machine} on {offer.provider} at {usd(offer.rate_usd_per_hour)}/h, limit {usd(ready.spend_limit_usd)}?"
    )
    return talk.ask(question, yes=yes)


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


def _say_next(done: Launched, ready: Draft, home: Home) -> None:
    talk.say(f"{done.run.id} has started; its first heartbeat is in the store.")
    if done.instance.provider == "local":
        talk.say("You may close this terminal. The run is on this computer, which must stay on.")
    elif can_end_itself(home.provider(done.instance.provider)):
        talk.say("You may close the laptop.")
    else:
        talk.say("You may close the laptop: it trains and pushes without you.")
        talk.say(f"But it bills until somebody ends it: a guard, a watch, or its limit at {usd(done.worst_case_usd)}.")
    talk.say(f"Watch it: homing watch {done.run.name}")
