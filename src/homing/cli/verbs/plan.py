"""`homing plan`: tokens, FLOPs, hours and dollars per offer, cheapest to finish first."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import parse_limit, usd
from homing.api.notices import say_problems
from homing.api.runs.plan_run import Planned, family_rows, load_planned, plan_run, precision_rows
from homing.cli import output
from homing.cli.options import Gpu, Json, Phases, RunName, Sets
from homing.cli.plan_without_account import parse_rate, show_listed
from homing.cli.verbs.launch import agrees_to_host
from homing.cloud.ledger import meter
from homing.cloud.plan.offers import rate_age
from homing.cloud.plan.plan import OfferPlan, Plan, suggested_limit
from homing.cloud.providers.base import Offer
from homing.cloud.try_offers import name_of
from homing.config.load import Loaded, with_options
from homing.units import counted, format_bytes, format_count, format_duration, format_rate
from homing.wire import codec

__all__ = ["command"]

_LEFT_OUT = 5  # printed individually
_LONG_HERE_S = 24 * 3600  # longer than most people would train on their own computer


def command(
    run: RunName = None,
    sets: Sets = None,
    phase: Phases = None,
    gpu: Gpu = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Plan a smoke run (a scaled-down version of the run) instead of the full run."),
    ] = False,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="Show how much training this limit buys.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="DOLLARS", help="Assume this hourly rate for every GPU, without querying providers."
        ),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Show every setting and where its value came from.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show hours and dollars per offer, cheapest to finish first. Rents nothing."""
    sets = with_options(sets, phases=phase, gpu=gpu)
    own_rate, limit = parse_rate(rate), parse_limit(spend_limit)
    if resolved:
        _show_resolved(load_planned(run, sets, is_smoke=smoke, spend_limit_usd=limit))
        return
    planned = plan_run(
        run,
        sets=sets,
        is_smoke=smoke,
        spend_limit_usd=limit,
        rate_usd_per_hour=own_rate,
        agrees_to_host=agrees_to_host,
    )
    if planned.plan is None:
        show_listed(planned)
        _say_refused(planned)
        return
    output.emit("plan/1", planned.to_dict())
    _show(planned.plan, planned)


def _show(plan: Plan, planned: Planned) -> None:
    loaded, now, typed = planned.loaded, planned.at, planned.typed
    run = plan.run
    rows = [
        ("parameters", f"{run.sizes.num_params:,}"),
        ("tokens", f"{plan.num_tokens:,}"),
        ("steps", f"{plan.num_steps:,}"),
        ("FLOPs", f"{plan.flops:.3g}"),
        ("memory", format_bytes(plan.needs.memory_bytes)),
        ("checkpoint", f"{format_bytes(plan.checkpoint_bytes)}, at most {format_bytes(plan.kept_bytes)} kept"),
        ("minimum spend", f"{usd(plan.offers[0].minimum_usd)} on {plan.offers[0].offer.name}"),
        ("which covers", plan.offers[0].timing.text),
        *_bought(plan),
        *family_rows(run),
        *precision_rows(plan),
        ("prepared", "yes" if loaded.is_prepared else f"no: homing prep {typed}"),
    ]
    output.table(["", ""], rows, title=f"Plan of {run.name}")
    headers = ["offer", "device", "rate", "tok/s", "time", "dollars", "more", "worst", "minimum", "how we know"]
    output.table(headers, (_row(plan, row, now) for row in plan.offers))
    _show_phases(plan)
    _say_left_out(plan)
    say_problems([*loaded.warnings, *plan.warnings])
    output.say(f"\n{_recommendation(plan)}")
    _say_refused(planned)
    if planned.refused and not _is_long_here(plan):
        return
    then = f"homing launch {typed} --spend-limit {suggested_limit(plan)}"
    if _is_long_here(plan):
        output.say(
            "Training takes a long time on this computer. You can also plan the run for a rented GPU, using list"
            " prices; no API key is needed."
        )
        then = f"homing plan {typed} --set cloud.providers=runpod"
    output.say(f"Next: {then}" if loaded.is_prepared else f"Next: homing prep {typed}   then: {then}")


def _say_refused(planned: Planned) -> None:
    """Instead of a launch command, say why `homing launch` refuses this run and what to change."""
    for refusal in planned.refused:
        output.say(f"warning: `homing launch` refuses this run. {refusal}\n  fix {refusal.fix}")
    if planned.refused and not planned.loaded.is_prepared:
        output.say(f"The text is not prepared yet either: homing prep {planned.typed}")


def _is_long_here(plan: Plan) -> bool:
    return plan.best.offer.provider == "local" and plan.best.seconds > _LONG_HERE_S


