"""Launches that homing refuses even with --yes, because they waste money. Shared by `plan`, `verify` and `launch`.

    many-passes   a phase reads the same text more than 100 times
    no-smoke      a large run whose smoke run has not passed
    low-balance   the account holds less than the run may cost

`--allow KIND` accepts one of them. `plan` and `verify` print the same sentences as `launch`, so that `plan` never
recommends a command that `launch` refuses. A resumed run was accepted when it was launched, so only its balance counts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.cloud.launch.draft import LaunchOrder, check_order
from homing.cloud.ledger import meter
from homing.cloud.plan.plan import Plan
from homing.cloud.providers.base import Provider
from homing.config.estimate.params_and_flops import DATA_CONSTRAINED_EPOCHS, num_epochs
from homing.config.load import Loaded
from homing.config.resolve.smoke_profile import has_smoke_failed, has_smoke_passed, needs_smoke_first
from homing.doctor.check import Prepaid, check_balance
from homing.errors import UsageError
from homing.units import format_count
from homing.wire.run_json import Run

__all__ = ["ALLOWED", "Refusal", "check_allowed", "low_balance", "raise_refusals", "refused_plan", "refused_run"]

MOST_PASSES = 100
ALLOWED = {
    "many-passes": f"a phase that reads its text more than {MOST_PASSES} times",
    "no-smoke": "a large run whose smoke run has not passed",
    "low-balance": "an account that holds less than the run may cost",
}


@dataclass(frozen=True)
class Refusal:
    kind: str  # a key of ALLOWED; "" if --allow cannot accept it
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why) if part)


def check_allowed(allow: Iterable[str]) -> None:
    for kind in allow:
        if kind not in ALLOWED:
            known = "; ".join(f"{name}: {text}" for name, text in ALLOWED.items())
            raise UsageError(what=f"--allow {kind}: unknown.", why=f"Known: {known}.", fix="homing launch --help")


def refused_run(loaded: Loaded, words: Words, *, is_smoke: bool, allow: Sequence[str] = ()) -> list[Refusal]:
    """Return why `homing launch` refuses this run file. This needs no provider."""
    if is_smoke:
        return []
    found = [*_many_passes(loaded.run, words), *_no_smoke(loaded, words)]
    return [refusal for refusal in found if refusal.kind not in allow]


def refused_plan(plan: Plan, loaded: Loaded, words: Words, home: Home, limit: str, *, is_smoke: bool) -> list[Refusal]:
    """Return why `homing launch` would refuse this run on the plan's best offer with this spend limit.

    `limit`: the spend limit that the plan would recommend.
    """
    found = refused_run(loaded, words, is_smoke=is_smoke)
    best, limit_usd = plan.best, Decimal(limit)
    order = LaunchOrder(
        loaded.run, loaded.text, loaded.is_prepared, best.offer, limit_usd, timing=best.timing, typed=words.typed
    )
    try:
        check_order(order, home)
    except UsageError as exc:
        found.append(Refusal("", exc.what, exc.why, exc.fix))
    worst = meter.worst_case(best.offer.rate_usd_per_hour, limit_usd, loaded.run.limits.time_s)
    return [*found, *low_balance(home.provider(best.offer.provider), worst)]


def low_balance(provider: Provider, needed_usd: Decimal) -> list[Refusal]:
    """Return a refusal if the provider reports a balance below `needed_usd`; if it reports none, nothing is known."""
    if not isinstance(provider, Prepaid):
        return []
    found = check_balance(provider, needed_usd)
    if not found.is_finding:
        return []
    fix = f"{found.fix} {found.page}".strip()
    return [Refusal("low-balance", found.text, "", f"{fix}   To launch anyway, add: --allow low-balance")]


def raise_refusals(refusals: Sequence[Refusal]) -> None:
    """Raise UsageError with all refusals, if there are any."""
    if not refusals:
        return
    if len(refusals) == 1:
        raise UsageError(what=refusals[0].what, why=refusals[0].why, fix=refusals[0].fix)
    raise UsageError(
        what=f"homing refuses this launch for {len(refusals)} reasons.",
        why="\n".join(str(refusal) for refusal in refusals),
        fix="\n".join(refusal.fix for refusal in refusals),
    )


def _many_passes(run: Run, words: Words) -> list[Refusal]:
    found = []
    for number, phase in enumerate(run.phases):
        if phase.kind not in ("pretrain", "mid"):
            continue
        num_train_tokens = phase.data.num_train_tokens if phase.data else run.data.num_train_tokens
        passes = num_epochs(phase.num_steps, phase.batch_tokens, num_train_tokens)
        key = _length_key(run, number)
        if passes is None or passes <= MOST_PASSES or key == "epochs":  # `epochs` says the number of passes itself
            continue
        enough = int(DATA_CONSTRAINED_EPOCHS * num_train_tokens)
        shorter = max(1, enough // phase.batch_tokens) if key == "steps" else format_count(enough)
        found.append(
            Refusal(
                "many-passes",
                f"Phase {phase.kind} would read its text {passes:,.0f} times; the maximum is {MOST_PASSES}.",
                f"It trains on {format_count(phase.num_steps * phase.batch_tokens)} tokens, but the text has only"
                f" {format_count(num_train_tokens)}. After about {DATA_CONSTRAINED_EPOCHS:.0f} passes, a model learns"
                " little more from the same text.",
                f"Use more text, or train for less: {words.to('plan')} --set phases.{number}.{key}={shorter}"
                f"   To launch anyway, add: --allow many-passes",
            )
        )
    return found


def _length_key(run: Run, number: int) -> str:
    """Return the key of the run file that sets the phase's length: tokens, epochs or steps."""
    origin = run.origin.get(f"phases.{number}.num_steps", "")
    named = re.search(r"phases\.\d+\.(tokens|epochs|steps)\b", origin)
    if named is not None:
        return named[1]
    return "tokens" if origin.startswith("derived") else "epochs" if origin.startswith("default") else "steps"


def _no_smoke(loaded: Loaded, words: Words) -> list[Refusal]:
    if not needs_smoke_first(loaded.run) or has_smoke_passed(loaded.file):
        return []
    first = f"{dataclasses.replace(words, is_resume=False).to('launch')} --smoke"
    if has_smoke_failed(loaded.file):
        return [
            Refusal(
                "",
                f"The smoke run of {loaded.file} failed, so the full run was not started.",
                "The full run would most likely fail too, and cost more.",
                f"Fix the run file, then rerun the smoke profile: {first}",
            )
        ]
    return [
        Refusal(
            "no-smoke",
            "This is a large run, and its smoke run has not passed yet.",
            "A smoke run finds mistakes in the run file within minutes and for little money.",
            f"Start the smoke run first: {first}   To launch anyway, add: --allow no-smoke",
        )
    ]
