"""`homing rehearse`: the whole trip for nothing, on the fake cloud, with the faults one wants to have seen."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import open_home, parse_limit, say_problems, usd
from homing.cli.extras import need
from homing.cli.options import Json, Sets, as_typed
from homing.cli.plan import suggested_limit
from homing.cli.stale_shards import stale_shards
from homing.cloud.plan import make_plan
from homing.cloud.rehearse import DEFAULT_LIMIT_USD, Rehearsal, RehearsalOrder, rehearse
from homing.cloud.rehearse_scenes import SCENES, find_scenes
from homing.config import Loaded, load_run
from homing.config import home as home_path
from homing.errors import DataError, NoOffer, RunFailed, UsageError
from homing.units import format_duration
from homing.world import World

__all__ = ["command"]


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run file.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="NAME", help="What goes wrong; may be given several times.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="What the fake cloud does by chance; the same seed, the same.")
    ] = 0,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="What can go wrong, by name.")] = False,
    no_guard: Annotated[bool, typer.Option("--no-guard", help="A cloud without a spend guard of its own.")] = False,
    spend_limit: Annotated[
        str | None, typer.Option("--spend-limit", metavar="DOLLARS", help="Made-up dollars; the limit is real.")
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Walk the whole trip with a shrunken model on a fake cloud, faults included. Rents nothing, costs nothing."""
    if list_faults:
        _show_faults()
        return
    if run is None:
        raise UsageError(
            what="Which run is to be rehearsed?", fix="homing rehearse RUN   or: homing rehearse --list-faults"
        )
    find_scenes(fault or [])
    need("lm", verb="rehearse")
    limit = parse_limit(spend_limit) or DEFAULT_LIMIT_USD
    loaded = _prepared(run, sets or [])
    say_problems(loaded.warnings)
    order = RehearsalOrder(loaded.run, loaded.text, tuple(fault or ()), seed, has_guard=not no_guard, limit_usd=limit)
    done = rehearse(order, home_path(), World(), _tell)
    talk.emit("rehearse/1", _document(done, order))
    _say_verdict(done, order)
    talk.say(f"For real: {_for_real(run, sets or [])}")


def _show_faults() -> None:
    talk.emit("rehearse-faults/1", {"faults": {name: scene.text for name, scene in SCENES.items()}})
    talk.table(["fault", "what happens"], [(name, scene.text) for name, scene in SCENES.items()])
    talk.say("Rehearse some of them: homing rehearse RUN --fault preempt --fault destroy-lies")


def _prepared(run: str, sets: list[str]) -> Loaded:
    """The smoke profile with its data: shrunk and prepared here, where that has not been done yet."""
    loaded = load_run(run, sets, is_smoke=True)
    if loaded.is_prepared and not any(stale_shards(loaded)):
        return loaded
    talk.say(f"\n== Prepare {loaded.run.name}: text to tokenizer to token shards")
    argv = [sys.executable, "-m", "homing.cli", "prep", run, "--smoke"]
    for change in sets:
        argv += ["--set", change]
    # Its stdout is talk here: under --json ours carries one document.
    code = subprocess.run([*argv, *(["-q"] if talk.is_quiet() else [])], stdout=sys.stderr, check=False).returncode
    if code:
        raise DataError(
            what=f"{run} could not be prepared.",
            why="The words of `homing prep` stand above.",
            fix=f"homing prep {run} --smoke",
        )
    return load_run(run, sets, is_smoke=True)


def _tell(kind: str, text: str) -> None:
    talk.say({"step": f"\n== {text}", "fault": f"  !! {text}"}.get(kind, f"  {text}"))


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
    """With the plan's own sum, where planning asks nobody but this computer: a rehearsal calls no cloud."""
    real, changes = load_run(run, sets).run, as_typed(sets, is_smoke=False)
    if real.limits.spend_usd is not None:
        return f"homing launch {run}{changes}   within {usd(real.limits.spend_usd)}"
    if set(real.cloud.providers) <= {"local"}:
        with open_home() as home, contextlib.suppress(NoOffer):
            return f"homing launch {run}{changes} --spend-limit {suggested_limit(make_plan(real, home))}"
    return f"homing plan {run}{changes}   says what it costs, and how to launch it"


def _say_verdict(done: Rehearsal, order: RehearsalOrder) -> None:
    rows = [
        (row.mark, row.instances, format_duration(row.billed_s), usd(row.bill_usd), usd(row.ledger_usd))
        for row in done.verdict.rows
    ]
    title = "The cloud's bill against our ledger"
    talk.table(["mark", "machines", "billed for", "bill", "ledger"], rows, title=title)
    if done.problems:
        raise RunFailed(
            what="The rehearsal did not come home well.",
            why="\n".join(done.problems),
            fix=f"Everything it left lies in {done.folder}",
        )
    assert done.fetched is not None
    talk.say(
        f"Good: nothing was left billing, {usd(done.verdict.bill_usd)} of {usd(order.limit_usd)} made-up dollars were"
        f" spent, bill and ledger agree, and the model of step {done.fetched.manifest.step:,} came home."
    )
