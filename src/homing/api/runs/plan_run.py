"""Plan a run without renting, as hours and dollars per offer. Implements `homing plan` and `Run.plan()`.

run file -> offers of every provider that is set up -> Planned, cheapest to finish first
         -> without an account, or with a given rate: prices per GPU; no provider is queried
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.api.data.stale_shards import refuse_stale
from homing.api.lookup.find_runs import meet_host, open_home
from homing.api.runs.refused_launch import Refusal, refused_plan, refused_run
from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.cloud.plan.measured_speeds import load_table
from homing.cloud.plan.plan import OfferPlan, Plan, make_plan, suggested_limit
from homing.cloud.plan.speed import learn_here
from homing.cloud.plan.without_account import Listed, is_without_key, list_prices
from homing.cloud.providers.ssh.connection import HostKeyUnknown
from homing.config.estimate.params_and_flops import sizes
from homing.config.home_and_run_files import newest_run, typed_name
from homing.config.load import Loaded, as_typed, load_run
from homing.errors import HomingError, NoOffer
from homing.gpus import find_gpu
from homing.units import format_duration
from homing.wire.run_json import Run

__all__ = ["Planned", "family_rows", "load_planned", "plan_run", "precision_rows"]

_OPENS = {
    "stock": "opens in transformers and llama.cpp",
    "swift": "opens in homing, and in transformers with a custom modeling file; no GGUF, no adapters",
}


@dataclass(frozen=True)
class Planned:
    """The plan of a run: offers of providers, or list prices if no provider was queried."""

    loaded: Loaded
    typed: str  # the run and its changes, as typed in a command
    at: float
    plan: Plan | None = None
    listed: list[Listed] = field(default_factory=list)  # list prices per GPU, used if there is no plan
    is_without_key: bool = False
    refused: list[Refusal] = field(default_factory=list)  # why `homing launch` would refuse this run as it is

    @property
    def offers(self) -> list[OfferPlan]:
        """The offers, cheapest to finish first; empty if no provider was queried."""
        return [] if self.plan is None else self.plan.offers

    @property
    def best(self) -> OfferPlan:
        """The offer that is cheapest to finish."""
        if self.plan is None:
            raise NoOffer(
                what="No provider was queried, so there are no offers.",
                why="This plan contains only list prices.",
                fix="See plan.listed, or set up a provider: homing setup runpod",
            )
        return self.plan.best

    def to_dict(self) -> dict[str, Any]:
        if self.plan is None:
            cards = [_listed_document(row) for row in self.listed]
            return {"run": self.loaded.run.name, "is_offer": False, "cards": cards, "refused": _refused(self)}
        return {**_document(self.plan, self.loaded, self.at), "refused": _refused(self)}


def load_planned(
    run: str | None, sets: Sequence[str] = (), *, is_smoke: bool = False, spend_limit_usd: Decimal | None = None
) -> Loaded:
    """Load the run file, by default the newest, with every value resolved."""
    limit = [] if spend_limit_usd is None else [f"limits.spend={spend_limit_usd}"]
    return load_run(run or newest_run(), [*sets, *limit], is_smoke=is_smoke)


def plan_run(
    run: str | None = None,
    *,
    sets: Sequence[str] = (),
    is_smoke: bool = False,
    spend_limit_usd: Decimal | None = None,
    rate_usd_per_hour: Decimal | None = None,
    agrees_to_host: Callable[[HostKeyUnknown], bool] | None = None,
    home: Home | None = None,
) -> Planned:
    """Return hours and dollars per offer, cheapest to finish first.

    `rate_usd_per_hour`: plan every GPU at this rate, without querying providers. If no provider in the run file has an
    API key, plan by list prices. `agrees_to_host` confirms the fingerprint of a new ssh host; without it, new hosts
    are refused.
    """
    loaded = load_planned(run, sets, is_smoke=is_smoke, spend_limit_usd=spend_limit_usd)
    typed = f"{typed_name(loaded.file)}{as_typed(sets, is_smoke=is_smoke)}"
    refuse_stale(loaded, typed)
    with open_home(home) as opened:
        words = Words(loaded.run.name, typed)
        refused = refused_run(loaded, words, is_smoke=is_smoke)
        planned = Planned(loaded, typed, opened.world.now(), refused=refused)
        if rate_usd_per_hour is not None:
            return dataclasses.replace(planned, listed=list_prices(loaded.run, opened, rate_usd_per_hour))
        try:
            meet_host(opened, loaded.run, agrees_to_host)
            learn_here(opened)
            plan = make_plan(loaded.run, opened, explain=True)
        except HomingError:
            if not is_without_key(loaded.run, opened):
                raise
            return dataclasses.replace(planned, listed=list_prices(loaded.run, opened), is_without_key=True)
        refused = refused_plan(plan, loaded, words, opened, suggested_limit(plan), is_smoke=is_smoke)
        return dataclasses.replace(planned, plan=plan, at=opened.world.now(), refused=refused)


def family_rows(run: Run) -> list[tuple[str, str]]:
    """Describe the advantages and limits of the chosen model family, with figures if both families were measured."""
    if run.base is not None:
        return []
    family = run.model.family
    said, learned = _OPENS[family], load_table().learned_by(family, "swift" if family == "stock" else "stock")
    if learned is not None:
        own, other = learned
        said += (
            f"; held-out text takes {own.bits_per_byte:.3f} bits per byte after {format_duration(own.seconds)} of one"
            f" {own.card}, with {other.recipe} {other.bits_per_byte:.3f} (seeds: {own.num_seeds} and {other.num_seeds})"
        )
    return [("family", f"{family}: {said}")]


def precision_rows(plan: Plan) -> list[tuple[str, str]]:
    """Suggest FP8 if it is likely to make training faster.

    The GPU must support FP8, and the model must be at least as large as the smallest model that FP8 made faster in our
    measurements.
    """
    run, gains = plan.run, load_table().gains_of_fp8()
    gpu = find_gpu(plan.best.offer.device)
    is_asked = run.train.precision == "auto" and gpu is not None and gpu.has_fp8
    if not is_asked or not gains or any(phase.method != "full" for phase in run.phases):
        return []
    if run.sizes.num_matmul_params < sizes(gains[0][0].shape).num_matmul_params:
        return []
    measured = ", ".join(
        f"{row.shape.num_layers} x {row.shape.width} {gain:.2f}x as fast on {row.card}" for row, gain in gains
    )
    return [("precision", f"bf16; measured with train.precision=fp8: {measured}")]


def _refused(planned: Planned) -> list[dict[str, str]]:
    return [dataclasses.asdict(refusal) for refusal in planned.refused]


def _document(plan: Plan, loaded: Loaded, now: float) -> dict[str, Any]:
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
        "family": dict(family_rows(plan.run)).get("family"),
        "precision": dict(precision_rows(plan)).get("precision"),
        "is_prepared": loaded.is_prepared,
        "offers": [
            {
                **dataclasses.asdict(row.offer),
                "tokens_per_s": row.speed.tokens_per_s,
                "speed_source": row.speed.source,
                "speed_text": row.speed.text,
                "seconds": row.seconds,
                "cost_usd": str(row.cost_usd),
                "more_usd": str(plan.more_usd(row) or 0),
                "worst_usd": str(row.worst_usd),
                "storage_usd": str(row.storage_usd),
                "num_interruptions": row.odds.num_interruptions,
                "odds_text": row.odds.text,
                "minimum_usd": str(row.minimum_usd),
                "rate_age_s": 0.0 if row.offer.as_of is None else max(0.0, now - row.offer.as_of),
                "phases": [
                    {"name": part.name, "seconds": part.seconds, "cost_usd": str(part.cost_usd)}
                    for part in row.phases(plan.run)
                ],
                "timing": dataclasses.asdict(row.timing),
                "buys": dataclasses.asdict(row.buys) if row.buys else None,
            }
            for row in plan.offers
        ],
        "left_out": [{**dataclasses.asdict(each.offer), "why": each.why} for each in plan.left_out],
        "warnings": [*loaded.warnings, *plan.warnings],
    }


def _listed_document(row: Listed) -> dict[str, object]:
    document = {key: value for key, value in dataclasses.asdict(row).items() if key != "rate_usd_per_hour"}
    rate, cost = row.rate_usd_per_hour, row.cost_usd
    document["rate_usd_per_hour"] = None if rate is None else str(rate)
    document["cost_usd"] = None if cost is None else str(cost)
    return document
