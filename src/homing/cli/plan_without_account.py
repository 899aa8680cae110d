"""Output of `homing plan` without provider queries: hours per GPU, and the cost at list price or the user's rate."""

from __future__ import annotations

from decimal import Decimal

from homing.api.lookup.find_runs import usd
from homing.api.notices import say_problems
from homing.api.runs.plan_run import Planned
from homing.cli import output
from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.plan.without_account import Listed
from homing.errors import UsageError
from homing.units import format_duration, format_rate, parse_usd

__all__ = ["parse_rate", "show_listed"]


def parse_rate(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        rate = parse_usd(text.removesuffix("/h"))
    except ValueError as exc:
        raise UsageError(what=f"--rate: {exc}.", fix="For example: --rate 2.50") from exc
    if not rate:
        raise UsageError(what="--rate must be more than 0.", fix="For example: --rate 2.50")
    return rate


def show_listed(planned: Planned) -> None:
    rows, run, typed = planned.listed, planned.loaded.run, planned.typed
    output.emit("plan-listed/1", planned.to_dict())
    headers = ["GPU", "at", "rate", "tok/s", "time", "dollars", "how we know"]
    limit = None if run.limits.spend_usd is None else Decimal(run.limits.spend_usd)
    title = f"{run.name} by GPU, estimated without querying providers"
    output.table(headers, (_row(row, limit) for row in rows), title=title)
    say_problems(planned.loaded.warnings)
    if any(row.rate_usd_per_hour is not None and row.provider for row in rows):
        output.say("Costs are based on the list prices on the dates shown; current prices may differ.")
    if any(row.rate_usd_per_hour is None for row in rows):
        output.say(f'"-" means that no list price is known. To use your own rate: homing plan {typed} --rate 2.50')
    if planned.is_without_key:
        for name in run.cloud.providers:
            account = ACCOUNTS[name]
            output.say(f"No API key for {account.title}. Create one at {account.key_page}, then: homing setup {name}")
        output.say(f"Once you have a key, plan with live offers: homing plan {typed}")


def _row(row: Listed, limit: Decimal | None) -> list[str]:
    rate, cost = row.rate_usd_per_hour, row.cost_usd
    over = f", over the limit of {usd(limit)}" if limit is not None and cost is not None and cost > limit else ""
    return [
        f"{row.num_gpus}x {row.card}",
        row.provider or "any",
        "-" if rate is None else f"{usd(rate)}/h",
        format_rate(row.tokens_per_s).removesuffix(" tok/s"),
        format_duration(row.seconds),
        "-" if cost is None else f"about {usd(cost)}{over}",
        "; ".join(filter(None, [row.speed_text, row.rate_text])),
    ]
