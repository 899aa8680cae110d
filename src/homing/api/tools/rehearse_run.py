"""Run the whole workflow with a small model on a fake cloud, with faults. Implements `homing rehearse`.

smoke profile -> its data, prepared if needed -> launch, watch, fetch and destroy on the fake cloud -> Rehearsed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.data.prepare import Prepared, prep_run
from homing.api.data.stale_shards import stale_shards
from homing.api.extras import need
from homing.api.lookup.find_runs import open_home, usd
from homing.api.notices import say_problems
from homing.cloud.plan.plan import make_plan, suggested_limit
from homing.config.home_and_run_files import home as home_path
from homing.config.load import Loaded, as_typed, load_run
from homing.errors import NoOffer, RunFailed
from homing.rehearse.rehearsal import DEFAULT_LIMIT_USD, Rehearsal, RehearsalOrder, rehearse
from homing.rehearse.scenes import SCENES, find_scenes
from homing.world import World

if TYPE_CHECKING:
    from homing.api.data.prepare_phases import OnProgress

__all__ = ["Rehearsed", "for_real", "list_faults", "rehearse_run"]


@dataclass(frozen=True)
class Rehearsed:
    done: Rehearsal
    order: RehearsalOrder

    @property
    def error(self) -> RunFailed | None:
        """Return RunFailed if something is billing, the bill and the ledger disagree, or the run did not finish."""
        if not self.done.problems:
            return None
        return RunFailed(
            what="The rehearsal failed.",
            why="\n".join(self.done.problems),
            fix=f"Inspect the rehearsal's files in {self.done.folder}",
        )

    def to_dict(self) -> dict[str, Any]:
        done, order = self.done, self.order
        return {
            "run": done.run.id if done.run else None,
            "faults": list(order.faults),
            "seed": order.seed,
            "is_good": not done.problems,
            "problems": done.problems,
            "launches": done.num_machines,
            "failed_launches": done.failed_launches,
            "bill_usd": str(done.verdict.bill_usd),
            "ledger_usd": str(done.verdict.ledger_usd),
            "limit_usd": str(order.limit_usd),
            "instances": [
                {"mark": row.mark, "bill_usd": str(row.bill_usd), "ledger_usd": str(row.ledger_usd)}
                for row in done.verdict.rows
            ],
            "model": str(done.fetched.model_dir) if done.fetched else None,
            "step": done.fetched.manifest.step if done.fetched else None,
            "folder": str(done.folder),
        }


def rehearse_run(
    run: str,
    *,
    faults: Sequence[str] = (),
    seed: int = 0,
    has_guard: bool = True,
    spend_limit_usd: Decimal | None = None,
    sets: Sequence[str] = (),
    on_event: Callable[[str, str], None] = lambda kind, text: None,
    on_progress: OnProgress | None = None,
    on_prepared: Callable[[Prepared], None] = lambda prepared: None,
) -> Rehearsed:
    """Run the whole workflow with a small model on a fake cloud. Rents nothing. A failure is in the result's `error`.

    `faults`: names from `list_faults`. `has_guard`: the cloud has its own spend guard. `spend_limit_usd`: simulated
    dollars. `on_event` is called with the kind of each event (step, fault or line) and its text; `on_progress` and
    `on_prepared` only if the data is prepared first.
    """
    find_scenes(faults)
    need("lm", verb="rehearse")
    loaded = _prepared(run, list(sets), on_progress, on_prepared)
    say_problems(loaded.warnings)
    limit_usd = spend_limit_usd or DEFAULT_LIMIT_USD
    order = RehearsalOrder(loaded.run, loaded.text, tuple(faults), seed, has_guard=has_guard, limit_usd=limit_usd)
    return Rehearsed(rehearse(order, home_path(), World(), on_event), order)


def list_faults() -> dict[str, str]:
    """Return the faults that a rehearsal can inject, as a dict: name -> description."""
    return {name: scene.text for name, scene in SCENES.items()}


def _prepared(
    run: str, sets: list[str], on_progress: OnProgress | None, on_prepared: Callable[[Prepared], None]
) -> Loaded:
    """Load the smoke profile with its data, preparing it if that has not been done yet."""
    loaded = load_run(run, sets, is_smoke=True)
    if loaded.is_prepared and not any(stale_shards(loaded)):
        return loaded
    notices.say(f"\n== Prepare {loaded.run.name}: train the tokenizer and write token shards")
    try:
        on_prepared(prep_run(run, sets=sets, smoke=True, on_progress=on_progress))
    except KeyboardInterrupt:
        notices.say("Progress is saved. Run the same command to continue.")
        raise
    return load_run(run, sets, is_smoke=True)


def for_real(run: str, sets: Sequence[str] = ()) -> str:
    """Return the command for the real run, with a suggested spend limit if its only provider is `local`."""
    real, changes = load_run(run, sets).run, as_typed(sets)
    if real.limits.spend_usd is not None:
        return f"homing launch {run}{changes}   within {usd(real.limits.spend_usd)}"
    if set(real.cloud.providers) <= {"local"}:
        with open_home() as home, contextlib.suppress(NoOffer):
            return f"homing launch {run}{changes} --spend-limit {suggested_limit(make_plan(real, home))}"
    return f"homing plan {run}{changes}   shows what it costs and how to launch it"
