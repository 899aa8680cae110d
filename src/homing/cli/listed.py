"""What `homing plan` shows where nobody was asked: hours of each card, and dollars that are nobody's offer."""

from __future__ import annotations

import dataclasses
from decimal import Decimal

from homing.cli import talk
from homing.cli.control import usd
from homing.cloud.accounts import ACCOUNTS
from homing.cloud.list_prices import Listed
from homing.errors import UsageError
from homing.units import format_duration, format_rate, parse_usd
from homing.wire.run import Run

__all__ = ["parse_rate", "show_listed"]


def parse_rate(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        rate = parse_usd(text.removesuffix("/h"))
    except ValueError as exc:
        raise UsageError(what=f"--rate: {exc}.", fix="--rate 2.50") from exc
    if not rate:
        raise UsageError(what="--rate: no card is rented for nothing.", fix="--rate 2.50")
    return rate


def show_listed(rows: list[Listed], run: Run, typed: str, *, is_without_key: bool = False) -> None:
    talk.emit("plan-listed/1", {"run": run.name, "is_offer": False, "cards": [_document(row) for row in rows]})
    headers = ["card", "at", "rate", "tok/s", "time", "dollars", "how we know"]
    limit = None if run.limits.spend_usd is None else Decimal(run.limits.spend_usd)
    title = f"{run.name}, card by card: no offers, nobody was asked"
    talk.table(headers, (_row(row, limit) for row in rows), title=title)
    if any(row.rate_usd_per_hour is not None and row.provider for row in rows):
        talk.say("Dollars are by list prices of the day that stands beside them; those of today may be others.")
    if any(row.rate_usd_per_hour is None for row in rows):
        talk.say(f"No list price ships with homing there; at a rate of your own: homing plan {typed} --rate 2.50")
    if is_without_key:
        for name in run.cloud.providers:
            account = ACCOUNTS[name]
            talk.say(
                f"There is no key for {account.title} here. One is made at {account.key_page}: homing setup {name}"
            )
        talk.say(f"With a key, by the offers of that moment: homing plan {typed}")


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


def _document(row: Listed) -> dict[str, object]:
    told = {key: value for key, value in dataclasses.asdict(row).items() if key != "rate_usd_per_hour"}
    rate, cost = row.rate_usd_per_hour, row.cost_usd
    told["rate_usd_per_hour"] = None if rate is None else str(rate)
    told["cost_usd"] = None if cost is None else str(cost)
    return told
