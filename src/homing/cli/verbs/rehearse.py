"""`homing rehearse`: the whole workflow on a fake cloud, free of charge, with injected faults."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Annotated, Any

import typer

from homing.api.data.stale_shards import stale_shards
from homing.api.extras import need
from homing.api.lookup.find_runs import open_home, parse_limit, usd
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, Sets
from homing.cloud.plan.plan import make_plan, suggested_limit
from homing.config.load import Loaded, as_typed, load_run
from homing.config.paths import home as home_path
from homing.errors import DataError, NoOffer, RunFailed, UsageError
from homing.rehearse.rehearsal import DEFAULT_LIMIT_USD, Rehearsal, RehearsalOrder, rehearse
from homing.rehearse.scenes import SCENES, find_scenes
from homing.units import format_duration
from homing.world import World

__all__ = ["command"]


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run file.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="NAME", help="Fault to inject; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the simulated cloud.")] = 0,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="List the faults.")] = False,
    no_guard: Annotated[bool, typer.Option("--no-guard", help="Simulate a cloud without its own spend guard.")] = False,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="Simulated dollars; the limit is enforced.")
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Run the whole workflow with a small model on a fake cloud, with faults of your choice.

    Rents nothing, costs nothing.
    """
    if list_faults:
        _show_faults()
        return
    if run is None:
        raise UsageError(what="No run given.", fix="homing rehearse RUN   or: homing rehearse --list-faults")
    find_scenes(fault or [])
    need("lm", verb="rehearse")
    limit = parse_limit(spend_limit) or DEFAULT_LIMIT_USD
    loaded = _prepared(run, sets or [])
    say_problems(loaded.warnings)
    order = RehearsalOrder(loaded.run, loaded.text, tuple(fault or ()), seed, has_guard=not no_guard, limit_usd=limit)
    done = rehearse(order, home_path(), World(), _print_event)
    output.emit("rehearse/1", _document(done, order))
    _say_verdict(done, order)
    output.say(f"For real: {_for_real(run, sets or [])}")


def _show_faults() -> None:
    output.emit("rehearse-faults/1", {"faults": {name: scene.text for name, scene in SCENES.items()}})
    output.table(["fault", "what happens"], [(name, scene.text) for name, scene in SCENES.items()])
    output.say("Rehearse some of them: homing rehearse RUN --fault preempt --fault destroy-lies")


def _prepared(run: str, sets: list[str]) -> Loaded:
    """Load the smoke profile with its data, preparing it if that has not been done yet."""
    loaded = load_run(run, sets, is_smoke=True)
    if loaded.is_prepared and not any(stale_shards(loaded)):
        return loaded
    output.say(f"\n== Prepare {loaded.run.name}: train the tokenizer and write token shards")
    argv = [sys.executable, "-m", "homing.cli", "prep", run, "--smoke"]
    for change in sets:
        argv += ["--set", change]
    # Its stdout goes to our stderr: with --json our stdout carries one document.
    code = subprocess.run([*argv, *(["-q"] if output.is_quiet() else [])], stdout=sys.stderr, check=False).returncode
    if code:
        raise DataError(
            what=f"Preparing {run} failed.",
            why="See the output of `homing prep` above.",
            fix=f"homing prep {run} --smoke",
        )
    return load_run(run, sets, is_smoke=True)


def _print_event(kind: str, text: str) -> None:
    output.say({"step": f"\n== {text}", "fault": f"  !! {text}"}.get(kind, f"  {text}"))


def _document(done: Rehearsal, order: RehearsalOrder) -> dict[str, Any]:
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


def _for_real(run: str, sets: list[str]) -> str:
    """Return the command for the real run, with the plan's suggested limit if planning needs only this computer."""
    real, changes = load_run(run, sets).run, as_typed(sets, is_smoke=False)
    if real.limits.spend_usd is not None:
        return f"homing launch {run}{changes}   within {usd(real.limits.spend_usd)}"
    if set(real.cloud.providers) <= {"local"}:
        with open_home() as home, contextlib.suppress(NoOffer):
            return f"homing launch {run}{changes} --spend-limit {suggested_limit(make_plan(real, home))}"
    return f"homing plan {run}{changes}   shows what it costs and how to launch it"


def _say_verdict(done: Rehearsal, order: RehearsalOrder) -> None:
    rows = [
        (row.mark, row.instances, format_duration(row.billed_s), usd(row.bill_usd), usd(row.ledger_usd))
        for row in done.verdict.rows
    ]
    title = "Bill of the simulated cloud and our ledger"
    output.table(["mark", "instances", "billed for", "bill", "ledger"], rows, title=title)
    if done.problems:
        raise RunFailed(
            what="The rehearsal failed.",
            why="\n".join(done.problems),
            fix=f"Its files are in {done.folder}",
        )
    assert done.fetched is not None
    output.say(
        f"Passed: nothing was left billing, {usd(done.verdict.bill_usd)} of {usd(order.limit_usd)} simulated dollars"
        f" were spent, bill and ledger agree, and the model of step {done.fetched.manifest.step:,} was fetched."
    )
