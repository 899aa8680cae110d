"""`homing plan`: tokens, FLOPs, hours and dollars per offer, cheapest to finish first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import meet_host, open_home, parse_limit, say_problems, usd
from homing.cli.options import Json, RunName, Sets
from homing.cloud.plan import OfferPlan, Plan, make_plan
from homing.config import Loaded, load_run, newest_run
from homing.units import format_bytes, format_count, format_duration, format_rate
from homing.wire import codec

__all__ = ["command"]


def command(
    run: RunName = None,
    sets: Sets = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The same file, shrunk to minutes.")] = False,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="What would this limit buy?")
    ] = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Every value and where it came from.")] = False,
    json_: Json = False,
) -> None:
    """Hours and dollars per offer, cheapest to finish first."""
    limit = [] if spend_limit is None else [f"limits.spend={parse_limit(spend_limit)}"]
    loaded = load_run(run or newest_run(), [*(sets or []), *limit], is_smoke=smoke)
    if resolved:
        _show_resolved(loaded)
        return
    with open_home() as home:
        meet_host(home, loaded.run)
        plan = make_plan(loaded.run, home)
    talk.emit("plan/1", _document(plan, loaded))
    _show(plan, loaded)


def _show(plan: Plan, loaded: Loaded) -> None:
    run = plan.run
    rows = [
        ("parameters", f"{run.sizes.num_params:,}"),
        ("tokens", f"{plan.num_tokens:,}"),
        ("steps", f"{plan.num_steps:,}"),
        ("FLOPs", f"{plan.flops:.3g}"),
        ("memory", format_bytes(plan.needs.memory_bytes)),
        ("checkpoint", f"{format_bytes(plan.checkpoint_bytes)}, at most {format_bytes(plan.kept_bytes)} kept"),
        ("minimum spend", f"{usd(plan.offers[0].minimum_usd)} on {plan.offers[0].offer.name}"),
        ("of it", plan.offers[0].timing.text),
        *_bought(plan),
        ("prepared", "yes" if loaded.is_prepared else f"no: homing prep {run.name}"),
    ]
    talk.table(["", ""], rows, title=f"Plan of {run.name}")
    headers = ["offer", "device", "rate", "tok/s", "time", "dollars", "minimum", "how we know the speed"]
    talk.table(headers, (_row(row) for row in plan.offers))
    say_problems([*loaded.warnings, *plan.warnings])
    talk.say(f"\nNext: homing launch {run.name} --spend-limit {_suggested(plan)}")


def _bought(plan: Plan) -> list[tuple[str, str]]:
    """What the limit buys on the cheapest offer."""
    best, limits = plan.offers[0], plan.run.limits
    if best.buys is None:
        return []
    named = [usd(Decimal(limits.spend_usd))] if limits.spend_usd is not None else []
    named += [format_duration(limits.time_s)] if limits.time_s else []
    buys = best.buys
    said = f"about {buys.num_steps:,} of {buys.of_steps:,} steps"
    lands = f", lands after {format_duration(buys.lands_after_s)}" if buys.is_landing else ""
    return [(f"with {' and '.join(named)}", said + lands)]


def _row(row: OfferPlan) -> list[str]:
    offer = row.offer
    device = f"{offer.num_gpus}x {offer.device}" if offer.num_gpus else f"{offer.device}, {offer.num_cores} cores"
    return [
        f"{offer.provider} {offer.name}",
        device,
        f"{usd(offer.rate_usd_per_hour)}/h",
        format_rate(row.speed.tokens_per_s).removesuffix(" tok/s"),
        format_duration(row.seconds),
        usd(row.cost_usd),
        usd(row.minimum_usd),
        row.speed.text,
    ]


def _suggested(plan: Plan) -> str:
    """Half as much again as the plan: a probe or an assumption may be off by that."""
    best = plan.offers[0]
    return usd(max(best.cost_usd * 3 / 2, best.minimum_usd * 2)).removeprefix("$").replace(",", "")


def _document(plan: Plan, loaded: Loaded) -> dict[str, Any]:
    return {
        "run": plan.run.name,
        "num_params": plan.run.sizes.num_params,
        "num_tokens": plan.num_tokens,
        "num_steps": plan.num_steps,
        "flops": plan.flops,
        "flops_per_token": plan.run.sizes.flops_per_token,
        "memory_bytes": plan.needs.memory_bytes,
        "disk_bytes": plan.needs.disk_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "minimum_spend_usd": str(plan.offers[0].minimum_usd),
        "is_prepared": loaded.is_prepared,
        "offers": [
            {
                **dataclasses.asdict(row.offer),
                "tokens_per_s": row.speed.tokens_per_s,
                "speed_source": row.speed.source,
                "speed_text": row.speed.text,
                "seconds": row.seconds,
                "cost_usd": str(row.cost_usd),
                "minimum_usd": str(row.minimum_usd),
                "timing": dataclasses.asdict(row.timing),
                "buys": dataclasses.asdict(row.buys) if row.buys else None,
            }
            for row in plan.offers
        ],
        "warnings": [*loaded.warnings, *plan.warnings],
    }


def _show_resolved(loaded: Loaded) -> None:
    document = codec.dump(loaded.run)
    origin = document.pop("origin")
    document.pop("schema")
    talk.emit("resolved/1", {"run": document, "origin": origin, "warnings": loaded.warnings})
    rows = [(key, _value(value), _origin(key, origin)) for key, value in _flat(document)]
    talk.table(["key", "value", "from"], rows, title=f"{loaded.run.name}, as {loaded.file} resolves")
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
    """Of the key itself, or of the nearest section above it that has one."""
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