def _recommendation(plan: Plan) -> str:
    best = plan.best
    said = f"Cheapest to finish: {name_of(best.offer)}, {usd(best.cost_usd)} in {format_duration(best.seconds)}"
    if best.buys is not None and best.buys.is_landing:
        said += f". It does not finish within {_limits(plan)}; it ends early at about step {best.buys.num_steps:,}"
        said += f" of {best.buys.of_steps:,}" + _refused(plan, best) + "."
    else:
        said += f", at worst {usd(best.worst_usd)}."
    if len(plan.offers) > 1:
        other = plan.offers[1]
        said += f" {name_of(other.offer)} would cost {usd(plan.more_usd(other))} more"
        quicker_s = best.seconds - other.seconds
        said += f" and finish {format_duration(quicker_s)} sooner." if quicker_s > 60 else "."
    return said


def _limits(plan: Plan) -> str:
    limits = plan.run.limits
    named = [usd(limits.spend_usd)] if limits.spend_usd is not None else []
    return " and ".join(named + ([format_duration(limits.time_s)] if limits.time_s else []))


def _refused(plan: Plan, row: OfferPlan) -> str:
    """Return a warning if the limit is below the minimum that `homing launch` accepts, else ""."""
    limit = plan.run.limits.spend_usd
    is_refused = limit is not None and row.minimum_usd > Decimal(limit)
    return f"; the minimum spend limit there is {usd(row.minimum_usd)}" if is_refused else ""


def _show_phases(plan: Plan) -> None:
    best = plan.best
    parts = best.phases(plan.run)
    device = _device(best.offer)
    rows = [(part.name, device, format_duration(part.seconds), usd(part.cost_usd)) for part in parts]
    if best.odds.num_interruptions:
        away_s = best.seconds - sum(part.seconds for part in parts)
        times = f"{best.odds.num_interruptions:.2g} preemptions expected ({best.odds.text})"
        rows.append((times, device, format_duration(away_s), usd(meter.cost(best.offer.rate_usd_per_hour, away_s))))
    if best.storage_usd:
        rows.append(("storage", plan.run.store, format_duration(best.seconds), usd(best.storage_usd)))
    rows.append(("all", device, format_duration(best.seconds), usd(best.cost_usd)))
    output.table(["phase", "on", "time", "cost"], rows, title="Time and cost by phase")


def _say_left_out(plan: Plan) -> None:
    """Print excluded offers whose rate is below the best offer's, because users ask about them; count the rest."""
    lower = [each for each in plan.left_out if each.offer.rate_usd_per_hour <= plan.best.offer.rate_usd_per_hour]
    for each in lower[:_LEFT_OUT]:
        rate = usd(each.offer.rate_usd_per_hour)
        output.say(f"Skipped offer: {name_of(each.offer)} ({_device(each.offer)}, {rate}/h) {each.why}.")
    if len(plan.left_out) > len(lower[:_LEFT_OUT]):
        more = counted(len(plan.left_out) - len(lower[:_LEFT_OUT]), "more offer")
        output.say(f"{more} not shown; use --json to list all of them.")


def _bought(plan: Plan) -> list[tuple[str, str]]:
    """Return how much training the limit buys on the cheapest offer."""
    buys = plan.offers[0].buys
    if buys is None:
        return []
    said = f"about {buys.num_steps:,} of {buys.of_steps:,} steps"
    lands = f", ends early after {format_duration(buys.lands_after_s)}" if buys.is_landing else ""
    return [(f"with {_limits(plan)}", said + lands)]


def _row(plan: Plan, row: OfferPlan, now: float) -> list[str]:
    offer = row.offer
    more = plan.more_usd(row)
    return [
        name_of(offer),
        _device(offer) + (", spot" if offer.is_spot else ""),
        f"{usd(offer.rate_usd_per_hour)}/h",
        format_rate(row.speed.tokens_per_s).removesuffix(" tok/s"),
        format_duration(row.seconds),
        usd(row.cost_usd),
        f"+{usd(more)}" if more > 0 else f"-{usd(-more)}" if more < 0 else "",
        usd(row.worst_usd),
        usd(row.minimum_usd),
        "; ".join(part for part in (row.speed.text, rate_age(offer, now)) if part),
    ]


def _device(offer: Offer) -> str:
    return f"{offer.num_gpus}x {offer.device}" if offer.num_gpus else f"{offer.device}, {offer.num_cores} cores"


def _show_resolved(loaded: Loaded) -> None:
    document = codec.dump(loaded.run)
    origin = document.pop("origin")
    document.pop("schema")
    output.emit("resolved/1", {"run": document, "origin": origin, "warnings": loaded.warnings})
    rows = [(key, _value(value), _origin(key, origin)) for key, value in _flat(document)]
    output.table(["key", "value", "from"], rows, title=f"{loaded.run.name}, resolved from {loaded.file}")
    say_problems(loaded.warnings)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}.{number}")
    else:
        yield path, value


def _origin(key: str, origin: dict[str, str]) -> str:
    """Return where the value of the key, or of the nearest enclosing section, came from."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = origin.get(".".join(parts[:length]))
        if found:
            return found
    return "computed"


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "none"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,} ({format_count(value)})"
    return str(value)
