"""`homing launch`: rent, boot, train, push, end billing. The confirmation prompt says how much money is involved."""

from __future__ import annotations

import contextlib
import sys
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import parse_limit, usd
from homing.api.runs.launch_run import LaunchInterrupted, LaunchOptions, Started, launch, machine_words
from homing.api.runs.refused_launch import ALLOWED
from homing.cli import output
from homing.cli.options import Gpu, Json, Phases, RunRequired, Sets, TrackerName, Trackers, Wandb, Yes
from homing.cli.verbs.offers import HEADERS, row_of
from homing.cloud.commands_to_type import Words
from homing.cloud.launch.launch import Draft
from homing.cloud.plan.offers import DEAR_USD_PER_HOUR, is_dear
from homing.cloud.plan.plan import OfferPlan, Plan
from homing.cloud.providers.ssh.connection import HostKeyUnknown
from homing.cloud.try_offers import is_within_plan, name_of
from homing.config.load import with_options
from homing.errors import UsageError
from homing.units import counted, format_duration, parse_duration

__all__ = ["agrees_to_host", "command"]


def command(
    run: RunRequired,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="Maximum cost of the run, over all attempts.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Override the name of this run.")] = None,
    sets: Sets = None,
    phase: Phases = None,
    gpu: Gpu = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a scaled-down version of the run that finishes in minutes.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the newest run of this name.")] = False,
    extend: Annotated[
        int | None,
        typer.Option(
            "--extend",
            metavar="STEPS",
            min=1,
            help="Train this many more steps from the newest weights, with a new warm-up.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the request; create nothing.")
    ] = False,
    keep_on_failure: Annotated[
        str | None,
        typer.Option(
            "--keep-on-failure", metavar="TIME", help="Keep a failed instance this long for inspection, such as 30m."
        ),
    ] = None,
    one_guard: Annotated[
        bool, typer.Option("--one-guard", help="Allow a launch with only one guard; two are required by default.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="KIND",
            help=f"Launch although homing would refuse: {', '.join(ALLOWED)}; repeatable. --yes does not include it.",
        ),
    ] = None,
    committed_only: Annotated[
        bool, typer.Option("--committed-only", help="Refuse to launch with uncommitted changes.")
    ] = False,
    no_spot: Annotated[
        bool, typer.Option("--no-spot", help="Use on-demand instances only: no preemption, higher rate.")
    ] = False,
    cloud: Annotated[
        str | None, typer.Option("--cloud", metavar="NAME", help="For scripts: rent from this cloud only.")
    ] = None,
    region: Annotated[
        str | None, typer.Option("--region", metavar="NAME", help="For scripts: rent in this region only.")
    ] = None,
    instance_type: Annotated[
        str | None, typer.Option("--instance-type", metavar="NAME", help="For scripts: rent this instance type only.")
    ] = None,
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Rent an instance, train on it, push the model to the store and end billing.

    You may close your laptop after the agent's first heartbeat.
    """
    options = LaunchOptions(
        spend_limit_usd=parse_limit(spend_limit),
        name=name,
        sets=tuple(with_options(sets, phases=phase, gpu=gpu)),
        is_smoke=smoke,
        resume=resume,
        extend=extend,
        dry_run=dry_run,
        keep_on_failure_s=_parse_keep(keep_on_failure),
        one_guard=one_guard,
        allow=tuple(allow or ()),
        committed_only=committed_only,
        no_spot=no_spot,
        cloud=cloud,
        region=region,
        instance_type=instance_type,
        trackers=(*(tracker or ()), *("wandb",) * wandb),
        tracker_name=run_name,
    )
    try:
        started = launch(run, options, answers=_AtTerminal(yes=yes, dry_run=dry_run))
    except LaunchInterrupted as interrupted:
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            output.say(str(interrupted))
        raise typer.Exit(130) from None
    if started is not None and started.done is None:
        _show_request(started)
    elif started is not None:
        output.emit("launch/1", started.to_dict())


def _parse_keep(text: str | None) -> float:
    try:
        return 0.0 if text is None else parse_duration(text)
    except ValueError as exc:
        raise UsageError(what=f"--keep-on-failure: {exc}.", fix="For example: --keep-on-failure 30m") from exc


class _AtTerminal:
    """Asks the user at the terminal. --yes accepts the costs that the plan shows."""

    def __init__(self, *, yes: bool, dry_run: bool) -> None:
        self._yes, self._is_dry = yes, dry_run

    def select(self, plan: Plan) -> OfferPlan | None:
        return select(plan, yes=self._yes or self._is_dry)

    def agrees(self, question: str) -> bool:
        return output.ask(question, yes=self._yes)

    def agrees_to_rate(self, row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool:
        return agrees_to_rate(row, words, limit_usd_per_hour)

    def agrees_to_next(self, row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None) -> bool:
        return agrees_to_next(row, agreed, limit_usd_per_hour, yes=self._yes)

    def agrees_to_host(self, unknown: HostKeyUnknown) -> bool:
        return agrees_to_host(unknown)


def _show_request(started: Started) -> None:
    ready, document = started.ready, started.request or {}
    output.emit("dry-run/1", document)
    rows = _flat(document["request"]) if output.is_verbose() else _in_short(ready, document["request"])
    output.table(["", ""], rows, title=f"Would create {ready.mark}")
    whole = "" if output.is_verbose() else " Full request: -v or --json."
    output.say(f"Dry run: nothing was created, pushed or recorded in the ledger.{whole}")


def _in_short(ready: Draft, request: dict[str, Any]) -> list[tuple[str, str]]:
    """Summarize what the user agrees to, without hashes, paths and variables, which only help in debugging."""
    offer, limits = ready.order.offer, ready.run.limits
    time_limit = format_duration(limits.time_s) if limits.time_s else "none; the spend limit applies"
    rows = [
        ("machine", f"{machine_words(offer)} ({name_of(offer)})"),
        ("rate", f"{usd(offer.rate_usd_per_hour)}/h{', spot' if offer.is_spot else ''}"),
        ("spend limit", f"{usd(ready.spend_limit_usd)}, worst case {usd(ready.worst_case_usd)}"),
        ("time limit", time_limit),
        ("phases", ", ".join(f"{phase.kind} {phase.num_steps:,} steps" for phase in ready.run.phases)),
        ("store", ready.run.store),
    ]
    if inputs := request.get("inputs"):
        rows.append(("sent", counted(len(inputs), "file")))
    if ready.order.keep_on_failure_s:
        rows.append(("if it fails", f"kept {format_duration(ready.order.keep_on_failure_s)} for inspection"))
    return rows


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


# --- questions that only a person at a terminal can answer ---


def agrees_to_host(unknown: HostKeyUnknown) -> bool:
    """Ask the user to verify the fingerprint of a new SSH host; --yes does not answer this question."""
    if not sys.stdin.isatty():
        return False
    output.say(f"{unknown.what}\n{unknown.why}")
    return output.ask("Is this the host's fingerprint? It will be pinned.", yes=False)


def select(plan: Plan, *, yes: bool) -> OfferPlan | None:
    """Return the offer that the user picks, or None if the user quits.

    Return the best offer without asking if --yes is set, if there is only one offer, or if there is no terminal (in
    that case the next question raises an error).
    """
    if yes or len(plan.offers) == 1 or not sys.stdin.isatty():
        return plan.best
    rows = ([*row_of(n, row.offer), *_to_finish(row)] for n, row in enumerate(plan.offers, start=1))
    output.table([*HEADERS, "Offer", "Time", "To finish"], rows, title="Offers, cheapest to finish first")
    while True:
        print(f"Select instance [1-{len(plan.offers)}] or 'q' to quit: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if answer.strip().lower() in ("q", "quit") or not answer:
            return None
        if answer.strip().isdigit() and 1 <= int(answer) <= len(plan.offers):
            return _picked(plan, plan.offers[int(answer) - 1])
        output.say(f"{answer.strip()!r} is not one of the choices.")


def agrees_to_rate(row: OfferPlan, words: Words, limit_usd_per_hour: Decimal | None) -> bool:
    """Ask the user to confirm a high hourly rate. One hour may cost more than a whole run, so --yes is not enough."""
    if not is_dear(row.offer, limit_usd_per_hour):
        return True
    rate = usd(row.offer.rate_usd_per_hour)
    question = f"{name_of(row.offer)} costs {rate}/h. Continue?"
    if not sys.stdin.isatty():
        # A resumed run does not accept --set, so the user cannot set limits.rate and must confirm at a terminal.
        again, change = words.to("launch"), f" --set limits.rate={row.offer.rate_usd_per_hour}   or"
        raise UsageError(
            what=f"{name_of(row.offer)} costs {rate}/h, which needs confirmation.",
            why=f"Rates over {usd(DEAR_USD_PER_HOUR)}/h need confirmation, even with --yes, unless limits.rate is set.",
            fix=f"{again}{'   and' if words.is_resume else change} confirm at a terminal",
        )
    return output.ask(question, yes=False)


def agrees_to_next(row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None, *, yes: bool) -> bool:
    """Return whether to use the next offer if the agreed one is gone. --yes accepts a cost close to the agreed one."""
    more = row.cost_usd - agreed.cost_usd
    if yes and is_within_plan(row, agreed, limit_usd_per_hour):
        return True
    if not sys.stdin.isatty():
        output.say(
            f"Skipped an offer: finishing the run on it would cost {usd(more)} more than on the offer you agreed to."
            " To allow such offers, pass --set limits.rate=..."
        )
        return False
    difference = f"{usd(more)} more" if more > 0 else f"{usd(-more)} less"
    return output.ask(f"Use it instead, {difference} to finish?", yes=False)


def _to_finish(row: OfferPlan) -> list[str]:
    return [row.offer.name, format_duration(row.seconds), usd(row.cost_usd)]


def _picked(plan: Plan, row: OfferPlan) -> OfferPlan:
    more = plan.more_usd(row)
    if more > 0:
        cheapest = name_of(plan.best.offer)
        output.say(f"Finishing the run on this offer costs {usd(more)} more than on the cheapest, {cheapest}.")
    return row
